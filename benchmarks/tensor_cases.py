"""Cases of tensor collectives: eager, compiled, fused, in graphs, overlapped, by size and by number of ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.implementations import Ours, Plain, Vllm, plain_name
from benchmarks.measuring import Bench, Sampler, Subject, of_calls
from benchmarks.results import BenchmarkError
from coordinator.group import GroupCoordinator
from device_comm.base import CallPath

__all__ = ["SIZES", "Parts", "only_ranks"]

SIZES: Final = tuple(1 << power for power in range(10, 27, 2))
"""1 KB to 64 MB."""
MIDDLE: Final = (8 << 10, 1 << 20, 16 << 20)
HIDDEN: Final = 4096


@dataclass(frozen=True)
class Parts:
    """The implementations that a case measures, on all ranks of `bench.group`."""

    bench: Bench
    ours: Ours
    plain: Plain
    vllm: Vllm | None = None

    @property
    def group(self) -> GroupCoordinator:
        """Return our group."""
        return self.ours.group

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.group.device


def _sizes(parts: Parts, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return sizes[:: len(sizes) // 2] if parts.bench.effort.is_quick else sizes


def _tensor(parts: Parts, nbytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(
        (nbytes // dtype.itemsize,), float(parts.group.rank_in_group + 1), dtype=dtype, device=parts.device
    )


def _demand(is_right: bool, what: str) -> None:
    if not is_right:
        raise BenchmarkError(f"{what} returned a wrong result; its time means nothing")


def _sum_of_ranks(parts: Parts) -> float:
    return parts.group.world_size * (parts.group.world_size + 1) / 2


# --- all-reduce ---------------------------------------------------------------------------------------------


def _all_reduce(
    parts: Parts, nbytes: int, dtype: torch.dtype, case: str = "all_reduce", variant: str = ""
) -> None:
    tensor = _tensor(parts, nbytes, dtype)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: parts.group.all_reduce(tensor),
        plain_name(parts.device): lambda: parts.plain.all_reduce(tensor),
    }
    for name, call in calls.items():
        _demand(bool((call() == _sum_of_ranks(parts)).all()), f"all-reduce of {name}")
    paths = {"ours": parts.ours.path("all_reduce", tensor)}
    subjects = {
        name: Subject(of_calls(call, parts.device), paths.get(name, parts.plain.path))
        for name, call in calls.items()
    }
    variant = variant or str(dtype).removeprefix("torch.")
    parts.bench.measure(case, variant, subjects, nbytes=nbytes)


def _all_reduce_in_place(parts: Parts, nbytes: int) -> None:
    # Zeros stay zeros after any number of sums.
    tensor = torch.zeros(nbytes // 4, device=parts.device)
    calls: dict[str, tuple[Callable[[], object], CallPath]] = {
        "ours": (lambda: parts.group.all_reduce_(tensor), parts.ours.path("all_reduce_", tensor)),
        plain_name(parts.device): (lambda: parts.plain.all_reduce_(tensor), parts.plain.path),
    }
    subjects = {name: Subject(of_calls(call, parts.device), path) for name, (call, path) in calls.items()}
    parts.bench.measure("all_reduce", "float32, in place", subjects, nbytes=nbytes)


def memcpy(parts: Parts) -> None:
    """Measure one copy of a tensor by torch, as a reference for the memory bandwidth."""
    for nbytes in _sizes(parts, MIDDLE):
        source = _tensor(parts, nbytes)
        target = torch.empty_like(source)
        copy = of_calls(lambda source=source, target=target: target.copy_(source), parts.device)  # type: ignore[misc]
        parts.bench.measure("memcpy", "torch.Tensor.copy_", {"torch": Subject(copy)}, nbytes=nbytes)


def all_reduce(parts: Parts) -> None:
    """Measure eager all-reduces by size."""
    for nbytes in _sizes(parts, SIZES):
        _all_reduce(parts, nbytes, torch.float32)
    for nbytes in _sizes(parts, MIDDLE):
        _all_reduce(parts, nbytes, torch.bfloat16)
    for nbytes in _sizes(parts, MIDDLE):
        _all_reduce_in_place(parts, nbytes)
    parts.bench.find_regions("all_reduce", SIZES[0], SIZES[-1])


def compiled(parts: Parts) -> None:
    """Measure all-reduces inside functions compiled by torch.compile; the first call does not count."""
    import torch.distributed._functional_collectives as torch_functional

    group = parts.group

    def of_ours(x: torch.Tensor) -> torch.Tensor:
        return group.all_reduce(x)

    def of_torch(x: torch.Tensor) -> torch.Tensor:
        traced: Any = torch_functional
        result: torch.Tensor = traced.wait_tensor(traced.all_reduce(x, "sum", parts.plain.group))
        return result

    functions: dict[str, Any] = {
        # "aot_eager" runs everything but the code generator, which is slow to load and has nothing to generate here.
        name: torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)
        for name, function in (("ours", of_ours), (plain_name(parts.device), of_torch))
    }
    for nbytes in _sizes(parts, MIDDLE):
        tensor = _tensor(parts, nbytes)
        subjects = {}
        for name, function in functions.items():
            _demand(bool((function(tensor) == _sum_of_ranks(parts)).all()), f"compiled all-reduce of {name}")
            path = parts.ours.path("all_reduce", tensor) if name == "ours" else parts.plain.path
            subjects[name] = Subject(
                of_calls(lambda function=function, tensor=tensor: function(tensor), parts.device),  # type: ignore[misc]
                path,
            )
        parts.bench.measure("all_reduce", "compiled", subjects, nbytes=nbytes)


def graph(parts: Parts) -> None:
    """Measure replays of CUDA graphs of sixteen all-reduces, per all-reduce."""
    if parts.device.type != "cuda":
        parts.bench.skip("all_reduce in a CUDA graph", f"the tensors of this group are on {parts.device}")
        return
    for nbytes in _sizes(parts, SIZES):
        tensor = _tensor(parts, nbytes, torch.bfloat16)
        recorded = torch.cuda.CUDAGraph()
        with parts.group.graph_capture() as context:
            parts.group.all_reduce(tensor)
            path = parts.ours.path("all_reduce", tensor)
            with torch.cuda.graph(recorded, stream=context.stream):  # type: ignore[arg-type]
                for _ in range(_IN_GRAPH):
                    parts.group.all_reduce(tensor)
        plain = torch.cuda.CUDAGraph()
        parts.plain.all_reduce(tensor)
        with torch.cuda.graph(plain):
            for _ in range(_IN_GRAPH):
                parts.plain.all_reduce(tensor)
        subjects = {
            "ours": Subject(_replays(recorded, parts.device), path),
            plain_name(parts.device): Subject(_replays(plain, parts.device), parts.plain.path),
        }
        parts.bench.measure("all_reduce", "graph", subjects, nbytes=nbytes)


_IN_GRAPH: Final = 16


def _replays(recorded: torch.cuda.CUDAGraph, device: torch.device) -> Sampler:
    sample = of_calls(recorded.replay, device)
    return lambda count: [seconds / _IN_GRAPH for seconds in sample(-(-count // _IN_GRAPH))]


def fused(parts: Parts) -> None:
    """Measure all-reduce, residual and norm as one call of ours, and as three calls of torch."""
    for rows in (8, 128) if parts.bench.effort.is_quick else (8, 128, 1024):
        dtype = torch.bfloat16
        tensor = torch.ones(rows, HIDDEN, dtype=dtype, device=parts.device)
        residual, weight = torch.ones_like(tensor), torch.ones(HIDDEN, dtype=dtype, device=parts.device)
        calls: dict[str, Callable[[], Any]] = {
            "ours": lambda tensor=tensor, residual=residual, weight=weight: (  # type: ignore[misc]
                parts.group.all_reduce_add_rms_norm(tensor, residual, weight, 1e-6)
            ),
            plain_name(parts.device): lambda tensor=tensor, residual=residual, weight=weight: (  # type: ignore[misc]
                parts.plain.all_reduce_add_rms_norm(tensor, residual, weight)
            ),
        }
        for name, call in calls.items():
            total = call()[1]
            _demand(bool((total == parts.group.world_size + 1).all()), f"fused norm of {name}")
        paths = {"ours": parts.ours.path("all_reduce_add_rms_norm", tensor)}
        subjects = {
            name: Subject(of_calls(call, parts.device), paths.get(name, parts.plain.path))
            for name, call in calls.items()
        }
        parts.bench.measure("all_reduce", "with residual and norm", subjects, nbytes=tensor.nbytes)


# --- moving data --------------------------------------------------------------------------------------------


def all_gather(parts: Parts) -> None:
    """Measure all-gathers along the first dimension, by the size of one rank's input."""
    for nbytes in _sizes(parts, MIDDLE):
        tensor = _tensor(parts, nbytes)
        _both(
            parts,
            "all_gather",
            tensor,
            lambda tensor=tensor: parts.group.all_gather(tensor, 0),  # type: ignore[misc]
            lambda tensor=tensor: parts.plain.all_gather(tensor),  # type: ignore[misc]
        )


