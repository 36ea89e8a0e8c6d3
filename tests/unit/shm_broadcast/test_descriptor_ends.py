"""The end of a reader's descriptor: how long it takes, and that nothing is left of it, whatever fails."""

import asyncio
import fcntl
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import count
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from shm_broadcast import _core
from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommTimeoutError,
    GroupBrokenError,
    InternalError,
)
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.reports.log_fields import LogFields
from shm_broadcast.ring.signal import _end_all
from tests.handlers import Interrupt
from tests.queues import queue
from tests.waiting import wait_until

LONG_S = 30.0


def is_readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    """Return whether the descriptor is readable, or becomes so in time."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def serving() -> int:
    """Return how many threads of this process serve descriptors. Python lists a thread a little longer than it does."""
    return sum(each.name == "group-coordinator-fileno" and each.is_alive() for each in threading.enumerate())


def unread(writer: QueueWriter, reader: QueueReader) -> None:
    """Leave a message unread, so that nobody has asked for the next signal."""
    writer.enqueue("unread")
    assert is_readable(reader.fileno(), LONG_S)


def closed(writer: QueueWriter, reader: QueueReader) -> None:
    """Close the writer's end, which keeps the descriptor readable."""
    reader.fileno()
    writer.close()
    assert is_readable(reader.fileno(), LONG_S)


@pytest.mark.guarantee("B7", "R17")
@pytest.mark.parametrize("prepare", [unread, closed])
@pytest.mark.parametrize("ends", ["close", "exit"])
def test_the_thread_of_a_descriptor_ends_at_once(
    prepare: Callable[[QueueWriter, QueueReader], None], ends: str
) -> None:
    """`close` and the exit of a process with four readers wait for no slice of 0.4 s; the best of five counts."""
    taken_s = []
    for _ in range(5):
        with ExitStack() as stack:
            for _ in range(1 if ends == "close" else 4):
                writer, [reader] = stack.enter_context(queue())
                assert not is_readable(reader.fileno(), 0.01)
                prepare(writer, reader)
            start = time.monotonic()
            if ends == "close":
                reader.close()
            else:
                _end_all()
            taken_s.append(time.monotonic() - start)
            assert serving() == 0
    assert min(taken_s) < 0.1


