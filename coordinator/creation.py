"""Building the parts of a group: agree on the facts, then connect, and undo all of it in order."""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from coordinator import inherited
from coordinator.agreement import View, agree
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
from coordinator.settings import CoordinatorSettings
from device_comm import fabric
from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.handles import Handle
from device_comm.health import GroupHealth
from device_comm.process_group import ProcessGroupCommunicator
from device_comm.registry import communicator_factory, communicator_name
from device_comm.solo import SoloCommunicator
from shm_broadcast.errors import CommError, InternalError, UsageError
from shm_broadcast.liveness import PeerWatch, this_process

# Ranks that run different protocols must not try to talk; raised when a message or a key changes.
PROTOCOL_VERSION = 1

# How long destroy pauses between two looks at sends that are still in flight.
FLUSH_PAUSE_S = 0.002


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


def create_parts(
    *,
    name: str,
    group_ranks: Sequence[Sequence[int]],
    membership: Membership,
    local_rank: int,
    backend: str,
    use_device_communicator: bool,
    store: dist.Store,
    settings: CoordinatorSettings,
) -> GroupParts:
    """Build this rank's group. Collective over all ranks of `group_ranks`."""
    device = device_of(backend, local_rank)
    group_store = dist.PrefixStore(f"group_coordinator/{name}", store)
    facts = {
        "protocol": str(PROTOCOL_VERSION),
        "group_ranks": str([list(ranks) for ranks in group_ranks]),
        "torch_distributed_backend": backend,
        "device type": device.type,
        "use_device_communicator": str(use_device_communicator),
        "communicator": communicator_name(device.type, 2),
        **{f"setting {field}": str(value) for field, value in settings.agreed().items()},
    }
    address = own_address(settings.interface, master_endpoint(store))
    own = View(facts, this_process(), address, fabric.place())
    views = agree(
        group_store, f"group {name!r}", membership.rank, membership.everyone, own, settings.create_timeout_s
    )
    members = {rank: views[rank] for rank in membership.ranks}
    peers = {rank: view.process for rank, view in members.items() if rank != membership.rank}
    watch = PeerWatch(own.process, peers)
    board = StoreBoard(
        dist.PrefixStore(f"board/{membership.ranks[0]}", group_store), membership.rank, membership.ranks
    )
    health = GroupHealth(name, membership.rank, membership.ranks, watch, board)
    if not peers:
        context = _context(health, membership, device, None, settings)
        return GroupParts(
            health=health,
            host=SoloHostPlane(health),
            communicator=SoloCommunicator(context),
            device=device,
            cpu_group=None,
            device_group=None,
            backend=backend,
            address=own.address,
            create_timeout_s=settings.create_timeout_s,
        )
    address = listening_address(members, membership.rank)
    meeting = _Meeting(group_store, membership, own, members, watch, settings.create_timeout_s)
    return _connect(
        health, watch, membership, meeting, device, address, backend, use_device_communicator, settings
    )


class _Meeting:
    """The ranks of a group before they are connected: who is where, and what they tell each other in the store."""

    def __init__(
        self,
        store: dist.Store,
        membership: Membership,
        own: View,
        members: Mapping[int, View],
        watch: PeerWatch,
        timeout_s: float,
    ) -> None:
        self._watch = watch
        self.is_on_one_host = len({view.place for view in members.values()}) == 1
        self.timeout_s = timeout_s
        self._store = store
        self._membership = membership
        self._own = own
        self._count = 0

    def exchange(self, own: bytes) -> list[bytes]:
        """Return what each rank brings, in the order of the group. Collective."""
        self._count += 1
        ranks = self._membership.ranks
        store = dist.PrefixStore(f"exchange/{ranks[0]}/{self._count}", self._store)
        view = View({}, self._own.process, self._own.address, note=base64.b64encode(own).decode())
        what = f"the shared memory of ranks {list(ranks)}"
        views = agree(store, what, self._membership.rank, ranks, view, self.timeout_s, self._watch)
        return [base64.b64decode(views[rank].note) for rank in ranks]


def _connect(
    health: GroupHealth,
    watch: PeerWatch,
    membership: Membership,
    meeting: _Meeting,
    device: torch.device,
    address: str,
    backend: str,
    use_device_communicator: bool,
    settings: CoordinatorSettings,
) -> GroupParts:
    """Build the planes of a group of several ranks, all of which have come and agree."""
    factory: Callable[[CommunicatorContext], DeviceCommunicator] = (
        communicator_factory(device.type, len(membership.ranks))
        if use_device_communicator
        else ProcessGroupCommunicator
    )
    needs_group = getattr(factory, "needs_process_group", True)
    parts = GroupParts(
        health=health,
        host=SoloHostPlane(health),
        communicator=SoloCommunicator(_context(health, membership, device, None, settings)),
        device=device,
        cpu_group=None,
        device_group=None,
        backend=backend,
        address=address,
        create_timeout_s=settings.create_timeout_s,
    )
    shared: fabric.SharedMemory | None = None
    try:
        gloo = None
        if meeting.is_on_one_host:
            shared = _share(health, membership, meeting)
        if needs_group or shared is None:
            gloo = _connect_groups(parts, watch, with_host=shared is None)
        parts.host = CpuGroup(
            membership.ranks, membership.rank_in_group, gloo, health, settings.timeout_s, shared
        )
        context = _context(health, membership, device, parts.device_group, settings, shared)
        parts.communicator = factory(context)
    except BaseException:
        health.release()
        if shared is not None:
            shared.close()
        parts.drop_groups()
        raise
    return parts


def _share(health: GroupHealth, membership: Membership, meeting: _Meeting) -> fabric.SharedMemory:
    """Make the memory that all ranks of a group on one host share. Collective."""
    timeout_s = meeting.timeout_s
    shared = fabric.connect(health, membership.rank_in_group, timeout_s, meeting.exchange)
    if shared is None:
        raise InternalError(f"{health.where('create shared memory')}: one host has become several")
    try:
        # A rank that has its group may destroy it at once, and the store with it; so nobody has it before all
        # need the store no more.
        shared.host.finish("barrier", shared.host.core.barrier(), timeout_s)
    except BaseException:
        shared.close()
        raise
    return shared


def _connect_groups(parts: GroupParts, watch: PeerWatch, with_host: bool) -> GlooBackend | None:
    """Connect the process groups of the planes; return the host plane's backend, if it is to have one. Collective."""
    health, timeout_s = parts.health, parts.create_timeout_s

    def connect() -> tuple[GlooBackend | None, GlooBackend | None]:
        host_gloo = None
        if with_host:
            parts.cpu_group, host_gloo = new_gloo_group(health.ranks, parts.address, health.name, timeout_s)
            parts.adopt(parts.cpu_group)
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
    )