def reduce_scatter(parts: Parts) -> None:
    """Measure reduce-scatters along the first dimension, by the size of one rank's input."""
    world_size = parts.group.world_size
    for nbytes in _sizes(parts, MIDDLE):
        tensor = _tensor(parts, nbytes // (4 * world_size) * 4 * world_size)
        _both(
            parts,
            "reduce_scatter",
            tensor,
            lambda tensor=tensor: parts.group.reduce_scatter(tensor, 0),  # type: ignore[misc]
            lambda tensor=tensor: parts.plain.reduce_scatter(tensor),  # type: ignore[misc]
        )


def _both(
    parts: Parts,
    operation: str,
    tensor: torch.Tensor,
    ours: Callable[[], torch.Tensor],
    plain: Callable[[], torch.Tensor],
) -> None:
    _demand(torch.equal(ours(), plain()), operation)
    subjects = {
        "ours": Subject(of_calls(ours, parts.device), parts.ours.path(operation, tensor)),
        plain_name(parts.device): Subject(of_calls(plain, parts.device), parts.plain.path),
    }
    variant = str(tensor.dtype).removeprefix("torch.")
    parts.bench.measure(operation, variant, subjects, nbytes=tensor.nbytes)


# --- beside computation -------------------------------------------------------------------------------------


def overlap(parts: Parts) -> None:
    """Measure an all-reduce and a pause of equal length, in sequence and overlapped."""
    if parts.device.type != "cpu":
        parts.bench.skip("overlap", "on a device every call is queued on a stream and overlaps anyway")
        return
    nbytes = (1 if parts.bench.effort.is_quick else 16) << 20
    tensor = _tensor(parts, nbytes)
    group, plain = parts.group, parts.plain
    took = of_calls(lambda: group.all_reduce(tensor), parts.device)(9)
    # The process sleeps, as while an accelerator computes; equally long on all ranks.
    pause_s = max(group.all_gather_object(statistics.median(took)))

    def ours_at_once() -> None:
        handle = group.all_reduce(tensor, async_op=True)
        time.sleep(pause_s)
        handle.wait()

    def plain_at_once() -> None:
        result = tensor.clone()
        work = dist.all_reduce(result, group=plain.group, async_op=True)
        time.sleep(pause_s)
        if work is not None:
            work.wait()

    def in_turn(call: Callable[[torch.Tensor], object]) -> Callable[[], None]:
        def calls() -> None:
            call(tensor)
            time.sleep(pause_s)

        return calls

    path = parts.ours.path("all_reduce", tensor)
    name = plain_name(parts.device)
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "alone": (lambda: group.all_reduce(tensor), lambda: plain.all_reduce(tensor)),
        "then a pause": (in_turn(group.all_reduce), in_turn(plain.all_reduce)),
        "during a pause": (ours_at_once, plain_at_once),
    }
    for variant, (ours, theirs) in ways.items():
        subjects = {
            "ours": Subject(of_calls(ours, parts.device), path),
            name: Subject(of_calls(theirs, parts.device), plain.path),
        }
        parts.bench.measure("overlap", variant, subjects, nbytes=nbytes, turn_s=0.1)


