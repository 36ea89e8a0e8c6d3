"""The expert-parallel kernels run as threads and have the bits of `all2all.py`: rows, sums, and what is lost."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from device_comm import all2all
from device_comm.all2all import contiguous_ranks
from device_comm.cuda import expert_layout
from device_comm.cuda.kernel_layout import KERNEL_NAMES, KernelFailure
from device_comm.cuda.kernels import kernel_source
from tests.expert_ranks import (
    Dispatched,
    ThreadMeeting,
    a_case,
    cases,
    clear_epochs,
    combine,
    dispatch,
    reference,
    rows_of,
)
from tests.native.cuda.host_build import HostKernels, build_host_library, shared_folder
from tests.native.cuda.test_kernel_results import SECOND, VARIANTS, Group, canonical, random_words

SHAPES = [(1, 1), (2, 2), (3, 4), (5, 2)]
"""Blocks and threads of a launch: fewer threads than ranks, more than tokens."""


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda each: f"{each[0]}-{each[1]}")
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Return a group. The groups have every world size, and each dtype occurs at least twice."""
    world_size, dtype = request.param
    kernels = HostKernels(build_host_library(world_size, dtype, shared_folder(tmp_path_factory)))
    kernels.library.set_limits(8, 8)
    yield Group(kernels, world_size, getattr(torch, dtype), 60 * SECOND)
    kernels.library.set_limits(2, 2)


