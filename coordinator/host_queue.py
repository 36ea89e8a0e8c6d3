"""`enqueue` and `dequeue` over the host plane: one writer and its readers, or many writers and one reader.

The shared-memory queue takes this place on one host; the roles and the two verbs stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.host_plane import HostPlane
from coordinator.transfer_tags import QUEUE_TAG
from shm_broadcast import codec
from shm_broadcast.errors import UsageError


class HostQueueWriter:
    """The writing end: every object reaches every reader, in order."""

    def __init__(self, host: HostPlane, readers: Sequence[int], number: int) -> None:
        """Write to `readers`, ranks in the group; `number` tells the queues of a group apart."""
        self._host = host
        self._readers = tuple(readers)
        self._tag = QUEUE_TAG + number

    def enqueue(self, obj: Any, timeout_s: float | None = None) -> None:
        """Send `obj` to every reader; return when it is owned by the transport."""
        if self._readers:
            message = codec.encode(obj)
            self._host.isend_message(message, self._readers, "enqueue", timeout_s, self._tag).wait()


class HostQueueReader:
    """The reading end."""

    def __init__(self, host: HostPlane, writer: int, number: int) -> None:
        """Read what rank `writer` of the group writes."""
        self._host = host
        self._writer = writer
        self._tag = QUEUE_TAG + number

    def dequeue(self, timeout_s: float | None = None, type: Any = None) -> Any:  # noqa: A002
        """Return the next object; without a deadline this waits until there is one."""
        return self._host.recv_object(self._writer, timeout_s, type, "dequeue", self._tag)


def refuse_external_writer(handle: object) -> None:
    """Raise if a writer outside the group is asked for, which the host plane does not have."""
    if handle is not None:
        raise UsageError(
            "external_writer_handle: the writer of a queue over the host plane is a rank of the group; "
            "a writer outside of it needs the shared-memory queue, which this version does not have"
        )
