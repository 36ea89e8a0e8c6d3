"""Rendezvous at an address: rank 0 serves a store there, and the others connect to it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.bootstrap.connections import open_tcp_store
from coordinator.bootstrap.secured import place_of
from coordinator.bootstrap.status_store import WorldStatusStore
from coordinator.security import store as secured_store
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CommTimeoutError, NativeError, UsageError
from shm_broadcast.liveness import fork_count

__all__ = ["WORLD_KEYS", "Rendezvous", "check_place", "join_address", "leaving", "meet_at_rank_0"]

WORLD_KEYS: Final = "group_coordinator/world"
"""The prefix of the keys of a world, in the store in which its ranks meet."""

# Rank 0 keeps its store at most this long while the others leave. torch writes to stderr on a rank that finds the
# store gone, and ranks usually leave together.
_LEAVE_S: Final = 0.1
# A rank that is earlier than rank 0 in the next world at an address looks again after this pause.
_LEFT_PAUSE_S: Final = 0.005


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous.

    Attributes:
        store: A store that every rank reaches.
        rank: Global rank of this process.
        world_size: Number of processes.
        leave: Releases the store's resources, after the world is destroyed. Idempotent; if it is interrupted it
            releases them all the same, or another call does.
        spans_hosts: Whether a launcher says that the processes are on several hosts.
    """

    store: dist.Store
    rank: int
    world_size: int
    leave: Callable[[], None]
    spans_hosts: bool = False


def check_place(rank: int, world_size: int, init_method: str) -> None:
    """Raise `UsageError` unless `rank` is one of so many ranks."""
    if rank < 0 or world_size < 1 or rank >= world_size:
        raise UsageError(
            f"with {init_method} pass the world size and this process's rank, 0 <= rank < world_size; "
            f"got world_size={world_size}, rank={rank}"
        )


def join_address(
    host: str, port: int, rank: int, world_size: int, settings: CoordinatorSettings
) -> Rendezvous:
    """Return a store that rank 0 serves at this address. torch.distributed is neither needed nor touched.

    Raises:
        UsageError: The arguments name no address or no rank, or rank 0 cannot listen there.
        CommTimeoutError: Nobody listened there within `create_timeout_s`; `.missing` names rank 0.
        NativeError: torch could not connect.
    """
    if not isinstance(host, str) or not host:
        raise UsageError(f"host must be the name or an address of rank 0's host, not {host!r}")
    for name, number in (("port", port), ("rank", rank), ("world_size", world_size)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise UsageError(f"{name} must be an integer, not {number!r}")
    if not 1 <= port <= 65535:
        raise UsageError(f"port must be from 1 to 65535, not {port}")
    check_place(rank, world_size, f"{host}:{port}")
    return meet_at_rank_0(host, port, rank, world_size, settings)


def meet_at_rank_0(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    settings: CoordinatorSettings,
    spans_hosts: bool = False,
    run: str = "",
) -> Rendezvous:
    """Return a store that rank 0 serves at this address, and which this rank has not left before.

    If `run` is not empty, it prefixes all keys.
    """
    end = time.monotonic() + settings.create_timeout_s
    place = place_of(settings, f"{run} {host}:{port}".lstrip(), rank, world_size)
    while True:
        store = open_tcp_store(host, port, rank, world_size, rank == 0, settings, place, spans_hosts)
        try:
            if run:
                store = dist.PrefixStore(run, store)
            if rank == 0 or not _was_left(store, rank, settings):
                leave = leaving(store, rank, world_size)
                return Rendezvous(store, rank, world_size, leave, spans_hosts)
        except BaseException:
            secured_store.close(store)
            raise
        # Rank 0 is still about to leave the last world at this address, and will serve the next one here.
        secured_store.close(store)
        del store
        if time.monotonic() >= end:
            raise CommTimeoutError(
                f"rendezvous (rank {rank} of {world_size}): rank 0 did not leave the last world at {host}:{port} "
                f"within {settings.create_timeout_s:.1f} s",
                missing=(0,),
            )
        time.sleep(_LEFT_PAUSE_S)


def _was_left(store: dist.Store, rank: int, settings: CoordinatorSettings) -> bool:
    """Return whether this rank has left the world of `store`, or the store has just ended."""
    key = f"left/{rank}"
    try:
        return ask_store(
            lambda: dist.PrefixStore(WORLD_KEYS, store).check([key]), "rendezvous", settings.create_timeout_s
        )
    except NativeError:
        return True


def leaving(store: dist.Store, rank: int, world_size: int) -> Callable[[], None]:
    """Return a function that leaves a store served by rank 0; rank 0 waits up to `_LEAVE_S` for the others.

    In a forked child the function does nothing.
    """
    forks = fork_count()
    status_store = WorldStatusStore(dist.PrefixStore(WORLD_KEYS, store), rank, range(world_size))

    def leave() -> None:
        if forks != fork_count():
            return
        try:
            if rank:
                status_store.leave()
            else:
                await_others()
        finally:
            secured_store.close(store)

    def await_others() -> None:
        end = time.monotonic() + _LEAVE_S
        while (
            status_store.is_reachable and len(status_store.left()) < world_size - 1 and time.monotonic() < end
        ):
            time.sleep(0.002)

    return leave
