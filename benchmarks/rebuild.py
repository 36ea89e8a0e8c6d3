"""Measure how long a group is out of work when a rank is killed: from the kill to the first good collective.

In each cycle four new ranks add up numbers in a loop; one of them, chosen at random, is killed at a random time, and
the others create their groups again. The cycle counts with the last of them to come to its first good sum.

    python -m benchmarks rebuild [--cycles 40] [--ranks 4] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.launching import die_with_parent
from benchmarks.results import BenchmarkError, write_figures
from coordinator.errors import CommTimeoutError, PeerLostError
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment

# How long the ranks of a cycle may take to start, and to go on.
LIMIT_S = 60.0
MOST_PAUSE_S = 0.05


def run_rank(rank: int, ranks: int, method: str, told: Connection) -> None:
    """Add up until a rank is gone and the others have gone on; tell when that was."""
    die_with_parent()
    torch.set_num_threads(1)
    init_distributed_environment(ranks, rank, method, backend="gloo", elastic=True)
    groups = ParallelGroups.from_sizes()
    tensor = torch.ones(256)
    groups.dp.all_reduce(tensor)
    told.send("ready")
    try:
        while True:
            groups.dp.all_reduce(tensor)
    except (PeerLostError, CommTimeoutError):
        failed_at = time.monotonic()
        groups = groups.rebuild()
    if groups.dp.all_reduce(tensor)[0].item() != ranks - 1:
        raise BenchmarkError(f"rank {rank} has a wrong sum behind the rebuild")
    told.send((failed_at, time.monotonic()))
    groups.destroy()
    destroy_distributed_environment()


def cycle(ranks: int, chance: random.Random) -> tuple[float, float]:
    """Return (seconds from the kill to the last rank's error, seconds to its first good sum)."""
    context = get_context("fork")
    victim = chance.randrange(ranks)
    with tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as folder:
        ends = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, f"file://{folder}/world", write), daemon=True)
            for rank, (_, write) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        for _, write in ends:
            write.close()
        try:
            for read, _ in ends:
                answer_of(read)
            time.sleep(chance.uniform(0.0, MOST_PAUSE_S))
            killed_at = time.monotonic()
            os.kill(processes[victim].pid or 0, signal.SIGKILL)
            times = [answer_of(read) for rank, (read, _) in enumerate(ends) if rank != victim]
        finally:
            for process in processes:
                process.join(LIMIT_S)
                process.kill()
    failed, good = (max(each) for each in zip(*times, strict=True))
    return failed - killed_at, good - killed_at


def answer_of(read: Connection) -> tuple[float, float]:
    """Return what a rank tells."""
    if not read.poll(LIMIT_S):
        raise BenchmarkError(f"a rank said nothing for {LIMIT_S:.0f} s")
    told: tuple[float, float] = read.recv()
    return told


def at_quantile(values: Sequence[float], part: float) -> float:
    """Return the value that `part` of `values` do not exceed."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks rebuild", description=__doc__)
    parser.add_argument("--cycles", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    found = [cycle(options.ranks, chance) for _ in range(options.cycles)]
    figures = {}
    print(f"{options.ranks} ranks, one of them killed, {options.cycles} cycles; ms from the kill")
    for name, times in zip(
        ("the last rank's error", "its first good sum"), zip(*found, strict=True), strict=True
    ):
        median, p99, most = statistics.median(times), at_quantile(times, 0.99), max(times)
        figures[name] = {"median_s": median, "p99_s": p99, "most_s": most}
        print(f"{name:25} median {median * 1e3:7.1f}   p99 {p99 * 1e3:7.1f}   most {most * 1e3:7.1f}")
    if options.json is not None:
        write_figures(options.json, {"cycles": options.cycles, "ranks": options.ranks, "times": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
