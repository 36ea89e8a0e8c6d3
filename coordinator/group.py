"""`GroupCoordinator`: one parallel group of an LLM serving engine.

It pairs a host plane (barriers, objects) with a device plane (tensors). It checks arguments and routes each call to a
plane; it computes nothing itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

import torch
import torch.distributed as dist

from coordinator import group_registry
from coordinator.bootstrap.creation import create_parts, device_of
from coordinator.bootstrap.group_names import GroupNames
from coordinator.bootstrap.group_parts import GroupParts, GroupPlan, kept
from coordinator.bootstrap.membership import find_membership
from coordinator.bootstrap.timings import CreationReport
from coordinator.bootstrap.world import World, world_of_torch
from coordinator.calls import Calls, Plane
from coordinator.collectives import subgroups
from coordinator.collectives.expert_parallel import TokenRouting
from coordinator.collectives.point_to_point import PointToPoint
from coordinator.collectives.scalar_collectives import ScalarCollectives
from coordinator.graph_capture import CaptureGuard, GraphCaptureContext, capture_on
from coordinator.host.frame_turns import FrameTurns
from coordinator.host.object_order import ObjectOrder
from coordinator.host.open_sends import OpenSends
from coordinator.host.shared import SharedHostPlane
from coordinator.queues.broadcast_order import BroadcastOrder
from coordinator.queues.broadcaster import Broadcaster
from coordinator.queues.ends import Queues, Reader, Writer
from coordinator.queues.external_writer import ExternalWriter
from coordinator.queues.group_queues import GroupQueues
from coordinator.queues.store_exchange import exchange_of
from coordinator.settings import CoordinatorSettings, permitted
from coordinator.torch_interop import process_group
from device_comm import base, checks
from device_comm.health import Operation
from device_comm.stages import in_parts
from shm_broadcast.errors import UsageError

logger: logging.Logger = logging.getLogger(__name__)

_ENABLING: Final = Operation("host", "enable_broadcaster", 0)


class GroupCoordinator(ScalarCollectives, PointToPoint):
    """One group of ranks: its collectives, point-to-point calls and queues.

    Creating a group is collective over all ranks in `group_ranks`. Every rank creates its groups in the same order.
    The constructor blocks until all ranks have joined and agree, for at most the settings' `create_timeout_s`.

    Threads may take turns: a collective call of a second thread waits, within its own deadline, until the call of the
    first thread is done. A call that is made of several others (`dispatch`, several tensors, an object of more than
    4 KiB) takes a turn for each of them: keep it apart from calls of other threads. Any thread may call `destroy`,
    which wakes a call that waits. A forked child cannot use its copy: every call raises `UsageError`.

    Attributes:
        device_index: Index of this process's device on its host, as `local_rank`.
        group_ranks: Global ranks of every group of this kind.
        torch_distributed_backend: torch backend of the device group.
        use_device_communicator: Whether tensors may use a communicator made for the device.
        use_all2all: What the creator passed.
        use_custom_op_call: True: a compiled graph holds each collective as one operation, and never traces into it.
        settings: The group's settings.
        creation: How long the creation of the group took.
        mq_broadcaster: This rank's end of the group's queue, or None. What is written to it directly must be read
            from it directly if the queue has readers on other hosts.
    """

    use_custom_op_call: Final = True
    use_all2all: bool = False
    # There is nothing to destroy before `_bind`, which sets this.
    _is_ending: bool = True

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        use_all2all: bool = False,
        *,
        settings: CoordinatorSettings | None = None,
    ) -> None:
        """Create this rank's group, together with the other ranks of `group_ranks`.

        Args:
            group_ranks: Global ranks of every group of this kind. No rank is in two groups, and this rank is in one.
            local_rank: Index of this process's device on its host.
            torch_distributed_backend: torch backend of the device group: "gloo", "nccl", …; it selects the device.
            use_device_communicator: Whether tensors may use a communicator made for the device; otherwise they use the
                process group. Equal on all ranks.
            use_message_queue_broadcaster: Whether to create `mq_broadcaster` with rank 0 as its writer.
            group_name: Name such as "tp". A number is appended, because several groups may have one name.
            use_all2all: Whether the group is meant for `dispatch` and `combine`; kept as an attribute. It changes
                nothing: every group can make these calls, and reserves nothing for them in advance.
            settings: Settings of the group; default: read from the environment.

        Raises:
            UsageError: A rank appears twice or in no group, `group_ranks` holds tensors instead of lists, or
                torch.distributed is not initialised.
            SettingsError: The environment has a setting that is unknown or malformed.
            DisagreementError: Ranks have different rank lists, settings or versions.
            CommTimeoutError: Ranks did not join in time; `.missing` names them.
            PeerLostError: A rank died meanwhile; `.peers` names it.
        """
        world, settings = world_of_torch(), permitted(settings or CoordinatorSettings.from_env())
        backend, queue = torch_distributed_backend, use_message_queue_broadcaster
        self._create(
            world, group_ranks, local_rank, backend, use_device_communicator, queue, group_name, settings
        )
        self.use_all2all = use_all2all

    def _create(
        self,
        world: World,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool,
        group_name: str | None,
        settings: CoordinatorSettings,
        beside: GroupParts | None = None,
    ) -> None:
        """Create this rank's group in `world`; see the constructor and `create_parts` for the other arguments."""
        membership = find_membership(group_ranks, world.rank, world.size)
        if isinstance(local_rank, bool) or not isinstance(local_rank, int) or local_rank < 0:
            raise UsageError(f"local_rank must be the index of a device, not {local_rank!r}")
        # Taking a name counts it. Find this rank's mistakes first, or its count would differ from the other ranks'.
        device_of(torch_distributed_backend, local_rank)
        name = GroupNames.of(world, settings.create_timeout_s, membership.everyone).take(group_name)
        made = list[GroupParts]()
        try:
            with kept(made):
                create_parts(
                    [GroupPlan(name, group_ranks, membership)],
                    made,
                    world=world,
                    what=f"group {name!r}",
                    round_name=name,
                    facts={},
                    local_rank=local_rank,
                    backend=torch_distributed_backend,
                    use_device_communicator=use_device_communicator,
                    settings=settings,
                    beside=beside,
                )
                self._bind(made[0], group_ranks, local_rank, torch_distributed_backend, settings)
            self.use_device_communicator = use_device_communicator
            if use_message_queue_broadcaster:
                self.enable_broadcaster()
            algorithm = self.device_communicator.algorithm
            place = f"rank {self.rank_in_group} of {self.world_size}, device {self.device}"
            logger.info(
                "created group %s: %s, tensors by %s, in %s",
                *(self.unique_name, place, algorithm, self.creation),
                extra=self._health.log_fields("create", algorithm),
            )
        except BaseException:
            # The caller never gets this group, and so cannot destroy it.
            self.destroy()
            raise

    @classmethod
    def _create_together(
        cls,
        groups: list[GroupCoordinator],
        tables: Mapping[str, Sequence[Sequence[int]]],
        local_rank: int,
        backend: str,
        settings: CoordinatorSettings,
        *,
        what: str,
        facts: Mapping[str, str],
        beside: GroupCoordinator | None,
        world: World | None = None,
        create_timeout_s: float | None = None,
    ) -> None:
        """Create several groups in one step, so that the ranks wait for each other only once. Collective.

        Args:
            groups: Gets the groups, in the order of `tables`. The caller destroys what is in it if this call raises,
                or an interrupt comes before the groups have another owner.
            tables: The rank lists by group name, in the same order on all ranks.
            local_rank: See the constructor.
            backend: See the constructor.
            settings: See the constructor.
            what: What is being created, for errors.
            facts: Further facts that must be equal on all ranks.
            beside: A group of all ranks, if there is one: it knows the ranks' host ids.
            world: The processes among which they are created; default: the world of torch.distributed.
            create_timeout_s: How long this may take, in seconds; default: as the settings say. Later calls of the
                groups have the deadlines of the settings.
        """
        world = world or world_of_torch()
        known = None if beside is None else beside._parts.world  # noqa: SLF001 - ours
        if known is not None and known.is_torch != world.is_torch:
            raise UsageError(
                "world must be a group of torch's world; a stateless group has other ranks, and no ParallelGroups"
            )
        rank, settings = world.rank, permitted(settings)
        limit_s = settings.create_timeout_s if create_timeout_s is None else create_timeout_s
        counted = GroupNames.of(world, limit_s, range(world.size))
        round_name, names = counted.take_round("layout", list(tables))
        plans = [
            GroupPlan(name, table, find_membership(table, rank, world.size))
            for name, table in zip(names, tables.values(), strict=True)
        ]
        made = list[GroupParts]()
        with kept(made), counted.caught_up():
            create_parts(
                plans,
                made,
                world=world,
                what=what,
                round_name=round_name,
                facts=facts,
                local_rank=local_rank,
                backend=backend,
                use_device_communicator=True,
                settings=settings,
                beside=None if beside is None else beside._parts,  # noqa: SLF001 - ours
                create_timeout_s=create_timeout_s,
            )
            for plan, parts in zip(plans, made, strict=True):
                group = cls.__new__(cls)
                group._bind(parts, plan.group_ranks, local_rank, backend, settings)  # noqa: SLF001 - ours
                group.use_device_communicator = True
                groups.append(group)

    def _bind(
        self,
        parts: GroupParts,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        backend: str,
        settings: CoordinatorSettings,
    ) -> None:
        """Fill this object with the parts of a group."""
        self.unique_name: str = parts.health.name
        self.rank: int = parts.health.rank
        self.ranks: list[int] = list(parts.health.ranks)
        self.world_size: int = len(self.ranks)
        self.rank_in_group: int = self.ranks.index(self.rank)
        self.local_rank: int = local_rank
        self.device_index: int = local_rank
        self.group_ranks: list[list[int]] = [list(ranks) for ranks in group_ranks]
        self.torch_distributed_backend = backend
        self.settings = settings
        self.device: torch.device = parts.device
        self.device_communicator: base.DeviceCommunicator = parts.communicator
        self.creation: CreationReport = parts.report
        self._parts = parts
        self._host = parts.host
        self._order = BroadcastOrder(parts.health)
        self._gathers = ObjectOrder("gather_object", parts.health)
        self._scatters = ObjectOrder("scatter_object_list", parts.health)
        self._health = parts.health
        self._guard = CaptureGuard(parts.health)
        self._cpu_group, self._device_group = parts.process_groups.for_callers()
        self._open_sends = OpenSends()
        self._dict_turns = FrameTurns(parts.health)
        communicator = parts.communicator
        self._calls = Calls(
            parts.health,
            parts.device,
            is_alone=self.world_size == 1 or parts.is_fake,
            is_collecting=lambda: communicator.is_collecting,
            aside=communicator.aside,
        )
        self._routing = TokenRouting(parts.communicator, parts.host)
        self._process_group: dist.ProcessGroup | None = None
        world = parts.world if parts.world is not None and parts.world.is_elastic else None
        address = parts.process_groups.address
        exchange = exchange_of(parts.world, parts.host_ids, parts.health)
        self._queues: Queues = GroupQueues(parts.host, parts.health, settings, address, world, exchange)
        self.mq_broadcaster: Writer | Reader | None = None
        self._is_ending = False  # from here on `destroy` finds all that it needs
        in_torch_world = parts.world is not None and parts.world.is_torch
        group_registry.register(self, self._calls, in_torch_world=in_torch_world)

    # ------------------------------------------------------------------ ranks and process groups

    @property
    def first_rank(self) -> int:
        """Return the global rank of the first process in the group."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """Return the global rank of the last process in the group."""
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        """Return whether this process is the first in the group."""
        return self.rank == self.ranks[0]

    @property
    def is_last_rank(self) -> bool:
        """Return whether this process is the last in the group."""
        return self.rank == self.ranks[-1]

    @property
    def next_rank(self) -> int:
        """Return the global rank after this one; the first rank follows the last."""
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        """Return the global rank before this one; the last rank precedes the first."""
        return self.ranks[(self.rank_in_group - 1) % self.world_size]

    @property
    def backend(self) -> str:
        """Return `torch_distributed_backend`."""
        return self.torch_distributed_backend

    @property
    def use_cpu_custom_send_recv(self) -> bool:
        """Return whether tensor dicts on the CPU pass through memory that all ranks of the group share."""
        return self.device.type == "cpu" and isinstance(self._host, SharedHostPlane)

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """Return the group's own Gloo process group, for torch functions that need one.

        If the group's own calls do not need it, the first access creates it, without waiting for other ranks. Two ranks
        then connect when the first message passes between them.
        """
        self._calls.enter("cpu_group", in_line=False)
        if self._cpu_group is None:
            groups = self._parts.process_groups
            self._cpu_group = groups.once("host", lambda: groups.open_gloo("host"))
        return self._cpu_group

    @property
    def device_group(self) -> dist.ProcessGroup:
        """Return the group's process group for device tensors. On the CPU it is a Gloo group, as `cpu_group`."""
        self._calls.enter("device_group", in_line=False)
        if self._device_group is None:
            groups = self._parts.process_groups
            self._device_group = groups.once("device", groups.open_device)
        return self._device_group

    # ------------------------------------------------------------------ queues, buffers, graphs

    def create_mq_broadcaster(
        self,
        writer_rank: int = 0,
        external_writer_handle: ExternalWriter | None = None,
        blocking: bool = True,
    ) -> Writer | Reader:
        """Create a queue from rank `writer_rank` to all others, or open one from outside the group. Collective.

        Readers on the writer's host read shared memory. Each reader on another host has an encrypted connection.

        Args:
            writer_rank: Rank in the group; ignored if there is an external writer.
            external_writer_handle: A `QueueWriter` outside the group, whose readers include all global ranks of this
                group. Ranks that pass None get it from the ranks that pass one.
            blocking: Whether to wait with a barrier until every rank has its end.

        Returns:
            The writing end on rank `writer_rank`, the reading end elsewhere; with an external writer the reading end on
            every rank. It is closed with the group.

        Raises:
            UsageError: Some rank cannot use the external writer. Every rank raises this.
            CapabilityError: A rank has too little memory, or could not open its end. Every rank raises this, and the
                group stays usable.
        """
        with self._calls.call("create_mq_broadcaster", plane="host"):
            writer = checks.check_rank(writer_rank, self.world_size, "writer_rank")
            return self._queues.broadcast(writer, external_writer_handle, is_blocking=blocking)

    def create_single_reader_mq_broadcasters(
        self, reader_rank_in_group: int = 0, blocking: bool = False
    ) -> tuple[Writer, list[Reader]]:
        """Create a queue from every rank to rank `reader_rank_in_group`, itself included. Collective.

        Args:
            reader_rank_in_group: Rank in the group.
            blocking: Whether to wait with a barrier until every rank has its ends.

        Returns:
            This rank's writing end, and the reading ends of all ranks' queues, in rank order, for `dequeue_any` or
            single reads. On ranks other than the reader the list is empty. All ends are closed with the group.

        Raises:
            CapabilityError: A rank has too little memory, or could not open its end. Every rank raises this, and the
                group stays usable.
        """
        with self._calls.call("create_single_reader_mq_broadcasters", plane="host"):
            reader = checks.check_rank(reader_rank_in_group, self.world_size, "reader_rank_in_group")
            return self._queues.gather(reader, is_blocking=blocking)

    def enable_broadcaster(self, writer_rank: int = 0) -> None:
        """Create `mq_broadcaster`, and from now on send through it what rank `writer_rank` broadcasts. Collective.

        `broadcast_object` and `broadcast_tensor_dict` with that rank as `src` then use the queue. With another `src`
        they use the host plane; the result is the same. In a group of one this does nothing.
        """
        self._calls.enter("enable_broadcaster", in_line=False)
        if self.world_size == 1 or self._broadcaster is not None:
            return

        def stages() -> None:
            started = time.perf_counter()
            self.mq_broadcaster = GroupCoordinator.create_mq_broadcaster(self, writer_rank)
            self.creation = self.creation.plus(queue=time.perf_counter() - started)
            self._adopt_queue(
                Broadcaster(self.mq_broadcaster, writer_rank, self._health, self.settings.timeout_s)
            )

        # Once the others have the queue, this rank must broadcast through it too, or break the group.
        in_parts(self._health, _ENABLING, stages)

    def make_sibling_device_group(self, group_desc: str | None = None) -> dist.ProcessGroup:
        """Create another process group of this group's ranks and backend. Collective.

        It serves operations that run concurrently with those on `device_group`. It is destroyed with this group.
        """
        with self._calls.call("make_sibling_device_group"):
            return self._parts.process_groups.connect_sibling(group_desc or "sibling")

    def prepare_communication_buffer_for_model(self, model: torch.nn.Module) -> None:
        """Reserve the device communicator's buffers for the messages of `model`. Collective.

        The largest message is assumed to be `TOKENS_PER_MESSAGE` rows of the model's widest parameter. Then the method
        `prepare_communication_buffer(group)` of every module that has one is called with this group, in the order of
        `model.modules()`, which must be the same on all ranks.
        """
        with self._calls.call("prepare_communication_buffer_for_model"):
            if not isinstance(model, torch.nn.Module):
                raise UsageError(f"expected a torch.nn.Module, not {type(model).__name__}")
            row_bytes = max(
                (max(parameter.shape, default=1) * parameter.itemsize for parameter in model.parameters()),
                default=0,
            )
            self.device_communicator.prepare_buffers(min(row_bytes * TOKENS_PER_MESSAGE, MAX_BUFFER_BYTES))
        for module in model.modules():
            hook = getattr(module, "prepare_communication_buffer", None)
            if callable(hook):
                hook(self)

    @contextmanager
    def graph_capture(
        self,
        graph_capture_context: GraphCaptureContext | None = None,
        stream: torch.Stream | None = None,
    ) -> Iterator[GraphCaptureContext]:
        """Prepare this group's collectives for the capture of a CUDA graph. On the CPU this does nothing.

        Entering and leaving are both *collective*. Entering connects and compiles what cannot be done during a capture.
        Leaving tells the other ranks which inputs were captured. A graph may be replayed only after that; an earlier
        replay breaks the group with a `UsageError`. Calls on the stream before the capture begins are executed, as a
        warm-up. Yields `graph_capture_context` if it is given, otherwise a new context for `stream`, or,
        without either, for a new stream. The capture uses the stream of that context.
        """
        self._calls.enter("graph_capture")
        communicators, guards = [self.device_communicator], [self._guard]
        with capture_on(self.device, communicators, guards, graph_capture_context, stream) as context:
            yield context

    # ------------------------------------------------------------------ sub-groups

    def split_group(
        self,
        split_ranks: Sequence[Sequence[int]] | None = None,
        *,
        color: int | None = None,
        key: int = 0,
        group_name: str | None = None,
    ) -> GroupCoordinator | None:
        """Create groups of this group's ranks, by lists or by color. Collective over all of this group's ranks.

        Args:
            split_ranks: For each new group its ranks in this group, in the order of the new group. No rank is in two
                lists; a rank that is in none gets None. Equal on all ranks.
            color: Used instead of lists: ranks of the same color form a group, and a rank with color -1 gets None.
            key: Used with a color: ranks are ordered by key in their new group. Ranks with equal keys keep their order.
            group_name: Name such as "eval"; default: "split". It is prefixed with this group's own name.

        Returns:
            The new group, which the caller must destroy; or None.

        Raises:
            UsageError: A rank appears twice or is not in this group, or not exactly one of `split_ranks` and `color` is
                given.
            DisagreementError: The ranks of this group ask for different groups.
            CommTimeoutError: Ranks did not join in time; `.missing` names them.
        """

        def choose() -> Sequence[Sequence[int]]:
            if (split_ranks is None) == (color is None):
                raise UsageError("split_group takes either split_ranks or color")
            if split_ranks is None:
                return self._lists_by_color(color, key)
            return subgroups.check_lists(split_ranks, self.world_size)

        # By color the ranks exchange their colors; lists are not sent.
        return self._split("split_group", choose, group_name or "split", None if color is None else "host")

    def create_subgroup(
        self, ranks: Sequence[int], *, group_name: str | None = None
    ) -> GroupCoordinator | None:
        """Create a group of some of this group's ranks. Collective: every rank of this group passes the same arguments.

        Blocks until all ranks have joined, for at most the settings' `create_timeout_s`. The new group has the settings
        and the backend of this group, is independent of it, and must be destroyed by the caller. This group stays
        usable after every error.

        Args:
            ranks: Ranks in this group, each once, in the order of the new group.
            group_name: Name such as "eval"; default: "sub". It is prefixed with this group's own name.

        Returns:
            The group; None on the ranks that are not in it.

        Raises:
            UsageError: `ranks` is empty, contains a rank twice, or something that is not a rank of this group. Nothing
                is sent.
            DisagreementError: The ranks of this group ask for different ranks.
            CommTimeoutError: Ranks did not join in time; `.missing` names them.
        """

        def choose() -> Sequence[Sequence[int]]:
            where = self._health.where("create_subgroup")
            return [subgroups.check_members(ranks, self.world_size, where)]

        return self._split("create_subgroup", choose, group_name or "sub")

    def as_process_group(self) -> dist.ProcessGroup:
        """Return this group as a torch process group: `dist.all_reduce(t, group=...)` then calls this group's method.

        Not collective. Every call returns the same object, which is destroyed with the group. torch's functions then
        have the order, results, deadlines and errors of this group's methods. They take global ranks.
        """
        self._calls.enter("as_process_group", in_line=False)
        if self._parts.world is not None and not self._parts.world.is_torch:
            raise UsageError(
                f"{self._health.where('as_process_group')}: torch knows nothing of the ranks of a stateless group; "
                "call its methods, or pass cpu_group to torch's functions"
            )
        if self._process_group is None:
            made, calls = self._parts.process_groups, self._calls
            self._process_group = made.once("torch", lambda: made.adopt(process_group.register(self, calls)))
        return self._process_group

    def _lists_by_color(self, color: int | None, key: int) -> list[list[int]]:
        return subgroups.lists_by_color(self._host.all_gather_integers(subgroups.pack_color(color, key)))

    def _split(
        self, call: str, choose: Callable[[], Sequence[Sequence[int]]], name: str, plane: Plane | None = None
    ) -> GroupCoordinator | None:
        """Create groups from the lists of ranks in this group that `choose` returns; return this rank's. Collective."""
        made = list[GroupCoordinator]()
        try:
            with self._calls.call(call, plane=plane):
                group_ranks = [[self.ranks[rank] for rank in ranks] for ranks in choose()]
                # Sub-groups of different groups may have one name and one store; the parent's first rank makes names
                # unique.
                scope = f"{self.unique_name.replace(':', '.')}@{self.ranks[0]}"
                lists = subgroups.with_singles(group_ranks, self.ranks)
                made.append(self._new_group(lists, f"{scope}/{name}"))
                # A list, because Python drops what a signal handler raises where it closes a generator.
                if [ranks for ranks in group_ranks if self.rank in ranks]:
                    return made[0]
                made[0].destroy()
        except BaseException:
            # The caller never gets this group, and so cannot destroy it.
            for group in made:
                group.destroy()
            raise
        return None

    def _new_group(self, group_ranks: list[list[int]], name: str) -> GroupCoordinator:
        group = GroupCoordinator.__new__(GroupCoordinator)
        world, backend = self._parts.world or world_of_torch(), self.torch_distributed_backend
        on_device = self.use_device_communicator
        group._create(  # noqa: SLF001 - ours
            world, group_ranks, self.local_rank, backend, on_device, False, name, self.settings, self._parts
        )
        return group

    # ------------------------------------------------------------------ life

    def destroy(self) -> None:
        """Release everything that the group holds. Not collective.

        It may be called more than once, in any state and after any failure, and takes at most about the settings'
        `destroy_timeout_s`. A call that waits in another thread raises `ClosedError`. Ranks that still wait for this
        one get a `PeerLostError`. In a forked child this does nothing.
        """
        self._destroy(None)

    def _destroy(self, within_s: float | None) -> None:
        """Release everything, unless that was begun before; None takes the time that the settings give."""
        if self._is_ending or self._health.is_inherited or self._is_ending:
            return
        # No function is called between the last look at the flag and the `try`, so no signal handler can run in
        # between: the call that sets the flag also releases the group. A signal handler that raises in the
        # `try`, as Ctrl-C does, ends only the waits; everything is then released without waiting.
        self._is_ending = True
        try:
            self._release(self.settings.destroy_timeout_s if within_s is None else within_s)
        except BaseException:
            self._release(0.0)
            raise

    def _release(self, within_s: float) -> None:
        """Release everything in about `within_s` seconds; after an interrupt another call does the rest."""
        self._health.close()
        group_registry.forget(self)
        deadline = time.monotonic() + within_s
        try:
            # A call that waits notices within 0.1 s that the group is closed; `_parts.destroy` wakes those that do not.
            self._calls.close(min(CALLS_END_S, within_s))
            self._queues.close(within_s / 2)
        finally:
            left_s = max(deadline - time.monotonic(), within_s / 2)
            self._parts.destroy(left_s, self._open_sends)
        self._open_sends.clear()
        self._calls.close(within_s / 2)
        self._process_group = self._cpu_group = self._device_group = self.mq_broadcaster = None
        self._adopt_queue(None)

    def __enter__(self) -> Self:
        """Return the group itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Destroy the group."""
        self.destroy()

    def __repr__(self) -> str:
        """Return the group's name, ranks, device and state."""
        state = "destroyed" if self._health.is_closed else "broken" if self._health.is_broken else "usable"
        return (
            f"<GroupCoordinator {self.unique_name!r} rank {self.rank} ({self.rank_in_group} of "
            f"{self.world_size}) ranks {subgroups.abbreviated(self.ranks)} on {self.device}, {state}>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse to be copied or pickled: a group is bound to its process."""
        raise UsageError("a GroupCoordinator cannot be copied or sent: it belongs to its process")


# How long `destroy` waits for asynchronous calls to end on their own.
CALLS_END_S = 0.5

# Prefill chunks of current engines have 2,048 to 8,192 tokens; messages above 64 MiB are sent in chunks anyway.
TOKENS_PER_MESSAGE = 2048
MAX_BUFFER_BYTES = 64 << 20
