"""Calls of a queue between hosts that wait ask its owner, such as a group, whether that has failed."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from shm_broadcast.errors import CommTimeoutError, GroupBrokenError, PeerLostError
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from shm_broadcast.reports.log_fields import LogFields
from tests.queue_ranks import DEADLINE_S
from tests.remotes import MEGABYTE, remote_queue, until_full

PROMPT_S = 5.0


class Group:
    """Stand for the group of an end: it breaks a while after the beginning, and closes the end then, as groups do."""

    def __init__(self, end: QueueReader | QueueWriter, after_s: float) -> None:
        self._end = end
        self._breaks_at = time.monotonic() + after_s
        self.error = PeerLostError("rank 7 on a third host is gone", peers=(7,))
        self.is_broken = False

    def log_fields(self) -> LogFields:
        """Say nothing."""
        return {}

    def look(self, call: str) -> None:
        """Break, once it is time."""
        if time.monotonic() >= self._breaks_at:
            self.is_broken = True
            self._end.close(*([0.2] if isinstance(self._end, QueueWriter) else []))
            raise self.error

    def ended(self, call: str, *, by_writer: bool = False) -> None:
        """Refuse what comes behind the break."""
        if self.is_broken:
            raise GroupBrokenError(f"{call}: an earlier failure") from self.error

    def failed(self, call: str, error: PeerLostError) -> None:
        """Never learn that the other end is to blame."""
        raise AssertionError(f"{call} blames {error.peers}")


def borrow(reader: QueueReader) -> Any:
    with reader.loan(DEADLINE_S) as value:
        return value


READS: dict[str, Callable[[QueueReader], Any]] = {
    "dequeue": lambda reader: reader.dequeue(DEADLINE_S),
    "loan": borrow,
    "dequeue_any": lambda reader: dequeue_any([reader], DEADLINE_S),
}


@pytest.mark.guarantee("R1", "R4")
@pytest.mark.parametrize("after_s", [0.0, 0.3])
@pytest.mark.parametrize("call", READS)
def test_a_read_that_waits_raises_why_its_group_breaks(call: str, after_s: float) -> None:
    """The writer is alive and connected, and has nothing to say. The end is closed when the call has ended."""
    with remote_queue() as (_, readers):
        group = Group(readers[1], after_s)
        readers[1].guard(group)
        began = time.monotonic()
        with pytest.raises(PeerLostError) as raised:
            READS[call](readers[1])
        assert raised.value is group.error
        assert time.monotonic() - began < PROMPT_S
        far: Any = readers[1]._ring
        assert far._context.closed
        with pytest.raises(GroupBrokenError) as later:
            readers[1].dequeue(DEADLINE_S)
        assert later.value.__cause__ is group.error


@pytest.mark.guarantee("R1", "R4")
def test_adequeue_asks_before_it_waits() -> None:
    """It asks no further, as the owner may block: an event loop would stand still."""
    with remote_queue() as (_, readers):
        group = Group(readers[1], 0.0)
        readers[1].guard(group)
        with pytest.raises(PeerLostError) as raised:
            asyncio.run(readers[1].adequeue(DEADLINE_S))
        assert raised.value is group.error


@pytest.mark.guarantee("R1", "R4")
def test_a_message_that_has_come_is_read_though_the_group_is_broken() -> None:
    """Only who waits asks."""
    with remote_queue() as (writer, readers):
        writer.enqueue("first")
        far: Any = readers[1]._ring
        while not far.is_ready():
            time.sleep(0.01)
        readers[1].guard(Group(readers[1], 0.0))
        assert readers[1].dequeue(DEADLINE_S) == "first"


@pytest.mark.guarantee("R1", "R4")
@pytest.mark.parametrize("local", [[], [2]], ids=["readers elsewhere", "also one here"])
def test_a_write_that_waits_for_room_raises_why_its_group_breaks(local: list[int]) -> None:
    """The readers are alive, and read nothing. What was sent before is not lost."""
    with remote_queue(local=local, ring_bytes=8 * MEGABYTE, high_water_bytes=MEGABYTE) as (writer, readers):
        sent, _ = until_full(writer, bytes(MEGABYTE // 8))
        group = Group(writer, 0.3)
        writer.guard(group)
        began = time.monotonic()
        with pytest.raises(PeerLostError) as raised:
            writer.enqueue(bytes(MEGABYTE // 8), DEADLINE_S)
        assert raised.value is group.error
        assert time.monotonic() - began < PROMPT_S
        with pytest.raises(GroupBrokenError) as later:
            writer.enqueue("later")
        assert later.value.__cause__ is group.error
        for reader in readers.values():
            assert [len(reader.dequeue(DEADLINE_S)) for _ in range(sent)] == [MEGABYTE // 8] * sent


@pytest.mark.guarantee("R1", "R4")
def test_a_healthy_group_changes_no_deadline() -> None:
    """A wait that asks its owner ten times a second ends when it should, and the queue goes on."""
    with remote_queue() as (writer, readers):
        readers[1].guard(Group(readers[1], DEADLINE_S))
        began = time.monotonic()
        with pytest.raises(CommTimeoutError):
            readers[1].dequeue(0.35)
        assert 0.35 <= time.monotonic() - began < PROMPT_S
        writer.enqueue("next")
        assert readers[1].dequeue(DEADLINE_S) == "next"
