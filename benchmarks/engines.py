"""Compare the steps of vLLM over our groups and queues with those of vLLM as it is.

    python -m benchmarks engines PYTHON [--rounds 24] [--busy 1] [--out DIR] [-- OPTIONS OF benchmarks.engine_steps]

PYTHON is the interpreter of an environment that holds vLLM and this project (`make bench-engines` makes one). All
engines run at the same time and work in turn, seconds apart, because a machine's speed changes within minutes. An
engine without requests sleeps. The third engine, `alone`, does the work of one rank in one process: what stock
needs more than that is communication. A ratio below 1 means that ours takes less. Figures are medians over the
rounds; a ratio is the median of the ratios of the same round. `--out` writes the figures and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.engine_plot import draw_engines
from benchmarks.launching import die_with_parent

ROOT: Final = Path(__file__).parents[1]
# The value of VLLM_PLUGINS, and further options.
SIDES: Final[dict[str, tuple[str, list[str]]]] = {
    "stock": ("", []),
    "ours": ("group_coordinator", []),
    "alone": ("", ["--alone"]),
}
# The first rounds fill caches and choose kernels.
WARM_UP: Final = 3
SHORT_REQUESTS: Final = 20
# Short requests are measured in every fourth round: they take as long as four rounds of steps.
SHORT_EVERY: Final = 4
# vLLM's own queues poll for one second after a message. No engine may work beside that.
REST_S: Final = 1.1
# An engine starts within a minute or two, and then answers within seconds.
ANSWER_S: Final = 600.0


@contextmanager
def busy_loop() -> Iterator[None]:
    """Keep one core busy with something else."""
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=die_with_parent)  # noqa: PLW1509
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, python: str, plugins: str, options: Sequence[str]) -> None:
        """Start it and wait until it is ready."""
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `stop`
        self.process = subprocess.Popen(  # noqa: S603 - our own module
            [python, "-m", "benchmarks.engine_steps", *options],
            env={**os.environ, "VLLM_PLUGINS": plugins},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            # Not a session of its own: Linux divides the cores among sessions first (sched(7), autogroup), and the
            # busy loop must compete with the engine's processes alone.
            process_group=0,
        )
        self._line()

    def ask(self, command: str) -> Any:
        """Return the answer to a line."""
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        limit = threading.Timer(ANSWER_S, os.killpg, (self.process.pid, signal.SIGKILL))
        limit.start()
        line = self.process.stdout.readline()
        limit.cancel()
        if not line:
            self.log.seek(0)
            sys.exit(
                f"the engine {self.name} ended, or did not answer for {ANSWER_S} s:\n{self.log.read()[-4000:]}"
            )
        return line

    def stop(self) -> None:
        """End it and every process that it has started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


def measure(engines: dict[str, Engine], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Let the engines work in turn; return what each round gave, by side and figure."""
    got: dict[str, dict[str, list[float]]] = {
        name: {"step_ms": [], "step_cpu_s": [], "short_ms": [], "short_cores": []} for name in engines
    }
    for number in range(-WARM_UP, rounds):
        # Who comes second finds warm caches, so the order changes from round to round.
        for name in list(engines)[:: 1 if number % 2 == 0 else -1]:
            time.sleep(REST_S)
            found = engines[name].ask("steps 1")
            if number < 0:
                continue
            got[name]["step_ms"] += found["took_ms"]
            got[name]["step_cpu_s"].append(found["cpu_s"])
            if number % SHORT_EVERY == 0:
                found = engines[name].ask(f"short {SHORT_REQUESTS}")
                got[name]["short_ms"] += found["took_ms"]
                got[name]["short_cores"].append(found["cores"])
        if number >= 0:
            steps = ", ".join(f"{name} {each['step_ms'][-1]:.2f}" for name, each in got.items())
            print(f"round {number + 1}: ms a step: {steps}", flush=True)
    return got


def table(got: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Return the medians of the sides by figure, and the medians of the ratios to stock."""
    for each in got.values():
        short = each.pop("short_ms")
        parts = [sorted(short[at : at + SHORT_REQUESTS]) for at in range(0, len(short), SHORT_REQUESTS)]
        each["short_p50_ms"] = [part[len(part) // 2] for part in parts]
        each["short_p90_ms"] = [part[len(part) * 9 // 10] for part in parts]
    rows: dict[str, dict[str, Any]] = {}
    for figure, stock in got["stock"].items():
        rows[figure] = {name: round(statistics.median(each[figure]), 3) for name, each in got.items()}
        for name in [name for name in got if name != "stock"]:
            ratios = sorted(mine / its for mine, its in zip(got[name][figure], stock, strict=True))
            quarters = [round(ratios[len(ratios) * part // 4], 2) for part in (1, 3)]
            rows[figure][f"{name}/stock"] = round(statistics.median(ratios), 3)
            rows[figure][f"{name}/stock quarters"] = quarters
    return rows


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Print the table, and the share of communication in a step."""
    print(f"{'':13}{'stock':>9}{'ours':>9}{'alone':>9}{'ours/stock':>12}{'quarters':>15}")
    for figure, row in rows.items():
        low, high = row["ours/stock quarters"]
        print(
            f"{figure:13}{row['stock']:9.2f}{row['ours']:9.2f}{row['alone']:9.2f}{row['ours/stock']:12.3f}"
            f"{f'{low:.2f} to {high:.2f}':>15}"
        )
    alone, ours = rows["step_ms"]["alone/stock"], rows["step_ms"]["ours/stock"]
    print(
        f"communication: {1 - alone:.0%} of stock's step; ours takes {(ours - alone) / (1 - alone):.2f} of that"
    )


def write(folder: Path, found: dict[str, Any]) -> None:
    """Write the figures, and a picture of the steps and of the cost of an engine with little to do."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "engine_steps_busy" if found["busy"] else "engine_steps"
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    draw_engines(found, folder / name)


def main() -> None:
    """Run the engines and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--busy", type=int, default=0, help="busy loops that run beside the engines")
    parser.add_argument("--out", type=Path)
    options, rest = parser.parse_known_args()
    rest = [word for word in rest if word != "--"]
    engines: dict[str, Engine] = {}
    with ExitStack() as stack:
        for name, (plugins, more) in SIDES.items():
            engines[name] = Engine(name, options.python, plugins, [*rest, *more])
            stack.callback(engines[name].stop)
        for _ in range(options.busy):
            stack.enter_context(busy_loop())
        got = measure(engines, options.rounds)
        is_equal = engines["stock"].ask("tokens") == engines["ours"].ask("tokens")
        versions = engines["ours"].ask("versions")
    rows = table(got)
    show(rows)
    if options.out:
        write(
            options.out,
            {"versions": versions, "options": rest, "busy": options.busy, "table": rows, "rounds": got},
        )
    if not is_equal:
        sys.exit("the tokens differ")
    print("the tokens are equal")


if __name__ == "__main__":
    main()
