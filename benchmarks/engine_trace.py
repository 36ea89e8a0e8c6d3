"""Trace the steps of vLLM over our groups and queues, and of vLLM as it is: who runs on which core, and who wakes whom.

    python -m benchmarks trace PYTHON [--decodings 4] [--rounds 3] [--out DIR] [-- OPTIONS OF benchmarks.engine_steps]

PYTHON is the interpreter of an environment that holds vLLM and this project (`make bench-engines` makes one). Both
engines are alive, and decode in turn while `perf` records each switch and each wake-up of the kernel's scheduler; that
needs the right to trace the system (root, or `kernel.perf_event_paranoid` of -1). A row is a process of an engine with
all of its threads. A step is one token for each of 4 requests. *Late* is the time from a wake-up to the first
instruction. What perf itself takes makes a step a little longer on both sides.
"""

from __future__ import annotations

import argparse
import collections
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.engine_steps import TOKENS
from benchmarks.engines import REST_S, SIDES, Engine
from benchmarks.process_tree import process_tree, title_of
from benchmarks.results import write_figures

_RECORD: Final = (
    "perf",
    "record",
    "-q",
    "-a",
    "-k",
    "CLOCK_MONOTONIC",
    "-e",
    "sched:sched_switch",
    "-e",
    "sched:sched_waking",
)
_PRINT: Final = ("perf", "script", "-F", "tid,cpu,time,event,trace")
_LINE: Final = re.compile(
    r"\s*(?P<tid>\d+)\s+\[(?P<core>\d+)\]\s+(?P<at>[\d.]+):\s+sched:sched_(?P<what>\w+): (?P<rest>.*)"
)
_SWITCH: Final = re.compile(r"prev_pid=(\d+) prev_prio=-?\d+ prev_state=(\S+) ==> .* next_pid=(\d+) ")
_WAKING: Final = re.compile(r"pid=(\d+) prio=")
# How long perf needs to begin, and at most to write what it has.
_BEGIN_S: Final = 0.5
_END_S: Final = 60.0


class Switch(msgspec.Struct, frozen=True):
    """A core goes from one thread to another at a time in seconds; `is_asleep` if the first one has nothing to do."""

    at: float
    core: int
    before: int
    after: int
    is_asleep: bool


class Waking(msgspec.Struct, frozen=True):
    """The thread `by` wakes the thread `whom`."""

    at: float
    by: int
    whom: int


Event = Switch | Waking


