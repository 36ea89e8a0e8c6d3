"""`ParallelGroups`: the groups of an engine as one frozen record, created and destroyed in order."""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, Self, TypeAlias, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from coordinator.bootstrap.membership import world_store
from coordinator.bootstrap.timings import StartUpReport
from coordinator.bootstrap.world import World
from coordinator.elastic.changing import ChangingGroups
from coordinator.elastic.ending import Ending, ending_of
from coordinator.elastic.exclusion import exclusion_in
from coordinator.elastic.part import Change, Recipe
from coordinator.elastic.rebuilding import Membership
from coordinator.graph_capture import GraphCaptureContext, capture_on
from coordinator.group import GroupCoordinator
from coordinator.layout import Dimension, ParallelLayout, RankLists
from coordinator.settings import CoordinatorSettings
from coordinator.torch_interop.device_mesh import layout_of_mesh, mesh_of
from device_comm.health import GroupHealth
from shm_broadcast.errors import UsageError
from shm_broadcast.reports.log_fields import log_fields

logger: logging.Logger = logging.getLogger(__name__)

# Groups are created in this order and destroyed in reverse. It must be the same on all ranks.
DIMENSIONS: Final[tuple[Dimension, ...]] = ("world", "tp", "dcp", "cp", "pp", "dp", "ep", "rdp", "sdp")
# Parts of `dp`, which `with_sharding` replaces.
_PARTS: Final = ("rdp", "sdp")

ExtraGroup: TypeAlias = Literal["replica", "eplb"]
"""A group that is created only on request: all ranks of one copy of the model; a second one of the ranks of `ep`."""

