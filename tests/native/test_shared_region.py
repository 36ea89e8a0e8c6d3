"""The shared region of a group. The ranks are threads of one process."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_comm import _core
from device_comm.cpu.communicator import all_reduce_kind
from device_comm.cpu.native_codes import OPERATION_CODES, TYPE_CODES
from device_comm.cpu.shared_memory import connect_part
from device_comm.reduction import ReduceOperation, check_reducible, reduce_in_rank_order
from shm_broadcast.errors import UsageError
from tests.waiting import sleeping_in, wait_until

SLOT = 8192
LINE = 64
GIVE_UP_S = 20.0


def regions(ranks: int, slot: int = SLOT) -> list[_core.SharedRegion]:
    """Return each rank's view of a new region, which is in private memory."""
    memory = mmap.mmap(-1, _core.segment_bytes(ranks, slot))
    _core.lay_out(memory, ranks, slot, 7)
    return [_core.SharedRegion(memory, rank) for rank in range(ranks)]


def finish(end: _core.SharedRegion, status: int) -> int:
    """Resume a call until it is no longer pending; return its status."""
    until = time.monotonic() + GIVE_UP_S
    while status == _core.PENDING and time.monotonic() < until:
        status = end.resume(10_000_000)
    return status


def everybody(ends: list[_core.SharedRegion], call: Callable[[int, _core.SharedRegion], Any]) -> list[Any]:
    """Run `call` as every rank at once; return the results by rank."""
    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(lambda rank: call(rank, ends[rank]), range(len(ends))))


def filled(rank: int, elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random elements that are equal for equal arguments."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    raw = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal bits; every NaN counts as equal to every other NaN."""
    if one.dtype.is_complex:
        parts = {4: torch.float16, 8: torch.float32, 16: torch.float64}[one.dtype.itemsize]
        one, other = one.view(parts), other.view(parts)
    if one.dtype.is_floating_point and one.dtype.itemsize > 1:
        both = one.isnan() & other.isnan()
        one, other = one.masked_fill(both, 0), other.masked_fill(both, 0)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 5),
    elements=st.one_of(st.integers(0, 70), st.integers(0, 6 * SLOT)),
    dtype=st.sampled_from(sorted(TYPE_CODES, key=str)),
    op=st.sampled_from(list(ReduceOperation)),
    in_place=st.booleans(),
    two_shot=st.booleans(),
    seed=st.integers(0, 9),
)
def test_an_all_reduce_has_the_bits_of_the_rank_order_reference(
    ranks: int,
    elements: int,
    dtype: torch.dtype,
    op: ReduceOperation,
    in_place: bool,
    two_shot: bool,
    seed: int,
) -> None:
    """Both algorithms give every rank the bits of the elements combined in rank order."""
    try:
        check_reducible(dtype, op)
    except UsageError:
        return
    inputs = [filled(rank, elements, dtype, seed) for rank in range(ranks)]
    expected = reduce_in_rank_order(inputs, op)
    kind = _core.ALL_REDUCE_TWO_SHOT if two_shot else _core.ALL_REDUCE_ONE_SHOT

    def call(rank: int, end: _core.SharedRegion) -> torch.Tensor:
        source = inputs[rank].clone()
        result = source if in_place else torch.empty_like(source)
        arguments = (
            source.data_ptr(),
            result.data_ptr(),
            elements,
            TYPE_CODES[dtype],
            OPERATION_CODES[op],
            0,
        )
        assert finish(end, end.reduce(kind, *arguments)) == _core.DONE
        if not in_place:
            assert same_bits(source, inputs[rank])
        return result

    for result in everybody(regions(ranks), call):
        assert same_bits(result, expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    widths=st.lists(st.integers(0, 3 * SLOT), min_size=1, max_size=4),
    seed=st.integers(0, 9),
)
def test_columns_are_gathered_and_scattered(rows: int, widths: list[int], seed: int) -> None:
    """All-gather, gather and scatter move each rank's columns of every row, of any widths."""
    ranks = len(widths)
    whole = filled(0, rows * sum(widths), torch.uint8, seed).view(rows, sum(widths))
    parts = [part.contiguous() for part in whole.split(widths, dim=1)]

    def call(rank: int, end: _core.SharedRegion) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        every, root, mine = torch.zeros_like(whole), torch.zeros_like(whole), torch.zeros_like(parts[rank])
        own, last = parts[rank], ranks - 1
        layout = (rows, tuple(widths), 0, 0)
        assert (
            finish(end, end.move(_core.ALL_GATHER, own.data_ptr(), every.data_ptr(), *layout, 0))
            == _core.DONE
        )
        assert (
            finish(end, end.move(_core.GATHER, own.data_ptr(), root.data_ptr(), *layout, last)) == _core.DONE
        )
        scatter = (_core.SCATTER, whole.data_ptr(), mine.data_ptr(), *layout, last)
        assert finish(end, end.move(*scatter)) == _core.DONE
        return every, root, mine

    for rank, (every, root, mine) in enumerate(everybody(regions(ranks), call)):
        assert torch.equal(every, whole)
        assert torch.equal(root, whole if rank == ranks - 1 else torch.zeros_like(whole))
        assert torch.equal(mine, parts[rank])


