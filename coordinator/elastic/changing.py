"""The calls by which the members of groups change: after a failure, and as planned."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, Self, SupportsIndex

from coordinator.bootstrap.world import World
from coordinator.elastic import joiners
from coordinator.elastic.callbacks import break_groups, call_back
from coordinator.elastic.driver import finite_seconds
from coordinator.elastic.ending import Ending
from coordinator.elastic.layouts import LayoutRule, drop_replicas
from coordinator.elastic.part import Change, Recipe
from coordinator.elastic.rebuilding import Membership, Plan, has_begun, prepare, rebuild
from coordinator.layout import ParallelLayout
from device_comm.health import GroupHealth
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout

__all__ = ["ChangingGroups"]

_TIMEOUT_S: Final = 30.0


class ChangingGroups(ABC):
    """All groups of a world whose members may change; a part of `ParallelGroups`."""

    # The callbacks that were registered by `on_rebuild`.
    _callbacks: list[Callable[[Any], object]]
    # Groups that have, or may have, followed these, and that an error or interrupt kept from the caller.
    _unreturned: list[Self]

    def rebuild(
        self,
        *,
        layout: LayoutRule = drop_replicas,
        progress: int = 0,
        min_members: int = 1,
        timeout_s: AnyTimeout = _TIMEOUT_S,
    ) -> Self:
        """Create the groups again on the ranks that are left, after `PeerLostError` or `CommTimeoutError`.

        Collective over all ranks that are left: each calls it when a call of its groups has raised. Whoever calls it
        breaks all of its groups, so that the calls of the other ranks raise too. They agree on who is left: all ranks
        of these groups but those whose process has provably ended, or, once the others have been silent for a third of
        `timeout_s` (5 s at most), a majority. A rank that fails meanwhile is left out in a further attempt. This record
        and its groups, the world group too, are destroyed once all have confirmed.

        Members keep the order of their ranks, which are numbered anew without gaps. torch.distributed's own world stays
        as it was, with the lost ranks: the new groups are not in it, like those of `create_stateless_group`.

        Args:
            layout: Chooses the new layout and the ranks that go on; a pure function, see `LayoutRule`. The default goes
                on with the replicas of the model that have lost no rank.
            progress: A whole number for the others to know, such as the last finished step; see `change.progress`.
            min_members: Refuse to go on with fewer. Equal on all ranks.
            timeout_s: How long to wait for enough ranks, finite; None is 30 s. Equal on all ranks.

        Returns:
            The new groups; `change` says what has changed.

        Raises:
            ExcludedError: The others go on without this rank.
            DisagreementError: A rank could not go on, with the reason: too few members, no layout, other settings. All
                of them raise it, and the groups are as they were; `rebuild` may be called again. Or a rank could not
                create its groups, such as for lack of memory: as above, but these groups are destroyed.
            CommTimeoutError: Too few ranks came in time; `.missing` names the others. As above.
            UsageError: The members of this world cannot change; see `init_distributed_environment(elastic=True)`. Or an
                argument is no such number. Nothing is sent, and the groups are as they were.
            NativeError: The store is gone.
            Others: What a callback has raised; see `on_rebuild`. After that, and after an interrupt, call it once more.
        """
        within_s = finite_seconds(timeout_s, _TIMEOUT_S)
        progress, min_members = _integer(progress, "progress"), _integer(min_members, "min_members")
        followed = self._followed("rebuild", within_s)
        if followed is not None:
            later = followed.rebuild(
                layout=layout, progress=progress, min_members=min_members, timeout_s=within_s
            )
            self._unreturned.clear()
            return later
        try:
            groups = rebuild(
                self._membership(),
                layout,
                progress,
                min_members,
                within_s,
                self._create_again,
                self._ending(),
                self._healths(),
                self._unreturned,
            )
            self._go_over(groups)
        except BaseException as error:
            self._give_up(error)
            raise
        return groups

    def prepare(
        self,
        *,
        leave: Collection[int] = (),
        join: int = 0,
        layout: LayoutRule = drop_replicas,
        progress: int = 0,
        timeout_s: AnyTimeout = _TIMEOUT_S,
    ) -> Plan[Self]:
        """Agree on a planned change and create its groups, while these serve. Collective over the world.

        *Blocks* until all have called it and `join` processes wait in `join_distributed_environment`; another thread
        may use these groups meanwhile. If one of its calls fails, let this one end before `rebuild`: all ranks refuse
        two changes at once. `Plan.commit` then takes no longer than an agreement.

        Args:
            leave: Ranks that leave; with the default rule, whole replicas of the model. Equal on all ranks.
            join: How many processes join, the first of those that wait. They form whole replicas, behind the others or
                in the places of members that were lost. Equal on all ranks: let one rank ask `pending_members` and send
                the others what it has found.
            layout: Chooses the layout of the ranks that stay, to which the replicas of the joining processes
                are added; a pure function, see `LayoutRule`. It must have a place for each rank that is not
                in `leave`. A rule of your own is a change even if nobody leaves or joins.
            progress: See `rebuild`.
            timeout_s: See `rebuild`.

        Raises:
            UsageError: It is no change, an argument is no such number, or the members of this world cannot change.
                Nothing is sent.
            DisagreementError: A rank could not go on, with the reason, or could not create its groups; the layout rule
                has raised, or ranks have different ones. All raise it, and the groups serve on.
            CommTimeoutError: Ranks did not come, too few wait to join, or a member has ended.
            NativeError: The store is gone.
        """
        within_s, progress = finite_seconds(timeout_s, _TIMEOUT_S), _integer(progress, "progress")
        if self._followed("prepare", within_s) is not None:
            raise UsageError("prepare: the next epoch has begun, call rebuild to go on from it")
        return prepare(
            self._membership(),
            layout,
            progress,
            leave,
            join,
            within_s,
            self._create_again,
            self._ending(),
            self._go_over,
            self._unreturned,
            self._give_up,
        )

    def pending_members(self, *, leave: Collection[int] = (), timeout_s: AnyTimeout = _TIMEOUT_S) -> int:
        """Return how many processes wait in `join_distributed_environment`. Not collective; asks the store.

        A process that waits for the place of a member that serves does not count.

        Args:
            leave: Ranks whose places are to be free.
            timeout_s: How long the store may take, finite; None is 30 s.

        Raises:
            UsageError: The members of this world cannot change, or there is no such rank.
            CommTimeoutError: The store does not answer within `timeout_s`.
            NativeError: The store is gone.
        """
        within_s = finite_seconds(timeout_s, _TIMEOUT_S)
        line = self._membership().world.line()
        if not set(leave) <= set(range(len(line.places))):
            raise UsageError(f"pending_members: leave={tuple(leave)} are no {len(line.places)} ranks")
        staying = [place for rank, place in enumerate(line.places) if rank not in leave]
        return len(joiners.pending(line, staying, "pending_members", within_s))

    def on_rebuild(self, callback: Callable[[Self], object]) -> None:
        """Call `callback` with the new groups after every later `rebuild` and `commit`, also of later groups.

        Use it for what belongs to one epoch and must be made anew, such as CUDA graphs. The callbacks run
        before `rebuild` or `commit` returns, in the order in which they were registered; each may make
        collective calls of the new groups. Register equal ones in equal order on all ranks: ranks with
        different numbers of callbacks refuse the change. A process that joins passes its own to
        `join_distributed_environment`; a rank that leaves calls none.

        What a callback raises breaks the new groups on all ranks, and `rebuild` or `commit` raises it. Then call
        `rebuild` of this record once more: it goes on from the new groups, and the callbacks run again. `destroy` of
        this record destroys them, too.
        """
        self._callbacks.append(callback)

    def _go_over(self, groups: Self) -> None:
        """Give `groups` the callbacks of these groups, and call the callbacks."""
        groups._callbacks[:] = self._callbacks
        self._unreturned[:] = [groups]
        groups._call_back()
        self._unreturned.clear()

    def _followed(self, call: str, timeout_s: float) -> Self | None:
        """Return groups that were kept from the caller if their epoch has begun; otherwise destroy them."""
        if not self._unreturned:
            return None
        later: Self = self._unreturned[0]
        own, world = self._membership().world, later._membership().world
        if has_begun(own.line(), world.epoch, call, timeout_s):
            later._callbacks[:] = self._callbacks
            if not all(health.is_closed for health in self._healths()):
                # A commit was interrupted before its change was decided: nobody has ended these groups.
                world.take_over(own.hand_over())
                self._ending().follow(own.epoch, world.epoch)
                self._destroy_all()
            return later
        leave_store = world.hand_over()
        later.destroy()
        own.take_over(leave_store)
        self._unreturned.clear()
        return None

    def _give_up(self, error: BaseException) -> None:
        """Break the groups that `error` kept from the caller: if their epoch began, others wait in them."""
        for groups in self._unreturned:
            break_groups(error, groups._healths(), "a change of members")  # noqa: SLF001 - ours

    def _call_back(self) -> None:
        """Call the callbacks with these groups, which have just begun to serve. Raises what they raise."""
        call_back([partial(callback, self) for callback in self._callbacks], self._healths())

    @abstractmethod
    def destroy(self) -> None:
        """Destroy the groups. Idempotent."""

    @abstractmethod
    def with_change(self, change: Change) -> Self:
        """Return a record of the same groups that says what has changed with them."""

    @abstractmethod
    def _membership(self) -> Membership:
        """Return what the others must know of this rank and its groups."""

    @abstractmethod
    def _healths(self) -> list[GroupHealth]:
        """Return the health of each group that `_destroy_all` destroys."""

    @abstractmethod
    def _ending(self) -> Ending:
        """Return the `Ending` of what `_destroy_all` destroys, in its order, which is equal on all ranks."""

    @abstractmethod
    def _create_again(
        self, own: World, recipe: Recipe, layout: ParallelLayout, create_timeout_s: float
    ) -> Self:
        """Create the groups of the next epoch in a world of their own. Collective over that world."""

    @abstractmethod
    def _destroy_all(self) -> None:
        """Destroy the groups, including the world group, even if `destroy` would keep it. Idempotent."""


def _integer(value: SupportsIndex, name: str) -> int:
    """Return a whole number as the others can read it, whatever its type is here, such as one of numpy's."""
    try:
        return int(operator.index(value))
    except TypeError as error:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from error
