"""Compare the steps of vLLM over our groups and queues with those of vLLM as it is.

    python -m benchmarks engines PYTHON [--rounds 24] [--busy 1] [--out DIR] [-- OPTIONS OF benchmarks.engine_steps]

PYTHON is the interpreter of an environment that holds vLLM and this project (`make bench-engines` makes one). All
engines run at the same time and work in turn, seconds apart, because a machine's speed changes within minutes. An
engine without requests sleeps. In each round an engine also works without the collectives of its ranks, which then
use their own tensors in place of the results: what a step takes more than such a silent one is communication. And it
works with ranks that only wait for each other in place of each collective, polling: that part of communication is what
ranks lose that are not equally fast, with any communicator. A ratio
below 1 means that ours takes less. Figures are medians over the rounds; a ratio is the median of the ratios of the
same round. `--out` writes the figures and a picture.
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
from benchmarks.results import write_figures
from benchmarks.stolen import stolen_s

ROOT: Final = Path(__file__).parents[1]
# The value of VLLM_PLUGINS.
SIDES: Final[dict[str, str]] = {"stock": "", "ours": "group_coordinator"}
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
        name: {
            "step_ms": [],
            "silent_ms": [],
            "meeting_ms": [],
            "step_cpu_s": [],
            "short_ms": [],
            "short_cores": [],
        }
        for name in engines
    }
    for number in range(-WARM_UP, rounds):
        # What comes second finds warm caches, so the orders change from round to round.
        step = 1 if number % 2 == 0 else -1
        for name in list(engines)[::step]:
            time.sleep(REST_S)
            found = {each: engines[name].ask(f"{each} 1") for each in ("steps", "silent", "meeting")[::step]}
            if number < 0:
                continue
            got[name]["step_ms"] += found["steps"]["took_ms"]
            got[name]["silent_ms"] += found["silent"]["took_ms"]
            got[name]["meeting_ms"] += found["meeting"]["took_ms"]
            got[name]["step_cpu_s"].append(found["steps"]["cpu_s"])
            if number % SHORT_EVERY == 0:
                found = engines[name].ask(f"short {SHORT_REQUESTS}")
                got[name]["short_ms"] += found["took_ms"]
                got[name]["short_cores"].append(found["cores"])
        if number >= 0:
            steps = ", ".join(f"{name} {each['step_ms'][-1]:.2f}" for name, each in got.items())
            print(f"round {number + 1}: ms a step: {steps}", flush=True)
    return got


def table(got: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Return the medians of the sides by figure, and of the ratios to stock; add further figures of each round."""
    for each in got.values():
        short = each.pop("short_ms")
        parts = [sorted(short[at : at + SHORT_REQUESTS]) for at in range(0, len(short), SHORT_REQUESTS)]
        each["short_p50_ms"] = [part[len(part) // 2] for part in parts]
        each["short_p90_ms"] = [part[len(part) * 9 // 10] for part in parts]
        each["communication_ms"] = [
            step - silent for step, silent in zip(each["step_ms"], each["silent_ms"], strict=True)
        ]
        each["waiting_ms"] = [
            met - silent for met, silent in zip(each["meeting_ms"], each["silent_ms"], strict=True)
        ]
    rows: dict[str, dict[str, Any]] = {}
    for figure, stock in got["stock"].items():
        ours = got["ours"][figure]
        rows[figure] = {name: round(statistics.median(each[figure]), 3) for name, each in got.items()}
        # A difference of two rounds may be zero, so there is no ratio for each round.
        if figure not in ("communication_ms", "waiting_ms"):
            ratios = sorted(mine / its for mine, its in zip(ours, stock, strict=True))
            rows[figure]["ours/stock"] = round(statistics.median(ratios), 3)
            rows[figure]["quarters"] = [round(ratios[len(ratios) * part // 4], 2) for part in (1, 3)]
    return rows


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Print the table, and what communication takes of a step."""
    print(f"{'':18}{'stock':>9}{'ours':>9}{'ours/stock':>12}{'quarters':>15}")
    for figure, row in rows.items():
        line = f"{figure:18}{row['stock']:9.2f}{row['ours']:9.2f}"
        if "quarters" in row:
            low, high = row["quarters"]
            line += f"{row['ours/stock']:12.3f}{f'{low:.2f} to {high:.2f}':>15}"
        print(line)
    took = rows["communication_ms"]
    print(
        f"communication: {took['stock'] / rows['step_ms']['stock']:.0%} of stock's step; "
        f"ours takes {took['ours'] / took['stock']:.2f} of that; ranks that only wait for each other lose "
        f"{rows['waiting_ms']['stock']:.2f} and {rows['waiting_ms']['ours']:.2f} ms"
    )


def write(folder: Path, found: dict[str, Any]) -> None:
    """Write the figures, and a picture of the steps and of the cost of an engine with little to do."""
    name = "engine_steps_busy" if found["busy"] else "engine_steps"
    write_figures(folder / f"{name}.json", found)
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
        for name, plugins in SIDES.items():
            engines[name] = Engine(name, options.python, plugins, rest)
            stack.callback(engines[name].stop)
        for _ in range(options.busy):
            stack.enter_context(busy_loop())
        start, stolen = time.monotonic(), stolen_s()
        got = measure(engines, options.rounds)
        stolen_cores = (stolen_s() - stolen) / (time.monotonic() - start)
        is_equal = engines["stock"].ask("tokens") == engines["ours"].ask("tokens")
        versions = engines["ours"].ask("versions")
    rows = table(got)
    show(rows)
    print(
        f"the host withheld {stolen_cores:.2f} cores; with more than a tenth of one, repeat this in another hour"
    )
    if options.out:
        write(
            options.out,
            {
                "versions": versions,
                "options": rest,
                "busy": options.busy,
                "stolen_cores": round(stolen_cores, 3),
                "table": rows,
                "rounds": got,
            },
        )
    if not is_equal:
        sys.exit("the tokens differ")
    print("the tokens are equal")


if __name__ == "__main__":
    main()
