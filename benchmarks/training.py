"""Measure data-parallel training on the CPU over Gloo and over the backend `group_coordinator`.

For a model of N float32 parameters there are two figures: the time of the all-reduces alone, in buckets of the sizes
that DistributedDataParallel makes, one after the other and with nothing beside them; and the time of a whole step of a
linear model under DistributedDataParallel. The two backends take turns in the same processes. A figure is the median
over the rounds of rank 0; every sample begins behind a barrier.

    python -m benchmarks training [--parameters 1000000 100000000] [--rounds 11] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import coordinator.torch_backend
from benchmarks.results import write_figures

BACKENDS: Final = ("gloo", coordinator.torch_backend.BACKEND)
WORLD: Final = 2
FIRST_BUCKET: Final = (1 << 20) // 4
BUCKET: Final = (25 << 20) // 4


def buckets(parameters: int) -> list[torch.Tensor]:
    """Return tensors of the sizes of DistributedDataParallel's buckets: the first one is smaller."""
    sizes: list[int] = []
    left = parameters
    while left:
        sizes.append(min(left, BUCKET if sizes else FIRST_BUCKET))
        left -= sizes[-1]
    return [torch.ones(size) for size in sizes]


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes after all ranks have come."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def all_reduces(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Reduce one bucket after the other."""
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)


def step_of(width: int, group: dist.ProcessGroup) -> Callable[[], None]:
    """Return a step of a linear model with `width * width` parameters."""
    model = DistributedDataParallel(
        torch.nn.Linear(width, width, bias=False), process_group=group, gradient_as_bucket_view=True
    )
    inputs = torch.ones(8, width)

    def step() -> None:
        model(inputs).sum().backward()
        model.zero_grad(set_to_none=False)

    return step


def measure(
    parameters: int, rounds: int, groups: dict[str, dist.ProcessGroup]
) -> dict[str, dict[str, float]]:
    """Return the medians in seconds: by figure, then by backend."""
    tensors = buckets(parameters)
    found: dict[str, dict[str, list[float]]] = {"all_reduces": {}, "step": {}}
    for round_ in range(rounds + 1):
        for name, group in groups.items():
            seconds = seconds_of(partial(all_reduces, tensors, group))
            if round_:
                found["all_reduces"].setdefault(name, []).append(seconds)
    tensors.clear()
    steps = {name: step_of(math.isqrt(parameters), group) for name, group in groups.items()}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            seconds = seconds_of(step)
            if round_:
                found["step"].setdefault(name, []).append(seconds)
    return {what: {name: statistics.median(each) for name, each in by.items()} for what, by in found.items()}


def be_rank(rank: int, directory: Path, sizes: list[int], rounds: int) -> None:
    """Measure in one of the processes; rank 0 writes the findings."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), WORLD)
    dist.init_process_group(coordinator.torch_backend.BACKEND, store=store, rank=rank, world_size=WORLD)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    found = {str(size): measure(size, rounds, groups) for size in sizes}
    if rank == 0:
        (directory / "findings.json").write_text(json.dumps(found))
    groups.clear()
    dist.destroy_process_group()


def show(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print one row for each figure."""
    print("| parameters | figure | gloo | group_coordinator | ratio |\n|---|---|---|---|---|")
    for size, figures in found.items():
        for what, by in figures.items():
            theirs, ours = (by[name] for name in BACKENDS)
            print(
                f"| {int(size):,} | {what} | {theirs * 1e3:.2f} ms | {ours * 1e3:.2f} ms | {ours / theirs:.2f} |"
            )


def main() -> None:
    """Start the ranks and print what they find."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 100_000_000])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        be_rank(arguments.rank, arguments.directory, arguments.parameters, arguments.rounds)
        return
    with tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as name:
        command = [sys.executable, "-m", "benchmarks.training", "--directory", name, "--rounds"]
        command += [str(arguments.rounds), "--parameters", *map(str, arguments.parameters), "--rank"]
        ranks = [
            subprocess.Popen(  # noqa: S603 - our own module
                [*command, str(rank)], env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
            )
            for rank in range(WORLD)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit("a rank failed")
        found: dict[str, Any] = json.loads((Path(name) / "findings.json").read_text())
    show(found)
    if arguments.json is not None:
        write_figures(arguments.json, {"rounds": arguments.rounds, "seconds": found})


if __name__ == "__main__":
    main()
