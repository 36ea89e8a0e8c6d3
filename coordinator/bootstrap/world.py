"""The world of a group: the processes among which it is created, and the store in which they meet."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.bootstrap import fork_guard
from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.bootstrap.connections import SpareConnection
from coordinator.bootstrap.membership import world_store
from coordinator.bootstrap.methods.address import join_address
from coordinator.bootstrap.rendezvous import is_started_elastic, world_fork_count, world_processes
from coordinator.heartbeats.watching import Heartbeats
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import ClosedError, UsageError
from shm_broadcast.liveness import ProcessIdentity, fork_count, name_host
from shm_broadcast.status.page import own_page
from shm_broadcast.threads import caller, owned_by, owner_forks


@dataclasses.dataclass(frozen=True)
class Line:
    """The line of epochs that a world belongs to: its members change from one to the next.

    Attributes:
        store: A store that outlives every member, whose keys are used by this line only.
        me: This process's number among all that were ever members; it stays the same.
        epoch: The epoch of the world, 0 for the first.
        members: The members of the epoch, by rank.
        places: Their places in the order of ranks, by rank.
        founders: How many members the first epoch had: their places are from 0 on.
    """

    store: dist.Store
    me: int
    epoch: int
    members: tuple[int, ...]
    places: tuple[int, ...]
    founders: int


class World:
    """Processes with ranks from 0, which can create groups.

    Most groups are created in the world of torch.distributed. A stateless group has a world of its own, of which torch
    knows nothing, and so have the groups that are split off it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        leave: Callable[[], None] | None = None,
        processes: Mapping[int, ProcessIdentity] | None = None,
        line: Line | None = None,
        forks: int | None = None,
    ) -> None:
        """Use `world_of_torch` or `join_own_world`.

        Args:
            rank: This process's rank.
            size: The number of processes.
            store: A store that all of them reach.
            leave: Lets go of the store; None in the world of torch.distributed, which we do not leave here.
            processes: The ranks' processes, if they are known, in a world of our own.
            line: The epochs that led to it, if there were any.
            forks: The fork count of the process to which it belongs; None for this one.
        """
        self.rank = rank
        self.size = size
        self._store: dist.Store | None = store
        self._leave = leave
        self._processes = processes or {}
        self._line = line
        self._spare = SpareConnection()
        self._heartbeats: dict[float, Heartbeats] = {}
        own_page().set_rank(rank, size)
        self.is_torch: bool = leave is None
        self.forks: int = fork_count() if forks is None else forks

    @property
    def is_inherited(self) -> bool:
        """Return whether this is a copy in a forked child, which must not use the store."""
        return self.forks != fork_count()

    @property
    def store(self) -> dist.Store:
        """Return the store.

        Raises:
            ClosedError: This process has left the world.
        """
        if self._store is None:
            raise ClosedError("the stateless group was destroyed, so its ranks can create no further groups")
        return self._store

    @property
    def epoch(self) -> int:
        """Return how often the members have changed before this world."""
        return 0 if self._line is None else self._line.epoch

    @property
    def is_elastic(self) -> bool:
        """Return whether its members may change and its store is known to outlive them."""
        return self._line is not None or (self.is_torch and is_elastic_world())

    def line(self) -> Line:
        """Return the line of epochs in which the members of this world may change.

        Raises:
            UsageError: It is no world whose members may change.
        """
        if self._line is not None:
            return self._line
        if not self.is_torch:
            raise UsageError(
                "the members of a stateless group cannot change: destroy it and create another one"
            )
        if not is_elastic_world():
            raise UsageError(
                "the members of this world cannot change: start it by init_distributed_environment with "
                "elastic=True, and with a store that is outside of the ranks"
            )
        # torch puts a prefix of its own before the keys of the store that it was given.
        given = self.store.underlying_store if isinstance(self.store, dist.PrefixStore) else self.store
        store = dist.PrefixStore("group_coordinator/elastic", given)
        ranks = tuple(range(self.size))
        return Line(store, self.rank, 0, ranks, ranks, self.size)

    @property
    def lasting_store(self) -> dist.Store:
        """Return the store in which members of later epochs meet those of this one; without epochs that of the world.

        Raises:
            ClosedError: This process has left the world.
        """
        return self.line().store if self.is_elastic else self.store

    def first_use(self, what: str, timeout_s: float) -> int:
        """Return the epoch in which `what` was first used: this one if it is new. Asks the store; not collective.

        Raises:
            UsageError: It is no world whose members may change.
            CommTimeoutError: The store does not answer within `timeout_s`.
            NativeError: The store is gone, or holds what no rank has written.
        """
        line = self.line()
        key, own = f"used/{what}", str(line.epoch)

        def question() -> int:
            return msgspec.json.decode(line.store.compare_set(key, "", own), type=int)

        return owned_by(self.forks, lambda: ask_store(question, f"first use of {what}", timeout_s))

    def spare_connection(self) -> SpareConnection:
        """Return what lends separate connections to `store`; all objects for one torch world share it."""
        world = dist.group.WORLD
        return self._spare if not self.is_torch or world is None else _spare_of(world)

    def heartbeats(self, lost_after_s: float) -> Heartbeats:
        """Return the links to other hosts with this setting; all objects for one torch world share them."""
        world = dist.group.WORLD
        by_setting = self._heartbeats if not self.is_torch or world is None else _heartbeats_of(world)
        return by_setting.setdefault(lost_after_s, Heartbeats(lost_after_s))

    def show(self) -> None:
        """Show this process's rank in the status page, once the epoch of this world has begun."""
        own_page().change_rank(self.rank, self.size)

    def processes(self) -> Mapping[int, ProcessIdentity]:
        """Return the ranks' processes as far as they are known, by rank."""
        return world_processes() if self.is_torch else self._processes

    def processes_of(self, ranks: Collection[int]) -> dict[int, ProcessIdentity]:
        """Return the processes of `ranks` as far as they are known."""
        return {rank: process for rank, process in self.processes().items() if rank in ranks}

    def hand_over(self) -> Callable[[], None]:
        """Return what lets go of the store, for the next epoch's world; `leave` of this one then keeps it."""
        leave = self._leave or _nothing
        if not self.is_torch:
            self._leave = _nothing
        return leave

    def take_over(self, leave: Callable[[], None]) -> None:
        """Let `leave` let go of the store. Does nothing in the world of torch."""
        if not self.is_torch:
            self._leave = leave

    def leave(self) -> None:
        """Leave a world of our own and let go of its store. Idempotent; does nothing in the world of torch.

        In a forked child it does nothing either.
        """
        store, leave = self._store, self._leave
        if store is None or leave is None or self.is_inherited:
            return
        try:
            leave()
        finally:
            self._spare.drop()
            fork_guard.release(store)
        # Behind all of it: another call finishes one that was interrupted.
        self._store, self._leave = None, _nothing