EXTRA_GROUPS: Final[tuple[ExtraGroup, ...]] = get_args(ExtraGroup)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelGroups(ChangingGroups):
    """The groups that this rank belongs to, one per parallel dimension.

    Used as a context manager, it makes these groups current and destroys them at the end. Each dimension has a group of
    its own, even if another one has the same ranks: its name (`tp:0`), its state, its lifetime and the order of its
    calls are its own. Two threads may use two of them at the same time, on CUDA devices as far as NCCL allows it.

    Attributes:
        layout: Sizes of the dimensions.
        world: All ranks.
        tp: Tensor parallel.
        dcp: Decode context parallel: the ranks of `cp` and `tp` that share the cache of a sequence.
        cp: (Prefill) context parallel.
        pp: Pipeline parallel.
        dp: Data parallel.
        ep: Expert parallel: the ranks of `dp`, `cp` and `tp` in one pipeline stage, or a part of them.
        rdp: Replicated data parallel: the ranks of `dp` that hold the same shard; all of `dp` without sharding.
        sdp: Sharded data parallel: the ranks of `dp` that share one copy of the model; only this rank without
            sharding.
        replica: The ranks of `tp`, `cp` and `pp` that hold one copy of the model; None unless it was asked for.
        eplb: The ranks of `ep` again, to move experts between ranks while `ep` is in use; None unless asked for.
        owns_world: Whether `destroy` also destroys `world`.
        change: What has changed with the last rebuild; None for groups that were created.
    """

    layout: ParallelLayout
    world: GroupCoordinator
    tp: GroupCoordinator
    dcp: GroupCoordinator
    cp: GroupCoordinator
    pp: GroupCoordinator
    dp: GroupCoordinator
    ep: GroupCoordinator
    rdp: GroupCoordinator
    sdp: GroupCoordinator
    replica: GroupCoordinator | None = None
    eplb: GroupCoordinator | None = None
    owns_world: bool = True
    change: Change | None = dataclasses.field(default=None, kw_only=True)
    _entered: list[contextvars.Token[ParallelGroups]] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _mesh: list[DeviceMesh] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)
    # Former `rdp` and `sdp` groups that this record must destroy.
    _retired: list[GroupCoordinator] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )

    _callbacks: list[Callable[[ParallelGroups], object]] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _unreturned: list[ParallelGroups] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Check that rank 0 of the world is rank 0 in each of its groups: engines do one-time work on that rank.

        Where members change, a call that fails asks whether the others have gone on without this rank.
        """
        world = self.world._parts.world  # noqa: SLF001 - ours
        if world is not None and world.is_elastic:
            for health in self._healths():
                health.exclusion = exclusion_in(world)
        for name, group in self.by_name().items():
            if self.world.rank_in_group == 0 and group.rank_in_group != 0:
                raise UsageError(
                    "rank 0 of the world must be rank 0 in each of its groups, "
                    f"but in {name!r} it is rank {group.rank_in_group}"
                )

    @classmethod
    def from_sizes(
        cls,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        decode_context_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        expert_parallel_size: int | None = None,
        shard_size: int | None = 1,
        local_rank: int | None = None,
        backend: str | None = None,
        use_message_queue_broadcaster: bool = True,
        settings: CoordinatorSettings | None = None,
        world: GroupCoordinator | None = None,
    ) -> Self:
        """Create the groups of these sizes. Collective over the world.

        Args:
            tensor_parallel_size: Ranks that share a layer.
            pipeline_parallel_size: Number of pipeline stages.
            context_parallel_size: Ranks that share a sequence.
            decode_context_parallel_size: Ranks that share the cache of a sequence; see `ParallelLayout`.
            data_parallel_size: Replicas that work together; if they do not use all ranks, the world holds several
                independent sets of them. None means that all replicas work together.
            expert_parallel_size: Ranks that share the experts; None means all ranks of a stage.
            shard_size: Replicas over which the model is sharded, usually those of one host; None means all.
            local_rank: See `create`.
            backend: See `create`.
            use_message_queue_broadcaster: See `create`.
            settings: See `create`.
            world: See `create`.

        Raises:
            UsageError: The sizes do not divide the world.
            Others: As `create`.
        """
        world_store()
        layout = ParallelLayout.from_world_size(
            dist.get_world_size(),
            tensor=tensor_parallel_size,
            pipeline=pipeline_parallel_size,
            data=data_parallel_size,
            context=context_parallel_size,
            decode_context=decode_context_parallel_size,
            expert=expert_parallel_size,
        )
        layout = dataclasses.replace(layout, shard=layout.data if shard_size is None else shard_size)
        return cls.create(
            layout,
            local_rank=local_rank,
            backend=backend,
            use_message_queue_broadcaster=use_message_queue_broadcaster,
            settings=settings,
            world=world,
        )

    @classmethod
    def from_device_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        local_rank: int | None = None,
        backend: str | None = None,
        use_message_queue_broadcaster: bool = True,
        settings: CoordinatorSettings | None = None,
        world: GroupCoordinator | None = None,
    ) -> Self:
        """Create the groups for the dimensions of a torch mesh over all ranks. Collective over the world.

        The mesh's own process groups are not used; `device_mesh` returns the mesh.

        Args:
            mesh: Its dimensions have any of the names "dp" (or "rdp" and "sdp", torch's "dp_replicate" and
                "dp_shard"), "pp", "cp" and "tp". Ranks must be numbered in this order, as in `ParallelLayout`.
            local_rank: See `create`.
            backend: See `create`.
            use_message_queue_broadcaster: See `create`.
            settings: See `create`.
            world: See `create`.

        Raises:
            UsageError: The mesh has other dimensions, or numbers its ranks in another order.
            Others: As `create`.
        """
        groups = cls.create(
            layout_of_mesh(mesh),
            local_rank=local_rank,
            backend=backend,
            use_message_queue_broadcaster=use_message_queue_broadcaster,
            settings=settings,
            world=world,
        )
        try:
            groups._mesh.append(mesh)  # noqa: SLF001 - ours
        except BaseException:
            groups.destroy()
            raise
        return groups

    @property
    def root(self) -> GroupCoordinator:
        """Return `world`; fairseq2 calls it root."""
        return self.world

    @property
    def device_mesh(self) -> DeviceMesh:
        """Return a torch mesh over these groups; it uses their process groups.

        It holds all ranks of the world; of several independent replicas only those of this one. Its dimensions are
        those of "dp" (under hybrid sharding "rdp" and "sdp"), "pp", "cp" and "tp" that have more than one rank; if
        there are none, "dp" with one rank. On the CPU the first access creates the process groups, without waiting for
        other ranks. They live as long as the groups.
        """
        if not self._mesh:
            self._mesh.append(mesh_of(self.layout, self.by_name()))
        return self._mesh[0]

    @classmethod
    def create(
        cls,
        layout: ParallelLayout,
        *,
        local_rank: int | None = None,
        backend: str | None = None,
        use_message_queue_broadcaster: bool = True,
        settings: CoordinatorSettings | None = None,
        world: GroupCoordinator | None = None,
        extra_groups: Collection[ExtraGroup] = (),
    ) -> Self:
        """Create every group of `layout`. Collective over the world.

        Args:
            layout: Its world size must equal that of torch.distributed.
            local_rank: Index of this process's device on its host; default: that of the world group, else the
                global rank.
            backend: torch backend of the device groups; default: that of the world group, else the accelerator's,
                else "gloo".
            use_message_queue_broadcaster: Whether the world group and the tensor-parallel group get an
                `mq_broadcaster`, written by their first rank.
            settings: Settings of every group; default: read from the environment.
            world: Existing group of all ranks to use as `world`; default: the one that
                `init_distributed_environment` created, if any. `destroy` leaves it alone.
            extra_groups: Further groups to create: "replica", "eplb" or both. Equal on all ranks.

        Raises:
            UsageError: The layout does not fit the world, `world` is not the group of all ranks in order, or there is
                no such extra group.
            DisagreementError: Ranks hold different layouts or settings.
            CommTimeoutError: Ranks did not join within `create_timeout_s`; `.missing` names them.
            PeerLostError: A rank died meanwhile; `.peers` names it.
        """
        world_store()
        if layout.world_size != dist.get_world_size():
            raise UsageError(
                f"the layout needs {layout.world_size} ranks, the world has {dist.get_world_size()}: {layout}"
            )
        started = time.perf_counter()
        settings = settings or CoordinatorSettings.from_env()
        world = world or find_world_group()
        if world is not None and world.ranks != list(range(layout.world_size)):
            raise UsageError(f"world must be the group of all ranks in ascending order, not of {world.ranks}")
        if not set(extra_groups) <= set(EXTRA_GROUPS):
            raise UsageError(f"extra_groups may hold {EXTRA_GROUPS}, not {tuple(extra_groups)}")
        names: list[Dimension | ExtraGroup] = [
            name for name in DIMENSIONS if world is None or name != "world"
        ]
        names += [name for name in EXTRA_GROUPS if name in extra_groups]
        facts = {"use_message_queue_broadcaster": str(use_message_queue_broadcaster)}
        made = list[GroupCoordinator]()
        try:
            groups = _create_groups(made, layout, names, settings, facts, world, local_rank, backend)
            if world is not None:
                groups = {"world": world, **groups}
            if use_message_queue_broadcaster:
                groups["world"].enable_broadcaster()
                groups["tp"].enable_broadcaster()
            record = cls(layout=layout, owns_world=world is None, **cast("dict[str, Any]", groups))
            elapsed_ms = (time.perf_counter() - started) * 1e3
            logger.info(
                "created the groups of %s in %.1f ms; %s",
                *(layout, elapsed_ms, record.startup_report()),
                extra=log_fields(rank=record.world.rank, call="create"),
            )
        except BaseException:
            destroy_together(made[::-1])
            raise
        return record

    def with_sharding(self, shard: int) -> Self:
        """Return a record of these groups with new `rdp` and `sdp`. Collective over the world.

        Creates nothing if `shard` is that of this record. The result takes over this record's groups, including the
        `rdp` and `sdp` that it replaces: destroy the result, not this record.

        Args:
            shard: See `ParallelLayout`.

        Raises:
            UsageError: `shard` does not divide the data-parallel size. Nothing is sent.
            DisagreementError: Ranks passed different `shard`, even if one of them needs no new group.
            Others: As `create`.
        """
        layout = dataclasses.replace(self.layout, shard=shard)
        replaced: list[Dimension | ExtraGroup] = [] if layout == self.layout else [*_PARTS]
        made = list[GroupCoordinator]()
        try:
            created = _create_groups(made, layout, replaced, self.world.settings, {}, self.world)
            parts = {name: getattr(self, name) for name in _PARTS}
            record = dataclasses.replace(self, layout=layout, **{**parts, **created})
            record._retired.extend([*self._retired, *(parts[name] for name in created)])  # noqa: SLF001 - ours
            record._callbacks.extend(self._callbacks)  # noqa: SLF001 - ours
        except BaseException:
            destroy_together(made[::-1])
            raise
        return record

    def with_change(self, change: Change) -> Self:
        """Return a record of the same groups that says what has changed with them."""
        return dataclasses.replace(self, change=change)

    def _membership(self) -> Membership:
        self.world._health.check_owner("a change of members")  # noqa: SLF001 - ours
        parts = self.world._parts  # noqa: SLF001 - ours
        if parts.world is None:
            raise UsageError("the members of fake groups cannot change")
        recipe = Recipe(
            self.layout,
            tuple(name for name in EXTRA_GROUPS if getattr(self, name) is not None),
            has_queues=self.world._has_had_broadcaster,  # noqa: SLF001 - ours
            has_token_group=self.ep.token_group is not None,
            backend=self.world.torch_distributed_backend,
        )
        settings = self.world.settings
        return Membership(parts.world, parts.processes, settings, recipe, len(self._callbacks))

    def _healths(self) -> list[GroupHealth]:
        return [group._health for group in [*self.by_name().values(), *self._retired]]  # noqa: SLF001 - ours

    def _ending(self) -> Ending:
        groups = self.owned() if self.owns_world else [*self.owned(), self.world]
        communicators = [group.device_communicator for group in groups]
        guards = [group._guard for group in groups]  # noqa: SLF001 - ours
        return ending_of(communicators, guards, self._destroy_all)

    def _create_again(
        self, own: World, recipe: Recipe, layout: ParallelLayout, create_timeout_s: float
    ) -> Self:
        return self._create_in(
            own, recipe, layout, self.world.settings, self.world.local_rank, create_timeout_s
        )

    @classmethod
    def _create_in(
        cls,
        own: World,
        recipe: Recipe,
        layout: ParallelLayout,
        settings: CoordinatorSettings,
        local_rank: int,
        create_timeout_s: float,
    ) -> Self:
        """Create groups as a recipe says, in a world of their own. Collective over that world."""
        names: list[Dimension | ExtraGroup] = [*DIMENSIONS]
        names += [name for name in EXTRA_GROUPS if name in recipe.extra_groups]
        within_s, made = min(create_timeout_s, settings.create_timeout_s), list[GroupCoordinator]()
        try:
            groups = _create_groups(
                made, layout, names, settings, {}, None, local_rank, recipe.backend, own, within_s
            )
            for group in (groups["world"], groups["tp"]) if recipe.has_queues else ():
                with group._queues.within(within_s):  # noqa: SLF001 - ours
                    group.enable_broadcaster()
            record = cls(layout=layout, owns_world=True, **cast("dict[str, Any]", groups))
            record.world._parts.after.append(own.leave)  # noqa: SLF001 - ours
            if recipe.has_token_group:
                record._set_token_group()
        except BaseException:
            destroy_together(made[::-1])
            raise
        return record

    def _set_token_group(self) -> None:
        """Choose which of `dp` and `cp` makes the calls of `ep` on tokens that are not sharded.

        It is the one whose ranks hold different tokens; if both do, `ep` makes these calls itself.
        """
        is_one = 1 in (self.layout.data, self.layout.context)
        self.ep.token_group = (self.dp if self.layout.data > 1 else self.cp) if is_one else None

    def _destroy_all(self) -> None:
        destroy_together(self.owned())
        self.world.destroy()

    def by_name(self) -> dict[str, GroupCoordinator]:
        """Return the groups by the names of their attributes, in order of creation."""
        found = {name: getattr(self, name) for name in (*DIMENSIONS, *EXTRA_GROUPS)}
        return {name: group for name, group in found.items() if group is not None}

    def startup_report(self) -> StartUpReport:
        """Return how long this rank took to create the groups, by group and phase, including the world group."""
        return StartUpReport.of([group.creation for group in self.by_name().values()])

    def destroy(self) -> None:
        """Destroy the groups in reverse order of creation. Idempotent, not collective.

        Waits for the other ranks at most about `destroy_timeout_s` per group.
        """
        destroy_together(self._leaving())
        self._unreturned.clear()

    def _leaving(self) -> list[GroupCoordinator]:
        """Return the groups that `destroy` destroys: before its own those that have followed and nobody got."""
        return [*(group for later in self._unreturned for group in later._leaving()), *self.owned()]  # noqa: SLF001 - ours

    def owned(self) -> list[GroupCoordinator]:
        """Return the groups that belong to this record, in the order in which `destroy` destroys them."""
        groups = self.by_name()
        parts = [groups.pop(name) for name in _PARTS]
        made = [*groups.values(), *self._retired, *parts]
        return [group for group in reversed(made) if self.owns_world or group is not self.world]

    @contextmanager
    def graph_capture(
        self,
        graph_capture_context: GraphCaptureContext | None = None,
        stream: torch.Stream | None = None,
    ) -> Iterator[GraphCaptureContext]:
        """Capture with all groups, entered in order of creation; see `GroupCoordinator.graph_capture`."""
        groups = self.by_name().values()
        communicators = [group.device_communicator for group in groups]
        guards = [group._guard for group in groups]  # noqa: SLF001 - ours
        with capture_on(self.world.device, communicators, guards, graph_capture_context, stream) as context:
            yield context

    def __enter__(self) -> Self:
        """Make these the current groups of this context; see `current_groups`."""
        self._entered.append(enter_groups(self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restore the previous current groups, and destroy these."""
        leave_groups(self._entered.pop())
        self.destroy()

    @contextmanager
    def as_current(self) -> Iterator[Self]:
        """Make these the current groups inside the block; do not destroy them at its end. Nestable."""
        token = enter_groups(self)
        try:
            yield self
        finally:
            leave_groups(token)


