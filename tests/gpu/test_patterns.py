"""Call patterns at the edge of what the kernels support, in two processes: right bits, or one of our errors in time.

Two groups in opposite order: their kernels wait for each other, and all must find room on the device. A capture that
forks: two calls in branches that the graph may run at once. A compiled function in the mode "reduce-overhead": torch
captures it on a stream of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.group import GroupCoordinator
from shm_broadcast.errors import CommError
from tests.gpu.notes import GpuRank, gpu_body
from tests.gpu.running import GpuRun, on_gpu
from tests.gpu.test_processes import DEVICE, check_replays, inputs_of, settings_of, world_of
from tests.gpu.values import expect_equal, expected_sum
from tests.native.nccl_stub.build import build_stub

RIGHT = "right bits"
TYPED = ("UsageError", "CommTimeoutError", "PeerLostError", "GroupBrokenError", "CapabilityError")
"""Errors that tell the caller what is wrong. An InternalError or an error of torch's own tells nothing."""
DEADLINE_S = 6.0
COUNTS = (4096, 500_000)


def outcome_of(work: Callable[[], None]) -> str:
    """Return `RIGHT`, or the name and the text of our error. Wrong bits and foreign errors are raised."""
    try:
        work()
    except Exception as error:
        # The compiler wraps what is raised inside of it.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, CommError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return f"{type(cause).__name__}: {str(cause)[:300]}"
    return RIGHT


def judge(outcomes: Sequence[str]) -> None:
    """Raise unless every rank has the right bits or one of the errors `TYPED`."""
    for rank, outcome in enumerate(outcomes):
        if outcome != RIGHT and outcome.partition(":")[0] not in TYPED:
            raise AssertionError(f"rank {rank}: {outcome}")


@gpu_body
def opposite_order(me: GpuRank, nccl: str) -> str:
    """Each rank begins with another group; the calls are large enough to fill the device."""
    with world_of(me, "nccl", settings_of(me, nccl, DEADLINE_S)) as world:
        other = world.create_subgroup(list(range(me.world_size)))
        assert other is not None
        with other:
            # The first call of a group is collective on the host, where opposite orders cannot meet.
            for each in (world, other):
                communicator: Any = each.device_communicator
                communicator.prepare_kernels()
            return outcome_of(lambda: call_both(me, [world, other]))


def call_both(me: GpuRank, groups: Sequence[GroupCoordinator]) -> None:
    """Call both groups on streams of their own, rank 0 and rank 1 in opposite order, and compare."""
    streams = [torch.cuda.Stream(DEVICE) for _ in groups]
    for turn, count in enumerate(COUNTS * 5):
        inputs = [inputs_of(count, torch.bfloat16, me.world_size, 2 * turn + each) for each in range(2)]
        own = [each[me.rank].to(DEVICE) for each in inputs]
        torch.cuda.synchronize()
        results: dict[int, torch.Tensor] = {}
        for each in (0, 1) if me.rank == 0 else (1, 0):
            with torch.cuda.stream(streams[each]):
                results[each] = groups[each].all_reduce(own[each])
        torch.cuda.synchronize()
        for each, group in enumerate(groups):
            check_health(group)
            expect_equal(results[each].cpu(), expected_sum(inputs[each]), f"group {each}, turn {turn}")


def check_health(group: GroupCoordinator) -> None:
    """Raise what a kernel has reported: a result counts only after that."""
    communicator: Any = group.device_communicator
    communicator.check()


@gpu_body
def forked_capture(me: GpuRank, nccl: str) -> str:
    """A capture forks and joins; each branch has a call of the same group."""
    with world_of(me, "nccl", settings_of(me, nccl, DEADLINE_S)) as group:
        return outcome_of(lambda: capture_branches(me, group))


def capture_branches(me: GpuRank, group: GroupCoordinator) -> None:
    """Capture two all-reduces in two branches, and replay them with new data."""
    own = [torch.zeros(count, dtype=torch.bfloat16, device=DEVICE) for count in (4096, 20_000)]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(DEVICE)
    with group.graph_capture() as context:
        for each in own:
            group.all_reduce(each)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=context.stream):  # type: ignore[arg-type]
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            first = group.all_reduce(own[0])
            with torch.cuda.stream(side):
                second = group.all_reduce(own[1])
            here.wait_stream(side)
    check_replays(graph, own, [first, second], me, 10)
    check_health(group)


@gpu_body
def reduce_overhead(me: GpuRank, nccl: str) -> str:
    """A compiled function that torch captures by itself, without `graph_capture`."""
    # The ranks compile at their own pace, so the deadline is a long one.
    with (
        warnings.catch_warnings(),
        world_of(me, "nccl", settings_of(me, nccl, 30.0)) as group,
    ):
        # The compiler warns of what it finds in torch itself.
        warnings.simplefilter("ignore")
        return outcome_of(lambda: call_compiled(me, group))


def call_compiled(me: GpuRank, group: GroupCoordinator) -> None:
    """Call the function until torch replays its capture, with other data in each call."""

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        return group.all_reduce(x * 2) + 1

    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.full((64, 64), float(step + me.rank), dtype=torch.bfloat16, device=DEVICE)
        found = layer(x).cpu()
        total = sum(2 * (step + rank) for rank in range(me.world_size)) + 1
        expect_equal(found, torch.full((64, 64), float(total), dtype=torch.bfloat16).view(-1), f"call {step}")
    check_health(group)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a stand-in for libnccl."""
    return str(build_stub(tmp_path_factory.mktemp("stub")))


@pytest.mark.parametrize("body", [opposite_order, forked_capture], ids=lambda body: body.__name__)
@on_gpu(10, 30)
def test_an_unusual_order_gives_right_bits_or_a_typed_error(
    gpu: GpuRun, stub: str, body: Callable[..., str]
) -> None:
    """Never wrong bits, never a hang."""
    found = gpu.run(body, stub, ranks=2)
    gpu.fact(f"two processes, {body.__name__}", found)
    judge(found)


@on_gpu(20, 60)
def test_a_compiled_capture_gives_right_bits_or_a_typed_error(gpu: GpuRun, stub: str, tmp_path: Path) -> None:
    """Never wrong bits, never a hang."""
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    found = gpu.run(reduce_overhead, stub, ranks=2, environ=environ)
    gpu.fact("two processes, torch.compile with reduce-overhead", found)
    judge(found)
