"""Compare the steps of vLLM over our groups and queues with those of vLLM as it is, in turn.

    python -m benchmarks engines PYTHON [--runs 5] [--busy 1] [--json FILE] [-- OPTIONS OF benchmarks.engine_steps]

PYTHON is the interpreter of an environment that holds vLLM and this project (`make bench-engines` makes one). A ratio
below 1 means that ours takes less. Every figure is the median over the runs of one side; the ratio is the median of the
ratios of runs that followed each other.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.launching import die_with_parent

ROOT: Final = Path(__file__).parents[1]
SIDES: Final = {"stock": "", "ours": "group_coordinator"}
FIGURES: Final = ("step_ms", "cpu_s", "short_cores", "short_p50_ms", "short_p90_ms")


@contextmanager
def busy_loop() -> Iterator[None]:
    """Keep one core busy with something else."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=die_with_parent)  # noqa: PLW1509
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def run(python: str, plugins: str, rest: Sequence[str]) -> dict[str, Any]:
    """Run one engine; return its figures."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(  # noqa: S603 - our own module
        [python, "-m", "benchmarks.engine_steps", *rest],
        env={**os.environ, "VLLM_PLUGINS": plugins},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    if not lines:
        sys.exit(
            f"the engine with VLLM_PLUGINS={plugins!r} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    found = json.loads(lines[-1].removeprefix("FIGURES "))
    short = sorted(found["short_ms"])
    return {
        "step_ms": statistics.median(found["steps_ms"]),
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "short_cores": found["short_cores"],
        "short_p50_ms": short[len(short) // 2],
        "short_p90_ms": short[len(short) * 9 // 10],
        "tokens": found["tokens"],
    }


def table(got: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians of both sides and the median of the ratios, by figure."""
    rows: dict[str, Any] = {}
    for figure in FIGURES:
        values = {side: [each[figure] for each in runs] for side, runs in got.items()}
        ratios = [ours / stock for stock, ours in zip(values["stock"], values["ours"], strict=True)]
        rows[figure] = {side: round(statistics.median(each), 3) for side, each in values.items()}
        rows[figure]["ratio"] = round(statistics.median(ratios), 3)
        rows[figure]["ratios"] = [round(each, 3) for each in ratios]
    rows["tokens_equal"] = len({json.dumps(each["tokens"]) for runs in got.values() for each in runs}) == 1
    return rows


def main() -> None:
    """Alternate the sides and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="busy loops that run beside the engine")
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args()
    rest = [word for word in rest if word != "--"]
    got: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with ExitStack() as beside:
        for _ in range(options.busy):
            beside.enter_context(busy_loop())
        for number in range(options.runs):
            # Who comes second finds warm caches, so the order changes from run to run.
            for side, plugins in list(SIDES.items())[:: 1 if number % 2 == 0 else -1]:
                got[side].append(run(options.python, plugins, rest))
                last = got[side][-1]
                print(f"run {number + 1} {side}: {last['step_ms']:.2f} ms a step", flush=True)
    rows = table(got)
    print(f"{'':14}{'stock':>10}{'ours':>10}{'ratio':>8}  single ratios")
    for figure in FIGURES:
        row = rows[figure]
        singles = " ".join(f"{each:.2f}" for each in row["ratios"])
        print(f"{figure:14}{row['stock']:10.2f}{row['ours']:10.2f}{row['ratio']:8.2f}  {singles}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if not rows["tokens_equal"]:
        sys.exit("the tokens differ")
    print("all tokens are equal")


if __name__ == "__main__":
    main()
