"""The status page of a rank that was killed is still read from the ranks that share memory with it."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator.diagnosis.pages import find_pages
from coordinator.errors import CommError
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.status.kept_pages import KeptPages
from shm_broadcast.status.page import OwnPage
from tests.harness import run_ranks
from tests.queues import descriptors_of
from tests.waiting import wait_until
from tests.worlds import meet, new_group, world

VICTIM = 2


def pages_seen() -> dict[int | None, Any]:
    """Return what is known of each page that this process holds, by rank."""
    return {
        found.page.rank: (found.pid, [group.name for group in found.page.groups])
        for found in find_pages([os.getpid()]).found
    }


def pages_held() -> int:
    """Return how many descriptors of pages this process has open."""
    return sum("group-coordinator-status" in target for _, target in descriptors_of("self"))


def after_a_kill(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as everybody:
        before = pages_held()
        with new_group(everybody):
            more = pages_held() - before
            meet(rank, range(world_size), directory, "grouped")
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CommError):
            everybody.barrier()
        seen = pages_seen()
    return {"more": more, "left": pages_held() - before, "seen": {str(each): seen[each] for each in seen}}


@pytest.mark.guarantee("S8")
def test_the_first_rank_keeps_the_pages_of_all_and_the_others_that_of_the_first() -> None:
    """A second group of the same ranks keeps no further descriptors, and `destroy` closes those of the last one."""
    first, other, _ = run_ranks(after_a_kill, 3, expect_dead=[VICTIM])
    assert sorted(first["seen"]) == ["0", "1", "2"]
    assert sorted(other["seen"]) == ["0", "1"]
    pid, groups = first["seen"][str(VICTIM)]
    assert pid is None, "the process has ended"
    assert any(name.startswith("world") for name in groups)
    assert (first["more"], other["more"]) == (0, 0)
    assert (first["left"], other["left"]) == (-2, -1)


def killed_writer(rank: int, world_size: int, directory: Path) -> list[Any]:
    told = directory / "handle"
    if rank == 0:
        writer = QueueWriter.create("steps", [1])
        (directory / "key").write_bytes(writer.key)
        (directory / "new").write_bytes(writer.handle.to_bytes(writer.key))
        (directory / "new").rename(told)
        writer.enqueue("step")
        meet(rank, range(world_size), directory, "read")
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(told.exists, "the writer's handle", 20.0)
    with QueueReader.open(told.read_bytes(), (directory / "key").read_bytes(), 1, 20.0) as reader:
        assert reader.dequeue(20.0) == "step"
        meet(rank, range(world_size), directory, "read")
        with pytest.raises(CommError):
            reader.dequeue(20.0)
        return [
            [found.pid is None, [queue.reader for queue in found.page.queues]]
            for found in find_pages([os.getpid()]).found
        ]


@pytest.mark.guarantee("S8")
def test_a_reader_keeps_the_page_of_its_writer() -> None:
    """The page of a writer that was killed still has its end of the queue."""
    _, found = run_ranks(killed_writer, 2, expect_dead=[0])
    assert sorted(found) == [[False, [0]], [True, [-1]]]


@pytest.mark.guarantee("S8")
def test_what_is_no_page_is_not_kept() -> None:
    """Its descriptor is closed. A page that is kept twice is open once, until both let it go."""
    one, other = KeptPages(), KeptPages()
    before = pages_held()
    read, write = os.pipe()
    one.take(read)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    os.close(write)
    page = OwnPage()
    one.take(os.dup(page.segment.descriptor))
    with_one = pages_held()
    other.take(os.dup(page.segment.descriptor))
    assert pages_held() == with_one
    one.close()
    one.close()
    assert pages_held() == with_one
    other.close()
    page.segment.close()
    vars(page).clear()
    assert pages_held() == before
