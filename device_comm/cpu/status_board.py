"""The status board: what the ranks of one host report, in the memory that they share.

It outlives every rank, unlike a store that one of them serves, and reading it takes microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from device_comm import _core
from shm_broadcast.reports.arrivals import Arrival
from shm_broadcast.reports.failure_record import FailureRecord

# The place of each plane on the board.
_PLACES: Final = {"shared": 0, "shared host": 1, "device": 2, "host": 3, "nccl": 4}

_record_decoder: Final = msgspec.json.Decoder(FailureRecord)


class StatusBoard:
    """A `StatusStore` in shared memory; every method returns at once. After `close` it is empty and takes nothing."""

    def __init__(self, memory: memoryview, ranks: Sequence[int], rank: int) -> None:
        """Use `memory`, which was zero when the group was made.

        Args:
            memory: The board of the group.
            ranks: Global ranks of the group in group order.
            rank: This process's global rank.
        """
        self._memory: memoryview | None = memory
        self._ranks = tuple(ranks)
        self._index = self._ranks.index(rank)

    @property
    def is_reachable(self) -> bool:
        """Return True: memory always answers."""
        return True

    def arrive(self, plane: str, arrival: Arrival) -> None:
        """Record in which call this rank waits, or that its wait there is over."""
        if self._memory is not None:
            place = (self._memory, len(self._ranks), self._index, _PLACES[plane])
            # The lowest bit of what the board holds says whether the wait is over.
            _core.board_arrive(*place, arrival.number << 1 | arrival.is_over, arrival.operation)

    def arrivals(self, plane: str) -> dict[int, Arrival]:
        """Return the recorded calls in which the other ranks wait, or waited last, by global rank."""
        if self._memory is None:
            return {}
        found = _core.board_arrivals(self._memory, len(self._ranks), _PLACES[plane])
        return {
            rank: Arrival(name.decode(errors="replace"), word >> 1, bool(word & 1))
            for index, (rank, (word, name)) in enumerate(zip(self._ranks, found, strict=True))
            if word and index != self._index
        }

    def failure_record(self) -> FailureRecord | None:
        """Return the failure record, if there is one."""
        if self._memory is None:
            return None
        return self._decoded(_core.board_record(self._memory, len(self._ranks)))

    def publish(self, failure_record: FailureRecord, within_s: float = 0.0) -> FailureRecord:
        """Publish a failure record unless one exists; return the one that counts."""
        if self._memory is None:
            return failure_record
        counts = _core.board_publish(self._memory, len(self._ranks), self._index, _encoded(failure_record))
        return self._decoded(counts) or failure_record

    def leave(self) -> None:
        """Record that this rank has destroyed the group."""
        if self._memory is not None:
            _core.board_leave(self._memory, len(self._ranks), self._index)

    def left(self) -> tuple[int, ...]:
        """Return the global ranks of the others that have destroyed the group."""
        if self._memory is None:
            return ()
        left = _core.board_left(self._memory, len(self._ranks))
        return tuple(sorted(self._ranks[index] for index in left if index != self._index))

    def close(self) -> None:
        """Let the memory go. Idempotent."""
        self._memory = None

    def _decoded(self, text: bytes) -> FailureRecord | None:
        if not text:
            return None
        try:
            return _record_decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            # A rank wrote something else into its memory: this rank goes on with what it knows itself.
            return None


def _encoded(failure_record: FailureRecord) -> bytes:
    """Return the record as JSON, with as much of its texts as has room."""
    while len(text := msgspec.json.encode(failure_record)) > _core.BOARD_RECORD_BYTES:
        operation, detail = failure_record.operation, failure_record.detail
        failure_record = msgspec.structs.replace(
            failure_record, operation=operation[:200], detail=detail[: len(detail) // 2]
        )
    return text


__all__ = ["StatusBoard"]
