"""`join_distributed_environment`: a process that was started later becomes a member of groups that serve already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from coordinator.bootstrap.creation import device_of
from coordinator.bootstrap.rendezvous import join_later
from coordinator.bootstrap.world import World
from coordinator.elastic import joiners
from coordinator.elastic.driver import finite_seconds
from coordinator.elastic.part import Recipe
from coordinator.elastic.rebuilding import join_members
from coordinator.groups import ParallelGroups
from coordinator.layout import ParallelLayout
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout

__all__ = ["join_distributed_environment"]

_TIMEOUT_S: Final = 300.0


def join_distributed_environment(
    store: dist.Store | str,
    *,
    replaces: int | None = None,
    local_rank: int | None = None,
    settings: CoordinatorSettings | None = None,
    timeout_s: AnyTimeout = _TIMEOUT_S,
    on_rebuild: Sequence[Callable[[ParallelGroups], object]] = (),
) -> ParallelGroups:
    """Wait until the ranks that serve take this process in, and return its groups.

    Call it once the process is ready to serve, with its weights loaded: after the commit the others rely on
    it. The ranks that serve see it in `ParallelGroups.pending_members`, and take it in by `prepare` and
    `commit`. torch's own world is neither needed nor made.

    Args:
        store: The store of the world that was started with `elastic=True`: `file:///DIRECTORY`, or the store from which
            torch.distributed was initialised there. With `env://` and the store of torchrun's agent the keys of each
            world have a prefix: pass `PrefixStore(f"{run_id}/{restarts}/{worlds}", store)`, where `store` is connected
            to the workers' `MASTER_ADDR` and `MASTER_PORT`, `run_id` and `restarts` are their `TORCHELASTIC_RUN_ID` and
            `TORCHELASTIC_RESTART_COUNT`, and `worlds` is how many worlds each of them had begun to join
            before this one.
        replaces: The member whose place this process takes among the ranks: its number in `Change.places`, which is the
            rank with which it was started. The place is free once that member is lost or leaves; until then the process
            waits. None puts it behind all ranks.
        local_rank: Index of this process's device on its host; None takes the current device.
        settings: Settings of the groups, equal to those of the others; default: read from the environment.
        timeout_s: How long to wait for each step, finite; None is 300 s.
        on_rebuild: Callbacks that get the groups now and after later changes: the same ones, in the same
            order, as the other ranks have registered. See `ParallelGroups.on_rebuild`. Graphs are captured in
            them, on all ranks together.

    Returns:
        The groups; `change` says what has changed. The process has one of the last ranks, or its place's.

    Raises:
        CommTimeoutError: Nobody has taken it in, or the store does not answer.
        DisagreementError: The change was given up after all. The process may call this again.
        UsageError: `store` is no such URL, or no run goes on there; there never was a member `replaces`; or `timeout_s`
            is not positive and finite.
        SettingsError: The environment has a setting that is unknown or malformed.
        NativeError: The store is gone.
        Others: What a callback has raised. The groups are destroyed, and the others find this process gone.
    """
    if replaces is not None and (isinstance(replaces, bool) or not isinstance(replaces, int) or replaces < 0):
        raise UsageError(f"replaces must be the number of a member, not {replaces!r}")
    within_s = finite_seconds(timeout_s, _TIMEOUT_S)
    settings = settings or CoordinatorSettings.from_env()
    given, leave = join_later(store) if isinstance(store, str) else (store, _nothing)

    def create(own: World, recipe: Recipe, layout: ParallelLayout, create_timeout_s: float) -> ParallelGroups:
        index = local_rank
        if index is None:
            on_host = device_of(recipe.backend, 0).type == "cpu"
            index = 0 if on_host else torch.accelerator.current_device_index()
        return ParallelGroups._create_in(  # noqa: SLF001 - ours
            own, recipe, layout, settings, index, create_timeout_s
        )

    try:
        line = joiners.new_line(given, replaces, "join_distributed_environment", within_s)
        groups = join_members(line, settings, within_s, create, leave, len(on_rebuild))
    except BaseException:
        leave()
        raise
    try:
        for callback in on_rebuild:
            groups.on_rebuild(callback)
        groups._call_back()  # noqa: SLF001 - ours
    except BaseException:
        groups.destroy()
        raise
    return groups


def _nothing() -> None:
    """Do nothing: the store is the caller's."""
