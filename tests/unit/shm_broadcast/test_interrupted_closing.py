"""A ring whose `close` a signal handler interrupts at any place, by an exception or by a `close` of its own."""

import os
import threading
import time
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest

from shm_broadcast.errors import ClosedError, PeerLostError
from shm_broadcast.queue import QueueReader, QueueWriter
from tests.handlers import handling_at, raising_at
from tests.queues import fill, queue
from tests.waiting import wait_until

PLACES = (
    *(f"shm_broadcast/ring/{name}.py" for name in ("reader", "signal", "writer")),
    "shm_broadcast/threads.py",
    "/threading.py",
)


def has_ended(end: QueueWriter | QueueReader, peer: QueueWriter | QueueReader) -> bool:
    """Return whether the other end has learnt that `end` was closed."""
    if isinstance(peer, QueueReader):
        with pytest.raises(ClosedError):
            peer.dequeue(1.0)
    else:
        with pytest.raises(PeerLostError):
            fill(peer, bytes(9000))
    with pytest.raises(ClosedError):
        end.statistics()
    return True


@pytest.mark.guarantee("B7", "B14", "R15")
@pytest.mark.parametrize("what", ["raises", "closes"])
@pytest.mark.parametrize("kind", ["writer", "reader", "reader with a descriptor"])
def test_a_close_that_a_handler_interrupts_is_finished(kind: str, what: str) -> None:
    """The next call goes on with it: the other end learns of it, and no descriptor or thread is left."""
    for step in count():
        with queue() as (writer, [reader]):
            end, peer = (writer, reader) if kind == "writer" else (reader, writer)
            if kind == "reader with a descriptor":
                reader.fileno()
            before, start = len(os.listdir("/proc/self/fd")), time.monotonic()
            came = (
                raising_at(step, end.close, PLACES)
                if what == "raises"
                else handling_at(step, end.close, end.close, PLACES)
            )
            end.close()
            assert time.monotonic() - start < 3.0
            assert len(os.listdir("/proc/self/fd")) < before
            assert not [each for each in threading.enumerate() if each.name == "group-coordinator-fileno"]
            assert has_ended(end, peer)
        if not came:
            break
    assert step > 6


@pytest.mark.guarantee("B7", "R15")
def test_a_handler_inside_of_a_look_for_lost_readers_closes_a_queue_that_a_reader_is_opening() -> None:
    """The thread that admits the reader, for whose end `close` waits, does not wait for the look."""
    for step in count():
        with QueueWriter.create("steps", [0]) as writer, ExitStack() as stack:
            ring: Any = writer._ring
            handover: Any = writer._handover

            def close(
                writer: QueueWriter = writer, stack: ExitStack = stack, handover: Any = handover
            ) -> None:
                stack.enter_context(QueueReader.open(writer.handle, writer.key, 0, 10.0))
                # It ends once every reader has come.
                wait_until(lambda: not handover._thread.is_alive(), "the end of the thread", 20.0)
                writer.close()

            if not handling_at(step, ring._watch.lost, close, ("shm_broadcast/liveness.py",)):
                break
            with pytest.raises(ClosedError):
                writer.enqueue("more", 1.0)
    assert step > 1
