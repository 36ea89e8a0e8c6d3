"""Join a world in a rank's body, list the calls in which a rank can wait, and record how a wait ended."""

import importlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from coordinator.errors import CommError, UsageError
from coordinator.group import GroupCoordinator
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.queues import group_queues
from coordinator.settings import CoordinatorSettings
from device_comm.cpu import shared_memory
from device_comm.cpu.several_hosts.communicator import HierarchicalCommunicator
from shm_broadcast.liveness import this_process
from tests.harness import RankPool
from tests.waiting import wait_until

__all__ = [
    "EVERYONE_WAITS",
    "FIRST_WAITS",
    "LARGE",
    "WAITS",
    "ApartPool",
    "FarPool",
    "HostsPool",
    "hierarchical",
    "join_world",
    "meet",
    "new_group",
    "outcome_of",
    "refused",
    "run_at",
    "run_far",
    "tell_when_waiting",
    "world",
]

LARGE = 64 << 20
"""A number of bytes that exceeds every kernel buffer: their sender waits for the receiver."""

Wait = Callable[[GroupCoordinator, int, float | None], Any]


def join_world(rank: int, world_size: int, directory: Path, **settings: Any) -> None:
    """Join a world through a rendezvous in `directory`."""
    init_distributed_environment(
        world_size,
        rank,
        f"file://{directory}/rendezvous",
        backend="gloo",
        settings=CoordinatorSettings.resolve({}, **settings),
    )


@contextmanager
def world(rank: int, world_size: int, directory: Path, **settings: Any) -> Iterator[GroupCoordinator]:
    """Join a world through a rendezvous in `directory`, yield its group, and leave it."""
    join_world(rank, world_size, directory, **settings)
    try:
        yield get_world_group()
    finally:
        destroy_distributed_environment()


def new_group(group: GroupCoordinator, name: str = "tp", **settings: Any) -> GroupCoordinator:
    """Create another group of the ranks of `group`."""
    chosen = CoordinatorSettings.resolve({}, **settings)
    return GroupCoordinator([group.ranks], group.local_rank, "gloo", True, group_name=name, settings=chosen)


def hierarchical(group: GroupCoordinator) -> HierarchicalCommunicator:
    """Return the communicator of a group whose ranks are on several hosts, where some ranks share a host."""
    communicator = group.device_communicator
    assert isinstance(communicator, HierarchicalCommunicator)
    return communicator