@settings(max_examples=30, deadline=None)
@given(table=st.lists(st.lists(st.integers(0, 2 * SLOT), min_size=3, max_size=3), min_size=3, max_size=3))
def test_an_uneven_all_to_all_gives_each_rank_its_parts(table: list[list[int]]) -> None:
    """Each pair of ranks has a size of its own, and ranks may need different numbers of steps."""
    sent = [[filled(3 * a + b, table[a][b], torch.uint8, 1) for b in range(3)] for a in range(3)]

    def call(rank: int, end: _core.SharedRegion) -> torch.Tensor:
        source = torch.cat(sent[rank])
        received = tuple(table[a][rank] for a in range(3))
        result = torch.zeros(sum(received), dtype=torch.uint8)
        addresses = (source.data_ptr(), result.data_ptr())
        assert (
            finish(end, end.move(_core.ALL_TO_ALL, *addresses, 1, (*table[rank], *received), 0, 0, 0))
            == _core.DONE
        )
        return result

    for rank, result in enumerate(everybody(regions(3), call)):
        assert torch.equal(result, torch.cat([sent[a][rank] for a in range(3)]))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 4),
    table=st.lists(
        st.lists(st.one_of(st.integers(0, 9), st.integers(0, SLOT)), min_size=3, max_size=3),
        min_size=3,
        max_size=3,
    ),
)
def test_an_all_to_all_of_columns_gives_each_rank_its_columns_of_every_row(
    rows: int, table: list[list[int]]
) -> None:
    """An all-to-all along another dimension than the first works in one step or several."""
    wholes = [filled(a, rows * sum(row), torch.uint8, 1).view(rows, sum(row)) for a, row in enumerate(table)]

    def call(rank: int, end: _core.SharedRegion) -> torch.Tensor:
        received = tuple(table[a][rank] for a in range(3))
        result = torch.zeros(rows, sum(received), dtype=torch.uint8)
        addresses = (wholes[rank].data_ptr(), result.data_ptr())
        assert (
            finish(end, end.move(_core.ALL_TO_ALL, *addresses, rows, (*table[rank], *received), 0, 0, 0))
            == _core.DONE
        )
        return result

    for rank, result in enumerate(everybody(regions(3), call)):
        parts = [whole.split(row, 1)[rank] for whole, row in zip(wholes, table, strict=True)]
        assert torch.equal(result, torch.cat(parts, 1))


@pytest.mark.guarantee("D13")
@settings(max_examples=40, deadline=None)
@given(
    sent=st.lists(st.integers(0, 2 * SLOT), min_size=3, max_size=3),
    pair=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    wrong=st.integers(0, 5 * SLOT),
    rows=st.integers(1, 2),
)
def test_an_exchange_whose_sizes_do_not_match_moves_nothing(
    sent: list[int], pair: tuple[int, int], wrong: int, rows: int
) -> None:
    """All ranks are told all sizes, even if their own match, and the next exchange works."""
    table = [list(sent) for _ in range(3)]
    table[pair[0]][pair[1]] = wrong
    is_wrong = wrong != sent[pair[1]]

    def call(rank: int, end: _core.SharedRegion) -> tuple[int, Any, torch.Tensor]:
        source = torch.ones(rows * sum(table[rank]), dtype=torch.uint8)
        result = torch.zeros(rows * 3 * sent[rank], dtype=torch.uint8)
        addresses = (source.data_ptr(), result.data_ptr())
        received = (sent[rank],) * 3
        status = finish(end, end.move(_core.ALL_TO_ALL, *addresses, rows, (*table[rank], *received), 0, 0, 0))
        widths = [each[1] for each in end.disagreement()] if status == _core.DISAGREE else None
        after = torch.full((3,), rank, dtype=torch.uint8)
        answer = torch.zeros(3, dtype=torch.uint8)
        addresses = (after.data_ptr(), answer.data_ptr())
        assert finish(end, end.move(_core.ALL_TO_ALL, *addresses, 1, (1,) * 6, 0, 0, 0)) == _core.DONE
        assert answer.tolist() == [0, 1, 2]
        return status, widths, result

    told = [(tuple(table[rank]), (sent[rank],) * 3) for rank in range(3)]
    for status, widths, result in everybody(regions(3), call):
        assert status == (_core.DISAGREE if is_wrong else _core.DONE)
        assert widths == (told if is_wrong else None)
        assert bool(result.all()) or is_wrong
        assert not (is_wrong and result.any())


