"""What a rank's native end compares and keeps of calls, for its threads and for the other ranks."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from device_comm import _core
from device_comm.cpu.native_codes import TYPE_CODES
from tests.native.test_shared_region import GIVE_UP_S, everybody, finish, regions


@pytest.mark.guarantee("D13")
@pytest.mark.parametrize("closes", [False, True])
def test_a_thread_learns_of_its_own_disagreement(closes: bool) -> None:
    """Another thread may have made the next call, or destroyed the group, before it reads what the ranks posted."""
    ends = regions(2)
    tensor = torch.zeros(16, dtype=torch.uint8)

    def disagree(end: _core.SharedRegion, nbytes: int) -> None:
        assert finish(end, end.broadcast(tensor.data_ptr(), nbytes, 9, 0)) == _core.DISAGREE

    def sizes(end: _core.SharedRegion) -> list[tuple[int, int]]:
        return [(view[0], view[2]) for view, _, _ in end.disagreement()]

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second, ThreadPoolExecutor(1) as other:
        for pool, nbytes in ((first, 1), (second, 2)):
            own, theirs = pool.submit(disagree, ends[0], nbytes), other.submit(disagree, ends[1], 8 * nbytes)
            own.result(GIVE_UP_S)
            theirs.result(GIVE_UP_S)
        if closes:
            ends[0].close(False)
        assert first.submit(sizes, ends[0]).result(GIVE_UP_S) == [(1, 1), (1, 8)]
        assert second.submit(sizes, ends[0]).result(GIVE_UP_S) == [(2, 2), (2, 16)]
        assert sizes(ends[0]) == []


@pytest.mark.guarantee("D69")
def test_a_refusal_during_a_call_is_posted_at_its_end() -> None:
    """It does so also if the ranks of that call disagree, who still learn of each other's views."""
    ends = regions(2)
    tensor = torch.zeros(16, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ends[0].broadcast, tensor.data_ptr(), 1, 9, 0).result(GIVE_UP_S) == _core.PENDING
        ends[0].refuse(b"first")
        ends[0].refuse(b"second")
        assert ends[0].number == 1
        assert ends[1].broadcast(tensor.data_ptr(), 8, 9, 0) == _core.DISAGREE
        assert pool.submit(ends[0].resume, 10_000_000).result(GIVE_UP_S) == _core.DISAGREE
        assert [view[2] for view, _, _ in pool.submit(ends[0].disagreement).result(GIVE_UP_S)] == [1, 8]
        assert ends[0].number == 3
        # The second one is posted in the next call, because the ranks meet in each step.
        after = pool.submit(lambda: finish(ends[0], ends[0].barrier()))
        for reason in (b"first", b"second"):
            assert finish(ends[1], ends[1].barrier()) == _core.DISAGREE
            ((number, *_), _, told), (_, _, own) = ends[1].disagreement()
            assert (number, told, own) == (ends[1].number, reason, b"")
        assert finish(ends[1], ends[1].barrier()) == after.result(GIVE_UP_S) == _core.DONE


def test_a_refusal_inside_of_a_call_of_the_same_thread_takes_no_number() -> None:
    """Only a signal handler or a finalizer can make it; the other ranks know nothing of it."""
    ends = regions(2)
    assert ends[0].barrier() == _core.PENDING
    ends[0].refuse(b"by a handler")
    assert ends[1].barrier() == _core.DONE
    assert finish(ends[0], ends[0].resume(0)) == _core.DONE
    assert ends[0].number == 1
    assert everybody(ends, lambda _rank, end: finish(end, end.barrier())) == [_core.DONE] * 2


@pytest.mark.guarantee("D10")
def test_a_call_that_was_left_is_told_from_one_further_out() -> None:
    """The mark of an exception lasts until the call is continued or kept; no other thread sets or sees it."""
    end = regions(2)[0]
    assert end.leave() == 0
    assert end.barrier() == _core.PENDING
    with ThreadPoolExecutor(1) as other:
        assert other.submit(end.leave).result(GIVE_UP_S) == 0
        assert end.barrier() == _core.NESTED
        assert end.leave() == end.number == 1
        assert end.barrier() == _core.ABANDONED
        assert other.submit(end.barrier).result(GIVE_UP_S) == _core.BUSY
    end.keep()
    assert end.barrier() == _core.NESTED
    assert end.leave() == 1
    assert end.resume(0) == _core.PENDING
    assert end.barrier() == _core.NESTED


@pytest.mark.guarantee("D13")
@pytest.mark.parametrize("kind", [_core.REDUCE_SCATTER, _core.ALL_GATHER, _core.SCATTER])
def test_rows_and_widths_that_are_exchanged_are_another_layout(kind: int) -> None:
    """4 rows of 8 bytes and 8 rows of 4 bytes, all of them of the first rank, are as many bytes."""
    tensors = [torch.zeros(8, dtype=torch.float32) for _ in range(2)]
    shapes = [(4, (8, 0)), (8, (4, 0))]

    def call(rank: int, end: _core.SharedRegion) -> int:
        address = tensors[rank].data_ptr()
        return finish(end, end.move(kind, address, address, *shapes[rank], TYPE_CODES[torch.float32], 0, 0))

    assert everybody(regions(2), call) == [_core.DISAGREE] * 2


@pytest.mark.parametrize("allocations", range(1, 8))
def test_a_finalizer_may_close_the_region_while_its_last_calls_are_listed(allocations: int) -> None:
    """Up to Python 3.11 the collector runs at an allocation, such as that of an entry, of which no more follow then."""
    ends = regions(4)
    everybody(ends, lambda _rank, end: finish(end, end.barrier()))

    class Closing:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            ends[0].close(False)

    thresholds = gc.get_threshold()
    gc.collect()
    Closing()
    try:
        gc.set_threshold(gc.get_count()[0] + allocations)
        found = ends[0].last_calls()
    finally:
        gc.set_threshold(*thresholds)
    assert found == [(1, 0)] * len(found)
    gc.collect()
    assert ends[0].last_calls() == []
