"""The status board in shared memory: the first record counts, and what a rank wrote stays readable without it."""

import mmap
import os
from collections.abc import Iterator

import msgspec
import pytest

from device_comm import _core
from device_comm.cpu.status_board import StatusBoard
from shm_broadcast.reports.arrivals import Arrival
from shm_broadcast.reports.failure_record import FailureRecord

RANKS = (2, 3, 5, 7)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """Return the zeroed memory of a board, which forked children share."""
    with mmap.mmap(-1, _core.board_bytes(len(RANKS))) as mapping:
        yield mapping


def board(memory: mmap.mmap, rank: int) -> StatusBoard:
    """Return the board as `rank` sees it."""
    return StatusBoard(memoryview(memory), RANKS, rank)


def lost(by: int, detail: str = "") -> FailureRecord:
    """Return a record that `by` found."""
    return FailureRecord("lost", (7,), by, "barrier #3", detail=detail)


def test_the_first_record_counts_for_all_ranks(memory: mmap.mmap) -> None:
    """Later ones are dropped, and whoever publishes gets the one that counts."""
    boards = {rank: board(memory, rank) for rank in RANKS}
    assert all(each.failure_record() is None for each in boards.values())
    assert boards[5].publish(lost(5)) == lost(5)
    assert boards[2].publish(lost(2)) == lost(5)
    assert {rank: each.failure_record() for rank, each in boards.items()} == dict.fromkeys(RANKS, lost(5))
    for each in boards.values():
        each.close()


def test_processes_that_publish_at_once_agree(memory: mmap.mmap) -> None:
    """Children write as fast as they can, and end; each has been told the record that the board holds."""
    children, readers = [], []
    for rank in RANKS:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(
                    writer, msgspec.json.encode(board(memory, rank).publish(lost(rank, "x" * rank * 100)))
                )
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writer)
        children.append(child)
        readers.append(reader)
    told = []
    for child, reader in zip(children, readers, strict=True):
        assert os.waitpid(child, 0)[1] == 0
        told.append(msgspec.json.decode(os.read(reader, 4096), type=FailureRecord))
        os.close(reader)
    mine = board(memory, 2)
    assert told == [mine.failure_record()] * len(RANKS)
    mine.close()


def test_long_texts_are_cut_and_the_ranks_are_kept(memory: mmap.mmap) -> None:
    """A record has 3,704 bytes; 200 ranks and long texts fit after their texts are cut."""
    mine = board(memory, 3)
    record = FailureRecord("timeout", tuple(range(200)), 3, "ä" * 3000, 1.5, "\x00" * 9000)
    counts = mine.publish(record)
    assert (counts.ranks, counts.within_s, counts.by) == (record.ranks, 1.5, 3)
    assert counts.detail
    assert record.detail.startswith(counts.detail)
    assert mine.failure_record() == counts
    mine.close()


def test_arrivals_and_departures_of_the_others_are_read(memory: mmap.mmap) -> None:
    """A rank's own are left out, planes are apart, and long names are cut at 56 bytes."""
    two, three = board(memory, 2), board(memory, 3)
    two.arrive("shared", Arrival("all_reduce", 117))
    two.arrive("shared", Arrival("x" * 100, 118))
    two.leave()
    assert three.arrivals("shared") == {2: Arrival("x" * 56, 118)}
    assert three.arrivals("shared host") == two.arrivals("shared") == {}
    assert (three.left(), two.left()) == ((2,), ())
    two.arrive("shared", Arrival("all_reduce", 118, is_over=True))
    assert three.arrivals("shared") == {2: Arrival("all_reduce", 118, is_over=True)}
    for each in (two, three):
        each.close()
        assert each.arrivals("shared") == {}
        assert each.left() == ()
        assert each.failure_record() is None
        assert each.publish(lost(2)) == lost(2)


@pytest.mark.parametrize("text", [b"no record", b'{"kind":"\xff"}', b'{"x":' + b"[" * 3000])
def test_a_record_that_is_none_of_ours_is_ignored(memory: mmap.mmap, text: bytes) -> None:
    """Another rank may write anything: no JSON, no UTF-8, deep nesting; this one goes on with what it knows itself."""
    mine = board(memory, 2)
    _core.board_publish(memory, len(RANKS), 1, text)
    assert mine.failure_record() is None
    assert mine.publish(lost(2)) == lost(2)
    memory[:4] = (200).to_bytes(4, "little")
    assert mine.failure_record() is None
    mine.close()


def test_memory_that_holds_no_board_is_refused(memory: mmap.mmap) -> None:
    """Sizes, ranks, planes and records are checked."""
    other = board(memory, 2)
    with pytest.raises(ValueError, match="no status board"):
        _core.board_left(memory, len(RANKS) + 1)
    with pytest.raises(ValueError, match="no status board"):
        _core.board_leave(memory, len(RANKS), len(RANKS))
    with pytest.raises(ValueError, match="no plane 5"):
        _core.board_arrive(memory, len(RANKS), 0, 5, 1, "barrier")
    with pytest.raises(KeyError, match="of another"):
        other.arrivals("of another")
    with pytest.raises(ValueError, match="does not fit"):
        _core.board_publish(memory, len(RANKS), 0, b"x" * (_core.BOARD_RECORD_BYTES + 1))
    other.close()
