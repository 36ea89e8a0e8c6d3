"""Broadcasts through a group's own queue: the third plane, for the inputs of every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

from coordinator.queues.broadcast_order import BroadcastOrder
from coordinator.queues.ends import Reader, Writer
from device_comm.health import GroupHealth
from shm_broadcast.errors import ClosedError, CommError, CommTimeoutError, PeerLostError
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
        if isinstance(end, QueueWriter):
            end.endpoint.timeout_ns = nanoseconds(timeout_s)
        # On the writer this sends its argument and returns it. On the other ranks it returns `NOTHING` when the next
        # object has come, which `endpoint.message` takes out. It need not ask the group's health, because the queue is
        # closed when the group is destroyed or breaks.
        self.endpoint: Any = end.endpoint
        self.exchange: Callable[[Any], Any] = end.endpoint.exchange

    def send(self, obj: Any, timeout_s: float | None) -> None:
        """Send an object to all other ranks; only on the writer."""
        assert isinstance(self._end, QueueWriter)
        limit_s = timeout_s or self.timeout_s
        try:
            self._end.enqueue(obj, limit_s)
        except CommError as error:
            self.blame(error, limit_s)

    def receive(self, timeout_s: float | None, type_: Any, order: BroadcastOrder) -> Any:
        """Return the writer's object of this call, within an optional deadline in seconds; only on the other ranks."""
        assert isinstance(self._end, QueueReader)
        try:
            if self.is_local:
                self._await(order, None if timeout_s is None else time.monotonic() + timeout_s)
            return self._end.dequeue(timeout_s, type_)
        except CommError as error:
            self.blame(error, timeout_s)

    def _await(self, order: BroadcastOrder, end: float | None) -> None:
        """Return when the message of this call has come, which the next read then takes out of the queue's end."""
        endpoint: Any = self.endpoint
        while True:
            endpoint.fetch(-1 if end is None else nanoseconds(max(end - time.monotonic(), 0.0)))
            if endpoint.tag == order.tag:
                return
            order.sort()

    def blame(self, error: CommError, within_s: float | None) -> NoReturn:
        """Raise the group's error for an error of the queue, and break the group if the queue has failed.

        `within_s` is the call's deadline in seconds, or None if it had none.
        """
        if isinstance(error, ClosedError):
            # This process closed the queue, or its writer left or broke: the status store knows which.
            operation = self._health.begin_point_to_point("queue", "broadcast_object")
            raise self._health.explain(operation, error, [self._health.ranks[self.writer]]) from error
        if isinstance(error, (CommTimeoutError, PeerLostError)):
            self._health.fail(error, "broadcast_object", within_s=within_s or 0.0)
        raise error
