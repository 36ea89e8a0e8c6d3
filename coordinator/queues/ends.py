"""Protocols for the ends of a group's queues, implemented by real and by fake groups."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from device_comm.health import GroupHealth
from shm_broadcast import codec
from shm_broadcast.timeouts import AnyTimeout, seconds


class Writer(Protocol):
    """The writing end of a queue."""

    def enqueue(self, obj: Any, timeout_s: AnyTimeout = None) -> None:
        """Send `obj` to every reader; return when the queue holds its encoded bytes."""


class Reader(Protocol):
    """A reading end of a queue."""

    def dequeue(self, timeout_s: AnyTimeout = None, type: Any = None) -> Any:  # noqa: A002
        """Return the next object. Without `timeout_s` this waits until one arrives or the writer dies."""


class Queues(Protocol):
    """Creates the queues of one group."""

    def broadcast(self, writer: int, external: object = None, *, is_blocking: bool) -> Writer | Reader:
        """Create a queue from rank `writer`, or from the `external` writer, to all other ranks. Collective."""

    def gather(self, reader: int, *, is_blocking: bool) -> tuple[Writer, list[Any]]:
        """Create a queue from every rank to rank `reader`. Collective."""

    def within(self, create_timeout_s: float) -> AbstractContextManager[None]:
        """Let what is created in the block take at most `create_timeout_s` seconds."""

    def close(self, timeout_s: float) -> None:
        """Close every queue, within about `timeout_s` seconds."""


class UnreadWriter:
    """The writing end of a queue without readers. It refuses the objects that every queue refuses."""

    def __init__(self, health: GroupHealth) -> None:
        """Check every call against `health`, the health of the group."""
        self._health = health

    def enqueue(self, obj: Any, timeout_s: AnyTimeout = None) -> None:
        """Check that `obj` can be encoded, and drop it."""
        self._health.check_usable("enqueue")
        seconds(timeout_s, may_be_zero=True)
        codec.encode(obj)