def elsewhere(descriptor: int) -> int:
    """Return a copy whose number is none of the lowest, which the system gives next; close the given one."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 500)
    os.close(descriptor)
    return moved


@pytest.mark.guarantee("R17")
def test_a_number_that_the_thread_has_closed_is_not_used() -> None:
    """After the end of the thread, as at the exit of the interpreter, reads leave whatever has its number now alone."""
    with queue() as (writer, [reader]):
        descriptor = reader.fileno()
        unread(writer, reader)
        _end_all()
        with pytest.raises(ClosedError, match="fileno"):
            reader.fileno()
        source, sink = (elsewhere(each) for each in os.pipe())
        os.dup2(source, descriptor)
        os.write(sink, bytes(8))
        assert reader.dequeue(LONG_S) == "unread"
        assert reader.try_dequeue() == (False, None)
        reader.close()
        assert len(os.read(descriptor, 100)) == 8
        for number in (source, sink, descriptor):
            os.close(number)


@pytest.mark.guarantee("R18")
@pytest.mark.parametrize("is_reused", [False, True])
def test_a_close_before_the_descriptor_is_duplicated_ends_the_call(*, is_reused: bool) -> None:
    """`adequeue` raises `ClosedError` at once, also if something else has the number meanwhile, and leaves nothing."""
    with queue() as (_, [reader]):
        before = _core.own_duplicate
        source, sink = os.pipe()

        def dup(descriptor: int) -> tuple[object, int]:
            reader.close()
            if is_reused:
                os.dup2(source, descriptor)
                own = before(descriptor)
                os.close(descriptor)
                return own
            return before(descriptor)

        numbers: list[int] = []

        def noting(descriptor: int) -> tuple[object, int]:
            owner, number = dup(descriptor)
            numbers.append(number)
            return owner, number

        with (
            mock.patch.object(_core, "own_duplicate", noting),
            pytest.raises(ClosedError, match="queue was closed") as caught,
        ):
            asyncio.run(reader.adequeue(LONG_S))
        # The error, which is kept here, keeps no duplicate open.
        for number in numbers:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(number)
        assert caught.value.__traceback__ is not None
        os.close(source)
        os.close(sink)


def struck_at(step: int, call: Callable[[], object]) -> bool:
    """Run `call`, and raise at a place of the coroutine that waits for a descriptor; return whether that place came."""
    places = count()

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        # asyncio drops what is raised in a callback of its loop.
        is_ours = frame.f_code.co_filename.endswith("/awaiting.py") and frame.f_code.co_name != "wake"
        if event in ("call", "c_return") and is_ours and next(places) == step:
            sys.setprofile(None)
            raise Interrupt

    sys.setprofile(profile)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.guarantee("B14", "R18")
def test_a_strike_at_any_place_of_adequeue_leaves_neither_a_descriptor_nor_an_entry_of_the_loop() -> None:
    """The loop would take the next descriptor with that number for the old one, and nobody would be woken."""
    with queue() as (writer, [reader]), closing(asyncio.new_event_loop()) as loop:
        reader.fileno()
        entries = len(loop._selector.get_map())  # type: ignore[attr-defined]
        before = len(os.listdir("/proc/self/fd"))

        def wait() -> None:
            with pytest.raises(CommTimeoutError):
                loop.run_until_complete(reader.adequeue(0.1))

        for step in count():
            came = struck_at(step, wait)
            assert len(os.listdir("/proc/self/fd")) == before
            assert len(loop._selector.get_map()) == entries  # type: ignore[attr-defined]
            writer.enqueue(step)
            assert loop.run_until_complete(reader.adequeue(LONG_S)) == step
            if not came:
                break
        assert step > 10


@pytest.mark.guarantee("B14")
@pytest.mark.parametrize(
    ("name", "error"),
    [("group-coordinator-descriptors", CapabilityError), ("group-coordinator-fileno", CapabilityError)],
    ids=["the one that opens the descriptor", "the one that serves it"],
)
def test_a_thread_that_cannot_be_started_leaves_no_descriptor(name: str, error: type[Exception]) -> None:
    """`fileno` raises and may be called again; `close` closes what was made."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("no thread")
        start(thread)

    failing = mock.patch.object(threading.Thread, "start", refuse)
    with queue() as (writer, [reader]):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            with failing, pytest.raises(error, match="no thread"):
                reader.fileno()
        unread(writer, reader)
        reader.close()
        assert len(os.listdir("/proc/self/fd")) < before
    with queue() as (_, [reader]):
        with failing, pytest.raises(error, match="no thread"):
            reader.fileno()
        reader.close()  # the test's fixture looks for what is left


@pytest.mark.guarantee("B10", "R17")
def test_the_thread_outlives_an_error_of_its_look_for_the_writer() -> None:
    """A ring that was overwritten makes the descriptor readable, as the next read says so; `close` ends the thread."""
    with queue() as (_, [reader]):
        ring: Any = reader._ring
        descriptor = reader.fileno()
        assert not is_readable(descriptor)
        with mock.patch.object(ring, "lost_writer", side_effect=InternalError("overwritten")):
            assert is_readable(descriptor, LONG_S)
        assert serving() == 1
        reader.close()
        assert serving() == 0


class Failed:
    """The guard of an owner that has failed."""

    def log_fields(self) -> LogFields:
        """Say nothing."""
        return {}

    def look(self, call: str) -> None:
        """Raise."""
        self.ended(call)

    def ended(self, call: str, *, by_writer: bool = False) -> None:
        """Raise the owner's error."""
        raise GroupBrokenError(f"{call}: the owner has failed")

    def failed(self, call: str, error: Exception) -> None:
        """Do nothing."""


@pytest.mark.guarantee("B14")
def test_a_close_while_the_descriptor_is_made_leaves_no_thread() -> None:
    """Also if the reader's owner has failed, whose error `fileno` then raises."""
    with queue() as (_, [reader]):
        reader.guard(Failed())
        before = os.eventfd

        def eventfd(*arguments: int) -> int:
            reader.close()
            return before(*arguments)

        with (
            mock.patch.object(os, "eventfd", eventfd),
            pytest.raises(GroupBrokenError, match="the owner has failed"),
        ):
            reader.fileno()
        wait_until(lambda: serving() == 0, "the thread to end", timeout_s=2.0)