# What belongs to each torch world, and must not outlive it: the spare connection goes to the world's store. An entry
# ends with its world; the callback runs no Python code, for the reason that `host/process_groups.py` gives.
_spares: Final[dict[weakref.ref[dist.ProcessGroup], SpareConnection]] = {}
_heartbeats: Final[dict[weakref.ref[dist.ProcessGroup], dict[float, Heartbeats]]] = {}

# The fork count of the process that has first used a torch world that others initialised: it belongs to that process,
# and not to its children.
_forks: Final[dict[weakref.ref[dist.ProcessGroup], int]] = {}

_declared_elastic: Final[set[weakref.ref[dist.ProcessGroup]]] = set()


def _spare_of(world: dist.ProcessGroup) -> SpareConnection:
    return _spares.setdefault(weakref.ref(world, _spares.pop), SpareConnection())


def _heartbeats_of(world: dist.ProcessGroup) -> dict[float, Heartbeats]:
    return _heartbeats.setdefault(weakref.ref(world, _heartbeats.pop), {})


def _nothing() -> None:
    """Do nothing, in a world that was left."""


def is_elastic_world() -> bool:
    """Return whether torch's current world was started as one whose members may change, by whoever initialised it."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return is_started_elastic() or (world is not None and weakref.ref(world) in _declared_elastic)


def declare_elastic(is_elastic: bool) -> None:
    """Say whether the members of torch's current world may change, which somebody else has initialised."""
    world = dist.group.WORLD
    _declared_elastic.clear()
    if is_elastic and world is not None:
        _declared_elastic.add(weakref.ref(world, _declared_elastic.discard))


def world_of_torch() -> World:
    """Return the world of torch.distributed.

    Raises:
        UsageError: torch.distributed is not initialised.
    """
    store, world = world_store(), dist.group.WORLD
    assert world is not None
    forks = world_fork_count()
    if forks is None:
        forks = _forks.setdefault(weakref.ref(world, _forks.pop), owner_forks())
    return World(dist.get_rank(), dist.get_world_size(), store, forks=forks)


def join_own_world(host: str, port: int, rank: int, size: int, settings: CoordinatorSettings) -> World:
    """Return a world whose store rank 0 serves at `host` and `port`, and nowhere else.

    Raises:
        UsageError: The arguments name no address or no rank, or rank 0 cannot listen there.
        CommTimeoutError: Nobody listened there within `create_timeout_s`; `.missing` names rank 0.
        NativeError: torch could not connect.
    """
    name_host(settings.host_id)
    before = caller.forks
    try:
        caller.forks = forks = owner_forks()
        rendezvous = join_address(host, port, rank, size, settings)
    finally:
        caller.forks = before
    try:
        fork_guard.protect(rendezvous.store)
        return World(rank, size, rendezvous.store, rendezvous.leave, forks=forks)
    except BaseException:
        # Nobody has the world yet, and so nobody could leave it.
        fork_guard.release(rendezvous.store)
        rendezvous.leave()
        raise
