"""`FakeGroupCoordinator`: a group for code that wants one and runs in a single process."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from coordinator.bootstrap.group_parts import GroupParts, GroupProcessGroups
from coordinator.bootstrap.timings import CreationReport
from coordinator.collectives.tensor_dicts import TensorDict
from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups, group_tables
from coordinator.host.plane import HostPlane, SoloHostPlane
from coordinator.host.tags import SCATTER_TAG
from coordinator.host.tensor_dict_format import WHOLE_TENSORS, Slicing
from coordinator.layout import ParallelLayout
from coordinator.planes import GroupPlanes
from coordinator.queues.ends import Reader, Writer
from coordinator.settings import CoordinatorSettings
from coordinator.testing.fake_planes import FakeCommunicator, FakeHostPlane, SilentStatusStore
from coordinator.testing.fake_queues import FakeQueues
from device_comm import checks
from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.handles import Handle
from device_comm.health import GroupHealth
from device_comm.process_group import dense
from device_comm.solo import SoloCommunicator
from shm_broadcast import codec
from shm_broadcast.errors import DecodeError, UsageError
from shm_broadcast.liveness import PeerWatch, this_process

_numbers: Final = itertools.count()


class FakeGroupCoordinator(GroupCoordinator):
    """One rank of a group whose other ranks do not exist: every collective gives a result at once.

    Arguments are checked as in a real group, with the same errors. The result is the one that this rank would
    get if every rank held the same input: a SUM is `world_size` times the input, in the real arithmetic; a
    gather repeats it; `broadcast_object` returns a copy of what this rank passes, also when another rank
    is the source. Where ranks would bring tensors of uneven sizes, see `FakeCommunicator`.

    Point to point is a loop-back: what was sent to a peer can be received from that peer, in order. A test feeds
    the code that it tests by sending, and sees what that code sent by receiving. To receive what was not
    sent is a `UsageError`, where a real rank would wait. What nobody receives is kept until `destroy`.

    Needs neither torch.distributed nor other processes, and has no process groups. A group of one behaves as
    a real one does.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        ranks: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        group_name: str = "fake",
        settings: CoordinatorSettings | None = None,
    ) -> None:
        """Be rank `rank` of `world_size`.

        Args:
            rank: Global rank: one of `ranks`.
            world_size: Number of ranks in the group.
            ranks: Global ranks of the group in group order; by default 0 to `world_size` - 1.
            device: Where the group's tensors live.
            group_name: For texts; a number is appended.
            settings: By default the defaults: the environment is not read.

        Raises:
            UsageError: The rank, the ranks and the world size do not fit each other.
        """
        members = _members(rank, world_size, ranks)
        settings = settings or CoordinatorSettings()
        where = torch.device(device)
        name = f"{group_name}:fake{next(_numbers)}"
        health = GroupHealth(name, rank, members, PeerWatch(this_process(), {}), SilentStatusStore())
        position = members.index(rank)
        context = CommunicatorContext(
            name=name,
            rank_in_group=position,
            ranks=members,
            device=where,
            process_group=None,
            health=health,
            timeout_s=settings.timeout_s,
        )
        host: HostPlane = SoloHostPlane(health) if world_size == 1 else FakeHostPlane(health, position)
        communicator: DeviceCommunicator = (
            SoloCommunicator(context) if world_size == 1 else FakeCommunicator(context)
        )
        parts = GroupParts(
            health=health,
            host=host,
            communicator=communicator,
            device=where,
            process_groups=GroupProcessGroups(name, members, "fake", "", settings.create_timeout_s),
            report=CreationReport(name=name, world_size=world_size),
            is_fake=True,
        )
        self._bind(parts, [members], where.index or 0, "fake", settings)
        self.use_device_communicator = True
        self._queues = FakeQueues(health)
        # For each peer and each dict sent to it: the tensors of which only a slice was sent.
        self._wholes: dict[int, deque[list[torch.Tensor]]] = {}

    # ------------------------------------------------------------------ what a fake does not have

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """Refuse: there is no other rank to make a process group with."""
        raise self._no_process_group("cpu_group")

    @property
    def device_group(self) -> dist.ProcessGroup:
        """Refuse: there is no other rank to make a process group with."""
        raise self._no_process_group("device_group")

    def make_sibling_device_group(self, group_desc: str | None = None) -> dist.ProcessGroup:
        """Refuse: there is no other rank to make a process group with."""
        raise self._no_process_group("make_sibling_device_group")

    def _no_process_group(self, name: str) -> UsageError:
        self._health.check_usable(name)
        return UsageError(
            f"{self._health.where(name)}: a fake group has no process group; use its methods, or a real group"
        )

    def as_process_group(self) -> dist.ProcessGroup:
        """Refuse: there is no other rank to make a process group with."""
        raise self._no_process_group("as_process_group")

    def recv_any(
        self,
        size: torch.Size | Sequence[int],
        dtype: torch.dtype,
        *,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Receive the next tensor of `tag` that was sent to any rank; (the tensor, that rank), lowest ranks first.

        Raises:
            UsageError: Nothing was sent that is still to be received.
        """
        self._health.check_usable("recv_any")
        refusal: UsageError | None = None
        for src in range(self.world_size):
            if src != self.rank_in_group:
                try:
                    return self.recv(size, dtype, src, tag=tag, timeout_s=timeout_s), src
                except UsageError as nothing:
                    refusal = nothing
        raise refusal or UsageError("recv_any: a group of one has no other rank")

    def _lists_by_color(self, color: int | None, key: int) -> list[list[int]]:
        """As if every rank brought this one's color and key."""
        super()._lists_by_color(color, key)
        return [list(range(self.world_size))] if color is not None and color >= 0 else []

    def _new_group(self, group_ranks: list[list[int]], name: str) -> GroupCoordinator:
        ranks = next(each for each in group_ranks if self.rank in each)
        return FakeGroupCoordinator(
            self.rank,
            len(ranks),
            ranks=ranks,
            device=self.device,
            group_name=name,
            settings=self.settings,
        )

    def scatter_object_list(
        self,
        output_list: list[Any],
        input_list: Sequence[Any] | None = None,
        src: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """As in a real group; from another rank comes a copy of what this rank passes.

        Raises:
            UsageError: This rank passes no list: there is no other rank that could.
        """
        checks.check_rank(src, self.world_size, "src")
        given = None if input_list is None else codec.decode(codec.encode(list(input_list)).to_bytes())
        if src == self.rank_in_group or given is None or len(given) != self.world_size:
            given = input_list
        result = super().scatter_object_list(output_list, given, self.rank_in_group, timeout_s=timeout_s)
        for peer in range(self.world_size):
            if peer != self.rank_in_group:
                self._host.recv_object(peer, None, None, "scatter_object_list", SCATTER_TAG)
        return result

    def enable_broadcaster(self, writer_rank: int = 0) -> None:
        """Make `mq_broadcaster`. What is broadcast does not take it: there is no rank to write or to read."""
        self._health.check_usable("enable_broadcaster")
        if self.world_size > 1 and self.mq_broadcaster is None:
            self.mq_broadcaster: Writer | Reader | None = self.create_mq_broadcaster(writer_rank)

    # ------------------------------------------------------------------ tensor dicts

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any],
        dst: int | None = None,
        all_gather_group: GroupPlanes | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> TensorDict | None:
        """As in a real group."""
        if self.world_size == 1:
            return super().send_tensor_dict(
                tensor_dict, dst, all_gather_group, all_gather_tensors, timeout_s=timeout_s
            )
        self.isend_tensor_dict(tensor_dict, dst, all_gather_group, all_gather_tensors, timeout_s=timeout_s)
        return None

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any],
        dst: int | None = None,
        all_gather_group: GroupPlanes | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Handle]:
        """As in a real group; what was cut into slices is kept whole, as the other ranks' slices never come."""
        handles = super().isend_tensor_dict(
            tensor_dict, dst, all_gather_group, all_gather_tensors, timeout_s=timeout_s
        )
        if self.world_size > 1:
            slicing = WHOLE_TENSORS
            if all_gather_group is not None:
                overrides = dict(all_gather_tensors or {})
                slicing = Slicing(all_gather_group.world_size, all_gather_group.rank_in_group, overrides)
            peer = self._neighbour(dst, 1, "dst")
            self._wholes.setdefault(peer, deque()).append(list(_sliced_tensors(tensor_dict, slicing)))
        return handles

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupPlanes | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[TensorDict | None, list[Handle], list[Callable[[], None]]]:
        """As in a real group; the callbacks complete sliced tensors with what was sent.

        Raises:
            UsageError: No dict was sent to rank `src` that is still to be received.
        """
        replayed: _ReplayedGroup | None = None
        if isinstance(all_gather_group, FakeGroupCoordinator) and all_gather_group.world_size > 1:
            replayed = _ReplayedGroup(all_gather_group)
        try:
            received = super().irecv_tensor_dict(
                src, replayed or all_gather_group, all_gather_tensors, timeout_s=timeout_s
            )
        except DecodeError:
            # The dict is lost, those that follow it are not.
            self._take_wholes(src)
            raise
        wholes = self._take_wholes(src)
        if replayed is not None:
            replayed.communicator.wholes.extend(wholes)
        return received

    def _take_wholes(self, src: int | None) -> list[torch.Tensor]:
        return self._wholes[self._neighbour(src, -1, "src")].popleft() if self.world_size > 1 else []

    def broadcast_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any] | None = None,
        src: int = 0,
        group: dist.ProcessGroup | None = None,
        metadata_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float | None = None,
    ) -> TensorDict | None:
        """Return the dict itself on rank `src`, elsewhere a copy of the one that this rank passes.

        Raises:
            UsageError: No dict is passed: there is no other rank that could send one.
        """
        if self.world_size == 1:
            return super().broadcast_tensor_dict(tensor_dict, src, group, metadata_group, timeout_s=timeout_s)
        self._health.check_usable("broadcast_tensor_dict")
        checks.check_timeout(timeout_s)
        checks.check_rank(src, self.world_size, "src")
        self._check_own_group(group, (), "group")
        self._check_own_group(metadata_group, (), "metadata_group")
        if tensor_dict is None:
            raise UsageError(
                f"{self._health.where('broadcast_tensor_dict')}: a fake group has no rank {src} that sends a tensor "
                "dict; pass the one that shall arrive"
            )
        packed = self._host.pack(tensor_dict, WHOLE_TENSORS)
        frame = codec.encode(packed.message()).to_bytes()
        if self.rank_in_group == src:
            return tensor_dict if isinstance(tensor_dict, dict) else dict(tensor_dict)
        landing = self._land(codec.decode(frame), WHOLE_TENSORS, lambda _parts: [])
        for (_, into), (_, sent) in zip(landing.parts, packed.tensors, strict=True):
            into.copy_(sent)
        return landing.tensor_dict

    # ------------------------------------------------------------------ life

    def destroy(self) -> None:
        """Forget everything that was sent; every later call raises `ClosedError`. Idempotent."""
        super().destroy()
        self._wholes.clear()


