"""The world of a group: the processes among which it is created, and the store in which they meet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch.distributed as dist

from coordinator.bootstrap import fork_guard
from coordinator.bootstrap.membership import world_store
from coordinator.bootstrap.rendezvous import join_address, world_processes
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import ClosedError
from shm_broadcast.liveness import ProcessIdentity
from shm_broadcast.status.page import own_page


class World:
    """Processes with ranks from 0, which can create groups.

    Most groups are created in the world of torch.distributed. A stateless group has a world of its own, of which torch
    knows nothing, and so have the groups that are split off it.
    """

    def __init__(
        self, rank: int, size: int, store: dist.Store, leave: Callable[[], None] | None = None
    ) -> None:
        """Use `world_of_torch` or `join_own_world`.

        Args:
            rank: This process's rank.
            size: The number of processes.
            store: A store that all of them reach.
            leave: Lets go of the store; None in the world of torch.distributed, which we do not leave here.
        """
        self.rank = rank
        self.size = size
        self._store: dist.Store | None = store
        self._leave = leave
        own_page().set_rank(rank, size)
        self.is_torch: bool = leave is None

    @property
    def store(self) -> dist.Store:
        """Return the store.

        Raises:
            ClosedError: This process has left the world.
        """
        if self._store is None:
            raise ClosedError("the stateless group was destroyed, so its ranks can create no further groups")
        return self._store

    def processes(self) -> Mapping[int, ProcessIdentity]:
        """Return the ranks' processes as far as they are known, by rank."""
        return world_processes() if self.is_torch else {}

    def processes_of(self, ranks: Collection[int]) -> dict[int, ProcessIdentity]:
        """Return the processes of `ranks` as far as they are known."""
        return {rank: process for rank, process in self.processes().items() if rank in ranks}

    def leave(self) -> None:
        """Leave a world of our own and let go of its store. Idempotent; does nothing in the world of torch."""
        store, leave = self._store, self._leave
        if store is None or leave is None:
            return
        leave()
        self._store, self._leave = None, _nothing
        fork_guard.release(store)


def _nothing() -> None:
    """Do nothing, in a world that was left."""


def world_of_torch() -> World:
    """Return the world of torch.distributed.

    Raises:
        UsageError: torch.distributed is not initialised.
    """
    store = world_store()
    return World(dist.get_rank(), dist.get_world_size(), store)


def join_own_world(host: str, port: int, rank: int, size: int, settings: CoordinatorSettings) -> World:
    """Return a world whose store rank 0 serves at `host` and `port`, and nowhere else.

    Raises:
        UsageError: The arguments name no address or no rank, or rank 0 cannot listen there.
        CommTimeoutError: Nobody listened there within `create_timeout_s`; `.missing` names rank 0.
        NativeError: torch could not connect.
    """
    rendezvous = join_address(host, port, rank, size, settings)
    fork_guard.protect(rendezvous.store)
    return World(rank, size, rendezvous.store, rendezvous.leave)
