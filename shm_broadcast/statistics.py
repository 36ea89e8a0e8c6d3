"""What one end of a queue tells about itself and about every reader, as frozen records."""

from __future__ import annotations

import msgspec

__all__ = ["QueueStatistics", "ReaderStatistics"]


class ReaderStatistics(msgspec.Struct, frozen=True):
    """How far one reader is.

    Attributes:
        rank: Its rank.
        behind_messages: Messages that it has not given back.
        behind_bytes: Bytes that it has not given back.
        progress_s: Seconds since it last gave a message back; None if it never has.
        is_attached: Whether it has come and not left.
    """

    rank: int
    behind_messages: int
    behind_bytes: int
    progress_s: float | None
    is_attached: bool


class QueueStatistics(msgspec.Struct, frozen=True):
    """What one end of a queue has done so far.

    Attributes:
        messages: Messages written or read by this end.
        nbytes: Bytes of their frames.
        waits: Calls that had to wait.
        waited_s: Seconds that they waited.
        capacity_bytes: Size of the ring.
        readers: Every reader, as the shared memory shows it.
    """

    messages: int
    nbytes: int
    waits: int
    waited_s: float
    capacity_bytes: int
    readers: tuple[ReaderStatistics, ...]