# --- by ranks -----------------------------------------------------------------------------------------------


@contextmanager
def only_ranks(world: GroupCoordinator, count: int) -> Iterator[tuple[GroupCoordinator, dist.ProcessGroup]]:
    """Create a group of the first `count` ranks, ours and torch's. Collective over the world."""
    ranks = list(range(count))
    others = [[rank] for rank in range(count, world.world_size)]
    backend = world.torch_distributed_backend
    plain: Any = dist.new_group(ranks, backend=backend)
    with GroupCoordinator([ranks, *others], world.local_rank, backend, True, group_name="bench") as group:
        yield group, plain
        # Ranks outside the group wait here, asleep.
        world.barrier()
    if world.rank < count:
        dist.destroy_process_group(plain)


def scaling(parts: Parts) -> None:
    """Measure barriers, small and large all-reduces with 2, 3, … ranks, and all sizes with 4."""
    world = parts.group
    counts = range(2, world.world_size + 1)
    for count in (counts[0], counts[-1]) if parts.bench.effort.is_quick else counts:
        with only_ranks(world, count) as (group, plain_group):
            if world.rank >= count:
                continue
            some = Parts(parts.bench.on(group), Ours(group), Plain(plain_group, group.device))
            for nbytes in (8 << 10, 1 << 20):
                _all_reduce(some, nbytes, torch.float32, "scaling", "all_reduce")
            _barrier(some, "scaling", "barrier")
            if count == 4:
                all_reduce(some)


def barrier(parts: Parts) -> None:
    """Measure barriers."""
    _barrier(parts, "barrier", "")


def _barrier(parts: Parts, case: str, variant: str) -> None:
    cpu = torch.device("cpu")
    subjects = {
        "ours": Subject(of_calls(parts.group.barrier, cpu)),
        "torch gloo": Subject(of_calls(parts.plain.barrier, cpu)),
    }
    if parts.vllm is not None:
        subjects["vllm"] = Subject(of_calls(parts.vllm.barrier, cpu), parts.vllm.path)
    parts.bench.measure(case, variant, subjects)
