"""The product in two and four processes that share the GPU: calls, captures, the end; ranks that die or stop.

Our kernels need no NCCL, but a capture, and a group of more than two, connect it, and NCCL refuses two ranks on one
GPU. So these groups get a stub of NCCL that connects and carries nothing.

Kernels of different processes take turns on a GPU, some milliseconds each, and a call in which ranks wait for each
other takes several turns. These tests are about results and failures: no time seen here means anything.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from coordinator.group import GroupCoordinator
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from device_comm.base import CommunicatorContext
from device_comm.cuda.communicator import CudaCommunicator
from device_comm.cuda.custom import resources
from device_comm.cuda_settings import CudaSettings
from device_comm.fused.rms_norm import rms_norm
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from shm_broadcast.errors import CommError
from tests.gpu.notes import GpuRank, gpu_body
from tests.gpu.running import GpuRun, on_gpu
from tests.gpu.values import expect_equal, expected_sum, random_words
from tests.native.nccl_stub.build import build_stub

DEVICE = torch.device("cuda", 0)
DEADLINE_S = 3.0
EXPANDABLE = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
EAGER_COUNTS = (8, 1000, 4096, 65536, 100_000)
GRAPH_COUNTS = (512, 20_000, 300_000, 1_500_000)
"""The last one does not fit into the arena: in a graph a pull carries it, where memory can be exported."""


def settings_of(me: GpuRank, nccl: str | None, deadline_s: float) -> CoordinatorSettings:
    """Return the settings of a rank; `nccl` names a library, None takes the one of torch."""
    cuda = CudaSettings(
        nccl_library=nccl,
        deadline_s=deadline_s,
        kernel_cache=str(me.cache),
        arena_bytes=4 << 20,
        staging_bytes=4 << 20,
    )
    return CoordinatorSettings.resolve({}, timeout_s=60.0, create_timeout_s=60.0, cuda=cuda)


@contextmanager
def world_of(me: GpuRank, backend: str, settings: CoordinatorSettings) -> Iterator[GroupCoordinator]:
    """Yield the world of all ranks."""
    torch.cuda.set_device(DEVICE)
    init_distributed_environment(
        me.world_size,
        me.rank,
        f"file://{me.directory}/rendezvous",
        0 if backend == "nccl" else -1,
        backend,
        settings=settings,
    )
    try:
        yield get_world_group()
    finally:
        destroy_distributed_environment()


@contextmanager
def communicator_of(
    me: GpuRank, nccl: str | None, deadline_s: float = 20.0
) -> Iterator[tuple[GroupCoordinator, CudaCommunicator]]:
    """Yield a group with a host plane only, and a CudaCommunicator that agrees over it."""
    settings = settings_of(me, nccl, deadline_s)
    with world_of(me, "gloo", settings) as group:
        context = CommunicatorContext(
            name=group.unique_name,
            rank_in_group=group.rank_in_group,
            ranks=tuple(group.ranks),
            device=DEVICE,
            process_group=None,
            health=group._health,
            timeout_s=settings.timeout_s,
            cuda=settings.cuda,
            exchange=group._host.exchange,
        )
        communicator = CudaCommunicator(context)
        try:
            yield group, communicator
        finally:
            communicator.destroy()


def inputs_of(count: int, dtype: torch.dtype, world_size: int, seed: int) -> list[torch.Tensor]:
    """Return what each rank brings, on the CPU; equal on all ranks."""
    return [random_words(count, dtype, 1000 * seed + rank) for rank in range(world_size)]


def check_sum(call: Callable[[torch.Tensor], torch.Tensor], me: GpuRank, count: int, seed: int) -> None:
    """All-reduce bfloat16 and compare with the sum in rank order."""
    inputs = inputs_of(count, torch.bfloat16, me.world_size, seed)
    result = call(inputs[me.rank].to(DEVICE))
    torch.cuda.synchronize()
    expect_equal(result.cpu(), expected_sum(inputs), f"all_reduce of {count}")


def eager_calls(communicator: CudaCommunicator, me: GpuRank, rounds: int) -> dict[str, str]:
    """Make eager calls of every kind; return the algorithm of each."""
    communicator.prepare_kernels()
    algorithms = {}
    for count in EAGER_COUNTS:
        path = communicator.path("all_reduce", count * 2, torch.bfloat16)
        algorithms[str(count * 2)] = path.algorithm
        # Two ranks of NCCL on one GPU: see the oracles.
        for turn in range(rounds if path.algorithm != "nccl" else 0):
            check_sum(communicator.all_reduce, me, count, turn)
            communicator.check()
    if set(algorithms.values()) == {"nccl"}:
        path = communicator.path("all_reduce", 16, torch.bfloat16)
        raise AssertionError(f"nothing went through our kernels: {path}")
    algorithms |= moves(communicator, me)
    norms(communicator, me)
    return algorithms


def moves(communicator: CudaCommunicator, me: GpuRank) -> dict[str, str]:
    """All-gather and reduce-scatter, where our kernels carry them; return the algorithms."""
    world, rank = me.world_size, me.rank
    gather = communicator.path("all_gather", 4096, torch.int32).algorithm
    if gather != "nccl":
        parts = [torch.full((1024,), -1 - each, dtype=torch.int32) for each in range(world)]
        gathered = communicator.all_gather(parts[rank].to(DEVICE), 0)
        torch.cuda.synchronize()
        expect_equal(gathered.cpu(), torch.cat(parts), "all_gather")
    nbytes = 1024 * world * 4
    scatter = communicator.path("reduce_scatter", nbytes, torch.float32).algorithm
    if scatter != "nccl":
        inputs = inputs_of(1024 * world, torch.float32, world, 77)
        scattered = communicator.reduce_scatter(inputs[rank].to(DEVICE), 0)
        torch.cuda.synchronize()
        expect_equal(scattered.cpu(), expected_sum(inputs).split(1024)[rank], "reduce_scatter")
    return {"all_gather of 4096": gather, f"reduce_scatter of {nbytes}": scatter}


def norms(communicator: CudaCommunicator, me: GpuRank) -> None:
    """The fused norm, against its definition on the CPU."""
    made = torch.Generator().manual_seed(5)
    *inputs, residual = [torch.randn(4, 2048, generator=made).bfloat16() for _ in range(me.world_size + 1)]
    weight = torch.randn(2048, generator=made).bfloat16()
    found, kept = communicator.all_reduce_add_rms_norm(
        inputs[me.rank].to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), 1e-6
    )
    torch.cuda.synchronize()
    total = reduce_in_rank_order(inputs, ReduceOperation.SUM) + residual
    expect_equal(kept.cpu(), total, "all_reduce_add_rms_norm, the sum")
    expect_equal(found.cpu(), rms_norm(total, weight, 1e-6), "all_reduce_add_rms_norm, the norm")


def graph_calls(communicator: CudaCommunicator, me: GpuRank, replays: int, counts: tuple[int, ...]) -> None:
    """Capture all-reduces, replay them with new data, and compare every result."""
    stream = torch.cuda.Stream(DEVICE)
    own = [torch.zeros(count, dtype=torch.bfloat16, device=DEVICE) for count in counts]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with communicator.capture(stream), torch.cuda.stream(stream):
        # The largest one is for the graph alone: eager it would go through NCCL.
        for each in own[:3]:
            communicator.all_reduce(each)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            results = [communicator.all_reduce(each) for each in own]
    check_replays(graph, own, results, me, replays)


def check_replays(
    graph: torch.cuda.CUDAGraph,
    own: list[torch.Tensor],
    results: list[torch.Tensor],
    me: GpuRank,
    replays: int,
) -> None:
    """Replay a graph of all-reduces with new data, and compare every result."""
    for turn in range(replays):
        inputs = [inputs_of(len(each), torch.bfloat16, me.world_size, turn) for each in own]
        for place, values in zip(own, inputs, strict=True):
            place.copy_(values[me.rank])
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for result, values in zip(results, inputs, strict=True):
            expect_equal(result.cpu(), expected_sum(values), f"replay {turn}")


@gpu_body
def whole_life(
    me: GpuRank, nccl: str | None, kind: str, rounds: int, replays: int, expandable: bool
) -> dict[str, Any]:
    """Everything in one life: eager calls, a capture and its replays, the end.

    `kind`: how the workspaces are shared, which the product would choose for itself.
    """
    setattr(resources, "_KINDS", (kind,))  # noqa: B010 - a constant of the product
    with communicator_of(me, nccl) as (group, communicator):
        algorithms = eager_calls(communicator, me, rounds)
        custom = communicator._custom
        if custom is None:
            raise AssertionError(f"no kernels of ours: {communicator._obstacle}")
        memory = custom._resources._memory
        assert memory is not None
        assert memory.kind == kind
        assert custom.facts.is_exportable != expandable
        if replays:
            graph_calls(communicator, me, replays, GRAPH_COUNTS[:3] if expandable else GRAPH_COUNTS)
        group.barrier()
    return {"algorithms": algorithms, "memory": memory.kind}


@gpu_body
def group_of_a_user(me: GpuRank, nccl: str | None, replays: int) -> dict[str, str]:
    """The same as a user has it: a world of the backend "nccl", the calls of the group, `graph_capture`."""
    with world_of(me, "nccl", settings_of(me, nccl, 20.0)) as group:
        assert isinstance(group.device_communicator, CudaCommunicator)
        path = group.device_communicator.path("all_reduce", 8192, torch.bfloat16)
        for turn in range(3):
            check_sum(group.all_reduce, me, 4096, turn)
        if replays:
            capture_by_group(group, me, replays)
    return {"algorithm": path.algorithm, "reason": path.reason}


def capture_by_group(group: GroupCoordinator, me: GpuRank, replays: int) -> None:
    """Capture an all-reduce of the group, and replay it. The graph is gone when this returns: NCCL waits for that."""
    own = torch.zeros(4096, dtype=torch.bfloat16, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with group.graph_capture() as context:
        group.all_reduce(own)
        with torch.cuda.graph(graph, stream=context.stream):  # type: ignore[arg-type]
            result = group.all_reduce(own)
    check_replays(graph, [own], [result], me, replays)


@gpu_body
def loses_rank_1(me: GpuRank, nccl: str, how: str, expected: str) -> None:
    """Kill or stop rank 1 between two calls; rank 0 judges what it was told, and when."""
    with communicator_of(me, nccl, DEADLINE_S) as (group, communicator):
        own = torch.ones(4096, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(3):
            communicator.all_reduce(own)
        torch.cuda.synchronize()
        communicator.check()
        pids = group.all_gather_object(os.getpid())
        group.barrier()
        if me.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(CommError) as caught:  # noqa: PT012 - any of these calls may be told of it
            for _ in range(50):
                communicator.all_reduce(own)
                torch.cuda.synchronize()
                communicator.check()
        seconds = time.monotonic() - start
        if how == "stopped":
            # It would never end, and the harness waits for it.
            os.kill(pids[1], signal.SIGKILL)
        error = caught.value
        named = [*getattr(error, "missing", ()), *getattr(error, "peers", ())]
        told = f"{type(error).__name__} naming {named} after {seconds:.2f} s"
        me.figure(f"a {how} rank: until the error, deadline {DEADLINE_S:.0f} s", seconds, "s")
        # After the deadline of the kernels the ranks still ask each other which one is missing.
        right = type(error).__name__ == expected and 1 in named and seconds < DEADLINE_S + 3.0
        if how == "killed":
            target = f"an error within the deadline of {DEADLINE_S:.0f} s"
            me.goal("a killed rank", target, told, right and seconds <= DEADLINE_S)
        assert right, f"expected {expected}: {told}: {str(error)[:500]}"


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a stand-in for libnccl."""
    return str(build_stub(tmp_path_factory.mktemp("stub")))


