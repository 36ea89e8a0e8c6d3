"""Building the parts of a group: agree on the facts, then connect, and undo all of it in order."""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from coordinator import inherited
from coordinator.agreement import LINGER_S, View, agree
from coordinator.blocking_calls import connect_watched
from coordinator.board import StoreBoard
from coordinator.cpu_group import CpuGroup
from coordinator.host_plane import HostPlane, SoloHostPlane
from coordinator.membership import Membership, listening_address, master_endpoint, own_address
from coordinator.process_groups import (
    BACKEND,
    LOOPBACK,
    GlooBackend,
    abort_gloo,
    new_gloo_group,
    new_group,
)
from coordinator.rendezvous import world_processes
from coordinator.settings import CoordinatorSettings
from coordinator.start_up import CreationReport, Stopwatch
from device_comm import fabric
from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.handles import Handle
from device_comm.health import GroupHealth
from device_comm.process_group import ProcessGroupCommunicator
from device_comm.registry import communicator_factory, communicator_name, needs_process_group
from device_comm.solo import SoloCommunicator
from shm_broadcast.errors import (
    CapabilityError,
    CommError,
    GroupBrokenError,
    InternalError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.liveness import PeerWatch, this_process

# Ranks that run different protocols must not try to talk; raised when a message or a key changes.
PROTOCOL_VERSION = 2

# How long destroy pauses between two looks at sends that are still in flight.
FLUSH_PAUSE_S = 0.002

# How long a group that could not be made may take to go.
UNDO_S = 1.0


@dataclasses.dataclass
class GroupParts:
    """Everything that a group holds, and the order in which it is given back.

    Attributes:
        health: The state that all parts share.
        host: The host plane.
        communicator: The device plane.
        device: Where the group's tensors live.
        cpu_group: The host plane's process group; None in a group of one until somebody asks.
        device_group: The device plane's process group, likewise.
        backend: torch backend of the device group.
        address: Where this rank listens.
        create_timeout_s: Deadline for process groups that are created later.
        places: Where each rank is, by global rank; equal where they can share memory.
        report: How long the group took to create.
        siblings: How many process groups were created beside the device plane's.
        adopted: Process groups to destroy with the group.
    """

    health: GroupHealth
    host: HostPlane
    communicator: DeviceCommunicator
    device: torch.device
    cpu_group: dist.ProcessGroup | None
    device_group: dist.ProcessGroup | None
    backend: str
    address: str
    create_timeout_s: float
    places: Mapping[int, str] = dataclasses.field(default_factory=dict)
    report: CreationReport | None = None
    siblings: int = 0
    adopted: list[dist.ProcessGroup] = dataclasses.field(default_factory=list)

    def adopt(self, group: dist.ProcessGroup) -> None:
        """Destroy `group` with this one; a forked child leaves it alone."""
        self.adopted.append(group)
        inherited.protect(group)

    def open_gloo_group(self, description: str) -> dist.ProcessGroup:
        """Create a Gloo group of the same ranks, whether or not the others do so now."""
        name = f"{self.health.name} {description}"
        address = self.address or LOOPBACK
        # Not aborted with the group: that takes a connection, for which it would wait where there is none yet.
        group, _ = new_gloo_group(self.health.ranks, address, name, self.create_timeout_s, is_lazy=True)
        self.adopt(group)
        return group

    def open_device_group(self) -> dist.ProcessGroup:
        """Create the device plane's process group, which our own calls do without; it connects at its first use."""
        if self.backend in ("gloo", BACKEND):
            return self.open_gloo_group("device")
        group = new_group(
            self.health.ranks, self.backend, f"{self.health.name} device", self.create_timeout_s
        )
        self.adopt(group)
        return group

    def new_device_group(self, description: str) -> dist.ProcessGroup:
        """Create another process group of the same ranks for device tensors. Collective."""
        self.siblings += 1
        name = f"{self.health.name} {description} {self.siblings}"
        group, _ = _connect_device_group(self.health, self.backend, self.address, name, self.create_timeout_s)
        return group

    def destroy(self, timeout_s: float, open_sends: Sequence[Handle]) -> None:
        """Give everything back, within about `timeout_s` seconds; half of it is for `open_sends` to complete."""
        deadline = time.monotonic() + timeout_s
        if not self.health.is_broken:
            _flush(open_sends, timeout_s / 2)
            self.host.flush(max(deadline - timeout_s / 2 - time.monotonic(), 0.0))
        self.health.say_goodbye()
        # Not left to the garbage collector: whoever keeps a reference would keep the other ranks waiting.
        self.health.abort()
        self.communicator.destroy()
        self.host.close(max(deadline - time.monotonic(), 0.5))
        self.health.release()
        self.drop_groups()

    def drop_groups(self) -> None:
        """Give the process groups back."""
        for group in reversed(self.adopted):
            try:
                dist.destroy_process_group(group)
            except (ValueError, AssertionError) as gone:
                # torch knows it no more: a world that was destroyed before took its groups with it.
                del gone
            inherited.release(group)
        self.adopted.clear()
        self.cpu_group = self.device_group = None


def _flush(sends: Sequence[Handle], timeout_s: float) -> None:
    """Wait until all of `sends` are complete, or one cannot be any more."""
    deadline = time.monotonic() + timeout_s
    try:
        while not all(send.is_completed() for send in sends) and time.monotonic() < deadline:
            time.sleep(FLUSH_PAUSE_S)
    except CommError as gone:
        # A connection is closed: its peer is gone.
        del gone


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """One of the groups that are created together.

    Attributes:
        name: Unique, equal on all ranks of the group.
        group_ranks: Global ranks of every group of this kind.
        membership: This rank's place in them.
    """

    name: str
    group_ranks: Sequence[Sequence[int]]
    membership: Membership


def create_parts(
    plans: Sequence[GroupPlan],
    *,
    what: str,
    meeting: str,
    facts: Mapping[str, str],
    local_rank: int,
    backend: str,
    use_device_communicator: bool,
    store: dist.Store,
    settings: CoordinatorSettings,
    places: Mapping[int, str] | None = None,
    agreed: Callable[[], None] | None = None,
) -> list[GroupParts]:
    """Build this rank's groups in one step. Collective over all ranks of every plan.

    Everything that ranks must know of each other, for all of the groups, is exchanged at once: each group more costs
    one segment, no round trip through the store.

    Args:
        plans: The groups, in the same order on all ranks. Without any, all ranks of the world agree on that: others may
            hold some.
        what: What is being created, for errors.
        meeting: A name under which the ranks meet, never used before.
        facts: What all ranks must hold alike besides what every group needs.
        local_rank: Index of this process's device on its host.
        backend: Of the device groups.
        use_device_communicator: Whether tensors may take a communicator made for the device.
        store: The world's store.
        settings: Of every group.
        places: Where the ranks are, if that is known already.
        agreed: Called once the ranks agree.
    """
    device = device_of(backend, local_rank)
    every_fact = {
        **_facts(plans, device, backend, use_device_communicator),
        **{f"setting {field}": str(value) for field, value in settings.agreed().items()},
        **facts,
    }
    everyone = sorted({rank for plan in plans for rank in plan.membership.everyone}) or list(
        range(dist.get_world_size())
    )
    builders = [
        _Builder(
            plan, dist.PrefixStore(f"group_coordinator/{plan.name}", store), device, backend, settings, places
        )
        for plan in plans
    ]
    try:
        for builder in builders:
            builder.prepare()
        address = own_address(settings.interface, master_endpoint(store))
        offers = msgspec.json.encode([builder.offer for builder in builders]).decode()
        own = View(every_fact, this_process(), address, fabric.place(), offers)
        place = dist.PrefixStore(f"group_coordinator/{meeting}", store)
        rank = dist.get_rank()
        started = time.perf_counter()
        # A rank that has died since it joined the world never comes: the others need not wait for it.
        known = {other: who for other, who in world_processes().items() if other in everyone}
        known.pop(rank, None)
        with closing(PeerWatch(own.process, known)) as watch:
            views = agree(place, what, rank, everyone, own, settings.create_timeout_s, watch)
        if agreed is not None:
            agreed()
        agreement_s = time.perf_counter() - started
        for number, builder in enumerate(builders):
            builder.meet(views, number)
        for builder in builders:
            builder.share()
        together = tuple(plan.name for plan in plans)
        return [builder.connect(use_device_communicator, agreement_s, together) for builder in builders]
    except BaseException as error:
        _give_up(builders, error)
        raise
    finally:
        for builder in builders:
            builder.preparation.close()


def _facts(
    plans: Sequence[GroupPlan], device: torch.device, backend: str, use_device_communicator: bool
) -> dict[str, str]:
    """Return what all ranks must hold alike to create groups."""
    return {
        "protocol": str(PROTOCOL_VERSION),
        "group_ranks": str([[list(ranks) for ranks in plan.group_ranks] for plan in plans]),
        "groups": ", ".join(plan.name for plan in plans),
        "torch_distributed_backend": backend,
        "device type": device.type,
        "use_device_communicator": str(use_device_communicator),
        "communicator": communicator_name(device.type, 2),
    }


def _give_up(builders: Sequence[_Builder], error: BaseException) -> None:
    """Undo what was built, and tell the ranks that wait for this one in another of the groups why it does not come."""
    healths = [builder.health for builder in builders if builder.health is not None]
    if isinstance(error, (CapabilityError, PeerLostError)):
        for health in healths:
            if not health.is_broken:
                health.fail(error)
    for builder in builders:
        builder.undo()
    if isinstance(error, CapabilityError) and healths:
        # The store may go with this rank, and the others have to read there why.
        time.sleep(LINGER_S)


class _Builder:
    """One group while it is being built."""

    def __init__(
        self,
        plan: GroupPlan,
        store: dist.Store,
        device: torch.device,
        backend: str,
        settings: CoordinatorSettings,
        places: Mapping[int, str] | None,
    ) -> None:
        self.preparation = _NOTHING
        self.health: GroupHealth | None = None
        self._plan = plan
        self._store = store
        self._device = device
        self._backend = backend
        self._settings = settings
        self._places = places
        self._offer = b""
        self._clock = Stopwatch()
        self._shared: fabric.SharedMemory | None = None
        self._parts: GroupParts | None = None

    @property
    def offer(self) -> str:
        """Return what the others need to share this rank's memory, as text."""
        return base64.b64encode(self.preparation.offer).decode()

    def prepare(self) -> None:
        """Make the group's memory, if this is the rank that does, unless its ranks are known not to share any."""
        membership = self._plan.membership
        known = self._places or {}
        if len(membership.ranks) == 1 or len({known.get(rank) for rank in membership.ranks}) > 1:
            return
        with self._clock.phase("shared_memory"):
            self.preparation = fabric.Preparation(len(membership.ranks), membership.rank_in_group)

    def meet(self, views: Mapping[int, View], number: int) -> None:
        """Take over what the ranks said; `number` says which of the offers are for this group."""
        membership, name = self._plan.membership, self._plan.name
        rank, first = membership.rank, membership.ranks[0]
        members = {member: views[member] for member in membership.ranks}
        peers = {member: view.process for member, view in members.items() if member != rank}
        watch = PeerWatch(this_process(), peers)
        board = StoreBoard(dist.PrefixStore(f"board/{first}", self._store), rank, membership.ranks)
        self._watch = watch
        self._board = board
        health = self.health = GroupHealth(name, rank, membership.ranks, watch, board)
        self._places = {member: view.place for member, view in members.items()}
        self._offer = base64.b64decode(msgspec.json.decode(members[first].note, type=list[str])[number])
        self._parts = GroupParts(
            health=health,
            host=SoloHostPlane(health),
            communicator=SoloCommunicator(_context(health, membership, self._device, None, self._settings)),
            device=self._device,
            cpu_group=None,
            device_group=None,
            backend=self._backend,
            address=listening_address(members, rank) if peers else members[rank].address,
            create_timeout_s=self._settings.create_timeout_s,
            places=self._places,
        )

    def share(self) -> None:
        """Map the memory that the ranks share, if they are on one host."""
        if len(self._plan.membership.ranks) > 1 and len(set((self._places or {}).values())) == 1:
            with self._clock.phase("shared_memory"):
                self._shared = _share(self)

    def map(self) -> fabric.SharedMemory:
        """Map what the first rank offers, and return once all ranks have. Collective."""
        health, timeout_s = self.built.health, self._settings.create_timeout_s
        if not self._offer:
            raise InternalError(f"{health.where('create shared memory')}: nothing was offered")
        shared = self.preparation.map(health, self._offer, timeout_s)
        try:
            # A rank that has its group may destroy it at once, and the store with it; so nobody has it before all
            # need the store no more.
            shared.host.finish("barrier", shared.host.core.barrier(), timeout_s)
        except GroupBrokenError as error:
            shared.close()
            verdict = self._board.verdict()
            if verdict is None:
                raise
            raise CapabilityError(verdict.detail, requirement="shared memory") from error
        except BaseException:
            shared.close()
            raise
        return shared

    @property
    def built(self) -> GroupParts:
        """Return what has been built so far."""
        if self._parts is None:
            raise InternalError(f"group {self._plan.name!r}: its ranks have not met")
        return self._parts

    def connect(
        self, use_device_communicator: bool, agreement_s: float, together: tuple[str, ...]
    ) -> GroupParts:
        """Build the planes of the group, all of whose ranks have come and agree."""
        parts, membership = self.built, self._plan.membership
        health, settings = parts.health, self._settings
        if len(membership.ranks) > 1:
            factory: Callable[[CommunicatorContext], DeviceCommunicator] = (
                communicator_factory(self._device.type, len(membership.ranks))
                if use_device_communicator
                else ProcessGroupCommunicator
            )
            gloo = None
            needs_group = needs_process_group(
                factory, self._device.type, shares_memory=self._shared is not None
            )
            if needs_group or self._shared is None:
                with self._clock.phase("gloo"):
                    gloo = _connect_groups(
                        parts, self._watch, with_host=self._shared is None, with_device=needs_group
                    )
            with self._clock.phase("communicator"):
                parts.host = CpuGroup(
                    *(membership.ranks, membership.rank_in_group, gloo, health, settings.timeout_s),
                    self._shared,
                )
                context = _context(
                    *(health, membership, self._device, parts.device_group, settings),
                    *(self._shared, parts.host.all_gather_object),
                )
                parts.communicator = factory(context)
        seconds = {f"{name}_s": spent for name, spent in self._clock.seconds.items()}
        parts.report = CreationReport(
            name=health.name,
            world_size=len(membership.ranks),
            together=together,
            agreement_s=agreement_s,
            **seconds,
        )
        return parts

    def undo(self) -> None:
        """Give back what has been built."""
        if self._parts is not None and self._parts.health.close():
            self._parts.destroy(UNDO_S, [])
            if self._shared is not None:
                self._shared.close()
        elif self._parts is None and self.health is not None and self.health.close():
            # It failed between the two: nothing is there but the watch.
            self.health.release()


_NOTHING: Final = fabric.Preparation(1, 0)


def _share(builder: _Builder) -> fabric.SharedMemory:
    """Make the memory that all ranks of a group on one host share. Collective."""
    return builder.map()


def _connect_groups(
    parts: GroupParts, watch: PeerWatch, *, with_host: bool, with_device: bool
) -> GlooBackend | None:
    """Connect the process groups of the planes; return the host plane's backend, if it is to have one. Collective."""
    health, timeout_s = parts.health, parts.create_timeout_s

    def connect() -> tuple[GlooBackend | None, GlooBackend | None]:
        host_gloo = device_gloo = None
        if with_host:
            parts.cpu_group, host_gloo = new_gloo_group(health.ranks, parts.address, health.name, timeout_s)
            parts.adopt(parts.cpu_group)
        if with_device:
            parts.device_group, device_gloo = _connect_device_group(
                health, parts.backend, parts.address, f"{health.name} device", timeout_s
            )
            parts.adopt(parts.device_group)
        # A rank that is connected may destroy the group at once; one that still connects would take that for
        # a failure. So nobody has it before all have.
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=timeout_s)
        last = host_gloo or device_gloo
        if last is not None:
            last.barrier(options).wait()
        return host_gloo, device_gloo

    host_gloo, device_gloo = connect_watched(
        connect, f"{health.name} connect", health.where("connect"), watch
    )
    if device_gloo is not None:
        health.on_abort(lambda: abort_gloo(device_gloo))
    return host_gloo