def _create_groups(
    made: list[GroupCoordinator],
    layout: ParallelLayout,
    names: Collection[Dimension | ExtraGroup],
    settings: CoordinatorSettings,
    facts: Mapping[str, str],
    world: GroupCoordinator | None,
    local_rank: int | None = None,
    backend: str | None = None,
    own: World | None = None,
    create_timeout_s: float | None = None,
) -> dict[str, GroupCoordinator]:
    """Create the groups of these names, in one agreement; return them by name. Collective over the world.

    `made` gets them too, before this call ends: the caller destroys them if an interrupt comes until it has returned.
    """
    if world is not None:
        backend = backend or world.torch_distributed_backend
        local_rank = world.local_rank if local_rank is None else local_rank
    GroupCoordinator._create_together(  # noqa: SLF001 - ours
        made,
        {name: rank_lists(layout, name) for name in names},
        dist.get_rank() if local_rank is None else local_rank,
        backend or default_backend(),
        settings,
        what=f"the groups of {layout}",
        # Ranks with different layouts would create groups of different ranks.
        facts={"layout": str(layout), **facts},
        beside=world,
        world=own,
        create_timeout_s=create_timeout_s,
    )
    return dict(zip(names, made, strict=True))


def rank_lists(layout: ParallelLayout, name: Dimension | ExtraGroup) -> RankLists:
    """Return the rank lists of all groups of this name."""
    return layout.groups("ep" if name == "eplb" else name)


