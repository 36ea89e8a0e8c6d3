"""Hold a lock for a block, with a deadline, whatever a signal handler raises meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shm_broadcast.interruption import is_held

__all__ = ["TakenError", "Turn"]


class TakenError(Exception):
    """Another thread held the lock until the deadline. Whoever began the block handles this."""


class Turn:
    """A context manager that holds a re-entrant lock, which this thread does not hold yet."""

    # Python looks `__exit__` up before it enters the block, and finds the lock's own method here. That is a
    # native function, so no signal handler can raise between the end of the block and the release.
    __slots__ = ("__exit__", "_lock", "_within_s")
    __exit__: Callable[..., None]

    def __init__(self, lock: threading.RLock, within_s: float | None) -> None:
        """Wait for `lock` for `within_s` seconds at most; None waits for ever, and 0 not at all."""
        self.__exit__ = lock.__exit__
        self._lock = lock
        self._within_s = -1.0 if within_s is None else min(within_s, threading.TIMEOUT_MAX)

    def __enter__(self) -> None:
        """Take the lock.

        Raises:
            TakenError: Another thread held it until the deadline.
        """
        try:
            is_mine = self._lock.acquire(timeout=self._within_s)
        except BaseException:
            # A signal handler has raised, and may have done so when the lock was taken.
            if is_held(self._lock):
                self._lock.release()
            raise
        if not is_mine:
            raise TakenError
