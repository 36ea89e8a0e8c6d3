"""The ends of a group's queues: what both kinds of groups, real and fake, give to their callers."""

from __future__ import annotations

from typing import Any, Protocol

from device_comm.health import GroupHealth
from shm_broadcast import codec


class Writer(Protocol):
    """The writing end of a queue, whatever carries it."""

    def enqueue(self, obj: Any, timeout_s: float | None = None) -> None:
        """Send `obj` to every reader; return when the queue owns it."""


class Reader(Protocol):
    """A reading end of a queue, whatever carries it."""

    def dequeue(self, timeout_s: float | None = None, type: Any = None) -> Any:  # noqa: A002
        """Return the next object; without a deadline this waits until there is one."""


class Queues(Protocol):
    """Makes the queues of one group."""

    def broadcast(self, writer: int, external: object = None) -> Writer | Reader:
        """Create a queue from rank `writer`, or from the writer outside of the group, to all others."""

    def gather(self, reader: int) -> tuple[Writer, list[Any]]:
        """Create a queue from every rank to rank `reader`."""

    def close(self, timeout_s: float) -> None:
        """Close every queue, within about `timeout_s` seconds."""


class UnreadWriter:
    """The writing end of a queue without readers. It refuses what every queue refuses."""

    def __init__(self, health: GroupHealth) -> None:
        """Belong to the group of `health`."""
        self._health = health

    def enqueue(self, obj: Any, timeout_s: float | None = None) -> None:
        """Send `obj` to nobody."""
        self._health.check_usable("enqueue")
        codec.encode(obj)
