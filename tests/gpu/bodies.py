"""What the ranks of the process steps do, each in a process of its own, all on one GPU.

Kernels of different processes take turns on a GPU, some milliseconds each: a call in which ranks wait for one another
takes several turns. This is about results and failures; no time that is seen here means anything.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coordinator.group import GroupCoordinator
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from device_comm import custom_resources
from device_comm.base import CommunicatorContext
from device_comm.cuda import CudaCommunicator
from device_comm.cuda_settings import CudaSettings
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from device_comm.rms_norm import rms_norm
from shm_broadcast.errors import CommError
from tests.gpu.values import expected_sum, random_words, raw

DEVICE = torch.device("cuda", 0)
EAGER_COUNTS = (8, 1000, 4096, 65536, 100_000)
# The last one does not fit into the arena: in a graph a pull carries it, where memory can be exported.
GRAPH_COUNTS = (512, 20_000, 300_000, 1_500_000)


def settings_of(
    directory: Path, nccl: str | None, deadline_s: float, timeout_s: float = 60.0
) -> CoordinatorSettings:
    """Return the settings of a rank; `nccl` names a library, None takes torch's."""
    cuda = CudaSettings(
        nccl_library=nccl,
        deadline_s=deadline_s,
        # Beside the directory: the next group of the step need not compile again.
        kernel_cache=str(directory.parent / "cache"),
        arena_bytes=4 << 20,
        staging_bytes=4 << 20,
    )
    return CoordinatorSettings.resolve({}, timeout_s=timeout_s, create_timeout_s=60.0, cuda=cuda)


def join(
    rank: int, world_size: int, directory: Path, nccl: str | None, deadline_s: float
) -> tuple[GroupCoordinator, CudaCommunicator]:
    """Join a world of the host plane, and make a CudaCommunicator that agrees over it."""
    settings = settings_of(directory, nccl, deadline_s)
    torch.cuda.set_device(DEVICE)
    init_distributed_environment(
        world_size, rank, f"file://{directory}/rendezvous", backend="gloo", settings=settings
    )
    group = get_world_group()
    context = CommunicatorContext(
        name=group.unique_name,
        rank_in_group=group.rank_in_group,
        ranks=tuple(group.ranks),
        device=DEVICE,
        process_group=None,
        health=group._health,
        timeout_s=settings.timeout_s,
        cuda=settings.cuda,
        exchange=group.all_gather_object,
    )
    return group, CudaCommunicator(context)


@contextmanager
def communicator_of(
    rank: int,
    world_size: int,
    directory: Path,
    nccl: str | None,
    deadline_s: float = 20.0,
) -> Iterator[tuple[GroupCoordinator, CudaCommunicator]]:
    """Yield a group of the host plane, and a CudaCommunicator that agrees over it."""
    group, communicator = join(rank, world_size, directory, nccl, deadline_s)
    try:
        yield group, communicator
    finally:
        communicator.destroy()
        destroy_distributed_environment()


def inputs_of(count: int, dtype: torch.dtype, world_size: int, seed: int) -> list[torch.Tensor]:
    """Return what each rank brings, on the CPU; equal on all ranks."""
    return [random_words(count, dtype, 1000 * seed + rank) for rank in range(world_size)]


def expect_sum(found: torch.Tensor, inputs: list[torch.Tensor], what: str) -> None:
    """Raise unless `found` has the bits of the sum in rank order."""
    if not torch.equal(raw(found.cpu().view(-1)), expected_sum(inputs)):
        raise AssertionError(f"{what}: wrong bits")


def eager_calls(communicator: CudaCommunicator, rounds: int) -> dict[str, str]:
    """Make eager calls of every kind; return how each size of all-reduce went."""
    rank, world = communicator.rank_in_group, communicator.world_size
    communicator.prepare_kernels()
    paths = {}
    for count in EAGER_COUNTS:
        path = communicator.path("all_reduce", count * 2, torch.bfloat16)
        paths[str(count * 2)] = path.algorithm
        if path.algorithm == "nccl":
            # Two ranks of NCCL on one GPU: see the oracles.
            continue
        for turn in range(rounds):
            inputs = inputs_of(count, torch.bfloat16, world, turn)
            result = communicator.all_reduce(inputs[rank].to(DEVICE))
            torch.cuda.synchronize()
            communicator.check()
            expect_sum(result, inputs, f"all_reduce of {count}")
    if all(algorithm == "nccl" for algorithm in paths.values()):
        raise AssertionError(
            f"nothing went through our kernels: {communicator.path('all_reduce', 16, torch.bfloat16)}"
        )
    moves(communicator, paths)
    norms(communicator)
    return paths


