"""Measure what the status page costs a call: two ranks make the same calls with it and without it, in turn.

Blocks of calls that are shown and that are not take turns in one group, so that both meet the same machine. A call that
is not shown reads no clock for the page and compares no arrivals; what both do is a store of the time into the post,
whose line is written anyway, and the check whether there is a lane. What Python does to show a call is timed by itself,
as such calls go through transports whose own time is a thousand times as long.

    python -m benchmarks status-calls [--rounds 41] [--calls 2000] [--most-percent 3] [--json FILE]

The exit status is 1 if an all-reduce of 1 KB, or a message of a queue, is more than `--most-percent` slower with the
page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.launching import die_with_parent
from benchmarks.results import BenchmarkError, write_figures
from coordinator.group import GroupCoordinator
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment
from device_comm.cpu.channel_receiver import ChannelReceiver, Receiving
from device_comm.health import Operation
from device_comm.works import CollectiveWork, PointToPointWorks, WaiterThreads
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import DONE, NOBODY
from shm_broadcast.status.shown_calls import ShownCalls

WORLD = 2
FLOATS = 256

SUM = "all_reduce of 1 KB"
MESSAGE = "a message of a queue and back"
GATED = (SUM, MESSAGE)
"""What the page may not slow down by more than `MOST_PERCENT`."""

MOST_PERCENT = 3.0


def timed(call: Callable[[], object], calls: int) -> float:
    """Return the time of a call in ns."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls


