"""Run a signal handler, or what one may do, after a time or at every place of a call where Python would run it."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any

from tests.waiting import wait_in

__all__ = [
    "PLACES",
    "Interrupt",
    "alarm",
    "alarm_in",
    "ctrl_c",
    "handling_at",
    "handling_where",
    "is_swallowing",
    "raising_at",
    "raising_twice_at",
    "uncollected",
]


class Interrupt(BaseException):
    """What a handler raises."""


LATER_S = 0.001
"""When an alarm comes again that struck where Python would swallow an exception."""


PLACES = (
    "shm_broadcast/queue.py",
    "/threading.py",
    "shm_broadcast/turn.py",
    "zmq/sugar/socket.py",
    *(
        f"shm_broadcast/remote/{name}.py"
        for name in ("end", "ledger", "news", "reader", "reads", "wire", "writer")
    ),
)
"""The files of remote readers, in which a handler runs unless a test names others."""


def ctrl_c() -> None:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


def is_swallowing(frame: FrameType | None) -> bool:
    """Return whether Python lets no exception out of what runs: a finalizer, or a callback of a weak reference."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename.endswith(("/weakref.py", "/_weakrefset.py")):
            return True
        frame = frame.f_back
    return False


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector out of the block: Python lets nothing out of its callbacks that a handler raises there."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def taking_alarms(handler: Callable[[], object]) -> Iterator[None]:
    """Let the signal handler of alarms call `handler` in the block, which may raise.

    Where Python would swallow what it raises, the alarm comes again a little later.
    """

    def ring(_number: int, frame: FrameType | None) -> None:
        if is_swallowing(frame):
            signal.setitimer(signal.ITIMER_REAL, LATER_S, signal.getitimer(signal.ITIMER_REAL)[1])
        else:
            handler()

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def alarm(after_s: float, handler: Callable[[], object], every_s: float = 0.0) -> Iterator[None]:
    """Let a signal handler call `handler` in the block after a time, once or again and again."""
    with taking_alarms(handler):
        signal.setitimer(signal.ITIMER_REAL, after_s, every_s)
        yield


@contextmanager
def alarm_in(function: str, handler: Callable[[], object]) -> Iterator[None]:
    """Let a signal handler call `handler` once in the block, when this thread sleeps in a function of that name.

    An alarm after some time may come before the call has begun to wait, if the machine is busy.
    """

    def strike() -> None:
        wait_in(function, this, is_over.is_set)
        if not is_over.is_set():
            os.kill(os.getpid(), signal.SIGALRM)

    is_over, this, thread = threading.Event(), threading.current_thread(), threading.Thread(target=strike)
    with taking_alarms(handler):
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def handling_at(
    step: int, call: Callable[[], object], handler: Callable[[], object], places: Sequence[str] = PLACES
) -> bool:
    """Run `call`, and `handler` at place `step` in the files that end with `places`; return whether that place came."""
    passed = count()
    return handling_where(
        lambda frame: frame.f_code.co_filename.endswith(tuple(places)) and next(passed) == step, call, handler
    )


def handling_where(
    is_place: Callable[[FrameType], bool], call: Callable[[], object], handler: Callable[[], object]
) -> bool:
    """Run `call`, and `handler` at the first place at which `is_place` holds of the frame; return whether it came.

    Python runs a handler when a function begins and when a native call has returned. These are the events of a
    profiler, whose exception appears at the same places.
    """
    has_come = False

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal has_come
        # The collector may come by at any place, and Python lets no exception out of a finalizer.
        if event in ("call", "c_return") and frame.f_code.co_name != "__del__" and is_place(frame):
            sys.setprofile(None)
            has_come = True
            handler()

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return has_come


def raising_at(step: int, call: Callable[[], object], places: Sequence[str] = PLACES) -> bool:
    """Run `call`, and raise at a place inside of the files that end with `places`; return whether that place came."""

    def handler() -> None:
        raise Interrupt

    try:
        return handling_at(step, call, handler, places)
    except Interrupt:
        return True


def raising_twice_at(
    step: int, second: int, call: Callable[[], object], places: Sequence[str], later: Sequence[str]
) -> tuple[bool, bool]:
    """Run `call`, raise as `raising_at`, and once more at a place behind that, inside of the files `later`.

    Returns:
        Whether the first place came, and whether the second one did before the exception had left `call`.
    """
    passed, come = [count(), count()], [False, False]

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        index = int(come[0])
        is_place = event in ("call", "c_return") and frame.f_code.co_filename.endswith(
            tuple((places, later)[index])
        )
        if (
            not come[1]
            and is_place
            and frame.f_code.co_name != "__del__"
            and next(passed[index]) == (step, second)[index]
        ):
            come[index] = True
            raise Interrupt

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:
        # What a profiler raises has ended it; this comes in the first frame that the exception meets.
        if event == "exception" and come == [True, False]:
            sys.setprofile(profile)
        return trace

    before = sys.gettrace()

    def run() -> None:
        # A frame of its own: only those that begin from here on are traced.
        try:
            call()
        except Interrupt:
            pass
        finally:
            sys.setprofile(None)

    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        sys.settrace(before)
    return come[0], come[1]
