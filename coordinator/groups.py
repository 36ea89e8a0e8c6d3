"""`ParallelGroups`: the groups of an engine as one frozen record, created and torn down in order."""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Self

import torch
import torch.distributed as dist

from coordinator.agreement import View, agree
from coordinator.graph_capture import GraphCaptureContext, capture_on
from coordinator.group import GroupCoordinator
from coordinator.group_names import unique_name
from coordinator.layout import ParallelLayout
from coordinator.membership import world_store
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import UsageError
from shm_broadcast.liveness import this_process

logger = logging.getLogger(__name__)

# The order in which groups are created, and in reverse torn down. The same on all ranks.
DIMENSIONS: Final = ("world", "tp", "cp", "pp", "dp", "ep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The groups that this rank belongs to, one for each parallel dimension.

    A context manager: leaving it destroys the groups. Dimensions with equal rank lists share one
    `GroupCoordinator`, whose name says which: `world=tp`.

    Attributes:
        layout: The sizes.
        world: All ranks.
        tp: Tensor parallel.
        cp: Context parallel.
        pp: Pipeline parallel.
        dp: Data parallel.
        ep: Expert parallel: the ranks of `dp`, `cp` and `tp` of one pipeline stage, or a part of them.
        owns_world: Whether `world` is destroyed with this record.
    """

    layout: ParallelLayout
    world: GroupCoordinator
    tp: GroupCoordinator
    cp: GroupCoordinator
    pp: GroupCoordinator
    dp: GroupCoordinator
    ep: GroupCoordinator
    owns_world: bool = True
    _entered: list[contextvars.Token[ParallelGroups | None]] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )

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
    ) -> Self:
        """Create every group of `layout`. Collective over the world.

        Args:
            layout: Its world size must be that of torch.distributed.
            local_rank: Index of this process's device on its host; by default the world group's, else the
                global rank.
            backend: torch backend of the device groups; by default the world group's, else that of the
                accelerator, else "gloo".
            use_message_queue_broadcaster: Whether the world and the tensor-parallel group get an `mq_broadcaster`
                with their first rank as its writer.
            settings: Of every group; by default what the environment says now.
            world: An existing group of all ranks to use as `world`, by default the one that
                `init_distributed_environment` made, if any; it is not destroyed with this record.

        Raises:
            UsageError: The layout does not fit the world.
            DisagreementError: Ranks hold different layouts or settings.
            CommTimeoutError: Ranks did not come.
        """
        world_store()
        if layout.world_size != dist.get_world_size():
            raise UsageError(
                f"the layout needs {layout.world_size} ranks, the world has {dist.get_world_size()}: {layout}"
            )
        started = time.perf_counter()
        settings = settings or CoordinatorSettings.from_env()
        world = world or find_world_group()
        if world is not None:
            backend = backend or world.torch_distributed_backend
            local_rank = world.local_rank if local_rank is None else local_rank
        backend = backend or default_backend()
        local_rank = dist.get_rank() if local_rank is None else local_rank
        _agree_on_layout(layout, use_message_queue_broadcaster, world is None, settings)
        tables: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for name in DIMENSIONS:
            tables.setdefault(layout.groups(name), []).append(name)
        groups: dict[str, GroupCoordinator] = {}
        try:
            for table, names in tables.items():
                group = world if "world" in names else None
                if group is None:
                    group = GroupCoordinator(
                        table, local_rank, backend, True, False, "=".join(names), settings=settings
                    )
                groups.update(dict.fromkeys(names, group))
            if use_message_queue_broadcaster:
                for group in dict.fromkeys((groups["world"], groups["tp"])):
                    group.enable_broadcaster()
        except BaseException:
            _destroy(groups, keep=world)
            raise
        logger.info("created the groups of %s in %.1f ms", layout, (time.perf_counter() - started) * 1e3)
        return cls(layout=layout, owns_world=world is None, **groups)

    def by_name(self) -> dict[str, GroupCoordinator]:
        """Return the groups by the name of their dimension, in order of creation."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    def destroy(self) -> None:
        """Destroy the groups in reverse order of creation. Idempotent, not collective, bounded."""
        _destroy(self.by_name(), keep=None if self.owns_world else self.world)

    @contextmanager
    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None
    ) -> Iterator[GraphCaptureContext]:
        """Capture with all groups, in the order of creation; see `GroupCoordinator.graph_capture`."""
        with capture_on(self.world.device, graph_capture_context) as context:
            yield context

    def __enter__(self) -> Self:
        """Make these the current groups of this context (see `current_groups`)."""
        self._entered.append(_current.set(self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restore the groups that were current before, and destroy these."""
        _current.reset(self._entered.pop())
        self.destroy()

    @contextmanager
    def as_current(self) -> Iterator[Self]:
        """Make these the current groups inside, without destroying them at the end. Nestable."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


def _agree_on_layout(
    layout: ParallelLayout, with_broadcaster: bool, with_world: bool, settings: CoordinatorSettings
) -> None:
    """Return once all ranks have come with the same layout.

    Another layout makes other groups, in another order and of other names: without this, ranks would wait for
    groups that nobody else ever creates.
    """
    facts = {
        "layout": str(layout),
        "use_message_queue_broadcaster": str(with_broadcaster),
        "creates a world group": str(with_world),
    }
    store, rank = world_store(), dist.get_rank()
    name = unique_name("layout", store, rank, settings.create_timeout_s)
    ranks = range(dist.get_world_size())
    view = View(facts, this_process(), "")
    store = dist.PrefixStore(f"group_coordinator/{name}", store)
    agree(store, f"the groups of {layout}", rank, ranks, view, settings.create_timeout_s)


def _destroy(groups: Mapping[str, GroupCoordinator], keep: GroupCoordinator | None) -> None:
    for group in reversed(list(dict.fromkeys(groups.values()))):
        if group is not keep:
            group.destroy()


def default_backend() -> str:
    """Return the torch backend of this machine's accelerator, or "gloo" without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "gloo"
    return dist.get_default_backend_for_device(accelerator)


_current: contextvars.ContextVar[ParallelGroups | None] = contextvars.ContextVar(
    "parallel_groups", default=None
)
_default: list[ParallelGroups] = []

# The group of all ranks, which exists before any layout is known; at most one entry.
_world: list[GroupCoordinator] = []


def set_world_group(group: GroupCoordinator | None) -> GroupCoordinator | None:
    """Remember the group of all ranks, or none; return the one before."""
    before = _world.pop() if _world else None
    if group is not None:
        _world.append(group)
    return before


def find_world_group() -> GroupCoordinator | None:
    """Return the group of all ranks that is in use, or None."""
    if _world and dist.is_initialized():
        return _world[0]
    return None


def set_default_groups(groups: ParallelGroups | None) -> ParallelGroups | None:
    """Make `groups` the default of this process, seen by every thread; return the previous default."""
    before = _default.pop() if _default else None
    if groups is not None:
        _default.append(groups)
    return before


def find_current_groups() -> ParallelGroups | None:
    """Return the current groups, or None: those of this context, else the process's default."""
    groups = _current.get()
    if groups is not None:
        return groups
    return _default[0] if _default else None


def current_groups() -> ParallelGroups:
    """Return the current groups: those of the innermost context manager, else the process's default.

    Raises:
        UsageError: There are none.
    """
    groups = find_current_groups()
    if groups is None:
        raise UsageError(
            "there are no current groups: call initialize_model_parallel(...), or enter a ParallelGroups record"
        )
    return groups