def test_widths_are_told_of_exchanges_alone() -> None:
    """A rank that made another call has no widths, whatever its slot holds."""
    ends = regions(2)
    tensor = torch.arange(8, dtype=torch.uint8)

    def call(rank: int, end: _core.SharedRegion) -> Any:
        address = tensor.data_ptr()
        exchange = (_core.ALL_TO_ALL, address, address, 1, (0, 4, 0, 4), 0, 0, 0)
        begun = end.move(*exchange) if rank else end.barrier()
        assert finish(end, begun) == _core.DISAGREE
        return [widths for _, widths, _ in end.disagreement()]

    assert everybody(ends, call) == [[None, ((0, 4), (0, 4))]] * 2


def test_an_exchange_between_more_ranks_than_the_slots_can_serve_is_refused() -> None:
    """It raises a ValueError, because its steps would move nothing."""
    end = regions(200, mmap.PAGESIZE)[0]
    with pytest.raises(ValueError, match="slots are too small"):
        end.move(_core.ALL_TO_ALL, 0, 0, 1, (0,) * 400, 0, 0, 0)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 5),
    elements=st.one_of(st.integers(0, 70), st.integers(0, 6 * SLOT)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int16, torch.bool]),
    seed=st.integers(0, 9),
)
def test_a_reduce_has_the_bits_of_the_reference_on_its_root_alone(
    ranks: int, elements: int, dtype: torch.dtype, seed: int
) -> None:
    """The other ranks pass no address for a result and get none."""
    inputs = [filled(rank, elements, dtype, seed) for rank in range(ranks)]
    expected = reduce_in_rank_order(inputs, ReduceOperation.SUM)
    root = seed % ranks

    def call(rank: int, end: _core.SharedRegion) -> None:
        source = inputs[rank].clone()
        result = torch.empty_like(source)
        address = result.data_ptr() if rank == root else 0
        arguments = (
            source.data_ptr(),
            address,
            elements,
            TYPE_CODES[dtype],
            OPERATION_CODES[ReduceOperation.SUM],
            root,
        )
        assert finish(end, end.reduce(_core.REDUCE, *arguments)) == _core.DONE
        assert same_bits(source, inputs[rank])
        assert rank != root or same_bits(result, expected)

    everybody(regions(ranks), call)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_reduce_scatter_has_the_bits_of_the_reference(rows: int) -> None:
    """Each rank gets its own columns of the sum. Their numbers differ, and several steps move them."""
    sizes, seed = (700, 0, 2500), 3
    inputs = [filled(rank, rows * sum(sizes), torch.bfloat16, seed) for rank in range(3)]
    expected = reduce_in_rank_order(inputs, ReduceOperation.SUM).view(rows, -1).split(sizes, dim=1)

    def call(rank: int, end: _core.SharedRegion) -> torch.Tensor:
        result = torch.empty(rows * sizes[rank], dtype=torch.bfloat16)
        widths = tuple(2 * size for size in sizes)
        addresses = (inputs[rank].data_ptr(), result.data_ptr())
        code = TYPE_CODES[torch.bfloat16]
        status = end.move(
            _core.REDUCE_SCATTER, *addresses, rows, widths, code, OPERATION_CODES[ReduceOperation.SUM], 0
        )
        assert finish(end, status) == _core.DONE
        return result

    for rank, result in enumerate(everybody(regions(3), call)):
        assert same_bits(result, expected[rank].reshape(-1))


