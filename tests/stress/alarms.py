"""Signals whose handler returns, or raises in a call that may be struck."""

import random
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.handlers import is_swallowing

__all__ = ["Alarms", "StrikeError"]

SHORTEST_S, LONGEST_S = 0.000_002, 0.004
"""When a strike comes after the beginning of a call: within a call that has all it needs, or while one waits."""

LATER_S = 0.001
"""When a signal comes again whose handler may not raise yet, as where Python would swallow Ctrl-C."""


def _anywhere(frame: FrameType | None) -> bool:
    return True


class StrikeError(Exception):
    """What the handler raises."""


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal that comes when nobody wants one any more."""


class Alarms:
    """Signals whose handler returns, at another rate in each step; in a call of `strike` it raises once.

    A strike is sent by the timer of the process or by another thread, which can run only while the call has let go of
    the interpreter's lock.

    Attributes:
        may_strike: Whether the handler may raise. It does not in a life that Ctrl-C may end at any place.
        count: How many signals have come.
        strikes: How many of them have raised.
    """

    def __init__(self, seed: str, *, may_strike: bool) -> None:
        """Install the handler."""
        self.count = 0
        self.strikes = 0
        self.may_strike = may_strike
        self._is_armed = False
        self._is_place: Callable[[FrameType | None], bool] = _anywhere
        self._is_looking = False
        self._is_interrupted = False
        self._random = random.Random(seed)
        self._every_s = 0.0
        self._main = threading.main_thread().ident or 0
        self._wanted = threading.Event()
        self._is_over = threading.Event()
        self._after_s = 0.0
        self._thread = threading.Thread(target=self._send)
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._unraisable
        signal.signal(signal.SIGALRM, self._ring)
        self._thread.start()

    def _ring(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._is_interrupted:
            self.interrupt(number, frame)
        if self._is_armed and not self._is_looking:
            self._strike_or_come_later(frame)

    def _strike_or_come_later(self, frame: FrameType | None) -> None:
        # On a busy machine the next signal comes during this look, which would go ever deeper.
        self._is_looking = True
        try:
            may_raise = self._is_place(frame)
        finally:
            self._is_looking = False
        if may_raise:
            self._is_armed = False
            self.strikes += 1
            raise StrikeError("struck")
        self._come_later()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT as Python does by default, but a little later where Python would swallow what this raises."""
        self._is_interrupted = is_swallowing(frame)
        if not self._is_interrupted:
            raise KeyboardInterrupt
        self._come_later()

    def _come_later(self) -> None:
        # Not by the thread: the lock of its event may be held by the handler that this one has interrupted.
        signal.setitimer(signal.ITIMER_REAL, LATER_S, self._every_s)

    def change(self) -> None:
        """Choose another rate: none, or every 0.3 to 20 ms."""
        self._every_s = self._random.choice((0.0, 0.0003, 0.001, 0.005, 0.02))
        signal.setitimer(signal.ITIMER_REAL, self._every_s, self._every_s)

    def wants_strike(self, share: float) -> bool:
        """Return whether the next call is to be struck, which is so for this share of them."""
        return self.may_strike and self._random.random() < share

    def strike(
        self, call: Callable[[], object], is_place: Callable[[FrameType | None], bool] = _anywhere
    ) -> bool:
        """Make a call, in which the handler may raise at any moment.

        Whoever wants its result lets `call` store it in a statement that calls nothing else, because a strike may come
        behind the call too.

        Args:
            call: The call.
            is_place: Whether the handler may raise where it interrupts this frame; otherwise the signal comes again.

        Returns:
            Whether it was struck.
        """
        struck = False
        self._after_s = SHORTEST_S * (LONGEST_S / SHORTEST_S) ** self._random.random()
        if self._random.random() < 0.5:
            signal.setitimer(signal.ITIMER_REAL, self._after_s)
        else:
            self._wanted.set()
        try:
            self._is_place = is_place
            self._is_armed = True
            call()
        except StrikeError:
            struck = True
        finally:
            self._is_armed = False
        signal.setitimer(signal.ITIMER_REAL, self._every_s, self._every_s)
        return struck

    def disarm(self) -> None:
        """Let no strike come any more in the call that is being made."""
        self._is_armed = False

    def end(self) -> None:
        """Switch them off. May be called again."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._is_over.set()
        self._wanted.set()
        self._thread.join()
        # Not ignored: a thread that the kernel has given a signal before may tell Python of it later, which reports an
        # error for one that it finds without a handler.
        signal.signal(signal.SIGALRM, _nothing)
        sys.unraisablehook = self._hook
        if self._is_interrupted:
            self._is_interrupted = False
            signal.raise_signal(signal.SIGINT)

    def _send(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._is_over.wait(self._after_s):
                return
            signal.pthread_kill(self._main, signal.SIGALRM)

    def _unraisable(self, event: Any) -> None:
        # Python swallows what a handler raises inside of a callback of a weak reference, or of a finalizer. A handler
        # that raises between `open` and its `with` block leaves the file to its finalizer, which closes it: so does
        # Ctrl-C, in a life in which the handler may not raise.
        is_file = event.exc_type is ResourceWarning and "unclosed file" in str(event.exc_value)
        if event.exc_type is not StrikeError and not (is_file and (self.strikes or not self.may_strike)):
            self._hook(event)
