"""The queues of a fake group: a message to a peer is dropped, and no peer sends one."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from coordinator.queues.ends import Reader, UnreadWriter, Writer
from coordinator.queues.external_writer import ExternalWriter
from coordinator.testing.fake_planes import nothing_there
from device_comm.health import GroupHealth
from shm_broadcast import codec
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout, seconds


class FakeReader:
    """A reading end: what this rank itself wrote is there, and nothing else."""

    def __init__(self, health: GroupHealth, writer: int) -> None:
        """Read what rank `writer` of the group writes."""
        self._health = health
        self._writer = writer
        self.frames: deque[bytes] = deque()

    def dequeue(self, timeout_s: AnyTimeout = None, type: Any = None) -> Any:  # noqa: A002
        """Return the next object.

        Raises:
            UsageError: There is none, where a real rank would wait.
        """
        self._health.check_usable("dequeue")
        seconds(timeout_s, may_be_zero=True)
        if not self.frames:
            where = self._health.where(f"dequeue from rank {self._health.ranks[self._writer]}")
            raise UsageError(nothing_there(where))
        return codec.decode(self.frames.popleft(), type)


class _OwnWriter:
    """The writing end of a queue whose one reader is this rank."""

    def __init__(self, health: GroupHealth, reader: FakeReader) -> None:
        self._health = health
        self._frames = reader.frames

    def enqueue(self, obj: Any, timeout_s: AnyTimeout = None) -> None:
        """Keep a copy of `obj` for the reader."""
        self._health.check_usable("enqueue")
        seconds(timeout_s, may_be_zero=True)
        self._frames.append(codec.encode(obj).to_bytes())


class FakeQueues:
    """The queues of one fake group."""

    def __init__(self, health: GroupHealth) -> None:
        """Create nothing yet."""
        self._health = health
        self._rank_in_group = health.ranks.index(health.rank)

    def broadcast(self, writer: int, external: object = None, *, is_blocking: bool) -> Writer | Reader:
        """Create a queue from rank `writer` to all others; a writer outside of the group never writes here."""
        del is_blocking  # there is nobody to wait for
        if external is not None and not isinstance(external, ExternalWriter):
            raise UsageError(
                f"external_writer_handle must be an ExternalWriter, not {type(external).__name__}"
            )
        if self._rank_in_group == writer and external is None:
            return UnreadWriter(self._health)
        return FakeReader(self._health, writer)

    def gather(self, reader: int, *, is_blocking: bool) -> tuple[Writer, list[FakeReader]]:
        """Create a queue from every rank to rank `reader`."""
        del is_blocking
        if self._rank_in_group != reader:
            return UnreadWriter(self._health), []
        readers = [FakeReader(self._health, rank) for rank in range(len(self._health.ranks))]
        return _OwnWriter(self._health, readers[reader]), readers

    def within(self, create_timeout_s: float) -> AbstractContextManager[None]:
        """Do nothing: nobody is waited for."""
        del create_timeout_s
        return nullcontext()

    def close(self, timeout_s: float) -> None:
        """There is nothing to close."""
