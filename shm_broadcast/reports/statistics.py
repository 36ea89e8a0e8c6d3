"""Define the frozen records in which one end of a queue describes itself and every reader."""

from __future__ import annotations

import msgspec

__all__ = ["QueueStatistics", "ReaderStatistics"]


class ReaderStatistics(msgspec.Struct, frozen=True):
    """Describes how far one reader is.

    Attributes:
        rank: The reader's rank.
        behind_messages: Number of messages that it has not given back.
        behind_bytes: Number of bytes that it has not given back.
        progress_s: Seconds since it last gave a message back; None if it never has.
        is_attached: Whether it has attached and has not left.
    """

    rank: int
    behind_messages: int
    behind_bytes: int
    progress_s: float | None
    is_attached: bool


class QueueStatistics(msgspec.Struct, frozen=True):
    """Describes what one end of a queue has done.

    Attributes:
        messages: Number of messages that this end has written or read.
        nbytes: Total size of their frames in bytes.
        waits: Number of calls that had to wait.
        waited_s: Seconds that these calls waited in total.
        capacity_bytes: Size of the ring in bytes.
        readers: One record for each reader.
    """

    messages: int
    nbytes: int
    waits: int
    waited_s: float
    capacity_bytes: int
    readers: tuple[ReaderStatistics, ...]
