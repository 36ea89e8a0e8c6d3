"""`FakeGroupCoordinator`: a group for code that wants one and runs in a single process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from coordinator.bootstrap.group_parts import GroupParts, GroupProcessGroups
from coordinator.bootstrap.timings import CreationReport
from coordinator.collectives.tensor_dicts import Parts, TensorDict
from coordinator.group import GroupCoordinator
from coordinator.groups import DIMENSIONS, ParallelGroups
from coordinator.host.object_order import ObjectCall
from coordinator.host.plane import HostPlane, SoloHostPlane
from coordinator.host.tags import SCATTER_TAG
from coordinator.host.tensor_dict_format import WHOLE_TENSORS, Landing, Slicing
from coordinator.layout import ParallelLayout
from coordinator.queues.ends import Reader, Writer
from coordinator.settings import CoordinatorSettings
from coordinator.testing.fake_planes import FakeCommunicator, FakeHostPlane, SilentStatusStore, WholeMessage
from coordinator.testing.fake_queues import FakeQueues
from device_comm import checks
from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.handles import Handle
from device_comm.health import GroupHealth
from device_comm.solo import SoloCommunicator
from shm_broadcast import codec
from shm_broadcast.errors import UsageError
from shm_broadcast.liveness import PeerWatch, this_process
from shm_broadcast.timeouts import AnyTimeout

_numbers: Final = itertools.count()


class FakeGroupCoordinator(GroupCoordinator):
    """One rank of a group whose other ranks do not exist: every collective gives a result at once.

    Arguments are checked as in a real group, with the same errors. The result is the one that this rank would
    get if every rank held the same input: a SUM is `world_size` times the input, in the real arithmetic; a
    gather repeats it; `broadcast_object` returns a copy of what this rank passes, also when another rank
    is the source. Where ranks would bring tensors of uneven sizes, see `FakeCommunicator`.

    Point to point is a loop-back: what was sent to a peer can be received from that peer, in order. A test feeds
    the code that it tests by sending, and sees what that code sent by receiving. A receive of something that was not
    sent raises `UsageError`, where a real rank would wait. What nobody receives is kept until `destroy`.

    A sliced tensor of a tensor dict is completed with the tensor that was sent, as the other ranks' slices never come.

    A fake needs neither torch.distributed nor other processes, and has no process groups. A group of one behaves as
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
        """Make the group as rank `rank` sees it; the other ranks do not exist.

        Args:
            rank: Global rank: one of `ranks`.
            world_size: Number of ranks in the group.
            ranks: Global ranks of the group in group order; by default 0 to `world_size` - 1.
            device: Where the group's tensors live.
            group_name: Name in errors and logs; a number is appended.
            settings: `CoordinatorSettings()` by default; the environment is not read.

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
        timeout_s: AnyTimeout = None,
    ) -> tuple[torch.Tensor, int]:
        """Receive the next tensor of `tag` that was sent to any rank; (the tensor, that rank), lowest ranks first.

        Raises:
            UsageError: Nothing was sent that is still to be received.
        """
        self._calls.enter("recv_any", in_line=False)
        refusal: UsageError | None = None
        for src in range(self.world_size):
            if src != self.rank_in_group:
                try:
                    return self.recv(size, dtype, src, tag=tag, timeout_s=timeout_s), src
                except UsageError as nothing:
                    refusal = nothing
        raise refusal or UsageError("recv_any: a group of one has no other rank")

    def _lists_by_color(self, color: int | None, key: int) -> list[list[int]]:
        """Return the lists that result if every rank brings this rank's color and key."""
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

    def _gather_object(
        self, call: ObjectCall, obj: Any, dst: int, timeout_s: float | None
    ) -> list[Any] | None:
        """Return on rank `dst` the object itself in its own place and a copy for every other rank; None elsewhere."""
        frame = codec.encode(obj).to_bytes()
        if self.rank_in_group != dst:
            return None
        return [obj if rank == dst else codec.decode(frame) for rank in range(self.world_size)]

    def scatter_object_list(
        self,
        output_list: list[Any],
        input_list: Sequence[Any] | None = None,
        src: int = 0,
        *,
        timeout_s: AnyTimeout = None,
    ) -> Any:
        """Scatter as in a real group. If another rank is the source, it is taken to pass a copy of this rank's list.

        Raises:
            UsageError: This rank passes no list: there is no other rank that could.
        """
        checks.check_rank(src, self.world_size, "src")
        super().scatter_object_list(output_list, input_list, self.rank_in_group, timeout_s=timeout_s)
        for peer in range(self.world_size):
            if peer != self.rank_in_group:
                self._host.recv_object(peer, None, None, "scatter_object_list", SCATTER_TAG)
        if src != self.rank_in_group:
            output_list[0] = codec.decode(codec.encode(output_list[0]).to_bytes())
        return output_list[0]

    def _broadcast(self, obj: Any, src: int, timeout_s: float | None, type_: Any) -> Any:
        """Return the object itself on rank `src`, elsewhere a copy of the one that this rank passes."""
        self._order.begin()
        return self._host.broadcast_object(obj, src, timeout_s, type_)

    def enable_broadcaster(self, writer_rank: int = 0) -> None:
        """Create `mq_broadcaster`. Broadcasts do not use it, because no other rank writes to it or reads it."""
        self._calls.enter("enable_broadcaster", in_line=False)
        if self.world_size > 1 and self.mq_broadcaster is None:
            self.mq_broadcaster: Writer | Reader | None = self.create_mq_broadcaster(writer_rank)

    # ------------------------------------------------------------------ tensor dicts

    def _land(self, message: object, slicing: Slicing, receive: Callable[[Parts], list[Handle]]) -> Landing:
        """Land a dict as in a real group, but complete the sliced tensors with what was sent."""
        landing = super()._land(message, slicing, receive)
        if isinstance(message, WholeMessage):
            wholes = zip(landing.sliced, message.wholes, strict=True)
            landing.sliced[:] = [(part, _putter(put, whole.to(part.device))) for (part, put), whole in wholes]
        return landing

    def broadcast_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any] | None = None,
        src: int = 0,
        group: dist.ProcessGroup | None = None,
        metadata_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: AnyTimeout = None,
    ) -> TensorDict | None:
        """Return the dict itself on rank `src`, elsewhere a copy of the one that this rank passes.

        Raises:
            UsageError: No dict is passed: there is no other rank that could send one.
        """
        checks.check_rank(src, self.world_size, "src")
        if tensor_dict is None and self.world_size > 1:
            raise UsageError(
                f"{self._health.where('broadcast_tensor_dict')}: a fake group has no rank {src} that sends a tensor "
                "dict; pass the one that shall arrive"
            )
        own = self.rank_in_group
        sent = super().broadcast_tensor_dict(tensor_dict, own, group, metadata_group, timeout_s=timeout_s)
        if src == own or sent is None:
            return sent
        packed = self._host.pack(sent, WHOLE_TENSORS)
        frame = codec.encode(packed.message()).to_bytes()
        landing = self._land(codec.decode(frame), WHOLE_TENSORS, lambda _parts: [])
        for (_, into), (_, tensor) in zip(landing.parts, packed.tensors, strict=True):
            into.copy_(tensor)
        return landing.tensor_dict


def _putter(put: Callable[[torch.Tensor], None], whole: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a function that puts `whole` in place, whatever has been gathered."""

    def put_whole(gathered: torch.Tensor) -> None:
        del gathered
        put(whole)

    return put_whole


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

    Each dimension has a group of its own, as in `ParallelGroups.create`.

    Args:
        layout: The sizes.
        rank: Global rank to be.
        device: Where the groups' tensors live.
        settings: Settings of every group; `CoordinatorSettings()` by default.

    Raises:
        UsageError: The layout has no such rank.
    """
    groups: dict[str, GroupCoordinator] = {}
    for name in DIMENSIONS:
        ranks = layout.group_of(name, rank)
        groups[name] = FakeGroupCoordinator(
            rank, len(ranks), ranks=ranks, device=device, group_name=name, settings=settings
        )
    return ParallelGroups(layout=layout, owns_world=True, **cast("dict[str, Any]", groups))
