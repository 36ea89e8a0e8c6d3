"""Measure barriers, all-reduces and messages of many more ranks than there are cores, alone and beside busy loops.

Each world is started twice: alone, and beside one loop for each core that never sleeps. Rank 0 times its barriers and
all-reduces of 64 KB, which follow each other without a pause. In the world of the queue rank 0 sends a message every
few ms, and the figure is the time until a reader has it, for all readers. A call that does not end within its time-out
ends the benchmark with an error.

    python -m benchmarks crowds [--ranks 2,4,8,16,32,64,128] [--readers 64] [--calls 300] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch

from benchmarks.launching import die_with_parent
from benchmarks.stolen import stolen_s
from coordinator import destroy_distributed_environment, get_world_group, init_distributed_environment
from coordinator.group import GroupCoordinator

# Without threads of torch, forked ranks start in milliseconds; a fresh interpreter takes seconds of a core.
FORK: Final = multiprocessing.get_context("fork")
ELEMENTS: Final = (64 << 10) // 4
WARM_UP: Final = 10
# A pause between two messages, in which the readers fall asleep, in seconds.
PAUSE_S: Final = 0.005
# A world that takes longer has failed, in seconds.
WORLD_S: Final = 600.0

Samples = dict[str, list[float]]


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """Return the duration of each of some calls that follow each other, in us."""
    for _ in range(WARM_UP):
        call()
    samples, before = [], time.perf_counter()
    for _ in range(calls):
        call()
        now = time.perf_counter()
        samples.append((now - before) * 1e6)
        before = now
    return samples


def collectives(group: GroupCoordinator, calls: int) -> Samples:
    """Return the durations of this rank's barriers and all-reduces."""
    tensor = torch.ones(ELEMENTS)
    return {
        "barrier": timed(group.barrier, calls),
        "all_reduce 64 KB": timed(lambda: group.all_reduce(tensor), calls),
    }


def messages(group: GroupCoordinator, calls: int) -> Samples:
    """Return how long each message took to each reader; on rank 0 alone."""
    latencies: list[float] = []
    for number in range(WARM_UP + calls):
        if group.rank_in_group == 0:
            time.sleep(PAUSE_S)
        sent = group.broadcast_object(time.monotonic() if group.rank_in_group == 0 else None, src=0)
        if number >= WARM_UP:
            latencies.append((time.monotonic() - sent) * 1e6)
    gathered = group.gather_object(latencies, dst=0)
    return {} if gathered is None else {"message": [each for reader in gathered[1:] for each in reader]}


def be_rank(
    rank: int,
    world_size: int,
    directory: str,
    measured: Callable[[GroupCoordinator, int], Samples],
    calls: int,
    answer: Connection,
) -> None:
    """Join the world, measure and leave; rank 0 sends its samples."""
    die_with_parent()
    torch.set_num_threads(1)
    init_distributed_environment(world_size, rank, f"file://{directory}/world", backend="gloo")
    samples = measured(get_world_group(), calls)
    if rank == 0:
        answer.send(samples)
    # A rank that has left counts as lost while others are still in a call.
    get_world_group().barrier()
    destroy_distributed_environment()


def be_busy() -> None:
    """Keep a core busy for ever."""
    die_with_parent()
    while True:
        pass


@contextmanager
def beside(loops: int) -> Iterator[None]:
    """Run some busy loops beside the body."""
    with ExitStack() as stack:
        for _ in range(loops):
            loop = FORK.Process(target=be_busy, daemon=True)
            loop.start()
            stack.callback(loop.join)
            stack.callback(loop.kill)
        yield


def run_world(world_size: int, measured: Callable[[GroupCoordinator, int], Samples], calls: int) -> Samples:
    """Return what rank 0 of a new world has measured.

    Raises:
        RuntimeError: A rank has failed; its error is on stderr.
    """
    ours, theirs = FORK.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as directory, ours, theirs:
        ranks = [
            FORK.Process(
                target=be_rank, args=(rank, world_size, directory, measured, calls, theirs), daemon=True
            )
            for rank in range(world_size)
        ]
        for each in ranks:
            each.start()
        try:
            until = time.monotonic() + WORLD_S
            while not ours.poll(0.1):
                if time.monotonic() > until or any(each.exitcode for each in ranks):
                    raise RuntimeError(f"a rank of {world_size} failed, or took longer than {WORLD_S:.0f} s")
            samples: Samples = ours.recv()
            for each in ranks:
                each.join(max(0.0, until - time.monotonic()))
            if any(each.exitcode != 0 for each in ranks):
                raise RuntimeError(f"a rank of {world_size} failed while it left")
            return samples
        finally:
            for each in ranks:
                each.kill()


def percentile(samples: list[float], share: float) -> float:
    """Return the smallest sample that at least this share of the samples does not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def compare(
    world_size: int, measured: Callable[[GroupCoordinator, int], Samples], calls: int, loops: int
) -> list[dict[str, float | str]]:
    """Measure a world alone and beside busy loops; return and print a row for each kind of call."""
    alone = run_world(world_size, measured, calls)
    with beside(loops):
        crowded = run_world(world_size, measured, calls)
    rows: list[dict[str, float | str]] = []
    for name in alone:
        figures = {
            f"{where} p{share:.0%}".rstrip("%"): round(percentile(samples[name], share), 1)
            for where, samples in (("alone", alone), ("busy", crowded))
            for share in (0.5, 0.99)
        }
        _, p99, _, busy_p99 = figures.values()
        rows.append({"ranks": world_size, "call": name, **figures, "ratio of p99": round(busy_p99 / p99, 1)})
        shown = "".join(f" {each:10.0f}" for each in figures.values())
        print(f"{world_size:5d}  {name:16s}{shown} {busy_p99 / p99:8.1f}", flush=True)
    return rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", default="2,4,8,16,32,64,128", help="sizes of worlds (default: %(default)s)"
    )
    parser.add_argument("--readers", type=int, default=64, help="readers of the queue; 0 leaves it out")
    parser.add_argument("--calls", type=int, default=300, help="calls of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    cores, stolen, start = len(os.sched_getaffinity(0)), stolen_s(), time.monotonic()
    print(f"us; {cores} cores, as many busy loops; {options.calls} calls\n")
    print("ranks  call              alone p50        p99   busy p50        p99    ratio")
    rows: list[dict[str, float | str]] = []
    for ranks in (int(each) for each in options.ranks.split(",") if each):
        rows += compare(ranks, collectives, options.calls, cores)
    if options.readers:
        rows += compare(options.readers + 1, messages, options.calls, cores)
    withheld = (stolen_s() - stolen) / (time.monotonic() - start) / (os.cpu_count() or 1)
    print(f"\nthe host withheld {withheld:.0%} of the cores")
    if options.json:
        options.json.write_text(json.dumps({"cores": cores, "withheld": withheld, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
