"""Ranks of a job with a secret agree on queues in its store: what happens where one of them does not take part."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator.group import GroupCoordinator
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.security import store as secured_store
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import DecodeError
from tests.handlers import alarm_in, ctrl_c
from tests.harness import RankPool, run_ranks
from tests.ports import free_port
from tests.secured import HERE
from tests.security.test_secured_worlds import settings_of
from tests.worlds import HostsPool, meet, new_group, outcome_of, run_at

PLACES = ["here", "there"]


def join(rank: int, world_size: int, directory: Path, port: int, timeout_s: float = 30.0) -> GroupCoordinator:
    """Join a world with a secret; return another group of its ranks, which pretend to be on two hosts."""
    settings = settings_of(directory, rank)
    init_distributed_environment(world_size, rank, f"tcp://{HERE}:{port}", backend="gloo", settings=settings)
    return new_group(get_world_group(), create_timeout_s=timeout_s)


def queue_of(group: GroupCoordinator) -> dict[str, Any]:
    """Make a queue from every rank to rank 0."""
    return outcome_of(lambda: group.create_single_reader_mq_broadcasters(0))


def keys_left(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    group, found = join(rank, world_size, directory, port), []
    exchange: Any = group._queues
    for _ in range(3):
        found.append(queue_of(group)["kind"])
        group.barrier()
        store = exchange._exchange._store
        own = [number for number in range(1, 40) if store.check([f"{number}/{rank}"])]
        found.append(len(own))
        group.barrier()
    group.destroy()
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("K8")
def test_what_was_told_is_deleted_behind_the_next_but_one(ranks2: RankPool) -> None:
    """However many queues are made, the store keeps two messages of each rank, with the keys of the last queue."""
    assert HostsPool(ranks2, PLACES).run(keys_left, free_port()) == [["NoneType", 2] * 3] * 2


def one_stays_away(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    group = join(rank, world_size, directory, port, timeout_s=0.7)
    found = {}
    if rank == 0:
        found = queue_of(group)
    meet(rank, range(world_size), directory, "gave up")
    if rank == 1:
        found = queue_of(group)
    after = outcome_of(group.barrier)
    meet(rank, range(world_size), directory, "looked")
    group.destroy()
    destroy_distributed_environment()
    return [found["kind"], found["missing"], after["kind"]]


@pytest.mark.guarantee("G8")
def test_a_rank_that_makes_no_queue_is_named(ranks2: RankPool) -> None:
    """At the deadline the group is broken; the rank that comes later learns why at once."""
    first, second = HostsPool(ranks2, PLACES).run(one_stays_away, free_port())
    assert first == ["CommTimeoutError", [1], "GroupBrokenError"]
    assert second[0] in ("CommTimeoutError", "PeerLostError")
    assert second[2] == "GroupBrokenError"


def one_is_interrupted(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    group = join(rank, world_size, directory, port)
    if rank == 0:
        with alarm_in("queue_of", ctrl_c):
            found = queue_of(group)
    else:
        meet(rank, range(world_size), directory, "interrupted")
        found = queue_of(group)
    if rank == 0:
        meet(rank, range(world_size), directory, "interrupted")
    meet(rank, range(world_size), directory, "looked")
    group.destroy()
    destroy_distributed_environment()
    return [found["kind"], found["peers"], "KeyboardInterrupt" in found["text"]]


@pytest.mark.guarantee("G37")
def test_an_interrupt_is_told_to_the_others(ranks2: RankPool) -> None:
    """A rank that Ctrl-C strikes while it waits for the others' keys breaks the group, which names it and why."""
    first, second = HostsPool(ranks2, PLACES).run(one_is_interrupted, free_port())
    assert first[0] == "KeyboardInterrupt"
    assert second == ["PeerLostError", [0], True]


def one_is_killed(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    group = join(rank, world_size, directory, port)
    meet(rank, range(world_size), directory, "joined")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = queue_of(group)
    group.destroy()
    destroy_distributed_environment()
    return [found["kind"], found["peers"]]


@pytest.mark.thorough
def test_a_death_ends_the_wait_for_its_keys() -> None:
    """A rank on the same kernel sees that the other one has ended, long before the deadline."""
    arguments = (PLACES, one_is_killed.__module__, one_is_killed.__qualname__, free_port())
    found = run_ranks(run_at, 2, *arguments, expect_dead=(1,))
    assert found[0] == ["PeerLostError", [1]]


def one_sends_nonsense(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    group = join(rank, world_size, directory, port)
    queues: Any = group._queues
    if rank == 1:
        queues._exchange._store.set("1/0", "nonsense")
        queues._exchange._store.set("1/1", "nonsense")
        meet(rank, range(world_size), directory, "written")
    else:
        meet(rank, range(world_size), directory, "written")
        found = queue_of(group)
    meet(rank, range(world_size), directory, "looked")
    group.destroy()
    destroy_distributed_environment()
    return [found["kind"]] if rank == 0 else [DecodeError.__name__]


def test_what_cannot_be_decoded_breaks_the_group(ranks2: RankPool) -> None:
    """Not even a holder of the secret makes a rank read anything but our types."""
    assert HostsPool(ranks2, PLACES).run(one_sends_nonsense, free_port()) == [["DecodeError"]] * 2


def the_store_ends(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    group = join(rank, world_size, directory, port)
    meet(rank, range(world_size), directory, "joined")
    if rank == 0:
        queues: Any = group._queues
        secured_store.close(queues._exchange._store)
    meet(rank, range(world_size), directory, "closed")
    found = queue_of(group)
    meet(rank, range(world_size), directory, "looked")
    group.destroy()
    destroy_distributed_environment()
    return [found["kind"]]


def test_the_end_of_the_store_is_a_typed_error(ranks2: RankPool) -> None:
    """On rank 0, which closed it, and on the other rank, whose connection broke."""
    assert HostsPool(ranks2, PLACES).run(the_store_ends, free_port()) == [["NativeError"]] * 2


def test_groups_of_one_host_agree_over_shared_memory(ranks2: RankPool) -> None:
    """They need no store to make a queue, with a secret or without."""
    assert ranks2.run(on_one_host, free_port()) == [[True, "NoneType"]] * 2


def on_one_host(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    group = join(rank, world_size, directory, port)
    queues: Any = group._queues
    found = [queues._exchange is None, queue_of(group)["kind"]]
    group.destroy()
    destroy_distributed_environment()
    assert CoordinatorSettings().secret_file is None
    return found
