"""Sends that were left open: none is dropped before it is complete, whoever keeps others meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from coordinator.host.open_sends import MAX_OPEN_SENDS, OpenSends
from shm_broadcast.errors import CapabilityError, ClosedError, PeerLostError


class Send:
    """A send that is complete, open or failed as the test says."""

    def __init__(self, *, is_done: bool = False, error: Exception | None = None) -> None:
        self.is_done = is_done
        self.error = error
        self.asked = 0

    def is_completed(self) -> bool:
        """Return what the test says; complete at the third question unless it has failed."""
        self.asked += 1
        if self.error is not None:
            raise self.error
        self.is_done = self.is_done or self.asked >= 3
        return self.is_done

    def wait(self) -> None:
        """Become complete."""
        if self.error is not None:
            raise self.error
        self.is_done = True


def kept_by_a_handler(strike: int, backlog: int) -> tuple[bool, list[Send]]:
    """Keep a send, and another one at step `strike` of that; return whether there is such a step, and what is lost."""
    sends = OpenSends()
    others = [Send() for _ in range(backlog + 1)]
    for send in others:
        sends.keep(send)
    others[0].is_done = True
    own, handlers = Send(), Send()
    steps, code = 0, OpenSends.keep.__code__

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal steps
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == strike:
                sys.settrace(None)
                sends.keep(handlers)
        return trace

    before = sys.gettrace()
    # Python 3.12 tells of instructions only if a frame asked for it before the tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        sends.keep(own)
    finally:
        sys.settrace(before)
    expected = [*others[1:], own, *([handlers] if steps >= strike else [])]
    return steps >= strike, [each for each in expected if each not in sends._handles]


@pytest.mark.parametrize("backlog", [0, 1, MAX_OPEN_SENDS - 1])
def test_a_handler_that_sends_within_a_send_loses_none(backlog: int) -> None:
    """At any step of keeping one send a handler may keep another; only those that are complete are dropped."""
    strike = 0
    strikes = True
    while strikes:
        strike += 1
        strikes, lost = kept_by_a_handler(strike, backlog)
        assert not [each for each in lost if not each.is_done], strike
    assert strike > 20


def test_a_failed_send_does_not_end_the_wait_for_others() -> None:
    """Before a group is destroyed, each send to a living rank completes, though an earlier one has failed."""
    sends = OpenSends()
    failed, open_send = Send(), Send()
    for send in (open_send, failed):
        sends.keep(send)
    failed.error = ClosedError("its rank has left")
    sends._handles.rotate(1)
    sends.flush(30.0)
    assert open_send.is_done


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("backlog", [1, MAX_OPEN_SENDS])
def test_a_send_is_not_concerned_if_an_older_one_has_no_thread(backlog: int) -> None:
    """It is on its way, so its caller must not take it for refused; the older ones stay open, and are waited for."""
    sends = OpenSends()
    older = [Send(error=CapabilityError("no thread", requirement="one more thread")) for _ in range(backlog)]
    sends._handles.extend(older)
    last = Send()
    sends.keep(last)
    assert [*sends._handles] == [*older, last]

    def find_threads() -> None:
        for send in older:
            send.error = None

    timer = threading.Timer(0.05, find_threads)
    timer.start()
    sends.flush(30.0)
    timer.join()
    assert all(send.is_done for send in older)


def test_a_send_is_kept_also_if_an_older_one_has_broken_the_group() -> None:
    """The error of the older one arrives at once; the memory of both is let go with the group."""
    sends = OpenSends()
    failed, last = Send(error=PeerLostError("lost rank 2", peers=(2,))), Send()
    sends._handles.append(failed)
    with pytest.raises(PeerLostError):
        sends.keep(last)
    assert [*sends._handles] == [failed, last]


@pytest.mark.guarantee("G9")
def test_messages_whose_handles_were_lost_are_waited_for() -> None:
    """Those of the transports count as those that are kept, until the time is over."""
    sends, unfinished = OpenSends(), {object()}
    timer = threading.Timer(0.05, unfinished.clear)
    start = time.monotonic()
    timer.start()
    sends.flush(30.0, unfinished)
    timer.join()
    assert 0.05 <= time.monotonic() - start < 20.0
    unfinished.add(object())
    start = time.monotonic()
    sends.flush(0.05, unfinished)
    assert 0.05 <= time.monotonic() - start < 20.0


def test_the_wait_for_sends_ends() -> None:
    """One that nobody receives keeps the group for the time that it is given, and no longer."""
    sends = OpenSends()
    stuck = Send()
    sends.keep(stuck)
    stuck.asked = -1_000_000
    sends.flush(0.05)
    assert not stuck.is_done
