"""One group during its creation: what is prepared before its ranks meet, and what is connected afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final, TypeVar

import msgspec
import torch
import torch.distributed as dist

from coordinator.bootstrap.agreement.agreeing import LINGER_S
from coordinator.bootstrap.agreement.views import Views
from coordinator.bootstrap.blocking_calls import (
    clone_hint,
    connect_watched,
    no_check,
    raise_if_lost,
    refuse_clones,
)
from coordinator.bootstrap.group_connections import open_connections
from coordinator.bootstrap.group_parts import GroupParts, GroupPlan, GroupProcessGroups, call_each
from coordinator.bootstrap.status_store import Connect, GroupStatusStore, WorldStatusStore
from coordinator.bootstrap.timings import CreationReport
from coordinator.bootstrap.world import World
from coordinator.heartbeats.partners import partners_of
from coordinator.host.gloo import GlooHostPlane
from coordinator.host.plane import HostPlane, SoloHostPlane
from coordinator.host.process_groups import LOOPBACK, GlooBackend, abort_gloo
from coordinator.host.shared import SharedHostPlane
from coordinator.meeting.losses import listen_for_losses
from coordinator.settings import CoordinatorSettings
from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.cpu import shared_memory
from device_comm.cpu.connect import needs_process_group
from device_comm.health import GroupHealth, Operation
from device_comm.process_group import ProcessGroupCommunicator
from device_comm.registry import CommunicatorFactory, communicator_factory
from device_comm.solo import SoloCommunicator
from shm_broadcast.errors import CapabilityError, CommError, CommTimeoutError, GroupBrokenError, PeerLostError
from shm_broadcast.liveness import PeerWatch
from shm_broadcast.stacks.offered import offer_stacks
from shm_broadcast.status.layout import GroupState
from shm_broadcast.timeouts import as_timedelta

# How long the host plane of a group that could not be created may take to close.
_UNDO_S: Final = 1.0
# The name of the step in which a rank maps the first rank's memory, for errors.
_SHARE: Final = "create shared memory"

Backend = TypeVar("Backend", bound=GlooBackend | None)


def prepare_region(
    plan: GroupPlan, host_ids: Mapping[int, str], offered: ExitStack
) -> shared_memory.Preparation:
    """Prepare the region that the group's ranks share, before they meet: the first rank creates and offers it.

    Nothing is prepared for a group of one, nor if `host_ids` says that the ranks are on several hosts. `offered` closes
    the result.
    """
    ranks = plan.membership.ranks
    is_alone = len(ranks) == 1 or len({host_ids.get(rank) for rank in ranks}) > 1
    size, index = (1, 0) if is_alone else (len(ranks), plan.membership.rank_in_group)
    region = shared_memory.Preparation(size, index)
    # This comes before it opens anything, so that an interrupt of the preparation leaves nothing open.
    offered.callback(region.close)
    if not is_alone:
        with plan.clock.phase("shared_memory"):
            region.prepare()
    return region


def status_store(
    plan: GroupPlan, store: dist.Store, check: Callable[[], None] = no_check
) -> WorldStatusStore:
    """Return the status store of a group whose ranks have no board yet; `store` is used by this group only.

    `check` raises `NativeError` once the host of the store is lost.
    """
    return WorldStatusStore(_scoped(plan, store), plan.membership.rank, plan.membership.ranks, check)


def _scoped(plan: GroupPlan, store: dist.Store) -> dist.Store:
    return dist.PrefixStore(f"status_store/{plan.membership.ranks[0]}", store)


@dataclasses.dataclass(eq=False, repr=False)
class GroupBuilder:
    """Connects one group whose ranks have met and agreed.

    Attributes:
        plan: The group.
        region: What this rank has prepared; the caller closes it.
        members: What this rank knows of the group's ranks.
        world: The processes among which the group is created.
        store: A store whose keys are used by this group only.
        connect_store: Lends a connection to `store` that no other thread uses.
        device: Device on which the group's tensors live.
        backend: torch backend of the process groups for device tensors.
        settings: Settings of the group.
        create_timeout_s: How long this creation may take, in seconds; None for what the settings say.
        health: The state that all parts of the group share.
        partners: The ranks on other hosts to which this rank needs links, each with all ranks of its host.
    """

    plan: GroupPlan
    region: shared_memory.Preparation
    members: Views
    world: World
    store: dist.Store
    connect_store: Connect
    device: torch.device
    backend: str
    settings: CoordinatorSettings
    create_timeout_s: float | None = None
    health: GroupHealth = dataclasses.field(init=False)
    partners: dict[int, tuple[int, ...]] = dataclasses.field(init=False)
    # What closes the parts that were made, the last one first.
    _made: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    _shared: shared_memory.SharedMemory | None = None

    def __post_init__(self) -> None:
        """Create the shared state of the group; nothing is connected yet."""
        try:
            self._begin()
        except BaseException:
            # Nobody has this object yet, and so nobody could undo it.
            try:
                call_each(self._made)
            finally:  # one more interrupt
                call_each(self._made)
            raise

    def _begin(self) -> None:
        # This comes after the agreement, so that the others are told why if this process cannot do it.
        offer_stacks(self.settings.stack_signal)
        name, ranks, rank = self.plan.name, self.plan.membership.ranks, self.plan.membership.rank
        self._host_ids = self.members.host_ids
        self._watch = self.members.watch()
        self._made.insert(0, self._watch.close)
        heartbeats = self.world.heartbeats(self.settings.remote.lost_after_s)
        check = heartbeats.check_store
        self._world_status_store = status_store(self.plan, self.store, check)
        self._status_store = GroupStatusStore(self._world_status_store)
        self.health = GroupHealth(name, rank, ranks, self._watch, self._status_store)
        self.health.forks = self.world.forks
        self.partners = partners_of(rank, self.members.hosts)
        # `release` is registered first, so that an interrupt between the two lines leaves no link in use.
        self._made.insert(0, partial(heartbeats.release, self.health))
        heartbeats.use(self.health, self.partners)
        for together in self.partners.values():
            heartbeats.learn(together)
        if self.partners:
            heartbeats.listen(self._watch, ranks)
        # After `heartbeats.listen`, for the same reason as in the agreement of the ranks (`creation.py`).
        if self.world.is_torch:
            listen_for_losses(self._watch, ranks)

    @property
    def _within_s(self) -> float:
        return self.settings.create_timeout_s if self.create_timeout_s is None else self.create_timeout_s

    def check_others(self) -> None:
        """Raise if a rank of the group has ended, or has published why it fails."""
        _check_others(self._watch, self.health)

    def refuse_clones(self) -> None:
        """Raise `PeerLostError` if the host of another rank seems to be a clone of this one."""
        refuse_clones(self._watch, f"creating {self.plan.name}")

    def share(self, number: int) -> None:
        """Map offer `number` of the first rank, if all ranks are on one host. Collective."""
        if len(self._host_ids) == 1 or not self.members.share_memory:
            return
        first, timeout_s = self.plan.membership.ranks[0], self._within_s
        offers = msgspec.json.decode(self.members.near[first].note, type=list[bytes])
        with self.plan.clock.phase("shared_memory"):
            try:
                self._shared = self.region.map(self.health, offers[number], timeout_s)
            except (PeerLostError, CommTimeoutError) as error:
                raise self._explained(error, first, timeout_s) from error
            except CapabilityError as error:
                raise self._hinted(error) from error
            self._made.insert(0, self._shared.close)
            self._status_store.attach(self._shared.board)

    def confirm(self) -> None:
        """Return when all ranks have mapped what they share. Collective.

        A rank may destroy its group, and the store with it, as soon as it has the group. Afterwards no rank needs the
        store any more, for this group or for others of the same ranks that were mapped before.
        """
        shared = self._shared
        if shared is None:
            return
        # If the first rank is stopped, a rank that still waits for its memory gives up `LINGER_S` before the
        # ranks that have the memory, and tells them who is missing. Otherwise they would blame that waiting
        # rank too.
        timeout_s = self._within_s + LINGER_S
        self.health.check_owner("barrier")
        with self.plan.clock.phase("shared_memory"):
            try:
                shared.host.make("barrier", shared.host.core.barrier, timeout_s)
            except GroupBrokenError as error:
                raise self._translated(error) from error

    def _explained(self, error: CommError, first: int, timeout_s: float) -> CommError:
        """Break the group, and return the error for a first rank that does not hand its memory over in time.

        That rank has ended, is stopped, or has failed in another group. In the last case it published the
        reason before it withdrew its offer.
        """
        if isinstance(error, CommTimeoutError):
            return self._translated(self.health.blame(_SHARE, (first,), timeout_s))
        return self._translated(self.health.explain(Operation("host", _SHARE, 0), error, (first,)))

    def _translated(self, error: CommError) -> CommError:
        """Return `error` or, if a rank cannot map its memory, the error which that rank itself raises."""
        failure_record = self.health.failure_record
        if failure_record is not None and failure_record.kind == "failed":
            return self._hinted(CapabilityError(failure_record.detail, requirement="shared memory"))
        return self._hinted(error)

    def _hinted(self, error: CommError) -> CommError:
        """Return `error`, and say how hosts that may be clones of one machine can start, if there are any.

        A process on this host may have the number of a rank on the clone. That rank then seems to live here.
        """
        hint = clone_hint(self._watch, self._watch.peers)
        if hint and isinstance(error, PeerLostError):
            return PeerLostError(f"{error}{hint}", peers=error.peers)
        if hint and isinstance(error, CapabilityError):
            return CapabilityError(f"{error}{hint}", requirement=error.requirement)
        return error

    def connect(
        self, use_device_communicator: bool, agreement_s: float, together: tuple[str, ...]
    ) -> GroupParts:
        """Build the planes, once all ranks have mapped what they share. Collective."""
        self.health.check_owner("connect")
        self._status_store.settle()
        if self._shared is not None:
            with self.plan.clock.phase("shared_memory"):
                self._shared.populate()
        self._process_groups = GroupProcessGroups(
            self.plan.name,
            self.plan.membership.ranks,
            self.backend,
            self.members.listening_address(LOOPBACK) if len(self._host_ids) > 1 else self.members.own.address,
            self.settings.create_timeout_s,
            apart=None if self.world.is_torch else (self.world, self.plan.membership.rank_in_group),
            connect_timeout_s=self.create_timeout_s,
        )
        self._made.insert(0, self._process_groups.destroy)
        if len(self._host_ids) > 1:
            self.health.refusals.use(self._world_status_store)
        host, communicator = self._planes(use_device_communicator)
        self.health.shown.status.set_state(GroupState.USABLE)
        report = CreationReport(name=self.plan.name, world_size=len(self._host_ids), together=together)
        return GroupParts(
            health=self.health,
            host=host,
            communicator=communicator,
            device=self.device,
            process_groups=self._process_groups,
            report=report.plus(agreement=agreement_s, **self.plan.clock.seconds),
            host_ids=self._host_ids,
            world=self.world,
            after=self._after(),
            processes=self.members.processes,
        )

    def _after(self) -> list[Callable[[], None]]:
        """Return what to call when everything else of the group is released."""
        heartbeats = self.world.heartbeats(self.settings.remote.lost_after_s)
        release = partial(heartbeats.release, self.health)
        return [release] if self.world.is_torch else [release, self._status_store.release]

    def _planes(self, use_device_communicator: bool) -> tuple[HostPlane, DeviceCommunicator]:
        """Choose the group's planes, and connect them."""
        world_size, clock = len(self._host_ids), self.plan.clock
        if world_size == 1:
            alone = SoloHostPlane(self.health)
            return alone, SoloCommunicator(self._context(alone))
        factory: CommunicatorFactory = ProcessGroupCommunicator
        if use_device_communicator:
            factory = communicator_factory(self.device.type, world_size)
        with_device = needs_process_group(factory, self.device.type, shares_memory=self._shared is not None)
        rank, timeout_s = self.plan.membership.rank_in_group, self.settings.timeout_s
        host: SharedHostPlane | GlooHostPlane
        if with_device:
            with clock.phase("gloo"):
                gloo = self._connected(self._process_groups.connect_device, "connect device")
            if gloo is not None:
                self.health.on_abort(partial(abort_gloo, gloo))
        if self._shared is not None:
            host = SharedHostPlane(self._shared, self.health, rank, timeout_s)
        else:
            with clock.phase("gloo"):
                host_gloo = self._connected(self._process_groups.connect_host, "connect")
            host = GlooHostPlane(host_gloo, self.health, rank, timeout_s)
        self._made.insert(0, partial(host.close, _UNDO_S))
        with clock.phase("communicator"):
            communicator = factory(self._context(host))
        self._made.insert(0, communicator.destroy)
        return host, communicator

    @contextmanager
    def _lent(self) -> Iterator[dist.Store]:
        with self.connect_store() as store:
            yield _scoped(self.plan, store)

    def _connected(self, connect: Callable[[], Backend], name: str) -> Backend:
        """Connect a process group, and return its backend once all ranks are connected. Collective."""

        def connect_all() -> Backend:
            gloo = connect()
            if gloo is not None:
                # A connected rank may destroy the group at once, which a rank that is still connecting would take for a
                # failure. Therefore no rank gets the group before all are connected.
                options = dist.BarrierOptions()
                options.timeout = as_timedelta(self._within_s)
                gloo.barrier(options).wait()
            return gloo

        check = partial(self.health.check_record, Operation("host", "connect", 0))
        where = self.health.where("connect")
        lost = partial(raise_if_lost, self._watch, where)
        with self._world_status_store.own_connection(self._lent, self._within_s, lost):
            try:
                return connect_watched(connect_all, f"{self.plan.name} {name}", where, self._watch, check)
            except BaseException as error:
                # Published over a connection of its own: the connecting thread may block the usual one until
                # its deadline.
                if not self.health.is_broken:
                    self.health.fail(error, "connect")
                raise

    def _context(self, host: HostPlane) -> CommunicatorContext:
        membership = self.plan.membership
        return CommunicatorContext(
            name=self.plan.name,
            rank_in_group=membership.rank_in_group,
            ranks=membership.ranks,
            device=self.device,
            process_group=self._process_groups.device,
            health=self.health,
            timeout_s=self.settings.timeout_s,
            shared=self._shared,
            cuda=self.settings.cuda,
            exchange=host.exchange,
            # It must not refer to this builder, whose store would live as long as somebody keeps the group.
            connect=partial(
                open_connections,
                membership.rank_in_group,
                address=self._process_groups.address,
                exchange=host.exchange,
                check=partial(_check_others, self._watch, self.health),
                where=self.health.where("connect"),
                timeout_s=self._within_s,
            ),
        )

    def undo(self) -> None:
        """Release what was connected. Idempotent; a call that is interrupted leaves the rest to the next one."""
        if self.health.is_inherited:
            return
        if self.health.close():
            self.health.say_goodbye()
        self.health.abort()
        call_each(self._made)
        self.health.release()


def _check_others(watch: PeerWatch, health: GroupHealth) -> None:
    """Raise if a rank of the group has ended, or has published why it fails."""
    raise_if_lost(watch, health.where("connect"))
    health.check_record(Operation("host", "connect", 0))


__all__ = ["GroupBuilder", "prepare_region", "status_store"]