def destroy_together(groups: Sequence[GroupCoordinator]) -> None:
    """Destroy groups, in this order, after the calls of all have ended. Idempotent, not collective.

    `destroy` of one waits a while for the device before it frees memory, also for the kernels of the other groups.
    *Blocks* for that up to the longest `destroy_timeout_s`, and then for the groups one after the other. An interrupt
    ends only the waits: all groups are released all the same.
    """
    try:
        limits = [group.settings.destroy_timeout_s for group in groups]
        deadline = time.monotonic() + max(limits, default=0.0)
        for group in groups:
            group.device_communicator.end_calls(max(deadline - time.monotonic(), 0.0))
        for group in groups:
            group.destroy()
    except BaseException:
        destroy_at_once(groups)
        raise


def destroy_at_once(groups: Sequence[GroupCoordinator]) -> None:
    """Destroy groups without waiting, also behind one whose end is interrupted."""
    if groups:
        try:
            groups[0]._destroy(0.0)  # noqa: SLF001 - ours
        finally:
            destroy_at_once(groups[1:])


def default_backend() -> str:
    """Return the torch backend of this machine's accelerator, or "gloo" if it has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "gloo"
    return dist.get_default_backend_for_device(accelerator)


# --- which groups are current ------------------------------------------------------------------------------------
#
# Getters such as `get_tp_group` read nothing else, and `torch.compile` traces them. It guards what it reads, and
# evaluates guards in the context that calls the compiled function: where other groups are current, or the default has
# changed, a fact on which the graph depends differs, and the function is compiled again instead of using old groups.

_current: Final[contextvars.ContextVar[ParallelGroups]] = contextvars.ContextVar("parallel_groups")


class _Process:
    """The groups of this process. There is one object of this class.

    Attributes:
        world: The world group, which exists before any layout is known.
        default: The current groups of contexts that have not chosen their own.
        chosen: The groups that the calling context has chosen; this object itself if it has chosen none.
        entered: A token for each block, in any context, whose groups are current there; for the text of an error.
    """

    # Dynamo cannot trace the call of a ContextVar's method. It does trace the attribute of an object, and takes the
    # getter of this property, which is written in C, to have no side effects. The property calls
    # `_current.get(self)`, where `self` is the answer of a context without a value.
    chosen: Any = property(_current.get)

    def __init__(self) -> None:
        self.world: GroupCoordinator | None = None
        self.default: ParallelGroups | None = None
        self.entered: list[contextvars.Token[ParallelGroups]] = []


_process: Final = _Process()


def set_world_group(group: GroupCoordinator | None) -> GroupCoordinator | None:
    """Set or clear the world group; return the previous one."""
    before, _process.world = _process.world, group
    return before


def find_world_group() -> GroupCoordinator | None:
    """Return the current world group, or None."""
    return _process.world if dist.is_initialized() else None


def set_default_groups(groups: ParallelGroups | None) -> ParallelGroups | None:
    """Make `groups` the default of this process for every thread; return the previous default."""
    before, _process.default = _process.default, groups
    return before


def groups_of_process() -> tuple[ParallelGroups | None, GroupCoordinator | None]:
    """Return the default groups and the world group of this process, also where torch's world has ended before."""
    return _process.default, _process.world