def moves(communicator: CudaCommunicator, paths: dict[str, str]) -> None:
    """All-gather and reduce-scatter, where our kernels carry them."""
    rank, world = communicator.rank_in_group, communicator.world_size
    paths["all_gather of 4096"] = communicator.path("all_gather", 4096, torch.int32).algorithm
    if paths["all_gather of 4096"] != "nccl":
        parts = [torch.full((1024,), -1 - each, dtype=torch.int32) for each in range(world)]
        gathered = communicator.all_gather(parts[rank].to(DEVICE), 0)
        torch.cuda.synchronize()
        if not torch.equal(gathered.cpu(), torch.cat(parts)):
            raise AssertionError("all_gather")
    nbytes = 1024 * world * 4
    paths[f"reduce_scatter of {nbytes}"] = communicator.path(
        "reduce_scatter", nbytes, torch.float32
    ).algorithm
    if paths[f"reduce_scatter of {nbytes}"] != "nccl":
        inputs = inputs_of(1024 * world, torch.float32, world, 77)
        scattered = communicator.reduce_scatter(inputs[rank].to(DEVICE), 0)
        torch.cuda.synchronize()
        own = expected_sum(inputs)[rank * 1024 : (rank + 1) * 1024]
        if not torch.equal(raw(scattered.cpu()), own):
            raise AssertionError("reduce_scatter")


def norms(communicator: CudaCommunicator) -> None:
    """The fused norm, against its definition on the CPU."""
    rank, world = communicator.rank_in_group, communicator.world_size
    made = torch.Generator().manual_seed(5)
    inputs = [torch.randn(4, 2048, generator=made).bfloat16() for _ in range(world)]
    residual, weight = (
        torch.randn(4, 2048, generator=made).bfloat16(),
        torch.randn(2048, generator=made).bfloat16(),
    )
    found, kept = communicator.all_reduce_add_rms_norm(
        inputs[rank].to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), 1e-6
    )
    torch.cuda.synchronize()
    total = reduce_in_rank_order(inputs, ReduceOperation.SUM) + residual
    if not (torch.equal(kept.cpu(), total) and torch.equal(found.cpu(), rms_norm(total, weight, 1e-6))):
        raise AssertionError("all_reduce_add_rms_norm")


def graph_calls(
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
    capture: Callable[[torch.cuda.Stream], Any],
    rank: int,
    world: int,
    replays: int,
    counts: tuple[int, ...],
) -> None:
    """Capture all-reduces, replay them with new data, and look at every result."""
    stream = torch.cuda.Stream(DEVICE)
    own = [torch.zeros(count, dtype=torch.bfloat16, device=DEVICE) for count in counts]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with capture(stream), torch.cuda.stream(stream):
        # The large one is for the graph alone: eager it would be NCCL's.
        for each in own[:3]:
            all_reduce(each)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = [all_reduce(each) for each in own]
    for turn in range(replays):
        inputs = [inputs_of(count, torch.bfloat16, world, turn) for count in counts]
        for place, values in zip(own, inputs, strict=True):
            place.copy_(values[rank])
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for result, values in zip(results, inputs, strict=True):
            expect_sum(result, values, f"replay {turn} of {len(values[0])}")


def whole(
    rank: int,
    world_size: int,
    directory: Path,
    nccl: str | None,
    kind: str,
    rounds: int,
    replays: int,
    expandable: bool,
) -> dict[str, Any]:
    """Everything in one life: eager calls, a capture and its replays, the end.

    `nccl`: a stub, to connect nothing. `kind`: how the workspaces are shared, where the product would choose itself.
    """
    setattr(custom_resources, "_KINDS", (kind,))  # noqa: B010 - a constant of the product
    with communicator_of(rank, world_size, directory, nccl) as (group, communicator):
        found: dict[str, Any] = {"paths": eager_calls(communicator, rounds)}
        custom = communicator._custom
        if custom is None:
            raise AssertionError(f"no kernels of ours: {communicator._obstacle}")
        found["memory"] = custom._resources._memory.kind if custom._resources._memory else ""
        if found["memory"] != kind:
            raise AssertionError(f"workspaces by {found['memory']}, not {kind}")
        found["exportable"] = custom.facts.is_exportable
        if custom.facts.is_exportable == expandable:
            raise AssertionError(
                f"expandable segments {expandable}, but exportable {custom.facts.is_exportable}"
            )
        if replays:
            counts = GRAPH_COUNTS[:3] if expandable else GRAPH_COUNTS
            graph_calls(communicator.all_reduce, communicator.capture, rank, world_size, replays, counts)
        group.barrier()
    return found


def shipped(rank: int, world_size: int, directory: Path, nccl: str | None, replays: int) -> dict[str, str]:
    """The same as a user has it: a world of the backend "nccl", the group's own calls, `graph_capture`."""
    settings = settings_of(directory, nccl, 20.0)
    torch.cuda.set_device(DEVICE)
    init_distributed_environment(
        world_size, rank, f"file://{directory}/rendezvous", 0, "nccl", settings=settings
    )
    group = get_world_group()
    communicator = group.device_communicator
    assert isinstance(communicator, CudaCommunicator)
    path = communicator.path("all_reduce", 8192, torch.bfloat16)
    for turn in range(3):
        inputs = inputs_of(4096, torch.bfloat16, world_size, turn)
        result = group.all_reduce(inputs[rank].to(DEVICE))
        torch.cuda.synchronize()
        expect_sum(result, inputs, "all_reduce of the group")
    if replays:
        _capture_by_group(group, rank, world_size, replays)
    destroy_distributed_environment()
    return {"algorithm": path.algorithm, "reason": path.reason}


