"""The queues of one group: over shared memory between ranks of one host, over encrypted TCP between hosts.

The ranks exchange their host ids, so all of them know which transport connects each writer to each reader. If one rank
cannot open its end, the creation fails on all ranks; no rank falls back alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import msgspec

from coordinator.host.plane import HostPlane
from coordinator.queues.ends import UnreadWriter
from coordinator.queues.external_writer import ExternalWriter
from coordinator.queues.guard import GroupQueueGuard
from coordinator.queues.store_exchange import StoreExchange
from coordinator.settings import CoordinatorSettings
from device_comm.health import EXPLAIN_S, GroupHealth, Operation
from device_comm.stages import in_parts
from shm_broadcast.codec import register_type
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import CapabilityError, CommError, DecodeError, PeerLostError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.liveness import this_process
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.threads import caller

# Part of `create_timeout_s` that opening may take; the rest is left for reporting a failure.
_OPENING_PART = 0.5

# Pause between two looks for ranks that have ended.
_LOOK_S = 0.02

# What a signal handler ends in the middle of a creation.
_CREATION = Operation("host", "create queue", 0)

# When a group breaks or a queue cannot be created, readers on other hosts have this long to take what was written.
_PARTING_S = 1.0


@register_type(name="coordinator.QueueRankInfo")
class QueueRankInfo(msgspec.Struct, frozen=True):
    """What a rank tells the others before a queue is created.

    Attributes:
        host_id: Equal on two ranks that can map one segment.
        external: Digest of the external writer's handle; empty if this rank was given none.
        failure: Why the external writer of this rank cannot be used; empty if it can.
    """

    host_id: str
    external: bytes = b""
    failure: str = ""


@register_type(name="coordinator.QueueKeys")
class QueueKeys(msgspec.Struct, frozen=True):
    """What a rank that reads from another host tells the writers.

    Attributes:
        public: Its public key for each such queue, by the writer's rank in the group.
        failure: Why this rank has no keys; empty if it has them.
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


class Epochs(Protocol):
    """A world whose members change."""

    @property
    def epoch(self) -> int:
        """Return how often they have changed."""

    def first_use(self, what: str, timeout_s: float) -> int:
        """Return the epoch in which `what` was first used: this one if it is new. Raises `CommError`."""


