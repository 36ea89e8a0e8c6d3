"""The queue between processes, with one writer and its readers, or with many writers and one reader."""

import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_broadcast.errors import ClosedError, CommTimeoutError, UsageError
from shm_broadcast.liveness import fork_count
from shm_broadcast.queue import QueueWriter, dequeue_any
from shm_broadcast.settings import WaitMode
from tests.harness import RankPool
from tests.queue_ranks import Marks, blob, offer, take
from tests.queues import fill, queue, segments_of, sockets_of

LIMIT_S = 30.0
# Messages of 3 kB that surely fit into a ring of 64 KiB.
AT_ONCE = 10


def sizes_of(seed: int, count: int) -> list[int]:
    """Return lengths between 0 and three rings of 64 KiB. Most are small."""
    rng = random.Random(seed)
    return [
        rng.choice([0, rng.randint(1, 300), rng.randint(1, 40_000), rng.randint(1, 200_000)])
        for _ in range(count)
    ]


def pass_sizes(
    rank: int, world_size: int, directory: Path, mode: WaitMode, slow: int, count: int
) -> tuple[int, int]:
    """Send or read `count` messages; rank `slow` sometimes sleeps. Returns (messages, calls that waited)."""
    marks = Marks(directory)
    dawdles = random.Random(rank)
    readers = range(1, world_size)
    end: Any = offer(marks, readers, 64 << 10, wait=mode) if rank == 0 else take(marks, rank)
    with end:
        for number, size in enumerate(sizes_of(5, count)):
            if rank == slow and dawdles.random() < 0.2:
                time.sleep(0.002)
            if rank == 0:
                end.enqueue({"number": number, "data": blob(number, size)}, LIMIT_S)
                continue
            message = end.dequeue(LIMIT_S)
            assert message["number"] == number
            assert np.array_equal(message["data"], blob(number, size))
        told = end.statistics()
        if rank == 0:
            # The writer closes at once. Readers get the error only after they have read everything.
            marks.mark("written")
        else:
            marks.wait("written")
            with pytest.raises(ClosedError):
                end.dequeue(LIMIT_S)
    assert segments_of() == []
    return told.messages, told.waits


@pytest.mark.guarantee("B1", "B2")
@pytest.mark.parametrize(
    ("mode", "slow"), [("adaptive", 0), ("adaptive", 2), ("park", 1), ("spin", 3), ("park", -1)]
)
def test_every_reader_gets_every_message_in_order(ranks4: RankPool, mode: str, slow: int) -> None:
    """All readers get all bytes of all messages in every wait mode, also if the writer or a reader is slow."""
    count = 150
    told = ranks4.run(pass_sizes, mode, slow, count)
    assert [messages for messages, _ in told] == [count] * 4
    if slow == 0:
        assert all(waits > 0 for _, waits in told[1:])
    elif slow > 0:
        assert told[0][1] > 0


def come_late(rank: int, world_size: int, directory: Path) -> list[int]:
    """Read messages that were written before this reader was opened."""
    marks = Marks(directory)
    if rank == 0:
        with offer(marks, range(1, world_size), 64 << 10) as writer:
            sent = 0
            with suppress(CommTimeoutError):
                while sent < 40:
                    writer.enqueue([sent, bytes(3000)], 0.0)
                    sent += 1
            assert AT_ONCE <= sent < 40
            marks.mark("read-0")
            while sent < 40:
                writer.enqueue([sent, bytes(3000)], LIMIT_S)
                sent += 1
            writer.wait_until_ready(LIMIT_S)
            marks.mark("all came")
        return []
    # The first reader comes when the ring is full, each further one when the reader before it has read a part.
    marks.wait(f"read-{rank - 1}")
    with take(marks, rank) as reader:
        found = [reader.dequeue(LIMIT_S)[0] for _ in range(AT_ONCE)]
        marks.mark(f"read-{rank}")
        found += [reader.dequeue(LIMIT_S)[0] for _ in range(AT_ONCE, 40)]
        marks.wait("all came")
        return found


@pytest.mark.guarantee("B1", "B2")
def test_readers_that_come_late_miss_nothing(ranks4: RankPool) -> None:
    """The writer may begin before any reader has come. It waits only when the ring is full."""
    assert ranks4.run(come_late)[1:] == [list(range(40))] * 3


def send_arrays(rank: int, world_size: int, directory: Path) -> int:
    """Send or read arrays that are larger than the ring, or nearly as large as a record may be."""
    marks = Marks(directory)
    sizes = [8 << 20, 1000, (2 << 20) - 4096, 8 << 20, 12 << 20]
    if rank == 0:
        with offer(marks, range(1, world_size), 4 << 20) as writer:
            for number, size in enumerate(sizes):
                writer.enqueue(blob(number, size), LIMIT_S)
            marks.wait("read-1")
            marks.wait("read-2")
            return writer.statistics().readers[0].behind_bytes
    with take(marks, rank) as reader:
        for number, size in enumerate(sizes):
            if rank == 1:
                assert np.array_equal(reader.dequeue(LIMIT_S), blob(number, size))
                continue
            with reader.loan(LIMIT_S) as lent:
                assert np.array_equal(lent, blob(number, size))
                del lent
        marks.mark(f"read-{rank}")
        return reader.statistics().messages