def device_of(backend: str, local_rank: int) -> torch.device:
    """Return the device that a torch backend is for.

    A plain name means the CPU if the backend serves it ("gloo"), else its first device type ("nccl"); the
    form "cpu:gloo,cuda:nccl" means its accelerator.

    Raises:
        UsageError: torch knows no such backend.
    """
    if not isinstance(backend, str) or not backend:
        raise UsageError(f"torch_distributed_backend must be text such as 'gloo' or 'nccl', not {backend!r}")
    if ":" in backend:
        types = [part.partition(":")[0].strip() for part in backend.lower().split(",")]
        chosen = next((each for each in types if each != "cpu"), "cpu")
    else:
        capability = dist.Backend.backend_capability
        types = capability.get(backend.lower(), [])
        if not types:
            raise UsageError(
                f"torch_distributed_backend is {backend!r}; this torch knows {', '.join(capability)}"
            )
        chosen = "cpu" if "cpu" in types else types[0]
    return torch.device("cpu") if chosen == "cpu" else torch.device(chosen, local_rank)


def _connect_device_group(
    health: GroupHealth, backend: str, address: str, description: str, timeout_s: float
) -> tuple[dist.ProcessGroup, GlooBackend | None]:
    # Engines ask torch for the backend of one group of ours, and create the next one with the answer.
    if backend in ("gloo", BACKEND):
        return new_gloo_group(health.ranks, address, description, timeout_s)
    return new_group(health.ranks, backend, description, timeout_s), None


def _context(
    health: GroupHealth,
    membership: Membership,
    device: torch.device,
    device_group: dist.ProcessGroup | None,
    settings: CoordinatorSettings,
    shared: fabric.SharedMemory | None = None,
    exchange: Callable[[bytes], list[bytes]] | None = None,
) -> CommunicatorContext:
    return CommunicatorContext(
        name=health.name,
        rank_in_group=membership.rank_in_group,
        ranks=membership.ranks,
        device=device,
        process_group=device_group,
        health=health,
        timeout_s=settings.timeout_s,
        shared=shared,
        cuda=settings.cuda,
        exchange=exchange,
    )