class GroupQueues:
    """The queues of one group, closed with it. Every method but `close` is collective."""

    def __init__(
        self,
        host: HostPlane,
        health: GroupHealth,
        settings: CoordinatorSettings,
        address: str,
        epochs: Epochs | None = None,
        exchange: StoreExchange | None = None,
    ) -> None:
        """Store the arguments; no queue is created yet.

        Args:
            host: The group's host plane, over which the ranks agree.
            health: The group's shared state.
            settings: Sizes, deadlines, and how readers on other hosts are served.
            address: Where this rank listens for readers on other hosts; numeric, never a wildcard.
            epochs: Says in which epoch an external writer's queue was first used; None if members do not change.
            exchange: What the ranks agree through instead of the host plane, in a job with a secret on several hosts.
        """
        self._host = host
        self._exchange = exchange
        self._epochs = epochs
        self._health = health
        self._settings = settings
        self._create_timeout_s = settings.create_timeout_s
        self._address = address
        self._rank_in_group = health.ranks.index(health.rank)
        self._count = 0
        self._batches: list[list[QueueWriter | QueueReader]] = []

    def broadcast(
        self, writer: int, external: object = None, *, is_blocking: bool
    ) -> QueueWriter | QueueReader | UnreadWriter:
        """Create a queue from rank `writer` to all others, or open one from outside of the group.

        Whatever a signal handler raises before the end breaks the group: the ranks exchange messages in several steps.

        Args:
            writer: Rank in the group. Ignored if there is an external writer.
            external: An `ExternalWriter`, or None. Ranks that pass None get it from those that pass one.
            is_blocking: Whether to wait until every rank has its end.

        Raises:
            UsageError: An external writer cannot be used: it is of another type, its readers do not include all ranks
                of the group, or ranks passed different ones. Every rank raises this.
            CapabilityError: A rank could not create or open its end. Every rank raises this.
            PeerLostError: A rank has ended; the group is broken.
        """

        def stages() -> QueueWriter | QueueReader | UnreadWriter:
            infos = self._exchange_rank_info(external)
            readers = [rank for rank in range(len(infos)) if rank != writer]
            if any(info.external for info in infos):
                end: QueueWriter | QueueReader | UnreadWriter = self._join(external, infos)
            elif readers:
                mine, ends = self._create({writer: readers}, infos)
                end = ends[writer] if mine is None else mine
            else:
                end = UnreadWriter(self._health)
            if is_blocking:
                self._host.barrier()
            return end

        return in_parts(self._health, _CREATION, stages)

    def gather(self, reader: int, *, is_blocking: bool) -> tuple[QueueWriter, list[QueueReader]]:
        """Create a queue from every rank, including `reader` itself, to rank `reader`; as `broadcast`.

        Returns:
            This rank's writing end, and on the reader the reading ends in rank order; on other ranks an empty list.
        """

        def stages() -> tuple[QueueWriter, list[QueueReader]]:
            infos = self._exchange_rank_info(None)
            mine, ends = self._create({rank: [reader] for rank in range(len(infos))}, infos)
            assert mine is not None
            if is_blocking:
                self._host.barrier()
            return mine, [ends[rank] for rank in sorted(ends)]

        return in_parts(self._health, _CREATION, stages)

    @contextmanager
    def within(self, create_timeout_s: float) -> Iterator[None]:
        """Let what is created in the block take at most `create_timeout_s` seconds; then what the settings say."""
        self._create_timeout_s = create_timeout_s
        try:
            yield
        finally:
            self._create_timeout_s = self._settings.create_timeout_s

    def close(self, timeout_s: float) -> None:
        """Close every queue, within about `timeout_s` seconds. Idempotent."""
        _close([end for batch in self._batches for end in batch], timeout_s)
        self._batches.clear()

    # ------------------------------------------------------------------ queues between ranks of the group

    def _create(
        self, plan: Mapping[int, Sequence[int]], infos: Sequence[QueueRankInfo]
    ) -> tuple[QueueWriter | None, dict[int, QueueReader]]:
        """Create a queue for each writer of `plan` to its readers.

        Returns:
            The writing end if this rank writes, and the reading ends by writer.
        """
        far = {
            writer: [rank for rank in readers if infos[rank].host_id != infos[writer].host_id]
            for writer, readers in plan.items()
        }
        pairs: dict[int, RemoteKeys] = {}
        told: list[QueueKeys] = []
        if any(far.values()):
            pairs, told = self._exchange_keys(far)
        self._count += 1
        own = self._rank_in_group
        mine: QueueWriter | None = None
        offer = QueueOffer()
        with self._batch(has_own_writer=True) as batch:
            if own in plan:
                public = {rank: told[rank].public[own] for rank in far[own]}
                try:
                    batch.append(mine := self._offer(plan[own], public))
                    offer = QueueOffer(mine.handle.to_bytes(mine.key), mine.key)
                except CommError as error:
                    if raised_by_handler(error):
                        raise
                    offer = QueueOffer(failure=self._blame(error))
            offers: list[QueueOffer] = self._gather(offer)
            self._agree([each.failure for each in offers])
            ends = self._open_ends([writer for writer in plan if own in plan[writer]], offers, pairs, batch)
        return mine, ends

    def _exchange_keys(
        self, far: Mapping[int, Sequence[int]]
    ) -> tuple[dict[int, RemoteKeys], list[QueueKeys]]:
        """Return this rank's key pair for each queue that it reads from another host, and all ranks' public keys."""
        pairs: dict[int, RemoteKeys] = {}
        failure = ""
        try:
            pairs = {writer: RemoteKeys.generate() for writer in far if self._rank_in_group in far[writer]}
        except CommError as error:
            if raised_by_handler(error):
                raise
            failure = self._blame(error)
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
        batch: list[QueueWriter | QueueReader],
    ) -> dict[int, QueueReader]:
        """Open the reading ends of the queues of `writers`, and append them to `batch`. Collective.

        If any rank fails, all ranks raise the same `CapabilityError`; or `PeerLostError` if a rank has ended, after
        which the group is broken.
        """
        ends: dict[int, QueueReader] = {}
        failure = ""
        deadline = time.monotonic() + self._create_timeout_s * _OPENING_PART
        before = caller.forks
        try:
            caller.forks = self._health.forks
            for writer in writers:
                offer, left = offers[writer], max(deadline - time.monotonic(), 0.1)
                keys = pairs.get(writer)
                end = QueueReader.open(offer.handle, offer.key, self._health.rank, left, remote_keys=keys)
                batch.append(end)
                ends[writer] = end
        except CommError as error:
            if raised_by_handler(error):
                raise
            self._raise_if_ended(error, deadline)
            failure = self._blame(error)
        finally:
            caller.forks = before
        self._agree(self._gather(failure))
        return ends

    def _raise_if_ended(self, error: CommError, deadline: float) -> None:
        """Break the group and raise if a rank has ended, when an end cannot be opened because of `error`.

        A writer that has ended answers no reader, though it may have told all that nothing failed there. The other
        ranks, which wait for this one in the exchange, get what this publishes. The kernel closes the connections of a
        process before it says that the process has ended: a lost connection is reason to look for a while.
        """
        end = min(time.monotonic() + EXPLAIN_S, deadline) if isinstance(error, PeerLostError) else 0.0
        self._health.check_peers(_CREATION)
        while time.monotonic() < end:
            time.sleep(_LOOK_S)
            self._health.check_peers(_CREATION)

    # ------------------------------------------------------------------ a queue from outside of the group

    def _join(self, external: object, infos: Sequence[QueueRankInfo]) -> QueueReader:
        """Open this rank's reading end of an external writer's queue."""
        givers = [rank for rank, info in enumerate(infos) if info.external]
        where = self._health.where("create queue")
        if len({infos[rank].external for rank in givers}) > 1:
            raise UsageError(f"{where}: external_writer_handle is not the same queue on ranks {givers}")
        own = external if isinstance(external, ExternalWriter) else None
        offer = QueueOffer() if own is None else QueueOffer(own.handle_bytes(), own.key)
        if len(givers) < len(infos):
            offer = self._gather(offer)[givers[0]]
        pairs = {0: own.remote_keys} if own is not None and own.remote_keys is not None else {}
        with self._batch(has_own_writer=False) as batch:
            return self._open_ends([0], [offer], pairs, batch)[0]

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
        stale = self._stale(external.digest())
        return (b"", f"{where}: queue {handle.name!r} {stale}") if stale else (external.digest(), "")

    def _stale(self, digest: bytes) -> str:
        """Return why the ranks of this epoch cannot use a queue; an empty text if they can."""
        if self._epochs is None:
            return ""
        own = self._epochs.epoch
        try:
            first = self._epochs.first_use(f"queue/{digest.hex()}", self._create_timeout_s)
        except CommError as error:
            if raised_by_handler(error):
                raise
            return f"may be of another epoch: {error}"
        if first == own:
            return ""
        return f"is of epoch {first}, and this is epoch {own}: its writer must create one for the ranks of this epoch"

    # ------------------------------------------------------------------ agreement

    def _exchange_rank_info(self, external: object) -> list[QueueRankInfo]:
        """Return where each rank is, and what it was given."""
        own = this_process()
        digest, failure = self._check_external(external)
        infos: list[QueueRankInfo] = self._gather(
            QueueRankInfo(f"{own.boot_id} {own.network_namespace}", digest, failure)
        )
        self._agree([info.failure for info in infos], UsageError)
        return infos

    def _gather(self, obj: object) -> list[Any]:
        if self._exchange is not None:
            return self._exchange.all_gather_object(obj, self._create_timeout_s)
        return self._host.all_gather_object(obj, self._create_timeout_s)

    def _blame(self, error: CommError) -> str:
        """Return what this rank tells the others of its `error`."""
        return f"rank {self._health.rank}: {error}"

    def _agree(self, failures: Sequence[str], kind: type[CommError] = CapabilityError) -> None:
        """Raise if any rank failed; all ranks raise the same error."""
        reasons = "; ".join(dict.fromkeys(failure for failure in failures if failure))
        if reasons:
            raise kind(f"{self._health.where('create queue')}: {reasons}")

    @contextmanager
    def _batch(self, *, has_own_writer: bool) -> Iterator[list[QueueWriter | QueueReader]]:
        """Give the block a list for the ends that it makes, and guard them behind it; if it raises, close them.

        What a signal handler raises may come at any place. Whatever is in the list, `close` finds, even if a second
        exception keeps this from closing it.
        """
        batch: list[QueueWriter | QueueReader] = []
        self._batches.append(batch)
        try:
            yield batch
            for end in batch:
                end.guard(GroupQueueGuard(self._health, has_own_writer=has_own_writer))
                # When the group breaks, the other ranks must not wait for this rank's next message.
                self._health.on_abort(partial(_close, [end], _PARTING_S))
        except BaseException:
            _close(batch, _PARTING_S)
            batch.clear()
            raise


def _close(ends: Sequence[QueueWriter | QueueReader], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for end in ends:
        if isinstance(end, QueueWriter):
            end.close(max(deadline - time.monotonic(), 0.0))
        else:
            end.close()