@pytest.mark.guarantee("B1", "B3")
def test_arrays_larger_than_the_ring_cross(ranks4: RankPool) -> None:
    """Eight megabytes pass through a ring of four, by copies and by loans."""
    assert ranks4.run(send_arrays_to_two)[:3] == [0, 5, 5]


def send_arrays_to_two(rank: int, world_size: int, directory: Path) -> int:
    return send_arrays(rank, 3, directory) if rank < 3 else 0


# --- many writers ----------------------------------------------------------------------------------------------


def from_many(rank: int, world_size: int, directory: Path, count: int) -> list[tuple[int, int]]:
    """Ranks 0 to 2 each write to their own queue, and rank 3 reads from all."""
    marks = Marks(directory)
    if rank < 3:
        with offer(marks, [3], 64 << 10, writer=rank) as writer:
            for number in range(count):
                writer.enqueue(
                    (number, bytes(random.Random(rank * 1000 + number).randint(0, 30_000))), LIMIT_S
                )
                if rank == 2:
                    time.sleep(0.001)  # the reader finds this queue empty while the two others are full
            marks.wait("read")
        return []
    readers = [take(marks, 3, writer) for writer in range(3)]
    found = []
    for _ in range(3 * count):
        index, (number, data) = dequeue_any(readers, LIMIT_S)
        assert len(data) == random.Random(index * 1000 + number).randint(0, 30_000)
        found.append((index, number))
    marks.mark("read")
    for reader in readers:
        reader.close()
    return found


@pytest.mark.guarantee("B20")
def test_one_reader_takes_from_many_writers(ranks4: RankPool) -> None:
    """`dequeue_any` returns every message of every writer, and those of one writer in order."""
    found = ranks4.run(from_many, 60)[3]
    for writer in range(3):
        assert [number for index, number in found if index == writer] == list(range(60))


@pytest.mark.guarantee("B20")
def test_a_busy_writer_starves_nobody() -> None:
    """`dequeue_any` serves the queues in turn while all of them have messages."""
    with queue() as (first, [a]), queue() as (second, [b]), queue() as (third, [c]):
        for writer in (first, second, third):
            for number in range(6):
                writer.enqueue(number)
        served = [dequeue_any([a, b, c], 1.0)[0] for _ in range(18)]
        assert all(sorted(served[turn : turn + 3]) == [0, 1, 2] for turn in range(0, 18, 3))


@pytest.mark.guarantee("B20")
def test_a_long_message_of_one_writer_ends_with_the_deadline() -> None:
    """The time-out of `dequeue_any` also ends the wait for the rest of a message that has begun."""
    with queue() as (first, [a]), queue() as (_, [b]):
        with pytest.raises(TimeoutError):
            dequeue_any([a, b], 0.05)
        # The end of this message is missing, because its writer has given up.
        with pytest.raises(TimeoutError):
            first.enqueue(bytes(300_000), 0.0)
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="no end of the message"):
            dequeue_any([a, b], 0.2)
        assert time.monotonic() - start >= 0.2


# --- forked children -------------------------------------------------------------------------------------------


def fork_and_try(rank: int, world_size: int, directory: Path) -> list[str]:
    """Use the queue in a forked child, then in the parent; return the errors in the child."""
    marks = Marks(directory)
    end: Any
    calls: tuple[Any, ...]
    if rank == 0:
        end = offer(marks, [1])
        calls = (lambda: end.enqueue(1), end.statistics, end.wait_until_ready)
        end.wait_until_ready(LIMIT_S)
    else:
        end = take(marks, 1)
        calls = (end.dequeue, end.try_dequeue, end.statistics, lambda: dequeue_any([end]))
    told = in_child(directory / f"told-{rank}", end, calls)
    if rank == 0:
        end.enqueue("after the fork", LIMIT_S)
        marks.wait("read")
    else:
        assert end.dequeue(LIMIT_S) == "after the fork"
        marks.mark("read")
    end.close()
    return told


def in_child(path: Path, end: Any, calls: Any) -> list[str]:
    """Make each call in a forked child, then close the endpoint there; return the kinds of errors."""
    forks = fork_count()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert fork_count() == forks + 1
            kinds = []
            for call in calls:
                try:
                    kinds.append(f"returned {call()}")
                except UsageError as error:
                    kinds.append(type(error).__name__ + (" forked" if "forked" in str(error) else ""))
            end.close()
            end.close()
            path.write_text("\n".join(kinds))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return path.read_text().splitlines()


@pytest.mark.guarantee("B19")
def test_a_forked_child_can_do_nothing_to_the_queue(ranks2: RankPool) -> None:
    """In a forked child every call raises a `UsageError` and `close` does nothing. The parent goes on undisturbed."""
    assert ranks2.run(fork_and_try) == [["UsageError forked"] * 3, ["UsageError forked"] * 4]


@pytest.mark.guarantee("B14")
def test_a_hundred_queues_leave_nothing() -> None:
    """Queues that are created, used and closed one after the other leave no descriptor, mapping, thread or socket."""
    before = sockets_of()
    with QueueWriter.create("steps", [0]) as listening:
        assert sockets_of() - before == {f"@{listening.handle.address}"}
    for _ in range(100):
        with queue(readers=2) as (writer, readers):
            fill(writer, bytes(9000))
            assert readers[0].dequeue(1.0) == bytes(9000)
    assert segments_of() == []
    assert sockets_of() <= before
