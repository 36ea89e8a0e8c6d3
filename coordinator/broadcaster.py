"""The third plane: step inputs from one rank to all others, over shared memory on one host.

The ranks of a group agree on where each of them is and choose alike: the shared-memory queue when all
share a host, else the host plane, which reaches everywhere. A rank that cannot open its end makes the
creation fail on all of them; nobody falls back alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from coordinator.host_plane import HostPlane
from coordinator.host_queue import HostQueueReader, HostQueues, HostQueueWriter, Reader, Writer
from coordinator.settings import CoordinatorSettings
from device_comm.health import GroupHealth
from shm_broadcast.codec import register_type
from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommError,
    CommTimeoutError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.liveness import this_process
from shm_broadcast.queue import QueueReader, QueueWriter

logger = logging.getLogger(__name__)


@register_type(name="coordinator.QueueOffer")
class QueueOffer(msgspec.Struct, frozen=True):
    """What a writer tells its readers.

    Attributes:
        handle: The queue's handle in bytes; empty when it could not be created.
        key: Its key. It travels between the ranks of the group only.
        failure: Why it could not be created.
    """

    handle: bytes = b""
    key: bytes = b""
    failure: str = ""

    def __repr__(self) -> str:
        """Hide the key."""
        return f"QueueOffer({len(self.handle)} bytes, failure={self.failure!r})"


class SharedQueues:
    """The queues of one group, over shared memory where all its ranks share a host; closed with it."""

    def __init__(self, host: HostPlane, health: GroupHealth, settings: CoordinatorSettings) -> None:
        """Create nothing yet."""
        self._host = host
        self._health = health
        self._settings = settings
        self._rank_in_group = health.ranks.index(health.rank)
        self._over_host = HostQueues(host, self._rank_in_group, len(health.ranks))
        self._count = 0
        self._open: list[QueueWriter | QueueReader] = []

    def broadcast(self, writer: int) -> Writer | Reader:
        """Create a queue from rank `writer` to all others. Collective.

        Raises:
            CapabilityError: Some rank lacks the memory, or could not open its end; on every rank.
        """
        if not self._share_a_host():
            return self._over_host.broadcast(writer)
        readers = [rank for rank in range(len(self._health.ranks)) if rank != writer]
        mine = None
        if self._rank_in_group == writer:
            mine = self._create(readers)
        offer = self._host.broadcast_object(_offer(mine), writer, self._settings.create_timeout_s)
        end: Writer | Reader | None = mine if isinstance(mine, QueueWriter) else None
        failure = offer.failure
        if not failure and self._rank_in_group != writer:
            reader = self._open_end(offer)
            end, failure = (reader, "") if isinstance(reader, QueueReader) else (None, reader)
        self._confirm(failure)
        if end is None:
            raise CapabilityError(f"{self._health.where('create queue')}: {failure}")
        return end

    def gather(self, reader: int) -> list[Writer | Reader]:
        """Create a queue from every other rank to rank `reader`. Collective; raises as `broadcast`.

        Returns:
            On the reader the reading ends in rank order, its own left out; elsewhere one writing end.
        """
        if not self._share_a_host():
            return self._over_host.gather(reader)
        others = [rank for rank in range(len(self._health.ranks)) if rank != reader]
        mine = None if self._rank_in_group == reader else self._create([reader])
        offers: list[QueueOffer] = self._host.all_gather_object(_offer(mine), self._settings.create_timeout_s)
        failure = "; ".join(offer.failure for offer in offers if offer.failure)
        ends: list[Writer | Reader] = [mine] if isinstance(mine, QueueWriter) else []
        if not failure and self._rank_in_group == reader:
            for rank in others:
                opened = self._open_end(offers[rank])
                if isinstance(opened, QueueReader):
                    ends.append(opened)
                else:
                    failure = opened
                    break
        self._confirm(failure)
        return ends

    def _share_a_host(self) -> bool:
        """Return whether several ranks can map one segment; all of them get the same answer."""
        if len(self._health.ranks) == 1:
            return False
        own = this_process()
        place = f"{own.boot_id} {own.network_namespace}"
        places = self._host.all_gather_object(place, self._settings.create_timeout_s)
        if len(set(places)) > 1:
            logger.info("%s: ranks on several hosts, queue over the host plane", self._health.name)
        return len(set(places)) == 1

    def _create(self, readers: Sequence[int]) -> QueueWriter | str:
        """Return the writing end, or why there is none."""
        self._count += 1
        try:
            writer = QueueWriter.create(
                f"{self._health.name}/{self._count}",
                [self._health.ranks[rank] for rank in readers],
                self._settings.broadcast,
                writer=self._health.rank,
            )
        except CapabilityError as error:
            return f"rank {self._health.rank}: {error}"
        self._adopt(writer)
        return writer

    def _open_end(self, offer: QueueOffer) -> QueueReader | str:
        """Return the reading end, or why it cannot be opened."""
        try:
            reader = QueueReader.open(
                offer.handle, offer.key, self._health.rank, self._settings.create_timeout_s
            )
        except CommError as error:
            return f"rank {self._health.rank}: {error}"
        self._adopt(reader)
        return reader

    def _adopt(self, end: QueueWriter | QueueReader) -> None:
        self._open.append(end)
        # A rank whose group broke must not let the others wait for its next message.
        self._health.on_abort(end.close)

    def _confirm(self, failure: str) -> None:
        """Let every rank know whether all ends are open; raise on all if one is not."""
        failures = self._host.all_gather_object(failure, self._settings.create_timeout_s)
        reasons = "; ".join(dict.fromkeys(reason for reason in failures if reason))
        if reasons:
            raise CapabilityError(f"{self._health.where('create queue')}: {reasons}")

    def close(self) -> None:
        """Close every queue. Idempotent."""
        for end in self._open:
            end.close()
        self._open.clear()


def _offer(mine: QueueWriter | str | None) -> QueueOffer:
    if isinstance(mine, QueueWriter):
        return QueueOffer(mine.handle.to_bytes(mine.key), mine.key)
    return QueueOffer(failure=mine or "")


class Broadcaster:
    """A group's own queue behind `broadcast_object`: its failures are the group's."""

    def __init__(self, end: Writer | Reader, writer: int, health: GroupHealth, timeout_s: float) -> None:
        """Use an end of a queue whose writer is rank `writer` of the group."""
        self.end = end
        self.writer = writer
        self._health = health
        self._timeout_s = timeout_s
        self._dequeue = end.dequeue if isinstance(end, (QueueReader, HostQueueReader)) else None
        # Sends what is short and fits at once; False leaves it to `send`, which knows how to wait and what to raise.
        # The queue is closed with its group and when that breaks, so nothing need be checked before.
        self.send_now: Callable[[Any], bool] | None = end.send_now if isinstance(end, QueueWriter) else None

    @property
    def carries_tensors(self) -> bool:
        """Return whether large CPU tensors go with the message, in one copy each way."""
        return isinstance(self.end, (QueueWriter, QueueReader))

    def send(self, obj: Any, timeout_s: float | None) -> None:
        """Send an object to all other ranks; only on the writer."""
        end = self.end
        if not isinstance(end, (QueueWriter, HostQueueWriter)):
            raise UsageError(f"{self._health.where('broadcast_object')}: this rank's end reads")
        try:
            end.enqueue(obj, timeout_s or self._timeout_s)
        except CommError as error:
            blamed = self._blamed(error)
            if blamed is error:
                raise
            raise blamed from error

    def receive(self, timeout_s: float | None, type_: Any) -> Any:
        """Return the writer's next object; only on the others."""
        if self._dequeue is None:
            raise UsageError(f"{self._health.where('broadcast_object')}: this rank's end writes")
        try:
            return self._dequeue(timeout_s, type_)
        except CommError as error:
            blamed = self._blamed(error)
            if blamed is error:
                raise
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
