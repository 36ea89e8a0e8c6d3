"""Failures while a world or a group is created, and failures of the rank that hosts the world's store."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from coordinator.bootstrap import rendezvous
from coordinator.bootstrap.agreement import agreeing
from coordinator.bootstrap.agreement.attendance import Attendance
from coordinator.bootstrap.group_builder import GroupBuilder
from coordinator.bootstrap.rendezvous import world_processes
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from coordinator.settings import CoordinatorSettings
from shm_broadcast.liveness import process_state
from tests.harness import RankPool, run_ranks
from tests.ports import free_port
from tests.samples import sampled
from tests.waiting import wait_until
from tests.worlds import (
    EVERYONE_WAITS,
    WAITS,
    join_world,
    meet,
    new_group,
    outcome_of,
    tell_when_waiting,
    world,
)

PROMPT_S = 20.0

ENDS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def replace(owner: ModuleType | type, name: str, function: Callable[..., Any]) -> None:
    """Replace a function of the product in this process, which ends soon."""
    assert hasattr(owner, name)
    setattr(owner, name, function)


def end_when_seen(other: int, end: str) -> None:
    """Kill or stop this rank, as `end` says, two seconds after it has seen `other` while it waits for all ranks."""

    def look(self: Any) -> None:
        if other in Attendance(self._store, self._rank, self._ranks).present():
            time.sleep(2.0)  # by then `other` has seen this rank too, and can report its death
            ENDS[end]()

    replace(agreeing._Agreement, "raise_if_lost", look)


# --- while it is being made -----------------------------------------------------------------------------------


def die_in_rendezvous(
    rank: int, world_size: int, directory: Path, method: str, culprit: int
) -> dict[str, Any] | None:
    """Keep the last rank away so that the others wait; then `culprit` dies."""
    found = None
    if rank == culprit:
        end_when_seen(1 - culprit, "killed")
    if rank != world_size - 1:
        settings = CoordinatorSettings.resolve({}, create_timeout_s=60.0)
        method = method.format(directory=directory)
        found = outcome_of(
            lambda: init_distributed_environment(world_size, rank, method, backend="gloo", settings=settings)
        )
    meet(rank, [other for other in range(world_size) if other != culprit], directory, "told")
    return found


@pytest.mark.parametrize("way", ["file", "tcp"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_death_during_the_rendezvous_is_told_to_the_waiting_ranks(way: str, culprit: int) -> None:
    """Ranks that wait for a third learn at once that another one has died, and which one."""
    method = f"tcp://127.0.0.1:{free_port()}" if way == "tcp" else "file://{directory}/rendezvous"
    found = run_ranks(die_in_rendezvous, 3, method, culprit, expect_dead=[culprit])[1 - culprit]
    assert (found["kind"], found["peers"]) == ("PeerLostError", [culprit]), found
    assert found["seconds"] < PROMPT_S


def die_in_creation(rank: int, world_size: int, directory: Path, culprit: int) -> dict[str, Any] | None:
    join_world(rank, world_size, directory)
    group = get_world_group()
    group.barrier()
    found = None
    if rank == culprit:
        end_when_seen(1 - culprit, "killed")
    if rank != world_size - 1:
        found = outcome_of(lambda: new_group(group))
    meet(rank, [other for other in range(world_size) if other != culprit], directory, "told")
    destroy_distributed_environment()
    return found


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_death_during_the_creation_of_a_group_is_told_to_the_waiting_ranks(culprit: int) -> None:
    """A rank that waits for a third in group creation learns at once which rank died."""
    found = run_ranks(die_in_creation, 3, culprit, expect_dead=[culprit])[1 - culprit]
    assert (found["kind"], found["peers"]) == ("PeerLostError", [culprit]), found
    assert found["seconds"] < PROMPT_S


def die_while_connecting(rank: int, world_size: int, directory: Path, what: str) -> dict[str, Any] | None:
    """Let all ranks agree; then rank 1 dies before it connects."""
    if what == "the world":
        if rank == 1:
            replace(rendezvous, "connect_watched", lambda *_: ENDS["killed"]())
        found = outcome_of(lambda: join_world(rank, world_size, directory))
    else:
        join_world(rank, world_size, directory)
        if rank == 1:
            replace(GroupBuilder, "share", lambda *_: ENDS["killed"]())
        found = outcome_of(lambda: new_group(get_world_group()))
    meet(rank, [0, 2], directory, "told")
    destroy_distributed_environment()
    return found


@pytest.mark.parametrize("what", ["the world", "a group"])
def test_a_death_while_the_ranks_connect_is_told_to_the_others(what: str) -> None:
    """A rank that dies between the agreement and the first collective is named at once."""
    for found in run_ranks(die_while_connecting, 3, what, expect_dead=[1], check_leaks=False)[::2]:
        assert (found["kind"], found["peers"]) == ("PeerLostError", [1]), found
        assert found["seconds"] < PROMPT_S


def end_before_the_hand_over(rank: int, world_size: int, directory: Path, end: str) -> dict[str, Any]:
    """Let all ranks agree; then rank 0 ends before the others take the memory of the groups in which it is first."""
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    join_world(rank, world_size, directory, create_timeout_s=3.0)
    map_memory = GroupBuilder.share

    def late(self: GroupBuilder, number: int) -> None:
        meet(rank, range(world_size), directory, "agreed")
        if rank == 0:
            ENDS[end]()
        wait_until(lambda: process_state(processes[0]) in ("dead", "stopped"), "the end of rank 0")
        map_memory(self, number)

    processes = world_processes()
    replace(GroupBuilder, "share", late)
    found = outcome_of(lambda: initialize_model_parallel(2, 2))
    meet(rank, range(1, world_size), directory, "told")
    if rank == 1 and end == "stopped":
        os.kill(int((directory / "pid-0").read_text()), signal.SIGKILL)
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("end", ENDS)
def test_a_first_rank_that_ends_before_it_hands_over_its_memory_is_named(end: str) -> None:
    """Every rank names it, one too that is in no group with it, and nobody blames the memory."""
    for found in run_ranks(end_before_the_hand_over, 4, end, expect_dead=[0])[1:]:
        if end == "killed":
            assert (found["kind"], found["peers"]) == ("PeerLostError", [0]), found
        else:
            assert (found["kind"], found["missing"]) == ("CommTimeoutError", [0]), found
        assert found["seconds"] < PROMPT_S


def absent_in_creation(rank: int, world_size: int, directory: Path) -> dict[str, Any] | None:
    with world(rank, world_size, directory) as group:
        found = None
        if rank < 2:
            found = outcome_of(lambda: new_group(group, create_timeout_s=1.0))
        meet(rank, range(world_size), directory, "told")
        group.barrier()
        return found


@pytest.mark.guarantee("G8")
def test_ranks_that_do_not_create_the_group_are_named(ranks4: RankPool) -> None:
    """Group creation has its own deadline, names exactly the absent ranks, and leaves other groups intact."""
    for found in ranks4.run(absent_in_creation)[:2]:
        assert (found["kind"], found["missing"]) == ("CommTimeoutError", [2, 3]), found
        assert found["seconds"] >= 1.0


def anew_after_an_uneven_failure(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            outcome_of(lambda: new_group(group, create_timeout_s=0.5))
        meet(rank, range(world_size), directory, "failed")
    with world(rank, world_size, directory) as group, new_group(group) as other:
        other.barrier()
        return other.unique_name


def test_a_new_world_forgets_a_creation_that_only_one_rank_tried(ranks2: RankPool) -> None:
    """In a new world the ranks number their groups alike again, and so wait for the same name."""
    assert ranks2.run(anew_after_an_uneven_failure) == ["tp:0", "tp:0"]


def absent_in_rendezvous(
    rank: int, world_size: int, directory: Path, method: str, absent: int
) -> dict[str, Any] | None:
    found = None
    if rank != absent:
        settings = CoordinatorSettings.resolve({}, create_timeout_s=1.5)
        method = method.format(directory=directory)
        found = outcome_of(
            lambda: init_distributed_environment(world_size, rank, method, backend="gloo", settings=settings)
        )
    meet(rank, range(world_size), directory, "told")
    return found


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(("way", "absent"), sampled(3, product(("file", "tcp"), (0, 1))))
def test_a_rank_that_never_comes_to_the_rendezvous_is_named(ranks2: RankPool, way: str, absent: int) -> None:
    """The other rank gives up after `create_timeout_s` and names the missing one."""
    method = f"tcp://127.0.0.1:{free_port()}" if way == "tcp" else "file://{directory}/rendezvous"
    found = ranks2.run(absent_in_rendezvous, method, absent)[1 - absent]
    assert (found["kind"], found["missing"]) == ("CommTimeoutError", [absent]), found
    assert 1.5 <= found["seconds"] < PROMPT_S


def await_store_threads() -> None:
    """Wait until the threads that asked a stopped store have ended, as they do some time after it was killed."""
    wait_until(
        lambda: not [each for each in threading.enumerate() if each.name.startswith("group-coordinator")],
        "the threads that asked the store have ended",
    )


def stop_in_rendezvous(rank: int, world_size: int, directory: Path, port: int) -> dict[str, Any] | None:
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 0:
        end_when_seen(1, "stopped")
    found = None
    if rank != 2:
        settings = CoordinatorSettings.resolve({}, create_timeout_s=3.0)
        method = f"tcp://127.0.0.1:{port}"
        found = outcome_of(
            lambda: init_distributed_environment(world_size, rank, method, backend="gloo", settings=settings)
        )
    meet(rank, [1, 2], directory, "told")
    if rank == 1:
        os.kill(int((directory / "pid-0").read_text()), signal.SIGKILL)
    await_store_threads()
    return found


def test_a_host_of_the_store_that_is_stopped_during_the_rendezvous_is_named() -> None:
    """The deadline holds although the store no longer answers, and its host is named."""
    found = run_ranks(stop_in_rendezvous, 3, free_port(), expect_dead=[0])[1]
    assert found["kind"] == "CommTimeoutError", found
    assert 0 in found["missing"]
    assert found["seconds"] < PROMPT_S


def end_before_a_group(rank: int, world_size: int, directory: Path, port: int, end: str) -> dict[str, Any]:
    """Let rank 0, which serves the store, end before rank 1 creates a group."""
    settings = CoordinatorSettings.resolve({}, create_timeout_s=10.0)
    method = f"tcp://127.0.0.1:{port}"
    init_distributed_environment(world_size, rank, method, backend="gloo", settings=settings)
    meet(rank, range(world_size), directory, "ready")
    if rank == 0:
        ENDS[end]()
    server = world_processes()[0]
    wait_until(lambda: process_state(server) in ("dead", "stopped"), "the end of rank 0")
    found = outcome_of(lambda: new_group(get_world_group(), create_timeout_s=1.0))
    if end == "stopped":
        os.kill(server.pid, signal.SIGKILL)
    await_store_threads()
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("end", ENDS)
def test_a_host_of_the_store_that_has_ended_before_a_group_is_created_is_named(end: str) -> None:
    """The ranks have not met for this group: its name is the first thing for which they ask the store."""
    found = run_ranks(end_before_a_group, 2, free_port(), end, expect_dead=[0])[1]
    expected = ("PeerLostError", [0], []) if end == "killed" else ("CommTimeoutError", [], [0])
    assert (found["kind"], found["peers"], found["missing"]) == expected, found
    assert found["seconds"] < PROMPT_S


# --- the host of the store --------------------------------------------------------------------------------------


def lose_the_host(rank: int, world_size: int, directory: Path, port: int, name: str, end: str) -> Any:
    """Let rank 0, which hosts the store of a world that the user initialised, die or stop."""
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    init_distributed_environment(world_size, rank, settings=CoordinatorSettings.resolve({}))
    group = get_world_group()
    group.barrier()
    meet(rank, range(world_size), directory, "ready")
    if rank == 0:
        meet(rank, range(world_size), directory, "waits")
        ENDS[end]()
    tell_when_waiting(group, directory)
    call = WAITS[name] if rank == 1 or name in EVERYONE_WAITS else WAITS["barrier"]
    found: list[Any] = [outcome_of(lambda: call(group, 0, 1.0)), outcome_of(group.barrier)]
    start = time.monotonic()
    group.destroy()
    found.append(time.monotonic() - start)
    meet(rank, range(1, world_size), directory, "told")
    if rank == 1 and end == "stopped":
        os.kill(int((directory / "pid-0").read_text()), signal.SIGKILL)
    await_store_threads()
    destroy_distributed_environment()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", ["barrier", "all_reduce", "recv_object", "broadcast_object"])
def test_the_death_of_the_rank_that_hosts_the_store_is_told(name: str) -> None:
    """Without a status store each survivor notices by itself that rank 0 is dead."""
    for first, second, seconds in run_ranks(lose_the_host, 3, free_port(), name, "killed", expect_dead=[0])[
        1:
    ]:
        assert (first["kind"], first["peers"]) == ("PeerLostError", [0]), first
        assert first["seconds"] < PROMPT_S
        assert second["kind"] == "GroupBrokenError"
        assert seconds < PROMPT_S


@pytest.mark.parametrize("name", ["barrier", "all_reduce", "recv_object", "broadcast_object"])
def test_a_stopped_host_of_the_store_is_named(name: str) -> None:
    """The status store hangs with rank 0; the others still raise, name it, and do not blame each other."""
    for first, second, seconds in run_ranks(lose_the_host, 3, free_port(), name, "stopped", expect_dead=[0])[
        1:
    ]:
        assert (first["kind"], first["missing"]) == ("CommTimeoutError", [0]), first
        assert first["seconds"] < PROMPT_S
        assert second["kind"] == "GroupBrokenError"
        assert seconds < PROMPT_S
