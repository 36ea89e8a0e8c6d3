"""Each rank reserves the pages of its own slots of the shared regions, so that they lie on its NUMA node."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest

from device_comm.cpu import shared_memory
from device_comm.cpu.shared_memory import HOST_SLOT_BYTES, SLOT_BYTES, Preparation
from shm_broadcast.segment import Segment

RANKS = 3


def reserved_bytes(segment: Segment) -> int:
    """Return how much memory the segment has, touched or not."""
    return os.fstat(segment.descriptor).st_blocks * 512


def touched(segment: Segment) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each run of pages that some process has read or written."""
    found, at = [], 0
    while at < segment.nbytes:
        try:
            begin = os.lseek(segment.descriptor, at, os.SEEK_DATA)
        except OSError:
            break  # nothing was touched from here on
        at = os.lseek(segment.descriptor, begin, os.SEEK_HOLE)
        found.append((begin, at - begin))
    return found


def slots_of(rank: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of a rank's slots in the regions of the device plane and of the host plane."""
    first = mmap.PAGESIZE
    second = first + 2 * RANKS * SLOT_BYTES + mmap.PAGESIZE
    return [
        (start + 2 * rank * nbytes, 2 * nbytes)
        for start, nbytes in ((first, SLOT_BYTES), (second, HOST_SLOT_BYTES))
    ]


@contextmanager
def prepared() -> Iterator[list[Preparation]]:
    """Yield what each of the ranks has prepared; all of them are in this process."""
    with ExitStack() as stack:
        preparations = [Preparation(RANKS, rank) for rank in range(RANKS)]
        for each in preparations:
            stack.callback(each.close)
            each.prepare()
        yield preparations


def taken(preparations: list[Preparation], rank: int) -> tuple[Segment | None, str]:
    """Return what `rank` gets of the first rank's offer."""
    return preparations[rank].take(preparations[0].offer, 30.0)


@pytest.mark.guarantee("D71")
def test_each_rank_reserves_its_own_slots_and_nobody_touches_another_slot() -> None:
    """The first rank reserves all but the others' slots. When all have mapped the memory, every page is reserved."""
    with prepared() as preparations:
        own, failure = taken(preparations, 0)
        assert own is not None, failure
        slots = sum(nbytes for _, nbytes in slots_of(0))
        assert reserved_bytes(own) == own.nbytes - (RANKS - 1) * slots
        for rank in range(1, RANKS):
            assert shared_memory._parts(RANKS, rank) == slots_of(rank)
            segment, failure = taken(preparations, rank)
            assert segment is not None, failure
            segment.close()
            assert reserved_bytes(own) == own.nbytes - (RANKS - 1 - rank) * slots
        # The first rank has written the layouts, each into one page.
        headers = [(offset - mmap.PAGESIZE, mmap.PAGESIZE) for offset, _ in slots_of(0)]
        assert touched(own) == headers
        own.close()


@pytest.mark.guarantee("D71")
def test_a_rank_that_gets_no_memory_for_its_slots_says_so() -> None:
    """The reservation of a rank other than the first one fails, as under a memory limit of its own."""
    with prepared() as preparations:
        own, _ = taken(preparations, 0)
        assert own is not None
        with mock.patch("shm_broadcast.segment.free_memory_bytes", return_value=1 << 10):
            segment, failure = taken(preparations, 1)
        assert segment is None
        assert failure.startswith("rank 1 of the group: a shared segment needs ")
        own.close()


def test_populated_memory_takes_no_page_fault_at_the_first_write() -> None:
    """A page that was entered by a read is also entered for writes."""
    segment = Segment.create(1 << 20, 0, [(0, 1 << 20)])
    segment.populate()
    content = b"x" * (1 << 20)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    segment.memory[:] = content
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 16
    segment.close()


def test_the_parts_of_all_ranks_are_the_whole_without_overlap() -> None:
    """This holds for every number of ranks, as the headers grow with it."""
    for ranks in (2, 3, 21, 22, 64, 256):
        parts = sorted(part for rank in range(ranks) for part in shared_memory._parts(ranks, rank))
        at = 0
        for offset, nbytes in parts:
            assert (offset, offset % mmap.PAGESIZE) == (at, 0)
            at += nbytes
        assert at == shared_memory._layout(ranks).end
