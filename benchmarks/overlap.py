"""Measure how much of an all-reduce hides behind computation, and the cost of a functional all-reduce.

Each round runs every variant once; a figure is the median over the rounds on rank 0. `hidden` is the share of the
shorter of communication and computation that the asynchronous form saves: 1 is perfect, 0 is nothing. There are two
kinds of computation: one that needs a core, and a sleep, as while an accelerator works. Communication over shared
memory needs a core too, so nothing can be hidden while all cores compute.

    python -m benchmarks.overlap [--world 2] [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coordinator import (
    destroy_distributed_environment,
    functional,
    get_world_group,
    init_distributed_environment,
)
from coordinator.group import GroupCoordinator
from coordinator.settings import CoordinatorSettings

SIZES = {"4 MB": 4 << 20, "32 MB": 32 << 20}


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_of(group: GroupCoordinator, call: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        group.barrier()
        samples.append(seconds_of(call))
    return statistics.median(samples)


def computation(kind: str, seconds: float) -> Callable[[], object]:
    """Return a function that takes about `seconds`, on a core or asleep."""
    if kind == "asleep":
        return lambda: time.sleep(seconds)
    matrix = torch.ones(192, 192)
    once = min(seconds_of(lambda: matrix @ matrix) for _ in range(50))
    count = max(int(seconds / once), 1)

    def compute() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    return compute


def overlap_of(group: GroupCoordinator, kind: str, nbytes: int, rounds: int) -> dict[str, float]:
    tensor = torch.ones(nbytes // 4)
    # All ranks compute for rank 0's duration.
    seconds = float(
        group.broadcast(torch.tensor(median_of(group, lambda: group.all_reduce(tensor), 9)).view(1))
    )
    compute = computation(kind, seconds)

    def in_turn() -> None:
        group.all_reduce(tensor)
        compute()

    def overlapping() -> None:
        handle = group.all_reduce(tensor, async_op=True)
        compute()
        handle.wait()

    ways = {
        "communication": lambda: group.all_reduce(tensor),
        "computation": compute,
        "in turn": in_turn,
        "overlapping": overlapping,
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            group.barrier()
            samples[name].append(seconds_of(way))
    figures = {name: round(statistics.median(each) * 1e3, 3) for name, each in samples.items()}
    shorter = min(figures["communication"], figures["computation"])
    figures["hidden"] = round((figures["in turn"] - figures["overlapping"]) / shorter, 2)
    return figures


def functional_of(group: GroupCoordinator, nbytes: int, rounds: int) -> dict[str, float]:
    tensor = torch.ones(nbytes // 4)
    ways: dict[str, Callable[[], object]] = {
        "method": lambda: group.all_reduce(tensor),
        "functional": lambda: functional.wait_tensor(functional.all_reduce(tensor, "sum", group)),
        "handle": lambda: group.all_reduce(tensor, async_op=True).wait(),
    }
    calls = 300 if nbytes <= 64 << 10 else 20
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            group.barrier()
            samples[name].append(statistics.median(seconds_of(way) for _ in range(calls)))
    return {name: round(statistics.median(each) * 1e6, 1) for name, each in samples.items()}


def run_rank(rank: int, world: int, directory: str, rounds: int) -> None:
    """Measure as one of `world` ranks; rank 0 prints the figures as JSON."""
    torch.set_num_threads(1)
    settings = CoordinatorSettings.resolve({})
    init_distributed_environment(world, rank, f"file://{directory}", backend="gloo", settings=settings)
    group = get_world_group()
    figures: dict[str, Any] = {"overlap, ms": {}, "functional, us": {}}
    for name, nbytes in SIZES.items():
        for kind in ("asleep", "on a core"):
            figures["overlap, ms"][f"{name}, computing {kind}"] = overlap_of(group, kind, nbytes, rounds)
    for name, nbytes in {"1 KB": 1 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "4 MB": 4 << 20}.items():
        figures["functional, us"][name] = functional_of(group, nbytes, rounds)
    if rank == 0:
        print(json.dumps(figures))
    destroy_distributed_environment()


def main() -> None:
    """Start the ranks and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.world, options.directory, options.rounds)
        return
    with tempfile.TemporaryDirectory() as directory:
        arguments = [sys.executable, "-m", "benchmarks.overlap", "--directory", f"{directory}/world"]
        arguments += ["--world", str(options.world), "--rounds", str(options.rounds), "--rank"]
        others = [subprocess.Popen([*arguments, str(rank)]) for rank in range(1, options.world)]  # noqa: S603 - ours
        first = subprocess.run([*arguments, "0"], check=True, capture_output=True, text=True)  # noqa: S603 - ours
        for other in others:
            other.wait()
    figures = json.loads(first.stdout)
    print(f"{options.world} ranks, {os.cpu_count()} cores")
    for table, rows in figures.items():
        print(f"\n{table}")
        for name, row in rows.items():
            print(f"  {name:26}", "  ".join(f"{key} {value}" for key, value in row.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