@pytest.mark.parametrize(
    ("ranks", "has_stub", "kind", "rounds", "replays", "goal"),
    [
        pytest.param(2, False, "ipc", 5, 0, "", id="2 by IPC, eager, the real NCCL unconnected"),
        pytest.param(2, True, "ipc", 5, 20, "two processes over CUDA IPC", id="2 by IPC, captured too"),
        pytest.param(4, True, "ipc", 2, 6, "four processes over CUDA IPC", id="4 by IPC, captured too"),
        pytest.param(2, True, "vmm", 2, 10, "", id="2 by descriptors, expandable segments"),
    ],
)
@on_gpu(12, 70)
def test_a_group_of_processes_has_a_whole_life(
    gpu: GpuRun, stub: str, ranks: int, has_stub: bool, kind: str, rounds: int, replays: int, goal: str
) -> None:
    """Right bits, eager and captured, on every rank; the ranks agree on every algorithm; the group ends."""
    if goal:
        gpu.goal(goal, "right bits, eager and captured", "failed", False)
    expandable = kind == "vmm"
    arguments = (stub if has_stub else None, kind, rounds, replays, expandable)
    environ = EXPANDABLE if expandable else None
    found = gpu.run(whole_life, *arguments, ranks=ranks, environ=environ, fresh=expandable)
    assert all(each == found[0] for each in found), found
    gpu.fact(f"algorithms of {ranks} processes, {kind}", f"{found[0]['algorithms']}")
    if goal:
        gpu.goal(goal, "right bits, eager and captured", "right", True)


@pytest.mark.parametrize(("how", "expected"), [("killed", "PeerLostError"), ("stopped", "CommTimeoutError")])
@on_gpu(12, 45)
def test_a_lost_rank_is_named(gpu: GpuRun, stub: str, how: str, expected: str) -> None:
    """The other rank gets a typed error that names the lost one, and can end."""
    gpu.run(loses_rank_1, stub, how, expected, ranks=2, expect_dead=[1])


@pytest.mark.parametrize("replays", [0, 5], ids=["eager", "captured"])
@on_gpu(10, 50)
def test_a_group_of_the_coordinator_uses_our_kernels(gpu: GpuRun, stub: str, replays: int) -> None:
    """What users write: the group's own calls, eager with the real NCCL unconnected, and captured."""
    found = gpu.run(group_of_a_user, stub if replays else None, replays, ranks=2)
    assert found[0] == found[1]
    assert found[0]["algorithm"] != "nccl", found
