"""The queues of one group: over shared memory where two ranks share a host, else over encrypted TCP.

The ranks agree on where each of them is, so all know the way from every writer to every reader. A rank that
cannot open its end makes the creation fail on all of them; nobody falls back alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from coordinator.host.plane import HostPlane
from coordinator.queues.ends import UnreadWriter
from coordinator.queues.external_writer import ExternalWriter
from coordinator.settings import CoordinatorSettings
from device_comm.health import GroupHealth
from shm_broadcast.codec import register_type
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import CapabilityError, CommError, DecodeError, UsageError
from shm_broadcast.liveness import this_process
from shm_broadcast.queue import QueueReader, QueueWriter

# Part of `create_timeout_s` that opening may take: the rest is for saying that it failed.
_OPENING_PART = 0.5

# How long readers on other hosts have, when a group breaks or a queue cannot be created, to take what was written.
_PARTING_S = 1.0


@register_type(name="coordinator.QueueSeat")
class QueueSeat(msgspec.Struct, frozen=True):
    """What a rank knows before a queue is created.

    Attributes:
        place: Equal on two ranks that can map one segment.
        external: Digest of the external writer's handle; empty if this rank was given none.
        failure: What is wrong with what it was given.
    """

    place: str
    external: bytes = b""
    failure: str = ""


@register_type(name="coordinator.QueueKeys")
class QueueKeys(msgspec.Struct, frozen=True):
    """What a rank that reads from another host tells the writers.

    Attributes:
        public: Its public key for each such queue, by the writer's rank in the group.
        failure: Why it has none.
    """

    public: dict[int, bytes]
    failure: str = ""


@register_type(name="coordinator.QueueOffer")
class QueueOffer(msgspec.Struct, frozen=True):
    """What a writer tells its readers.

    Attributes:
        handle: The queue's handle in bytes; empty if this rank writes none.
        key: Its key. It travels between the ranks of the group only.
        failure: Why the queue could not be created.
    """

    handle: bytes = b""
    key: bytes = b""
    failure: str = ""

    def __repr__(self) -> str:
        """Hide the key."""
        return f"QueueOffer({len(self.handle)} bytes, failure={self.failure!r})"


class GroupQueues:
    """The queues of one group, closed with it. Every method but `close` is collective."""

    def __init__(
        self, host: HostPlane, health: GroupHealth, settings: CoordinatorSettings, address: str
    ) -> None:
        """Create nothing yet.

        Args:
            host: What the ranks agree by.
            health: The group's shared state.
            settings: Sizes, deadlines, and how readers on other hosts are served.
            address: Where this rank listens for readers on other hosts; numeric, never a wildcard.
        """
        self._host = host
        self._health = health
        self._settings = settings
        self._address = address
        self._rank_in_group = health.ranks.index(health.rank)
        self._count = 0
        self._open: list[QueueWriter | QueueReader] = []

    def broadcast(self, writer: int, external: object = None) -> QueueWriter | QueueReader | UnreadWriter:
        """Create a queue from rank `writer` to all others, or open one from outside of the group.

        Args:
            writer: Rank in the group. Without meaning if there is an external writer.
            external: An `ExternalWriter`, or None. Ranks that give none get it from those that do.

        Raises:
            UsageError: An external writer cannot be used: it is none, has not all ranks of the group for
                readers, or ranks gave different ones; on every rank.
            CapabilityError: Some rank could not create or open its end; on every rank.
        """
        seats = self._take_seats(external)
        if any(seat.external for seat in seats):
            return self._join(external, seats)
        readers = [rank for rank in range(len(seats)) if rank != writer]
        if not readers:
            return UnreadWriter(self._health)
        mine, ends = self._create({writer: readers}, seats)
        return ends[writer] if mine is None else mine

    def gather(self, reader: int) -> tuple[QueueWriter, list[QueueReader]]:
        """Create a queue from every rank to rank `reader`, which has one to itself too; raises as `broadcast`.

        Returns:
            This rank's writing end, and on the reader the reading ends in rank order; elsewhere no others.
        """
        seats = self._take_seats(None)
        mine, ends = self._create({rank: [reader] for rank in range(len(seats))}, seats)
        if mine is None:
            raise CapabilityError(f"{self._health.where('create queue')}: no writing end")
        return mine, [ends[rank] for rank in sorted(ends)]

    def close(self, timeout_s: float) -> None:
        """Close every queue, within about `timeout_s` seconds. Idempotent."""
        _close(self._open, timeout_s)
        self._open.clear()

    # ------------------------------------------------------------------ queues between ranks of the group

    def _create(
        self, plan: Mapping[int, Sequence[int]], seats: Sequence[QueueSeat]
    ) -> tuple[QueueWriter | None, dict[int, QueueReader]]:
        """Create a queue for each writer of `plan` to its readers.

        Returns:
            The writing end if this rank writes, and the reading ends by writer.
        """
        far = {
            writer: [rank for rank in readers if seats[rank].place != seats[writer].place]
            for writer, readers in plan.items()
        }
        pairs: dict[int, RemoteKeys] = {}
        told: list[QueueKeys] = []
        if any(far.values()):
            pairs, told = self._exchange_keys(far)
        self._count += 1
        mine: QueueWriter | None = None
        offer = QueueOffer()
        if self._rank_in_group in plan:
            public = {rank: told[rank].public[self._rank_in_group] for rank in far[self._rank_in_group]}
            try:
                mine = self._offer(plan[self._rank_in_group], public)
                offer = QueueOffer(mine.handle.to_bytes(mine.key), mine.key)
            except CommError as error:
                offer = QueueOffer(failure=f"rank {self._health.rank}: {error}")
        ends: dict[int, QueueReader] = {}
        try:
            offers: list[QueueOffer] = self._gather(offer)
            self._agree([each.failure for each in offers])
            failure = self._open_ends(
                [writer for writer in plan if self._reads(plan[writer])], offers, pairs, ends
            )
            self._agree(self._gather(failure))
        except BaseException:
            _close([mine, *ends.values()], _PARTING_S)
            raise
        self._adopt([mine, *ends.values()])
        return mine, ends

    def _reads(self, readers: Sequence[int]) -> bool:
        return self._rank_in_group in readers

    def _exchange_keys(
        self, far: Mapping[int, Sequence[int]]
    ) -> tuple[dict[int, RemoteKeys], list[QueueKeys]]:
        """Return this rank's pair for each queue that it reads from another host, and what all ranks told."""
        pairs: dict[int, RemoteKeys] = {}
        failure = ""
        try:
            pairs = {writer: RemoteKeys.generate() for writer in far if self._reads(far[writer])}
        except CommError as error:
            failure = f"rank {self._health.rank}: {error}"
        told: list[QueueKeys] = self._gather(
            QueueKeys({writer: pair.public for writer, pair in pairs.items()}, failure)
        )
        self._agree([each.failure for each in told])
        return pairs, told

    def _offer(self, readers: Sequence[int], public: Mapping[int, bytes]) -> QueueWriter:
        """Create this rank's writing end; `public` holds the key of each reader on another host."""
        ranks = self._health.ranks
        return QueueWriter.create(
            f"{self._health.name}/{self._count}",
            [ranks[rank] for rank in readers if rank not in public],
            self._settings.broadcast,
            writer=self._health.rank,
            remote_readers={ranks[rank]: key for rank, key in public.items()},
            bind_address=self._address if public else None,
            port_range=self._settings.remote_port_range,
            remote=self._settings.remote,
        )

    def _open_ends(
        self,
        writers: Sequence[int],
        offers: Sequence[QueueOffer],
        pairs: Mapping[int, RemoteKeys],
        ends: dict[int, QueueReader],
    ) -> str:
        """Open the reading ends of the queues of `writers` into `ends`; return what went wrong, or nothing."""
        deadline = time.monotonic() + self._settings.create_timeout_s * _OPENING_PART
        for writer in writers:
            left = max(deadline - time.monotonic(), 0.1)
            offer = offers[writer]
            try:
                ends[writer] = QueueReader.open(
                    offer.handle, offer.key, self._health.rank, left, remote_keys=pairs.get(writer)
                )
            except CommError as error:
                return f"rank {self._health.rank}: {error}"
        return ""

    # ------------------------------------------------------------------ a queue from outside of the group

    def _join(self, external: object, seats: Sequence[QueueSeat]) -> QueueReader:
        """Open this rank's reading end of an external writer's queue."""
        givers = [rank for rank, seat in enumerate(seats) if seat.external]
        where = self._health.where("create queue")
        if len({seats[rank].external for rank in givers}) > 1:
            raise UsageError(f"{where}: external_writer_handle is not the same queue on ranks {givers}")
        own = external if isinstance(external, ExternalWriter) else None
        offer = QueueOffer() if own is None else QueueOffer(own.handle_bytes(), own.key)
        if len(givers) < len(seats):
            offer = self._host.broadcast_object(offer, givers[0], self._settings.create_timeout_s)
        pairs = {0: own.remote_keys} if own is not None and own.remote_keys is not None else {}
        ends: dict[int, QueueReader] = {}
        failure = self._open_ends([0], [offer], pairs, ends)
        try:
            self._agree(self._gather(failure))
        except BaseException:
            _close([*ends.values()], _PARTING_S)
            raise
        self._adopt([*ends.values()])
        return ends[0]

    def _check_external(self, external: object) -> tuple[bytes, str]:
        """Return the digest of the external writer's handle, and what is wrong with it."""
        if external is None:
            return b"", ""
        where = f"rank {self._health.rank}: external_writer_handle"
        if not isinstance(external, ExternalWriter):
            return b"", f"{where} must be an ExternalWriter, not {type(external).__name__}"
        try:
            handle = external.authenticated()
        except DecodeError as error:
            return b"", f"{where}: {error}"
        readers = {*handle.ranks, *(() if handle.remote is None else handle.remote.ranks)}
        missing = sorted(set(self._health.ranks) - readers)
        if missing:
            return b"", f"{where}: queue {handle.name!r} has no readers {missing}, but {sorted(readers)}"
        return external.digest(), ""

    # ------------------------------------------------------------------ agreement

    def _take_seats(self, external: object) -> list[QueueSeat]:
        """Return where each rank is, and what it was given."""
        own = this_process()
        digest, failure = self._check_external(external)
        seats: list[QueueSeat] = self._gather(
            QueueSeat(f"{own.boot_id} {own.network_namespace}", digest, failure)
        )
        failures = _distinct([seat.failure for seat in seats])
        if failures:
            raise UsageError(f"{self._health.where('create queue')}: {failures}")
        return seats

    def _gather(self, obj: object) -> list[Any]:
        return self._host.all_gather_object(obj, self._settings.create_timeout_s)

    def _agree(self, failures: Sequence[str]) -> None:
        """Raise, on all ranks alike, if one of them failed."""
        reasons = _distinct(failures)
        if reasons:
            raise CapabilityError(f"{self._health.where('create queue')}: {reasons}")

    def _adopt(self, ends: Sequence[QueueWriter | QueueReader | None]) -> None:
        for end in ends:
            if end is not None:
                self._open.append(end)
                # A rank whose group broke must not let the others wait for its next message.
                self._health.on_abort(partial(_close, [end], _PARTING_S))


def _close(ends: Sequence[QueueWriter | QueueReader | None], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for end in ends:
        if isinstance(end, QueueWriter):
            end.close(max(deadline - time.monotonic(), 0.0))
        elif end is not None:
            end.close()


def _distinct(failures: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(failure for failure in failures if failure))