def _capture_by_group(group: GroupCoordinator, rank: int, world_size: int, replays: int) -> None:
    own = torch.zeros(4096, dtype=torch.bfloat16, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with group.graph_capture() as context:
        group.all_reduce(own)
        with torch.cuda.graph(graph, stream=context.stream):  # type: ignore[arg-type]
            result = group.all_reduce(own)
    for turn in range(replays):
        inputs = inputs_of(4096, torch.bfloat16, world_size, 50 + turn)
        own.copy_(inputs[rank])
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expect_sum(result, inputs, f"replay {turn} of the group's graph")


def fails(
    rank: int, world_size: int, directory: Path, nccl: str | None, how: str, deadline_s: float
) -> dict[str, Any]:
    """Rank 1 is killed or stopped between two calls; the others return what they were told, and when."""
    group, communicator = join(rank, world_size, directory, nccl, deadline_s)
    own = torch.ones(4096, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(3):
        communicator.all_reduce(own)
    torch.cuda.synchronize()
    communicator.check()
    group.barrier()
    if rank == 1:
        (directory / "gone").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    start = time.monotonic()
    try:
        for _ in range(50):
            communicator.all_reduce(own)
            torch.cuda.synchronize()
            communicator.check()
    except CommError as error:
        seconds = time.monotonic() - start
        missing = [*getattr(error, "missing", ()), *getattr(error, "peers", ())]
        return {"kind": type(error).__name__, "seconds": seconds, "ranks": missing, "text": str(error)[:500]}
    raise AssertionError("50 calls went well though rank 1 was gone")


def two_ranks_of_nccl(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Connect NCCL for two ranks on one GPU, which it refuses: return what that looks like here."""
    with communicator_of(rank, world_size, directory, None) as (_, communicator):
        start = time.monotonic()
        try:
            communicator.connect()
        except CommError as error:
            return {
                "kind": type(error).__name__,
                "seconds": time.monotonic() - start,
                "text": str(error)[:500],
            }
        # NCCL 2.30.3 allows two, if NCCL_MULTI_RANK_GPU_ENABLE is set.
        return {"kind": "connected", "seconds": time.monotonic() - start, "text": str(communicator.library)}


def symmetric_memory(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """All-reduce by torch's symmetric memory, and ours: near each other, and ours with the bits of the rank order."""
    import torch.distributed._symmetric_memory as symm_mem

    torch.cuda.set_device(DEVICE)
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    count = 4096
    made = torch.Generator().manual_seed(9)
    inputs = [torch.randn(count, generator=made).bfloat16() for _ in range(world_size)]
    tensor = symm_mem.empty(count, dtype=torch.bfloat16, device=DEVICE)
    symm_mem.rendezvous(tensor, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    tensor.copy_(inputs[rank])
    torch.cuda.synchronize()
    dist.barrier()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    theirs = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name).cpu()
    torch.cuda.synchronize()
    dist.barrier()
    expected = reduce_in_rank_order(inputs, ReduceOperation.SUM)
    return {
        "close": torch.allclose(theirs.float(), expected.float(), rtol=2**-7, atol=1e-2),
        "equal": torch.equal(theirs, expected),
    }


def peer_memory(rank: int, world_size: int, directory: Path, kind: str) -> dict[str, Any]:
    """Map each other's memory in one way, and find what the other wrote."""
    from device_comm.cuda_driver import CudaDriver
    from device_comm.peer_access import PROBE_BYTES, verify_peer_access
    from device_comm.peer_memory import PeerMemory

    driver = CudaDriver(0)
    exchange = _file_exchange(rank, world_size, directory)
    ranks = list(range(world_size))
    nbytes = PROBE_BYTES * world_size
    memory = PeerMemory.create(driver, rank, ranks, nbytes, exchange, kinds=(kind,))  # type: ignore[arg-type]
    verdict = verify_peer_access(driver, rank, ranks, memory.addresses, exchange, None)

    def meet() -> None:
        exchange(b"")

    memory.close(meet)
    driver.close()
    return {"works": verdict.works, "reason": verdict.reason, "kind": memory.kind}


def _file_exchange(rank: int, world_size: int, directory: Path) -> Callable[[bytes], list[bytes]]:
    store = dist.FileStore(str(directory / "store"), world_size)
    number = 0

    def exchange(data: bytes) -> list[bytes]:
        nonlocal number
        number += 1
        # Not empty: the store cannot hold that.
        store.set(f"{number}/{rank}", "+" + data.hex())
        keys = [f"{number}/{other}" for other in range(world_size)]
        end = time.monotonic() + 20.0
        while not store.check(keys):
            if time.monotonic() > end:
                raise TimeoutError(f"no answer in exchange {number}")
            time.sleep(0.001)
        return [bytes.fromhex(store.get(key).decode()[1:]) for key in keys]

    return exchange