@pytest.mark.guarantee("D13")
def test_ranks_that_make_different_calls_all_learn_of_it_and_go_on() -> None:
    """No data is moved, every rank sees every rank's view, and the next call works."""
    ends = regions(2)

    def call(rank: int, end: _core.SharedRegion) -> tuple[int, list[tuple[int, int, int, int]], torch.Tensor]:
        tensor = torch.full((10 + rank,), float(rank))
        status = finish(end, end.broadcast(tensor.data_ptr(), tensor.nbytes, TYPE_CODES[torch.float32], 0))
        assert finish(end, end.barrier()) == _core.DONE
        views = [view for view, _, _ in end.disagreement()]
        assert end.disagreement() == []
        return status, views, tensor

    (first, views, _), (second, others, tensor) = everybody(ends, call)
    assert first == second == _core.DISAGREE
    assert views == others
    assert [view[2] for view in views] == [40, 44]
    assert torch.equal(tensor, torch.full((11,), 1.0))


def test_a_rank_that_does_not_come_is_told_and_may_come_later() -> None:
    """A pending call names the missing ranks, refuses a second call, and ends when those ranks have come."""
    ends = regions(3)
    assert ends[0].barrier() == _core.PENDING
    assert ends[0].missing() == [1, 2]
    assert ends[0].barrier() == _core.NESTED
    assert ends[1].barrier() == _core.PENDING
    assert ends[0].missing() == [2]
    assert ends[2].barrier() == _core.DONE
    assert [finish(end, end.resume(0)) for end in ends[:2]] == [_core.DONE] * 2
    assert ends[0].resume(0) == _core.BUSY


def test_closing_ends_a_call_that_waits_in_another_thread() -> None:
    """`close` wakes the sleeping thread at once, and every later call returns CLOSED."""
    ends = regions(2)
    assert ends[0].barrier() == _core.PENDING
    outcome: list[int] = []

    def resume() -> None:
        outcome.append(ends[0].resume(int(GIVE_UP_S * 1e9)))

    thread = threading.Thread(target=resume)
    thread.start()
    wait_until(lambda: sleeping_in("resume"), "the thread asleep")
    ends[0].close(False)
    thread.join(GIVE_UP_S)
    assert outcome == [_core.CLOSED]
    ends[0].close(False)
    assert ends[0].barrier() == ends[0].resume(0) == _core.CLOSED
    assert (ends[0].missing(), ends[0].disagreement()) == ([], [])


def test_a_rank_that_left_ends_the_waiting_for_it_and_for_no_other() -> None:
    """A call that waits for the rank returns LEFT at once, and a call in which it took part is completed."""
    ends = regions(3)
    assert [end.barrier() for end in ends] == [_core.PENDING, _core.PENDING, _core.DONE]
    ends[2].close(False)
    assert [finish(end, end.resume(0)) for end in ends[:2]] == [_core.DONE] * 2
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: finish(ends[0], ends[0].barrier()))
        assert waiting.result(GIVE_UP_S) == _core.LEFT
    assert ends[1].barrier() == _core.LEFT


def test_a_broken_group_completes_no_call_any_more() -> None:
    """A rank that comes after another one has given up gets an error like the others."""
    ends = regions(2)
    assert ends[0].barrier() == _core.PENDING
    ends[0].close(True)
    assert ends[1].barrier() == _core.LEFT


@pytest.mark.guarantee("D14")
def test_a_sleeping_rank_is_woken_by_the_last_to_come() -> None:
    """A sleeping rank goes on when the others come. It does not poll meanwhile."""
    ends = regions(2)
    assert ends[0].barrier() == _core.PENDING

    def resume() -> tuple[int, float]:
        before = time.thread_time()
        return ends[0].resume(int(GIVE_UP_S * 1e9)), time.thread_time() - before

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(resume)
        time.sleep(1.0)  # ten times the processor time that the wait may use
        assert ends[1].barrier() == _core.DONE
        status, used_s = waiting.result(GIVE_UP_S)
    assert status == _core.DONE
    assert used_s < 0.1


@pytest.mark.guarantee("D70")
def test_a_rank_that_comes_wakes_nobody_unless_it_is_the_last() -> None:
    """No sleeping rank runs while others come one after the other, and all go on when the last one comes."""
    ends = regions(6)
    numbers: list[int] = []

    def resume(rank: int) -> int:
        assert ends[rank].barrier() == _core.PENDING
        numbers.append(threading.get_native_id())
        return ends[rank].resume(int(GIVE_UP_S * 1e9))

    def rest() -> bool:
        """Return whether all ranks are in the second slice of their call, and none has woken up for 0.1 s."""
        before = list(map(sleeps_of, numbers))
        time.sleep(0.1)
        is_there = len(numbers) == sleeping_in("resume") == len(waiting)
        return is_there and before == list(map(sleeps_of, numbers))

    with ThreadPoolExecutor(len(ends)) as pool:
        waiting: list[Future[int]] = []
        before: dict[int, int] = {}
        for rank in range(len(ends) - 1):
            waiting.append(pool.submit(resume, rank))
            wait_until(rest, "the rank asleep")
            assert {number: sleeps_of(number) for number in before} == before
            before = {number: sleeps_of(number) for number in numbers}
        assert ends[-1].barrier() == _core.DONE
        assert [each.result(GIVE_UP_S) for each in waiting] == [_core.DONE] * (len(ends) - 1)


