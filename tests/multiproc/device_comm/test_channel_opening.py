"""Signal handlers that raise, or make a call, while a channel is opened."""

from __future__ import annotations

import dis
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import pytest

from device_comm import _core, health
from device_comm.cpu import channels as opening
from device_comm.cpu.channels import Channels
from shm_broadcast.errors import (
    ClosedError,
    CommError,
    GroupBrokenError,
    NativeError,
    PeerLostError,
    UsageError,
)
from tests.channels import channels_of, health_of
from tests.queues import background
from tests.unit.shm_broadcast.test_signal_handlers import LONG_S, MANY, AlarmError, alarms
from tests.waiting import wait_until

TAG = 1
# The interpreter looks for signals behind a call, at the beginning of a function, and at the end of a loop's turn.
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")
ALWAYS = ("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_FORWARD")


def send(channels: Channels, obj: Any, dst: int) -> None:
    """Send an object within a time that a claim which nobody ends exceeds."""
    channels.send("host", "send", obj, (dst,), TAG, 5.0)


def recv(channels: Channels, src: int) -> Any:
    """Receive an object; as `send`."""
    return channels.recv("host", "recv", src, TAG, 5.0)


def looks_for_signals(frame: FrameType) -> bool:
    """Return whether the interpreter may have run a signal handler just before the next instruction of `frame`."""
    code = list(dis.get_instructions(frame.f_code))
    behind = [one for one in code if one.offset < frame.f_lasti and one.opname not in ("CACHE", "PRECALL")]
    if behind and behind[-1].opname in ALWAYS:
        # What stands behind a jump that is always made is reached by other jumps, as is the body of an `if` in 3.13.
        behind = [one for one in code if one.opcode in dis.hasjrel and one.argval == frame.f_lasti]
    return bool(behind) and behind[-1].opname.startswith(LOOKS)


class Strikes:
    """Calls `strike` once in each run, one place later each time, where a handler could run inside of `modules`."""

    def __init__(self, strike: Callable[[], None], *modules: ModuleType) -> None:
        """Begin with the first place, inside of `channels.py` if no module is given."""
        self.strike = strike
        self._files = [module.__file__ for module in modules or (opening,)]
        self.place = 0
        self.passed = 0
        self._known: dict[tuple[Any, int], bool] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Strikes | None:
        """Trace a function."""
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        # Python 3.12 also tells of what ends a generator that nobody uses. It has no line, and no handler runs there.
        if event == "opcode" and frame.f_lineno is not None:
            key = (frame.f_code, frame.f_lasti)
            if key not in self._known:
                self._known[key] = looks_for_signals(frame)
            if self._known[key]:
                self.passed += 1
                if self.passed == self.place + 1:
                    self.strike()
        return self

    @contextmanager
    def run(self) -> Iterator[None]:
        """Strike once within the block, unless its places are used up."""
        self.passed = 0
        before = sys.gettrace()
        # Python 3.12 tells of instructions only if a frame asked for it before the tracing began.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)
            self.place += 1

    @property
    def is_over(self) -> bool:
        """Return whether the latest run had no place left."""
        return self.place > self.passed


def strike() -> None:
    """Raise as a handler."""
    raise AlarmError("struck")


@pytest.mark.guarantee("D74")
@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_a_strike_at_any_step_of_opening_leaves_no_claim(first: str) -> None:
    """What a handler raises at each place where one can run: the next calls of both ranks open the channel at once."""
    strikes = Strikes(strike)
    while not strikes.is_over:
        with channels_of(2) as (zero, one):
            try:
                with strikes.run():
                    if first == "sender":
                        send(zero, "struck", 1)
                    else:
                        # Opens the channel, and finds nothing.
                        one._receiver(0, "recv")
            except AlarmError:
                pass
            send(zero, "sent", 1)
            found = recv(one, 0)
            assert found in {"sent", "struck"}
            if found == "struck":
                assert recv(one, 0) == "sent"
            send(one, "back", 0)
            assert recv(zero, 1) == "back"
    assert strikes.place > 20


@pytest.mark.guarantee("D74")
def test_a_handler_that_uses_the_channel_that_it_finds_being_opened_is_refused_or_served() -> None:
    """It never waits for the call that it has interrupted, and whatever it sends arrives."""
    outcomes: list[str] = []
    texts: list[str] = []

    def call() -> None:
        try:
            send(zero, "handler", 1)
            outcomes.append("sent")
        except UsageError as error:
            texts.append(str(error))
            outcomes.append("refused")

    strikes = Strikes(call)
    while not strikes.is_over:
        count = len(outcomes)
        with channels_of(2) as (zero, one):
            start = time.monotonic()
            with strikes.run():
                send(zero, "outer", 1)
            awaited = ["outer"] + ["handler"] * (outcomes[count:] == ["sent"])
            assert sorted(recv(one, 0) for _ in awaited) == sorted(awaited)
            assert time.monotonic() - start < 5.0
    assert {"sent", "refused"} == set(outcomes)
    assert all("is opening the channel with rank 1 already" in text for text in texts)


