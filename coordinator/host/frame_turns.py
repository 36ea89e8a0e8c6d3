"""Turns of the threads of a rank: the two messages of a frame follow each other without one of another frame."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from device_comm.health import GroupHealth, Operation
from device_comm.stages import until
from shm_broadcast.errors import UsageError
from shm_broadcast.interruption import is_held

__all__ = ["FrameTurns"]


class FrameTurns:
    """A lock for each peer and tag, for one direction. A handler that leaves one locked has broken the group."""

    def __init__(self, health: GroupHealth) -> None:
        """Lock nothing yet."""
        self._health = health
        self._locks: dict[tuple[int, int], threading.RLock] = {}

    def take(
        self, operation: Operation, peers: Sequence[int], tag: int, end: float | None
    ) -> list[threading.RLock]:
        """Return the locks of `peers` under `tag`, which this thread holds from then on; the caller releases them.

        Blocks while another thread holds one of them, until the monotonic time `end` or without limit; raises as
        `GroupHealth.wait` does.

        Raises:
            UsageError: This thread holds one already: a signal handler makes the call. Nothing was sent or received.
        """
        # In one order for all threads, so that no two of them wait for each other.
        locks = {peer: self._locks.setdefault((peer, tag), threading.RLock()) for peer in sorted(set(peers))}
        for peer, lock in locks.items():
            if is_held(lock):
                raise UsageError(
                    f"{self._health.where(operation)}: a signal handler cannot make this call: it has interrupted one "
                    f"between the two messages that it moves to or from rank {self._health.ranks[peer]}"
                )
        held: list[threading.RLock] = []
        try:
            for peer, lock in locks.items():
                if not lock.acquire(blocking=False):
                    waiting = _Waiting(lock, self._health.ranks[peer])
                    self._health.wait(operation, waiting, None if end is None else until(end))
                held.append(lock)
        except BaseException:
            for lock in held:
                lock.release()
            raise
        return held


class _Waiting:
    """The wait for a lock that another thread of this rank holds; see `Pollable`."""

    def __init__(self, lock: threading.RLock, rank: int) -> None:
        self._lock = lock
        self._rank = rank

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds; return whether this thread holds the lock."""
        return self._lock.acquire(timeout=slice_s)

    def pending(self) -> tuple[int, ...]:
        """Return the rank to or from which the other thread moves a frame."""
        return (self._rank,)
