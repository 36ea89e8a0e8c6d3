"""What a group broadcasts through its own queue: the third plane, for the inputs of every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from coordinator.queues.ends import Reader, Writer
from device_comm.health import GroupHealth
from shm_broadcast.errors import (
    ClosedError,
    CommError,
    CommTimeoutError,
    InternalError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.queue import QueueReader, QueueWriter


class Broadcaster:
    """A group's own queue behind `broadcast_object`: its failures are the group's."""

    def __init__(self, end: Writer | Reader, writer: int, health: GroupHealth, timeout_s: float) -> None:
        """Use an end of a queue whose writer is rank `writer` of the group."""
        self.end = end
        self.writer = writer
        self._health = health
        self._timeout_s = timeout_s
        self._dequeue = end.dequeue if isinstance(end, QueueReader) else None
        # Sends its argument and returns it on the writer; returns the next object on the others. The queue is closed
        # with its group and when that breaks, so the group need not be asked.
        self.exchange: Callable[[Any], Any] = self._exchange_of(end)

    def _exchange_of(self, end: Writer | Reader) -> Callable[[Any], Any]:
        if not isinstance(end, (QueueWriter, QueueReader)):
            raise InternalError(f"{self._health.where('enable_broadcaster')}: {end!r} is no queue's end")
        if isinstance(end, QueueWriter):
            end.endpoint.timeout_ns = int(self._timeout_s * 1e9)
        return end.endpoint.exchange

    def send(self, obj: Any, timeout_s: float | None) -> None:
        """Send an object to all other ranks; only on the writer."""
        end = self.end
        if not isinstance(end, QueueWriter):
            raise UsageError(f"{self._health.where('broadcast_object')}: this rank's end reads")
        try:
            end.enqueue(obj, timeout_s or self._timeout_s)
        except CommError as error:
            self.blame(error)

    def receive(self, timeout_s: float | None, type_: Any) -> Any:
        """Return the writer's next object; only on the others."""
        if self._dequeue is None:
            raise UsageError(f"{self._health.where('broadcast_object')}: this rank's end writes")
        try:
            return self._dequeue(timeout_s, type_)
        except CommError as error:
            self.blame(error)

    def blame(self, error: CommError) -> NoReturn:
        """Raise what an error of the queue is to the group."""
        blamed = self._blamed(error)
        if blamed is error:
            raise error
        raise blamed from error

    def _blamed(self, error: CommError) -> CommError:
        """Return what to raise for a failure of the queue; break the group if it is one."""
        if isinstance(error, ClosedError):
            # Closed by this process, or by a writer that left or broke: the board knows why.
            operation = self._health.begin_point_to_point("queue", "broadcast_object")
            return self._health.explain(operation, error, [self._health.ranks[self.writer]])
        if isinstance(error, (CommTimeoutError, PeerLostError)):
            self._health.fail(error)
        return error