@pytest.mark.guarantee("D74")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("least", [21, pytest.param(MANY, marks=pytest.mark.thorough)])
def test_alarms_in_hundreds_of_first_sends_leave_no_claim(least: int) -> None:
    """Alarms of the clock, 0.1 ms apart, strike first sends of fresh groups, of which each is then repeated."""
    end, groups = time.monotonic() + LONG_S, 0
    with alarms(0.0001) as handler:
        handler.driver = sys._getframe().f_code
        while groups < 400 or (least == MANY and handler.count < least):
            assert time.monotonic() < end, handler.count
            groups += 1
            with channels_of(2) as (zero, one):
                try:
                    handler.is_armed = True
                    send(zero, "struck", 1)
                except AlarmError:
                    pass
                handler.is_armed = False
                send(zero, "sent", 1)
                found = recv(one, 0)
                assert found in {"sent", "struck"}
                if found == "struck":
                    assert recv(one, 0) == "sent"
        struck = handler.count
    assert struck >= least


def outcome_of(call: Callable[[], object]) -> object:
    """Return what a call returns or raises."""
    try:
        return call()
    except CommError as error:
        return error


def end_group(channels: Channels, ending: str) -> None:
    """Destroy the group of a rank, or break it."""
    if ending == "destroys":
        health_of(channels).close()
        channels.close()
    else:
        health_of(channels).fail(PeerLostError("lost", peers=(1,)))


CALLS: dict[str, Callable[[Channels], object]] = {
    "send": lambda channels: send(channels, "sent", 1),
    "isend": lambda channels: channels.isend("host", "isend", "sent", 1, TAG, 5.0).wait(),
    "recv": lambda channels: recv(channels, 1),
    "recv_each": lambda channels: channels.recv_each("host", "gather", (1,), TAG, 5.0),
    "recv_any": lambda channels: channels.recv_any("host", "recv", TAG, 5.0),
    "irecv": lambda channels: channels.irecv("host", "irecv", 1, TAG, 5.0, id).wait(),
}


@pytest.mark.guarantee("D74")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=name, marks=[] if name in ("send", "recv") else pytest.mark.thorough)
        for name, call in CALLS.items()
    ],
)
@pytest.mark.parametrize("ending", [pytest.param("destroys", marks=pytest.mark.thorough), "breaks"])
def test_a_handler_that_ends_the_group_at_any_step_of_opening_is_told(
    call: Callable[[Channels], object], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call raises that the group was destroyed, or is broken, and nothing else; the other rank's call ends too."""
    monkeypatch.setattr(health, "EXPLAIN_S", 0.01)
    outcomes: list[str] = []
    kinds = ClosedError if ending == "destroys" else (GroupBrokenError, NativeError)
    strikes = Strikes(strike)
    while not strikes.is_over:
        with channels_of(2) as (zero, one):
            strikes.strike = partial(end_group, zero, ending)
            if call not in (CALLS["send"], CALLS["isend"]):
                send(one, "sent", 0)
            try:
                with strikes.run():
                    call(zero)
                outcomes.append("returned")
            except kinds:
                outcomes.append("raised")
            if zero.is_closed:
                start = time.monotonic()
                found: object = None
                while not isinstance(found, CommError):
                    found = outcome_of(partial(recv, one, 0))
                assert "left the group" in str(found)
                assert time.monotonic() - start < 4.0
    assert set(outcomes) == {"returned", "raised"}


@pytest.mark.guarantee("D74")
@pytest.mark.parametrize("ending", ["destroys", "breaks"])
def test_a_handler_that_ends_the_group_while_the_other_rank_makes_the_channel_is_told(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call, which waits for the other rank, raises that the group was destroyed, or is broken."""
    monkeypatch.setattr(health, "EXPLAIN_S", 0.01)
    kinds = ClosedError if ending == "destroys" else CommError
    strikes = Strikes(strike)
    for _ in range(120):
        with channels_of(2) as (zero, one):
            is_over = threading.Event()
            strikes.strike = partial(end_group, zero, ending)
            table = getattr(one, "_table")  # noqa: B009 - a test looks inside

            def make(is_over: threading.Event = is_over) -> object:
                is_over.wait(20.0)
                raise AlarmError("not made")

            with background(partial(_core.channel_open, table, 2, 0, 1, make)):
                wait_until(lambda: one.state(0, 1) == _core.CHANNEL_MAKING, "the channel is being made")
                with pytest.raises(kinds), strikes.run():
                    send(zero, "never", 1)
                is_over.set()
    assert not strikes.is_over