def sleeps_of(thread: int) -> int:
    """Return how often a thread of this process has gone to sleep so far."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.partition("nonvoluntary")[0].partition("voluntary_ctxt_switches:")[2])


@pytest.mark.parametrize(
    ("offset", "value"), [(0, 1), (8, 1), (8, 2), (12, 0), (12, 300), (16, 100), (16, 1 << 40), (24, 1)]
)
def test_a_mapping_that_is_no_region_is_refused(offset: int, value: int) -> None:
    """The core compares the identity with the size of the mapping before it touches anything else."""
    memory = mmap.mmap(-1, _core.segment_bytes(2, SLOT))
    _core.lay_out(memory, 2, SLOT, 7)
    struct.pack_into("<I" if offset in (8, 12) else "<Q", memory, offset, value)
    with pytest.raises(ValueError, match="no shared region of this version"):
        _core.SharedRegion(memory, 0)


def test_a_rank_outside_of_the_region_is_refused() -> None:
    """A rank that is too high raises, and a mapping that is too small raises when it is laid out."""
    memory = mmap.mmap(-1, _core.segment_bytes(2, SLOT))
    with pytest.raises(ValueError, match="too small"):
        _core.lay_out(memory, 3, SLOT, 7)
    _core.lay_out(memory, 2, SLOT, 7)
    with pytest.raises(ValueError, match="no shared region of this version"):
        _core.SharedRegion(memory, 2)


def test_every_field_stands_where_the_layout_says() -> None:
    """A post is step, number, code, count, detail and steps. The slots follow the page-aligned header.

    A sleeper notes its step, and a rank that leaves changes the gong.
    """
    memory = mmap.mmap(-1, _core.segment_bytes(2, SLOT))
    _core.lay_out(memory, 2, SLOT, 7)
    ends = [_core.SharedRegion(memory, rank) for rank in range(2)]
    tensor = torch.arange(8, dtype=torch.uint8)
    assert ends[1].broadcast(tensor.data_ptr(), 8, TYPE_CODES[torch.uint8], 1) == _core.PENDING
    # Rank 1's post for odd steps follows the identity and the block of three lines of rank 0.
    post = struct.unpack_from("<6Q", memory, 2 * LINE + 3 * LINE + LINE)
    assert post == (1, 1, 5 | TYPE_CODES[torch.uint8] << 8 | 1 << 24, 8, 0, 1)
    slot = mmap.PAGESIZE + (2 * 1 + 1) * SLOT
    assert memory[slot : slot + 8] == bytes(range(8))
    assert struct.unpack_from("<4I", memory, LINE) == (0, 0, 0, 1)
    ends[0].close(True)
    assert struct.unpack_from("<4I", memory, LINE) == (1, 1, 0, 1)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_creation_that_fails_leaves_no_descriptor(fails_at: int) -> None:
    """Rank 0 frees its segment if an exchange fails, before or after the others were told of the segment."""
    calls = 0

    def exchange(own: bytes) -> list[bytes]:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise ConnectionError
        return [own, own]

    health: Any = SimpleNamespace(ranks=(0, 1))
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectionError):
        connect_part(health, 0, (0, 1), 1.0, exchange)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_choice_of_the_algorithm_depends_on_size_and_ranks_alone() -> None:
    """Two ranks always use one shot. More ranks use it up to 128 KiB in all, so the limit falls with their number."""
    assert all_reduce_kind(1 << 30, 2) == _core.ALL_REDUCE_ONE_SHOT
    for ranks in (3, 4, 8, 16, 32, 128):
        most = (128 << 10) // ranks
        assert all_reduce_kind(most, ranks) == _core.ALL_REDUCE_ONE_SHOT
        assert all_reduce_kind(most + 1, ranks) == _core.ALL_REDUCE_TWO_SHOT