def enter_groups(groups: ParallelGroups) -> contextvars.Token[ParallelGroups]:
    """Make `groups` current in this context until `leave_groups` gets the result."""
    token = _current.set(groups)
    _process.entered.append(token)
    return token


def leave_groups(token: contextvars.Token[ParallelGroups]) -> None:
    """Restore the groups that were current before the call of `enter_groups` that returned `token`."""
    _current.reset(token)
    _process.entered.remove(token)


def find_current_groups() -> ParallelGroups | None:
    """Return the current groups: those of this context, else the process's default, else None."""
    chosen: ParallelGroups | _Process = _process.chosen
    return _process.default if isinstance(chosen, _Process) else chosen


def current_groups() -> ParallelGroups:
    """Return the current groups: those of the innermost `with groups:`, else the process's default.

    Raises:
        UsageError: There are no current groups.
    """
    groups = find_current_groups()
    if groups is None:
        raise UsageError(_nothing_current())
    return groups


def _nothing_current() -> str:
    if _process.entered:
        return (
            "there are no current groups in this thread: it was started with a context of its own, and does not see "
            "the `with groups:` of the thread that started it; enter `with groups.as_current():` in this thread, or "
            "start it with contextvars.copy_context().run as its target"
        )
    return "there are no current groups: call initialize_model_parallel(...), or use a ParallelGroups in a with block"