def parsed(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events of what `perf script` prints."""
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        at, core = float(found["at"]), int(found["core"])
        if found["what"] == "switch" and (switch := _SWITCH.search(found["rest"])):
            is_asleep = not switch[2].startswith("R")
            yield Switch(at, core, int(switch[1]), int(switch[3]), is_asleep)
        elif found["what"] == "waking" and (waking := _WAKING.search(found["rest"])):
            yield Waking(at, int(found["tid"]), int(waking[1]))


class Row:
    """What one process of an engine has done."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.core_s: collections.defaultdict[int, float] = collections.defaultdict(float)
        self.sleeps = 0
        self.displaced = 0
        self.woken_by: collections.Counter[str] = collections.Counter()
        self.late_us: list[float] = []

    def shown(self, steps: int) -> dict[str, Any]:
        """Return the figures of one step."""
        late = sorted(self.late_us)
        return {
            "ms on core": {
                str(core): round(took * 1e3 / steps, 3) for core, took in sorted(self.core_s.items())
            },
            "sleeps": round(self.sleeps / steps, 2),
            "displaced": round(self.displaced / steps, 2),
            "woken by": {name: round(count / steps, 2) for name, count in self.woken_by.most_common()},
            "late us, median": round(statistics.median(late), 1) if late else None,
            "late us, p90": round(late[len(late) * 9 // 10], 1) if late else None,
        }


def analysed(events: Iterable[Event], names: dict[int, str], steps: int) -> dict[str, dict[str, Any]]:
    """Return what each process did in a step.

    Args:
        events: What happened, in any order.
        names: The name of the process of each thread of the engine. What belongs to none is "another process".
        steps: How many steps it were.
    """
    rows: dict[str, Row] = {name: Row() for name in sorted(set(names.values()))}
    since: dict[int, float] = {}  # by core: when its thread began to run
    woken: dict[int, float] = {}  # by thread: when it was woken
    for event in sorted(events, key=lambda each: each.at):
        if isinstance(event, Waking):
            if event.whom in names:
                woken[event.whom] = event.at
                rows[names[event.whom]].woken_by[names.get(event.by, "another process")] += 1
            continue
        if event.before in names and event.core in since:
            row = rows[names[event.before]]
            row.core_s[event.core] += event.at - since[event.core]
            row.sleeps += event.is_asleep
            row.displaced += not event.is_asleep
        since[event.core] = event.at
        if event.after in woken:
            rows[names[event.after]].late_us.append((event.at - woken.pop(event.after)) * 1e6)
    return {name: row.shown(steps) for name, row in rows.items()}


def printed(file: Path) -> list[str]:
    """Return the lines in which perf prints what it has recorded."""
    command = [*_PRINT, "-i", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()  # noqa: S603


def threads(root: int) -> dict[int, str]:
    """Return the name of the process of each thread of an engine, by the thread's number."""
    found = {}
    for process in process_tree(root):
        folder = Path("/proc", str(process.pid))
        name = title_of(process.pid) or "client"
        found.update(dict.fromkeys((int(each.name) for each in (folder / "task").iterdir()), name))
    return found


class Recording(msgspec.Struct, frozen=True):
    """What was recorded: the names of the engine's threads, the time of a step, and when decoding began and ended."""

    names: dict[int, str]
    step_ms: float
    begin: float
    end: float


def record(engine: Engine, decodings: int, file: Path) -> Recording:
    """Record what happens while an engine decodes."""
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen([*_RECORD, "-o", str(file)], stdout=said, stderr=said) as perf,  # noqa: S603
    ):
        try:
            time.sleep(_BEGIN_S)
            begin = time.monotonic()
            took = engine.ask(f"steps {decodings}")["took_ms"]
            end = time.monotonic()
            names = threads(engine.process.pid)
            perf.send_signal(signal.SIGINT)
            perf.wait(_END_S)
        finally:
            perf.kill()  # it would record until the end of the program
        if not file.exists():
            said.seek(0)
            sys.exit(f"perf records nothing: {said.read().strip()}")
    return Recording(names, statistics.median(took), begin, end)


def show(found: dict[str, dict[str, Any]]) -> None:
    """Print the last round as a table of Markdown."""
    print("| | process | ms on core 0, 1, … | sleeps | displaced | late, median and p90 | woken by |")
    print("|---|---|---|---|---|---|---|")
    for side, each in found.items():
        for name, row in each["processes"].items():
            cores = ", ".join(f"{took:.2f}" for took in row["ms on core"].values())
            wakers = ", ".join(f"{by} {count:.1f}" for by, count in row["woken by"].items())
            late = f"{row['late us, median']}, {row['late us, p90']} µs"
            print(f"| {side} | {name} | {cores} | {row['sleeps']} | {row['displaced']} | {late} | {wakers} |")
        print(f"a step of {side}: {each['step ms']:.2f} ms")


def main() -> None:
    """Trace the engines in turn and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python")
    parser.add_argument("--decodings", type=int, default=4, help=f"of {TOKENS} steps each, in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options, rest = parser.parse_known_args()
    rest = [word for word in rest if word != "--"]
    if shutil.which("perf") is None:
        sys.exit("tracing needs the command perf, which is not installed")
    rounds: list[dict[str, dict[str, Any]]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines: dict[str, Engine] = {}
        for name, plugins in SIDES.items():
            engines[name] = Engine(name, options.python, plugins, rest)
            stack.callback(engines[name].stop)
        for number in range(options.rounds + 1):
            found: dict[str, dict[str, Any]] = {}
            for name, engine in engines.items():
                time.sleep(REST_S)
                file = folder / f"{name}-{number}"
                made = record(engine, options.decodings, file)
                seen = [each for each in parsed(printed(file)) if made.begin <= each.at <= made.end]
                rows = analysed(seen, made.names, options.decodings * TOKENS)
                found[name] = {"step ms": round(made.step_ms, 3), "processes": rows}
            if number:  # the first round fills caches
                rounds.append(found)
                show(found)
        versions = engines["ours"].ask("versions")
    if options.out:
        write_figures(
            options.out / "engine_trace.json", {"versions": versions, "options": rest, "rounds": rounds}
        )


if __name__ == "__main__":
    main()
