"""Broadcasts through a group's own queue: the third plane, for the inputs of every step."""

from __future__ import annotations

import time
from typing import Any, NoReturn

from coordinator.queues.broadcast_order import BroadcastOrder, refusal_of
from coordinator.queues.ends import Reader, Writer
from device_comm.health import GroupHealth
from shm_broadcast._core import WriteEndpoint
from shm_broadcast.errors import ClosedError, CommError, CommTimeoutError, PeerLostError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.ring.writer import nanoseconds


class Broadcaster:
    """A group's own queue, which `broadcast_object` uses. A failure of the queue is a failure of the group."""

    def __init__(self, end: Writer | Reader, writer: int, health: GroupHealth, timeout_s: float) -> None:
        """Use an end of a queue whose writer is rank `writer` of the group."""
        assert isinstance(end, (QueueWriter, QueueReader))
        self._end = end
        self.writer = writer
        self._health = health
        self.timeout_s = timeout_s
        self.is_local: bool = end.handle.remote is None
        # On the writer of a queue of one host, `endpoint.exchange` sends its argument and returns it. On the other
        # ranks it returns `NOTHING` when the next object has come, which `endpoint.message` takes out. It need not ask
        # the group's health, because the queue is closed when the group is destroyed or breaks.
        self.endpoint: Any = end.endpoint
        if isinstance(end.endpoint, WriteEndpoint):
            end.endpoint.timeout_ns = nanoseconds(timeout_s)

    def send(self, obj: Any, timeout_s: float | None, order: BroadcastOrder) -> None:
        """Send an object to all other ranks, or the reason why it cannot be sent; only on the writer."""
        if not self.is_local:
            end = time.monotonic() + (timeout_s or self.timeout_s)
            order.send_in_queue(obj, lambda message: self._enqueue(message, _left(end)))
            return
        try:
            self._enqueue(obj, timeout_s)
        except UsageError as error:
            if refusal_of(obj) is not None:
                self.refuse(f"{order.name}: {error}", order)
            raise

    def refuse(self, reason: str, order: BroadcastOrder) -> None:
        """Send all other ranks the reason why this one refuses its call; only on the writer."""
        if self.is_local:
            order.refuse(reason, self.timeout_s)
        else:
            order.refuse_in_queue(reason, lambda message: self._enqueue(message, None))

    def _enqueue(self, obj: Any, timeout_s: float | None) -> None:
        assert isinstance(self._end, QueueWriter)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            self._end.enqueue(obj, limit_s)
        except CommError as error:
            self.blame(error, limit_s)

    def receive(self, timeout_s: float | None, type_: Any, order: BroadcastOrder) -> Any:
        """Return the writer's object of this call, within an optional deadline in seconds; only on the other ranks."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            if not self.is_local:
                return order.receive_in_queue(lambda: self._dequeue(end, None), type_)
            self._await(order, end)
            return self._dequeue(end, type_)
        except CommError as error:
            self.blame(error, timeout_s)

    def _dequeue(self, end: float | None, type_: Any) -> Any:
        assert isinstance(self._end, QueueReader)
        return self._end.dequeue(_left(end), type_)

    def _await(self, order: BroadcastOrder, end: float | None) -> None:
        """Return when the message of this call has come, which the next read then takes out of the queue's end."""
        endpoint: Any = self.endpoint
        while True:
            endpoint.fetch(nanoseconds(_left(end)))
            if endpoint.tag == order.tag:
                return
            order.sort()

    def blame(self, error: CommError, within_s: float | None) -> NoReturn:
        """Raise the group's error for an error of the queue, and break the group if the queue has failed.

        `within_s` is the call's deadline in seconds, or None if it had none.
        """
        if raised_by_handler(error):
            raise error
        if isinstance(error, ClosedError):
            # This process closed the queue, or its writer left or broke: the status store knows which.
            operation = self._health.begin_point_to_point("queue", "broadcast_object")
            raise self._health.explain(operation, error, [self._health.ranks[self.writer]]) from error
        if isinstance(error, (CommTimeoutError, PeerLostError)):
            self._health.fail(error, "broadcast_object", within_s=within_s or 0.0)
        raise error


def _left(end: float | None) -> float | None:
    """Return the seconds until `end`; None without one."""
    return None if end is None else max(end - time.monotonic(), 0.0)
