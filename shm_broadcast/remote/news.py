"""Wake threads that wait for a change, whatever a signal handler raises meanwhile.

`threading.Condition` and `threading.Event` let go of a lock before the `try` that takes it back. What a handler raises
in between is replaced by an error of the lock. Here a thread holds nothing while it sleeps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["News"]

# No sleep lasts longer. One woken thread wakes the next; a handler that raises in between breaks this chain.
_LONGEST_SLEEP_S: Final = 0.2


class News:
    """Tells threads that something has changed."""

    def __init__(self) -> None:
        """Begin with nothing told."""
        self._next = _taken()

    @property
    def next(self) -> threading.Lock:
        """The next change; ask for it before you look whether to `sleep`."""
        return self._next

    def tell(self) -> None:
        """Wake every thread that waits for the next change. One thread at a time may call this."""
        later = _taken()
        # No handler runs between reading and storing an attribute, so nobody frees this lock twice.
        self._next, now = later, self._next
        now.release()

    @staticmethod
    def sleep(until: threading.Lock, seconds: float) -> None:
        """Return when the change `until` has been told, or after about `seconds`, or sooner; look again then."""
        if until.acquire(timeout=max(0.0, min(seconds, _LONGEST_SLEEP_S))):
            until.release()

    def await_until(self, deadline: float, is_over: Callable[[], bool]) -> None:
        """Sleep until `is_over` returns true, which it can after each change, or `deadline` of `time.monotonic()`."""
        news = self._next
        while not is_over() and (left := deadline - time.monotonic()) > 0.0:
            self.sleep(news, left)
            news = self._next


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
