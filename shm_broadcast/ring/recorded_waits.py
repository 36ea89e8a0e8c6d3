"""Write down what a call on a ring waits for, if this process keeps a record that outlives all processes."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Final

from shm_broadcast.layout import FIELDS
from shm_broadcast.liveness import PeerWatch, ProcessIdentity, this_process
from shm_broadcast.segment import Segment
from shm_broadcast.status.failure_dump import QueueDump, QueueEnd, dump_of_ring
from shm_broadcast.status.page import OwnPage

__all__ = ["RecordedWaits"]

# One wait is written at most once in this many seconds: callers may poll with short deadlines.
_EVERY_S: Final = 1.0


class RecordedWaits:
    """What one end of a ring writes down. Without a record it does nothing."""

    def __init__(
        self, page: OwnPage, name: str, segment: Segment, ranks: Sequence[int], watch: PeerWatch
    ) -> None:
        """Write nothing yet.

        Args:
            page: The page of this process when it made the end.
            name: Of the queue.
            segment: The memory of the ring.
            ranks: The ranks of its readers, by place.
            watch: The processes at the other ends.
        """
        self._page = page
        self._name = name
        self._segment = segment
        self._ranks = ranks
        self._watch = watch
        self._messages = -1
        self._next_s = 0.0

    def begin(self, messages: int) -> None:
        """Forget the wait that was written down, once the end has passed more messages."""
        dumps = self._page.dumps
        if self._messages not in (-1, messages) and dumps is not None and not self._page.is_inherited:
            self._messages, self._next_s = -1, 0.0
            dumps.forget_wait(self._name)

    def write(self, messages: int, place: int, others: Mapping[int, int], error: str = "") -> None:
        """Write down who is at the other ends, and how far all are.

        The wait of a reader is written only if the writer is stopped, has ended, or has no room because
        another reader is behind: otherwise the reader may just be idle.

        Args:
            messages: Number of messages that this end has passed.
            place: Place of this end among the readers, or -1 for the writer.
            others: The ranks at the other ends that this end watches, by place.
            error: Class of the error in which the wait ends; empty if it goes on.
        """
        dumps = self._page.dumps
        if dumps is None or self._page.is_inherited or time.monotonic() < self._next_s:
            return
        queue = dump_of_ring(self._segment.descriptor)
        ends = [
            _end(at, self._watch.state(rank), process)
            for at, rank in others.items()
            if (process := self._watch.process(rank)) is not None
        ]
        is_held_up = any(end.state in ("stopped", "dead") for end in ends)
        if queue is None or (place >= 0 and not is_held_up and not _is_full(queue)):
            return
        self._messages, self._next_s = messages, time.monotonic() + _EVERY_S
        ends.append(_end(place, "alive", this_process()))
        # A reader leaves the ranks out if the writer has none: the readers' numbers may not be ranks of the world then.
        ranks = self._ranks if place < 0 or others.get(-1, -1) >= 0 else ()
        dumps.write_wait(self._name, place, queue, error, ends, ranks)


def _is_full(queue: QueueDump) -> bool:
    """Return whether the writer waits for room."""
    field = FIELDS["waiting"]
    return bool(struct.unpack_from("<" + field.form, queue.second, field.offset)[0])


def _end(place: int, state: str, process: ProcessIdentity) -> QueueEnd:
    return QueueEnd(
        place,
        state,
        process.pid,
        process.start_ticks,
        process.pid_namespace,
        process.boot_id,
        process.hostname,
    )