def same_rows(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether shape, dtype and all bits are equal."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.itemsize]
    return got.dtype == wanted.dtype and torch.equal(
        got.contiguous().view(bits), wanted.contiguous().view(bits)
    )


@pytest.mark.guarantee("D80")
@pytest.mark.parametrize("is_compact", [False, True], ids=["padded", "compact"])
def test_rows_and_sums_have_the_bits_of_the_contract(group: Group, is_compact: bool) -> None:
    """Rows, order, ids, weights, lost tokens and both kinds of combine agree, in turn on one workspace."""
    size, everything = group.world_size, cases(group.world_size, group.dtype)
    meeting = ThreadMeeting(size)

    def work(rank: int) -> None:
        for number, case in enumerate(everything):
            grid, threads = SHAPES[number % len(SHAPES)]
            routed = reference(case, rank, meeting)
            came = (routed.local_ids >= 0).any(1)
            counts = came.view(size, -1).sum(1).tolist()
            rows = max(1, sum(counts) + number % 3) if is_compact else None
            made = dispatch(group, case, rank, max_rows=rows, grid=grid, threads=threads)
            tensors, ids, local = rows_of(routed, rows)
            assert len(made.tensors) == len(tensors)
            for got, wanted in zip(made.tensors, tensors, strict=True):
                assert same_rows(got, wanted), (rank, number)
            assert same_rows(made.ids, ids), (rank, number)
            assert torch.equal(made.local, local), (rank, number)
            assert routed.lost is not None
            assert torch.equal(made.lost, routed.lost), (rank, number)
            assert made.received.tolist() == [*counts, sum(counts)], (rank, number)
            hidden = case.hidden[rank].shape[1]
            for shape in ((size * case.capacity, hidden), (size * case.capacity, ids.shape[1], hidden)):
                if len(shape) == 3 and made.weights is None:
                    continue
                # What a rank computes for a row depends on the row, so both layouts get the same.
                results = random_words(shape, group.dtype, 1000 * number + rank)
                wanted = all2all.combine(meeting.communicator(rank), results, routed)
                own = results
                if rows is not None:
                    own = results.new_zeros((rows, *shape[1:]))
                    own[: sum(counts)] = results[came]
                got = combine(group, made, case, rank, own, grid=grid, threads=threads)
                assert torch.equal(canonical(got), canonical(wanted)), (rank, number, len(shape))

    group.on_all(work)
    assert all(group.failure(rank) is None for rank in range(size))


@pytest.mark.guarantee("D80")
def test_epochs_wrap_and_the_two_calls_come_in_any_order(group: Group) -> None:
    """Several dispatches may be open and be combined twice, while the number of the launch passes 2^32."""
    size, meeting = group.world_size, ThreadMeeting(group.world_size)
    everything = [
        a_case(group.world_size, group.dtype, [3] * size, 2, contiguous_ranks(size, size), 3, 40 + 2 * n)
        for n in range(3)
    ]
    clear_epochs(group, 2**32 - 5)

    def work(rank: int) -> None:
        routed = [reference(case, rank, meeting) for case in everything]
        made = [dispatch(group, case, rank) for case in everything]
        for number in (2, 0, 1, 2, 1):
            results = random_words(tuple(made[number].tensors[0].shape), group.dtype, 70 + number + rank)
            wanted = all2all.combine(meeting.communicator(rank), results, routed[number])
            got = combine(group, made[number], everything[number], rank, results)
            assert torch.equal(canonical(got), canonical(wanted)), (rank, number)
        for one, wanted_rows in zip(made, routed, strict=True):
            assert same_rows(one.tensors[0], wanted_rows.hidden_states)

    group.on_all(work)
    assert all(group.failure(rank) is None for rank in range(size))


# --- failure --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(build_host_library(3, "bfloat16", shared_folder(tmp_path_factory)))


@pytest.mark.guarantee("D78")
@pytest.mark.parametrize("kernel", ["expert_dispatch", "expert_combine"])
def test_a_deadline_names_the_rank_that_did_not_come(three: HostKernels, kernel: str) -> None:
    """Both waiting ranks name rank 1. A later launch returns at once and moves nothing."""
    group = Group(three, 3, torch.bfloat16, SECOND // 4)
    case = a_case(group.world_size, group.dtype, [2, 2, 2], 2, [0, 1, 2], 2, 5)
    made: dict[int, Dispatched] = {}
    if kernel == "expert_combine":
        group.on_all(lambda rank: made.update({rank: dispatch(group, case, rank)}))

    def work(rank: int) -> None:
        if kernel == "expert_dispatch":
            dispatch(group, case, rank)
        else:
            combine(group, made[rank], case, rank, made[rank].tensors[0])

    group.on_all(work, ranks=[0, 2])
    for rank in (0, 2):
        assert group.failure(rank) == KernelFailure("deadline", kernel, (1,), int(kernel == "expert_combine"))
    group.params[0] = group.params[0][:80] + (3600 * SECOND).to_bytes(8, "little") + group.params[0][88:]
    before = ctypes.string_at(group.workspaces[2], group.layout.total_bytes)
    work(0)
    assert ctypes.string_at(group.workspaces[2], group.layout.total_bytes) == before
    failure = group.failure(0)
    assert failure is not None
    assert failure.missing == (1,)


@pytest.mark.guarantee("D77")
def test_more_rows_than_the_output_has_are_reported(three: HostKernels) -> None:
    """The receiver reports the sources whose rows do not fit, and writes nothing behind its output."""
    group = Group(three, 3, torch.bfloat16, 10 * SECOND)
    case = a_case(group.world_size, group.dtype, [4, 4, 4], 1, [1], 4, 8)
    for ids in case.ids:
        ids.zero_()
    made: dict[int, Dispatched] = {}
    # Rank 1 gets four rows from each rank, and has room for six: rank 1's do not all fit, rank 2's not at all.
    group.on_all(lambda rank: made.update({rank: dispatch(group, case, rank, max_rows=6)}))
    assert group.failure(1) == KernelFailure("overflow", "expert_dispatch", (1, 2), 0)
    assert made[1].received.tolist() == [4, 4, 4, 12]
    assert same_rows(made[1].tensors[0], torch.cat([case.hidden[0], case.hidden[1][:2]]))
    assert group.failure(0) is None
    assert group.failure(2) is None
    exact = Group(three, 3, torch.bfloat16, 10 * SECOND)
    exact.on_all(lambda rank: made.update({rank: dispatch(exact, case, rank, max_rows=12)}))
    assert exact.failure(1) is None


# --- layout ---------------------------------------------------------------------------------------------------


def test_python_and_the_kernels_hold_the_same_structures() -> None:
    """The packed arguments have the sizes that the source asserts, and the kernels the numbers that they report."""
    source = kernel_source()
    assert f"sizeof(ExpertDispatch) == {expert_layout.DISPATCH_BYTES}" in source
    assert f"sizeof(ExpertCombine) == {expert_layout.COMBINE_BYTES}" in source
    assert f"constexpr u32 MOST_COLUMNS = {expert_layout.MOST_COLUMNS};" in source
    assert (
        f"enum ExpertKernel : u32 {{ EXPERT_DISPATCH = {KERNEL_NAMES.index('expert_dispatch')}, EXPERT_COMBINE }};"
        in source
    )
    assert KERNEL_NAMES.index("expert_combine") == KERNEL_NAMES.index("expert_dispatch") + 1
    slots = expert_layout.DispatchSlots.of(3, 5, (32, 20))
    assert (slots.ids_offset, slots.offsets, slots.slot_bytes) == (128, (128 + 64, 128 + 64 + 96), 384)
    call = expert_layout.DispatchCall(
        slots=slots, row_bytes=(32, 20), topk=5, experts=7, capacity=3, rows=9, id_bytes=8, is_compact=True
    )
    assert len(call.words()) * 8 == expert_layout.DISPATCH_BYTES
    summed = expert_layout.CombineCall(
        slot_bytes=128, row_bytes=32, topk=5, capacity=3, rows=9, is_compact=False
    )
    assert len(summed.words()) * 8 == expert_layout.COMBINE_BYTES
    assert [expert_layout.unit_of(each) for each in (16, 64, 20, 4, 6, 1, 0)] == [16, 16, 4, 4, 0, 0, 0]