class _ReplayCommunicator(FakeCommunicator):
    """All-gathers by returning, in order, the tensors of which slices were sent."""

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self.wholes: deque[torch.Tensor] = deque()

    def _all_gather(
        self, input_: torch.Tensor, dim: int, sizes: tuple[int, ...], timeout_s: float | None
    ) -> torch.Tensor:
        self.context.health.check_usable("all_gather")
        return self.wholes.popleft().to(self.device).view(-1)


class _ReplayedGroup(GroupPlanes):
    """Stands for the all-gather group while a tensor dict is received."""

    def __init__(self, group: FakeGroupCoordinator) -> None:
        self.world_size = group.world_size
        self.rank_in_group = group.rank_in_group
        self.device = group.device
        self._calls = group._calls  # noqa: SLF001 - it stands for that group
        self.device_communicator = self.communicator = _ReplayCommunicator(group.device_communicator.context)


def _sliced_tensors(tree: Mapping[Any, Any], slicing: Slicing, prefix: str = "") -> Iterator[torch.Tensor]:
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if type(value) in (dict, OrderedDict):
            yield from _sliced_tensors(value, slicing, key)
        elif isinstance(value, torch.Tensor) and slicing.slices(key, value.numel()) > 1:
            yield dense(value).clone()


def _members(rank: object, world_size: object, ranks: Sequence[int] | None) -> tuple[int, ...]:
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UsageError(f"world_size must be at least 1, not {world_size!r}")
    members = tuple(range(world_size) if ranks is None else ranks)
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in members):
        raise UsageError(f"ranks must be global ranks, not {members}")
    if len(members) != world_size or len(set(members)) != world_size:
        raise UsageError(f"ranks must hold {world_size} different ranks, not {members}")
    if isinstance(rank, bool) or rank not in members:
        raise UsageError(f"rank {rank!r} is none of the group's ranks {members}")
    return members


def fake_groups(
    layout: ParallelLayout,
    rank: int,
    *,
    device: torch.device | str = "cpu",
    settings: CoordinatorSettings | None = None,
) -> ParallelGroups:
    """Return the groups of one rank of `layout`, all of them fakes.

    Dimensions with equal rank lists share one group, as in `ParallelGroups.create`.

    Args:
        layout: The sizes.
        rank: Global rank to be.
        device: Where the groups' tensors live.
        settings: Of every group; by default the defaults.

    Raises:
        UsageError: The layout has no such rank.
    """
    tables = group_tables(layout)
    groups: dict[str, GroupCoordinator] = {}
    for name, dimensions in tables.items():
        ranks = layout.group_of(dimensions[0], rank)
        group = FakeGroupCoordinator(
            rank, len(ranks), ranks=ranks, device=device, group_name=name, settings=settings
        )
        groups.update(dict.fromkeys(dimensions, group))
    return ParallelGroups(layout=layout, owns_world=True, **groups)
