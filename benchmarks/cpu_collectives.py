"""All-reduce, barrier and tensor dicts between processes of one host, beside torch's Gloo.

Every round runs every implementation once, one after the other, so that a ratio compares figures of the same
minute; a figure is the median over the rounds of the medians on rank 0. Results are checked.

    python -m benchmarks.cpu_collectives [--world 2] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coordinator import destroy_distributed_environment, get_world_group, init_distributed_environment
from coordinator.settings import CoordinatorSettings

IMPLEMENTATIONS = ("ours", "torch gloo")
SIZES = {
    "1 KB": 1 << 10,
    "8 KB": 8 << 10,
    "64 KB": 64 << 10,
    "1 MB": 1 << 20,
    "16 MB": 16 << 20,
    "64 MB": 64 << 20,
}


def rounds_of(nbytes: int) -> int:
    return 500 if nbytes <= 64 << 10 else 60 if nbytes <= 1 << 20 else 8


class Gloo:
    """torch.distributed alone, behind our verbs."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        dist.all_reduce(result)
        return result

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        dist.barrier()

    def send_tensor_dict(self, tensors: dict[str, torch.Tensor], dst: int) -> None:
        """Send the metadata as an object, and each tensor behind it, as engines do."""
        metadata = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
        dist.send_object_list([metadata], dst)
        for value in tensors.values():
            dist.send(value, dst)

    def recv_tensor_dict(self, src: int) -> dict[str, torch.Tensor]:
        """Receive what `send_tensor_dict` sends."""
        box: list[Any] = [None]
        dist.recv_object_list(box, src)
        received = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in box[0].items()}
        for value in received.values():
            dist.recv(value, src)
        return received


def median_us(samples: list[float]) -> float:
    return round(statistics.median(samples) * 1e6, 2)


def time_sums(
    group: Any, rank: int, world: int, call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor
) -> float:
    """Return the median of one all-reduce; each eighth result is checked."""
    samples = []
    for i in range(rounds_of(tensor.nbytes) + 5):
        tensor.fill_(rank + i % 8)
        start = time.perf_counter()
        result = call(tensor)
        samples.append(time.perf_counter() - start)
        expected = sum(range(world)) + world * (i % 8)
        if i % 8 == 5 and not bool((result == expected).all()):
            raise AssertionError(f"all-reduce gave {result[:4]}, not {expected}")
    del group
    return median_us(samples[5:])


def time_dicts(group: Any, rank: int) -> dict[str, float]:
    """Return half of the way from rank 0 to rank 1 and back, for three dicts of an engine."""
    bf16 = torch.bfloat16
    dicts = {
        "tensor dict, decode (2 x 64 KB)": {
            k: torch.ones(8, 4096, dtype=bf16) for k in ("hidden", "residual")
        },
        "tensor dict, prefill (2 x 16 MB)": {
            k: torch.ones(2048, 4096, dtype=bf16) for k in ("hidden", "residual")
        },
        "tensor dict, twelve small": {f"t{i}": torch.ones(16) for i in range(12)},
    }
    figures = {}
    for name, tensors in dicts.items():
        samples = []
        for _ in range(20 if "prefill" in name else 300):
            dist.barrier()
            start = time.perf_counter()
            if rank == 0:
                group.send_tensor_dict(tensors, 1)
                back = group.recv_tensor_dict(1)
                samples.append((time.perf_counter() - start) / 2)
                if not all(torch.equal(back[key], value) for key, value in tensors.items()):
                    raise AssertionError(f"{name} came back changed")
            elif rank == 1:
                group.send_tensor_dict(group.recv_tensor_dict(0), 0)
            for value in tensors.values():
                value.view(-1)[0] += 1
        figures[name] = median_us(samples) if rank == 0 else 0.0
    return figures


def time_copy(nbytes: int) -> float:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    samples = []
    for _ in range(20):
        start = time.perf_counter()
        target.copy_(source)
        samples.append(time.perf_counter() - start)
    return median_us(samples)


def run_rank(rank: int, world: int, implementation: str, directory: str) -> None:
    """Measure one implementation as one of `world` ranks; rank 0 prints the figures as JSON."""
    torch.set_num_threads(1)
    settings = CoordinatorSettings.resolve({})
    init_distributed_environment(world, rank, f"file://{directory}", backend="gloo", settings=settings)
    group: Any = get_world_group() if implementation == "ours" else Gloo()
    figures: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, nbytes in SIZES.items():
            tensor = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
            label = f"all-reduce {str(dtype).removeprefix('torch.')} {name}"
            figures[label] = time_sums(group, rank, world, group.all_reduce, tensor)
    for name, nbytes in SIZES.items():
        tensor = torch.ones(nbytes // 4)
        figures[f"all-reduce in place {name}"] = time_sums(group, rank, world, group.all_reduce_, tensor)
    samples = []
    for _ in range(500):
        start = time.perf_counter()
        group.barrier()
        samples.append(time.perf_counter() - start)
    figures["barrier"] = median_us(samples)
    figures |= time_dicts(group, rank)
    for name in ("1 MB", "16 MB", "64 MB"):
        figures[f"memcpy {name}"] = time_copy(SIZES[name])
    dist.barrier()
    if rank == 0:
        print(json.dumps(figures), flush=True)
    destroy_distributed_environment()


def run(implementation: str, world: int) -> dict[str, float]:
    """Run all ranks of one implementation; return rank 0's figures."""
    with tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as directory:
        command = [sys.executable, "-m", "benchmarks.cpu_collectives", "--world", str(world)]
        command += ["--directory", directory, "--implementation", implementation]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE)  # noqa: S603 - our own module
            for rank in range(world)
        ]
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{implementation}: a rank failed")
    figures: dict[str, float] = json.loads(outputs[0])
    return figures


def main() -> None:
    """Measure all implementations in turn, and print a table of medians with the ratio to torch's Gloo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=2, help="number of processes, at least 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--implementation", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank, args.world, args.implementation, args.directory)
        return
    samples: dict[str, dict[str, list[float]]] = {}
    for number in range(args.rounds):
        for implementation in IMPLEMENTATIONS:
            print(f"round {number + 1} of {args.rounds}: {implementation}", file=sys.stderr, flush=True)
            for case, value in run(implementation, args.world).items():
                samples.setdefault(case, {}).setdefault(implementation, []).append(value)
    medians = {
        case: {implementation: statistics.median(values) for implementation, values in by.items()}
        for case, by in samples.items()
    }
    print(f"{'µs':36s}" + "".join(f"{implementation:>14s}" for implementation in IMPLEMENTATIONS))
    for case, by in medians.items():
        ratio = f"{by['torch gloo'] / by['ours']:>10.1f}x" if by["ours"] else ""
        print(f"{case:36s}" + "".join(f"{value:>14,.1f}" for value in by.values()) + ratio)
    if args.json:
        args.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
