"""Turns of the threads of a rank: the messages of a frame, or of a tensor dict, follow each other without another's."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from device_comm.health import GroupHealth, Operation, Pollable
from device_comm.stages import until
from shm_broadcast.errors import UsageError
from shm_broadcast.interruption import is_held

__all__ = ["FrameTurns", "Turn"]


class Turn:
    """What one thread at a time has while it moves frames to or from a peer; see `Pollable` of those who wait for it.

    Attributes:
        lock: Held by that thread.
        awaited: The messages for which that thread waits, which may be those of several peers.
    """

    def __init__(self, rank: int) -> None:
        """Let no thread have it; `rank` is the peer's global rank."""
        self._rank = rank
        self.lock: threading.RLock = threading.RLock()
        self.awaited: Pollable | None = None

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds; return whether this thread has the turn."""
        return self.lock.acquire(timeout=slice_s)

    def pending(self) -> Sequence[int]:
        """Return the ranks for which the other thread waits: it may have got the frame of this peer already."""
        awaited = self.awaited
        return (None if awaited is None else awaited.pending()) or (self._rank,)

    def release(self) -> None:
        """Let another thread have it."""
        self.awaited = None
        self.lock.release()


class FrameTurns:
    """A turn for each peer and tag, for one direction. A handler that leaves one taken has broken the group."""

    def __init__(self, health: GroupHealth) -> None:
        """Take nothing yet."""
        self._health = health
        self._turns: dict[tuple[int, int], Turn] = {}

    def take(self, operation: Operation, peers: Sequence[int], tag: int, end: float | None) -> list[Turn]:
        """Return the turns of `peers` under `tag`, which this thread has from then on; the caller releases them.

        Blocks while another thread has one of them, until the monotonic time `end` or without limit; raises as
        `GroupHealth.wait` does.

        Raises:
            UsageError: This thread has one already: a signal handler makes the call. Nothing was sent or received.
        """
        # In one order for all threads, so that no two of them wait for each other.
        ranks = self._health.ranks
        turns = {peer: self._turns.setdefault((peer, tag), Turn(ranks[peer])) for peer in sorted(set(peers))}
        for peer, turn in turns.items():
            if is_held(turn.lock):
                raise UsageError(
                    f"{self._health.where(operation)}: a signal handler cannot make this call: it has interrupted one "
                    f"between the messages that it moves to or from rank {ranks[peer]}"
                )
        held: list[Turn] = []
        try:
            for turn in turns.values():
                if not turn.lock.acquire(blocking=False):
                    self._health.wait(operation, turn, None if end is None else until(end))
                held.append(turn)
        except BaseException:
            for turn in held:
                turn.release()
            raise
        return held
