"""A ring whose `close` a signal handler interrupts at any place, by an exception or by a `close` of its own."""

import os
import sys
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType

import pytest

from shm_broadcast.errors import ClosedError, PeerLostError
from shm_broadcast.queue import QueueReader, QueueWriter
from tests.queues import fill, queue


class Interrupt(BaseException):
    """What a handler raises."""


def acting_at(step: int, act: Callable[[], None], call: Callable[[], None]) -> bool:
    """Run `call`, and run `act` at a place of the ring's code; return whether that place came.

    Python runs a handler when a function begins and when a native call has returned. These are the events of a
    profiler, whose exception appears at the same places.
    """
    places = count()
    acted: list[int] = []

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        is_place = event in ("call", "c_return") and "shm_broadcast/ring/" in frame.f_code.co_filename
        if is_place and next(places) == step:
            sys.setprofile(None)
            acted.append(step)
            act()

    sys.setprofile(profile)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
    return bool(acted)


def raise_interrupt() -> None:
    """Do what a handler does that raises."""
    raise Interrupt


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
            before = len(os.listdir("/proc/self/fd"))
            came = acting_at(step, raise_interrupt if what == "raises" else end.close, end.close)
            end.close()
            assert len(os.listdir("/proc/self/fd")) < before
            assert not [each for each in threading.enumerate() if each.name == "group-coordinator-fileno"]
            assert has_ended(end, peer)
        if not came:
            break
    assert step > 6
