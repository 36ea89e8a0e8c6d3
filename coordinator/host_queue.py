"""`enqueue` and `dequeue` over the host plane: one writer and its readers, or many writers and one reader.

On one host the shared-memory queue takes this place, with the same two verbs; see `coordinator.broadcaster`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from coordinator.host_plane import HostPlane
from coordinator.transfer_tags import QUEUE_TAG
from shm_broadcast import codec
from shm_broadcast.errors import UsageError


class Writer(Protocol):
    """The writing end of a queue, whatever carries it."""

    def enqueue(self, obj: Any, timeout_s: float | None = None) -> None:
        """Send `obj` to every reader; return when the queue owns it."""


class Reader(Protocol):
    """A reading end of a queue, whatever carries it."""

    def dequeue(self, timeout_s: float | None = None, type: Any = None) -> Any:  # noqa: A002
        """Return the next object; without a deadline this waits until there is one."""


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


class HostQueues:
    """The queues of one group over its host plane."""

    def __init__(self, host: HostPlane, rank_in_group: int, world_size: int) -> None:
        """Create nothing yet."""
        self._host = host
        self._rank_in_group = rank_in_group
        self._world_size = world_size
        self._count = 0

    def broadcast(self, writer: int) -> Writer | Reader:
        """Create a queue from rank `writer` to all others. Collective."""
        self._count += 1
        if self._rank_in_group == writer:
            return HostQueueWriter(self._host, self._others(writer), self._count)
        return HostQueueReader(self._host, writer, self._count)

    def gather(self, reader: int) -> list[Writer | Reader]:
        """Create a queue from every other rank to rank `reader`. Collective."""
        self._count += 1
        if self._rank_in_group == reader:
            return [HostQueueReader(self._host, rank, self._count) for rank in self._others(reader)]
        return [HostQueueWriter(self._host, [reader], self._count)]

    def close(self) -> None:
        """The host plane is closed by its owner."""

    def _others(self, rank: int) -> list[int]:
        return [other for other in range(self._world_size) if other != rank]


def refuse_external_writer(handle: object) -> None:
    """Raise if a writer outside of the group is asked for."""
    if handle is not None:
        raise UsageError(
            "external_writer_handle: the writer of a group's queue is one of its ranks; for a writer outside of it "
            "open the queue itself, with shm_broadcast.queue.QueueReader.open"
        )