def in_turn(group: GroupCoordinator, rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Return the times of the calls of a group that are shown and that are not, in ns, by call."""
    communicator: Any = group.device_communicator
    host: Any = group._host  # noqa: SLF001 - the benchmark switches the display of both planes off and on
    regions = [communicator._region, host._region]  # noqa: SLF001
    lanes = [region.lane for region in regions]
    tensor, output = torch.ones(FLOATS), torch.empty(FLOATS)
    forms: dict[str, Callable[[], object]] = {
        SUM: lambda: group.all_reduce(tensor),
        "all_reduce of 1 KB into an output": lambda: communicator.all_reduce_into_output(tensor, output),
        "barrier": group.barrier,
    }
    found: dict[str, dict[str, list[float]]] = {name: {"shown": [], "hidden": []} for name in forms}
    for number in range(rounds):
        for name, call in forms.items():
            order = ("shown", "hidden") if number % 2 else ("hidden", "shown")
            for how in order:
                group.barrier()
                for region, lane in zip(regions, lanes, strict=True):
                    region.core.report_to(lane.capsule() if how == "shown" else None)
                group.barrier()
                found[name][how].append(timed(call, calls))
    return found


class Unfinished:
    """A transfer of torch that does not end before `end` is set."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def wait(self, _timeout: object) -> bool:
        return self.end.wait()


def of_python(rounds: int, calls: int) -> dict[str, list[float]]:
    """Return what Python does to show a call, beyond what it does without the page, in ns.

    Each form makes the calls of the page that the product makes: `collective` and transfers in
    `device_comm.process_group`, `calling` of a connection of NCCL, and `GroupHealth.wait` for a channel. What is waited
    for is what the product waits for, but the wait itself is over at once.
    """
    shown = ShownCalls("bench:0", 0, [0, 1])
    queued = shown.queued_lane("nccl", "nccl")
    threads, unfinished = WaiterThreads("bench"), Unfinished()
    over_torch: Any = CollectiveWork(cast("dist.Work", unfinished))
    transfer: Any = PointToPointWorks(threads, [(1, cast("dist.Work", unfinished))], None)
    message: Any = Receiving(cast("ChannelReceiver", SimpleNamespace(peers=(1,))), 0, None)
    collective = Operation("device", "all_reduce", 7, shown.lanes["device"])
    receive = Operation("device", "recv from rank 1", 0)

    def wait(_call: Operation, _work: object, _timeout_s: float | None) -> None:
        pass

    def shown_wait(work: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        return lambda: shown.wait(receive, work, None, wait), lambda: wait(receive, work, None)

    def over_gloo() -> None:
        lane = shown.lanes["device"]
        lane.begin(kind_of("all_reduce"), 7, 1024, NOBODY)
        shown.wait(collective, over_torch, None, wait)
        lane.end(DONE)

    def over_nccl() -> None:
        queued.begin(kind_of("all_gather"), 7, 1024, NOBODY)
        queued.end(DONE)

    forms: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "showing a call over a process group": (over_gloo, lambda: wait(collective, over_torch, None)),
        "showing a call of NCCL": (over_nccl, lambda: None),
        "showing a wait for a transfer over a process group": shown_wait(transfer),
        "showing a wait in a channel": shown_wait(message),
    }
    found = {
        name: [timed(call, calls) - timed(without, calls) for _ in range(rounds)]
        for name, (call, without) in forms.items()
    }
    unfinished.end.set()
    threads.close(1.0)
    shown.status.leave()
    return found


def of_queue(rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Return the times of a message to a reader in the same process, in ns, with the queue in the page and without."""
    with (
        QueueWriter.create("bench", [0]) as writer,
        QueueReader.open(writer.handle, writer.key, 0, 10.0) as reader,
    ):

        def message() -> None:
            writer.enqueue(1)
            reader.dequeue()

        rings: list[Any] = [writer._ring, reader._ring]  # noqa: SLF001 - as for `in_turn`
        found: dict[str, list[float]] = {"shown": [], "hidden": []}
        for number in range(rounds):
            for how in ("shown", "hidden") if number % 2 else ("hidden", "shown"):
                for place, ring in enumerate(rings, -1):
                    ring._page.remove_queue(ring._shown)  # noqa: SLF001
                    ring._shown = None  # noqa: SLF001
                    if how == "shown":
                        ring._show(place)  # noqa: SLF001
                found[how].append(timed(message, calls))
        return {MESSAGE: found}


def run_rank(rank: int, method: str, rounds: int, calls: int) -> None:
    """Measure, and print the times of rank 0 as JSON."""
    die_with_parent()
    torch.set_num_threads(1)
    init_distributed_environment(WORLD, rank, method, backend="gloo")
    group = GroupCoordinator([list(range(WORLD))], rank, "gloo", True, group_name="bench")
    found: dict[str, Any] = {"in turn": in_turn(group, rounds, calls)}
    group.barrier()
    group.destroy()
    destroy_distributed_environment()
    if rank == 0:
        found["in turn"] |= of_queue(rounds, calls)
        found["alone"] = of_python(rounds, calls)
        sys.stdout.write(json.dumps(found) + "\n")


def measure(rounds: int, calls: int) -> dict[str, Any]:
    """Return what `run_rank` prints."""
    with tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.status_calls", "--method", f"file://{folder}/world"]
        command += ["--rounds", str(rounds), "--calls", str(calls), "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own module
            for rank in range(WORLD)
        ]
        told = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise BenchmarkError(f"the ranks ended with {[rank.returncode for rank in ranks]}")
    answer: dict[str, Any] = json.loads(told[0])
    return answer


def misses(calls: Mapping[str, Mapping[str, float]], most_percent: float) -> str:
    """Return what misses the gate and why, or nothing if all of it is met."""
    percents = {name: 100.0 * calls[name]["difference_ns"] / calls[name]["hidden_ns"] for name in GATED}
    return "; ".join(
        f"{name}: {percent:.1f} % slower with the status page, and {most_percent:g} % is the most"
        for name, percent in percents.items()
        if percent > most_percent
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks status-calls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=2000, help="calls in a row")
    parser.add_argument("--most-percent", type=float, default=MOST_PERCENT, help="the gate (default: 3)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.method, options.rounds, options.calls)
        return 0
    found = measure(options.rounds, options.calls)
    calls: dict[str, dict[str, float]] = {}
    print(
        "two ranks, or one process for the queue: ns per call, medians; differences are medians over pairs of blocks"
    )
    for name, times in found["in turn"].items():
        shown, hidden = times["shown"], times["hidden"]
        differences = [one - other for one, other in zip(shown, hidden, strict=True)]
        calls[name] = {
            "shown_ns": statistics.median(shown),
            "hidden_ns": statistics.median(hidden),
            "difference_ns": statistics.median(differences),
        }
        print(
            f"{name:35} shown {calls[name]['shown_ns']:8.0f}   hidden {calls[name]['hidden_ns']:8.0f}"
            f"   difference {calls[name]['difference_ns']:6.0f}"
        )
    for name, times in found["alone"].items():
        calls[name] = {"median_ns": statistics.median(times), "least_ns": min(times)}
        print(f"{name:35} median {calls[name]['median_ns']:7.0f}   least {calls[name]['least_ns']:7.0f}")
    if options.json is not None:
        write_figures(options.json, {"rounds": options.rounds, "calls": calls})
    missed = misses(calls, options.most_percent)
    if missed:
        print(missed, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
