"""One group while it is being made: what is prepared before its ranks meet, and what is connected after."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Final, TypeVar

import msgspec
import torch
import torch.distributed as dist

from coordinator.bootstrap.agreement import View
from coordinator.bootstrap.blocking_calls import connect_watched
from coordinator.bootstrap.group_parts import GroupParts, GroupPlan, GroupProcessGroups
from coordinator.bootstrap.membership import listening_address
from coordinator.bootstrap.status_store import StoreBoard
from coordinator.bootstrap.timings import CreationReport, Stopwatch
from coordinator.host.gloo import GlooHostPlane
from coordinator.host.plane import HostPlane, SoloHostPlane
from coordinator.host.process_groups import GlooBackend, abort_gloo
from coordinator.host.shared import SharedHostPlane
from coordinator.settings import CoordinatorSettings
from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.cpu import shared_memory
from device_comm.cpu.connect import needs_process_group
from device_comm.health import GroupHealth
from device_comm.process_group import ProcessGroupCommunicator
from device_comm.registry import CommunicatorFactory, communicator_factory
from device_comm.solo import SoloCommunicator
from shm_broadcast.errors import CapabilityError, GroupBrokenError, InternalError
from shm_broadcast.liveness import PeerWatch, this_process

# How long a host plane of a group that could not be made may take to close.
_UNDO_S: Final = 1.0

Backend = TypeVar("Backend", bound=GlooBackend | None)


class GroupOffer:
    """What this rank does for a group before it meets the others: the first rank makes the shared region.

    Attributes:
        clock: Counts the group's seconds.
    """

    def __init__(self, plan: GroupPlan, places: Mapping[int, str]) -> None:
        """Make the region if this is the first rank, unless `places` says that the ranks are on several hosts."""
        ranks = plan.membership.ranks
        self.clock: Stopwatch = Stopwatch()
        if len(ranks) == 1 or len({places.get(rank) for rank in ranks}) > 1:
            self._region = shared_memory.Preparation(1, 0)
        else:
            with self.clock.phase("shared_memory"):
                self._region = shared_memory.Preparation(len(ranks), plan.membership.rank_in_group)

    @property
    def text(self) -> str:
        """Return what the others need to map the region."""
        return base64.b64encode(self._region.offer).decode()

    def map(self, health: GroupHealth, offer: str, timeout_s: float) -> shared_memory.SharedMemory:
        """Map what the first rank offers by `offer`, its `text`."""
        if not offer:
            raise InternalError(f"{health.where('create shared memory')}: nothing was offered")
        return self._region.map(health, base64.b64decode(offer), timeout_s)

    def close(self) -> None:
        """Offer it no longer, and drop what was not mapped. Idempotent."""
        self._region.close()


class GroupBuilder:
    """Connects one group, all of whose ranks have come and agree.

    Attributes:
        health: The state that all parts share.
    """

    def __init__(
        self,
        plan: GroupPlan,
        offer: GroupOffer,
        members: Mapping[int, View],
        *,
        store: dist.Store,
        device: torch.device,
        backend: str,
        settings: CoordinatorSettings,
    ) -> None:
        """Take over what the ranks said; nothing is connected yet.

        Args:
            plan: The group.
            offer: What this rank has prepared for it; stays the caller's.
            members: What each of its ranks said, by global rank.
            store: For this group.
            device: Where its tensors live.
            backend: Of its process groups for device tensors.
            settings: Of the group.
        """
        ranks, rank = plan.membership.ranks, plan.membership.rank
        peers = {member: view.process for member, view in members.items() if member != rank}
        address = listening_address(members, rank) if peers else members[rank].address
        self._plan = plan
        self._offer = offer
        self._device = device
        self._settings = settings
        self._first = members[ranks[0]]
        self._places = {member: view.place for member, view in members.items()}
        self._watch = PeerWatch(this_process(), peers)
        self._board = StoreBoard(dist.PrefixStore(f"board/{ranks[0]}", store), rank, ranks)
        self.health: GroupHealth = GroupHealth(plan.name, rank, ranks, self._watch, self._board)
        self._process_groups = GroupProcessGroups(
            plan.name, ranks, backend, address, settings.create_timeout_s
        )
        self._made = ExitStack()
        self._shared: shared_memory.SharedMemory | None = None

    def share(self, number: int) -> None:
        """Map the region that the first rank offers as its `number`-th, if all ranks are on one host. Collective."""
        if len(self._places) > 1 and len(set(self._places.values())) == 1:
            offers = msgspec.json.decode(self._first.note, type=list[str])
            with self._offer.clock.phase("shared_memory"):
                self._shared = self._map(offers[number])

    def _map(self, offer: str) -> shared_memory.SharedMemory:
        timeout_s = self._settings.create_timeout_s
        shared = self._offer.map(self.health, offer, timeout_s)
        self._made.callback(shared.close)
        try:
            # A rank that has its group may destroy it at once, and the store with it: return only once no rank still
            # needs the store.
            shared.host.finish("barrier", shared.host.core.barrier(), timeout_s)
        except GroupBrokenError as error:
            verdict = self._board.verdict()
            if verdict is None:
                raise
            raise CapabilityError(verdict.detail, requirement="shared memory") from error
        return shared

    def connect(
        self, use_device_communicator: bool, agreement_s: float, together: tuple[str, ...]
    ) -> GroupParts:
        """Build the planes. Collective."""
        host, communicator = self._planes(use_device_communicator)
        seconds = {f"{name}_s": spent for name, spent in self._offer.clock.seconds.items()}
        report = CreationReport(
            name=self._plan.name,
            world_size=len(self._places),
            together=together,
            agreement_s=agreement_s,
            **seconds,
        )
        return GroupParts(
            health=self.health,
            host=host,
            communicator=communicator,
            device=self._device,
            process_groups=self._process_groups,
            report=report,
            places=self._places,
        )

    def _planes(self, use_device_communicator: bool) -> tuple[HostPlane, DeviceCommunicator]:
        """Choose what the group's planes are, and connect them."""
        world_size, clock = len(self._places), self._offer.clock
        if world_size == 1:
            alone = SoloHostPlane(self.health)
            return alone, SoloCommunicator(self._context(alone))
        factory: CommunicatorFactory = ProcessGroupCommunicator
        if use_device_communicator:
            factory = communicator_factory(self._device.type, world_size)
        with_device = needs_process_group(factory, self._device.type, shares_memory=self._shared is not None)
        rank, timeout_s = self._plan.membership.rank_in_group, self._settings.timeout_s
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
        self._made.callback(host.close, _UNDO_S)
        with clock.phase("communicator"):
            communicator = factory(self._context(host))
        self._made.callback(communicator.destroy)
        return host, communicator

    def _connected(self, connect: Callable[[], Backend], name: str) -> Backend:
        """Connect a process group, and return its backend once all ranks are connected. Collective."""

        def connect_all() -> Backend:
            gloo = connect()
            if gloo is not None:
                # A rank that is connected may destroy the group at once; one that still connects would take that for
                # a failure. So none has it before all have.
                options = dist.BarrierOptions()
                options.timeout = timedelta(seconds=self._settings.create_timeout_s)
                gloo.barrier(options).wait()
            return gloo

        return connect_watched(
            connect_all, f"{self._plan.name} {name}", self.health.where("connect"), self._watch
        )

    def _context(self, host: HostPlane) -> CommunicatorContext:
        membership = self._plan.membership
        return CommunicatorContext(
            name=self._plan.name,
            rank_in_group=membership.rank_in_group,
            ranks=membership.ranks,
            device=self._device,
            process_group=self._process_groups.device,
            health=self.health,
            timeout_s=self._settings.timeout_s,
            shared=self._shared,
            cuda=self._settings.cuda,
            exchange=host.all_gather_object,
        )

    def undo(self) -> None:
        """Give back what was connected. Idempotent."""
        if self.health.close():
            self.health.say_goodbye()
            self.health.abort()
            self._made.close()
            self.health.release()
            self._process_groups.destroy()


__all__ = ["GroupBuilder", "GroupOffer"]