def outcome_of(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the value or error of `call` in a form that msgpack carries, and the time that the call took."""
    start = time.monotonic()
    error: BaseException | None = None
    value = None
    try:
        value = call()
    except (CommError, KeyboardInterrupt) as raised:
        error = raised
    cause = None if error is None else error.__cause__
    return {
        "kind": type(error).__name__,
        "value": value if isinstance(value, (int, str, list)) else None,
        "missing": list(getattr(error, "missing", ())),
        "peers": list(getattr(error, "peers", ())),
        "text": str(error),
        "cause": type(cause).__name__,
        "seconds": time.monotonic() - start,
    }


def meet(rank: int, ranks: Collection[int], directory: Path, place: str) -> None:
    """Wait until all of `ranks` have reached the point named `place`. It uses files and no group."""
    (directory / f"{place}-{rank}").touch()
    wait_until(
        lambda: all((directory / f"{place}-{other}").exists() for other in ranks),
        f"all of ranks {sorted(ranks)} at {place!r}",
        # Calls before this point may take as long as the harness allows.
        timeout_s=300.0,
    )


def tell_when_waiting(group: GroupCoordinator, directory: Path, place: str = "waits") -> None:
    """Let this rank arrive at `place`, as in `meet`, once one of its calls has waited for other ranks for 0.1 s.

    A waiting call looks for dead ranks at that interval, and sleeps between two looks.
    """
    health: Any = group._health
    check = health.check_peers

    def tell_and_check(operation: Any) -> None:
        (directory / f"{place}-{group.rank}").touch()
        check(operation)

    health.check_peers = tell_and_check


def refused(call: Any) -> bool:
    """Return whether `call` raises a UsageError."""
    try:
        call()
    except UsageError:
        return True
    return False


class ApartPool:
    """Run bodies in ranks that pretend to be on different hosts, which makes everything use Gloo."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def run(self, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Run `body` as the pool does."""
        return self._pool.run(_run_apart, body.__module__, body.__qualname__, *args, **options)


def _run_apart(rank: int, world_size: int, directory: Path, module: str, name: str, *args: Any) -> Any:
    place, shared_memory.host_id = shared_memory.host_id, lambda: f"host {rank}"
    try:
        return getattr(importlib.import_module(module), name)(rank, world_size, directory, *args)
    finally:
        shared_memory.host_id = place


class HostsPool:
    """Run bodies in ranks that pretend to be on other hosts; `places` has a host id for each rank."""

    def __init__(self, pool: RankPool, places: Sequence[str]) -> None:
        self._pool = pool
        self._places = list(places)

    def run(self, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Run `body` as the pool does."""
        return self._pool.run(run_at, self._places, body.__module__, body.__qualname__, *args, **options)


class FarPool(HostsPool):
    """As `HostsPool`, also for the queues of groups."""

    def run(self, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Run `body` as the pool does."""
        return self._pool.run(run_far, self._places, body.__module__, body.__qualname__, *args, **options)


def run_at(
    rank: int, world_size: int, directory: Path, places: list[str], module: str, name: str, *args: Any
) -> Any:
    """Run a body in a rank that pretends to be on host `places[rank]`. This is a function for `run_ranks`."""
    place, shared_memory.host_id = shared_memory.host_id, lambda: places[rank]
    try:
        return getattr(importlib.import_module(module), name)(rank, world_size, directory, *args)
    finally:
        shared_memory.host_id = place


def run_far(
    rank: int, world_size: int, directory: Path, places: list[str], module: str, name: str, *args: Any
) -> Any:
    """As `run_at`, also for the queues of groups, which then go over TCP between the pretended hosts."""
    own = this_process()
    process = msgspec.structs.replace(own, boot_id=f"{places[rank]} {own.boot_id}")
    with mock.patch.object(group_queues, "this_process", return_value=process):
        return run_at(rank, world_size, directory, places, module, name, *args)


def small() -> torch.Tensor:
    """Return a tensor that divides evenly over 2 and 4 ranks."""
    return torch.arange(8, dtype=torch.float32)


def large() -> torch.Tensor:
    """Return a tensor of `LARGE` bytes."""
    return torch.empty(LARGE, dtype=torch.uint8)


EVERYONE_WAITS: dict[str, Wait] = {
    "barrier": lambda group, _, s: group.barrier(s),
    "all_reduce": lambda group, _, s: group.all_reduce(small(), timeout_s=s),
    "all_reduce of 1 MiB": lambda group, _, s: group.all_reduce(torch.ones(1 << 18), timeout_s=s),
    "all_gather": lambda group, _, s: group.all_gather(small(), timeout_s=s),
    "reduce_scatter": lambda group, _, s: group.reduce_scatter(small(), timeout_s=s),
    "broadcast": lambda group, peer, s: group.broadcast(small(), peer, timeout_s=s),
    "scatter": lambda group, peer, s: group.scatter(
        small()[:1], small()[: group.world_size], peer, timeout_s=s
    ),
    "all_to_all": lambda group, _, s: group.all_to_all(small(), timeout_s=s),
    "all_gather_object": lambda group, _, s: group.all_gather_object("x", timeout_s=s),
    "broadcast_object": lambda group, peer, s: group.broadcast_object(None, peer, timeout_s=s),
    "broadcast_tensor_dict": lambda group, peer, s: group.broadcast_tensor_dict({"x": 1}, peer, timeout_s=s),
}
"""Calls in which every rank waits for rank `peer` of the group."""

FIRST_WAITS: dict[str, Wait] = {
    "reduce": lambda group, _, s: group.reduce(small(), timeout_s=s),
    "gather": lambda group, _, s: group.gather(small(), timeout_s=s),
    "gather_object": lambda group, _, s: group.gather_object("x", timeout_s=s),
    "recv": lambda group, peer, s: group.recv((8,), torch.float32, peer, timeout_s=s),
    "recv_object": lambda group, peer, s: group.recv_object(peer, timeout_s=s),
    "recv_tensor_dict": lambda group, peer, s: group.recv_tensor_dict(peer, timeout_s=s),
    "send of 64 MiB": lambda group, peer, s: group.send(large(), peer, timeout_s=s),
    "send_object of 64 MiB": lambda group, peer, s: group.send_object(bytes(LARGE), peer, timeout_s=s),
    "send_tensor_dict of 64 MiB": lambda group, peer, s: group.send_tensor_dict(
        {"x": large()}, peer, timeout_s=s
    ),
    "isend of 64 MiB": lambda group, peer, s: group.device_communicator.isend(
        large(), peer, timeout_s=s
    ).wait(),
    "isend_object of 64 MiB": lambda group, peer, s: group.isend_object(
        bytes(LARGE), peer, timeout_s=s
    ).wait(),
    "irecv": lambda group, peer, s: group.device_communicator.irecv(small(), peer, timeout_s=s).wait(),
}
"""Calls in which rank 0 of the group waits for rank `peer`."""

WAITS = {**EVERYONE_WAITS, **FIRST_WAITS}
