"""When a rank dies, stops, is interrupted or leaves, every rank that waits for it learns which one, at once."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from coordinator.group import GroupCoordinator
from coordinator.parallel_state import destroy_distributed_environment, get_world_group
from tests.harness import RankPool, run_ranks
from tests.rank_exit import RankExit
from tests.samples import sampled
from tests.waiting import has_ended, wait_until
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

# Deadlines are minutes; a death is noticed within a second, and a busy machine may take a few.
PROMPT_S = 20.0

CALLS = [
    "broadcast_object",
    "recv_object",
    "recv_tensor_dict",
    "barrier",
    "all_reduce",
    "all_gather_object",
    "gather",
    "send of 64 MiB",
]


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_without_destroy() -> None:
    raise RankExit(0)


def exit_hard() -> None:
    os._exit(3)


DEATHS: dict[str, Callable[[], None]] = {
    "killed": be_killed,
    "sys.exit": exit_without_destroy,
    "os._exit": exit_hard,
}


def survivors_of(
    rank: int, world_size: int, directory: Path, name: str, death: str, culprit: int
) -> list[dict[str, Any]]:
    """Wait for `culprit` in call `name` while it dies; return this error and that of the next call."""
    join_world(rank, world_size, directory)
    try:
        return _survive(get_world_group(), directory, name, death, culprit)
    finally:
        if rank != culprit:
            destroy_distributed_environment()


def _survive(
    group: GroupCoordinator, directory: Path, name: str, death: str, culprit: int
) -> list[dict[str, Any]]:
    rank, world_size = group.rank, group.world_size
    group.barrier()
    meet(rank, range(world_size), directory, "ready")
    if rank == culprit:
        meet(rank, range(world_size), directory, "waits")
        DEATHS[death]()
    tell_when_waiting(group, directory)
    call = WAITS[name] if rank == 0 or name in EVERYONE_WAITS else WAITS["barrier"]
    found = [outcome_of(lambda: call(group, culprit, None)), outcome_of(group.barrier)]
    # Leave only after all have their error, or the others might see the leaving instead.
    meet(rank, [other for other in range(world_size) if other != culprit], directory, "told")
    return found


def assert_all_were_told(found: list[Any], culprit: int) -> None:
    assert found[culprit] is None
    for rank, outcomes in enumerate(found):
        if rank == culprit:
            continue
        first, second = outcomes
        assert (first["kind"], first["peers"]) == ("PeerLostError", [culprit]), (rank, first)
        assert first["seconds"] < PROMPT_S, (rank, first)
        assert (second["kind"], second["cause"]) == ("GroupBrokenError", "PeerLostError"), (rank, second)


@pytest.mark.guarantee("D7")
@pytest.mark.guarantee("D8")
@pytest.mark.parametrize(("name", "death", "world_size"), sampled(5, product(CALLS, DEATHS, (2, 4))))
def test_survivors_name_the_dead_rank(name: str, death: str, world_size: int) -> None:
    """All survivors raise `PeerLostError` with the dead rank alone, in any call and for any kind of death."""
    culprit = world_size - 1
    found = run_ranks(survivors_of, world_size, name, death, culprit, expect_dead=[culprit])
    assert_all_were_told(found, culprit)


@pytest.mark.parametrize("name", ["barrier", "all_reduce", "broadcast"])
def test_survivors_name_rank_0_of_a_world_by_directory(name: str) -> None:
    """The death of the rank that created the rendezvous is told like any other."""
    assert_all_were_told(run_ranks(survivors_of, 4, name, "killed", 0, expect_dead=[0]), 0)


def all_but_one_die(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    join_world(rank, world_size, directory)
    group = get_world_group()
    group.barrier()
    others = [pid for pid in group.all_gather_object(os.getpid()) if pid != os.getpid()]
    meet(rank, range(world_size), directory, "ready")
    if rank != 1:
        be_killed()
    wait_until(lambda: all(map(has_ended, others)), f"the end of processes {others}")
    found = outcome_of(group.barrier)
    destroy_distributed_environment()
    return found


def test_all_dead_ranks_are_named_in_a_call_that_starts_after_their_death() -> None:
    """A survivor names all three ranks that died before its call."""
    found = run_ranks(all_but_one_die, 4, expect_dead=[0, 2, 3])[1]
    assert (found["kind"], found["peers"]) == ("PeerLostError", [0, 2, 3])


def die_and_leave_a_child(rank: int, world_size: int, directory: Path, name: str) -> list[dict[str, Any]]:
    join_world(rank, world_size, directory)
    group = get_world_group()
    group.barrier()
    if rank == 1 and os.fork() == 0:
        # The child holds copies of all sockets of its parent and lives on.
        while directory.exists() and not (directory / "told-0").exists():
            time.sleep(0.02)  # until the test ends, which removes the directory
        os._exit(0)
    found = _survive(group, directory, name, "killed", 1)
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("D7")
@pytest.mark.parametrize("name", ["barrier", "recv_object", "broadcast_object", "send of 64 MiB"])
def test_a_living_child_that_inherited_the_sockets_does_not_hide_a_death(name: str) -> None:
    """A death is noticed although a child of the dead rank keeps its connections open."""
    assert_all_were_told(run_ranks(die_and_leave_a_child, 2, name, expect_dead=[1]), 1)


def one_is_stopped(rank: int, world_size: int, directory: Path, name: str) -> dict[str, Any] | None:
    join_world(rank, world_size, directory)
    group = get_world_group()
    pids = group.all_gather_object(os.getpid())
    culprit = world_size - 1
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0 or name in EVERYONE_WAITS:
        found = outcome_of(lambda: WAITS[name](group, culprit, 1.0))
    else:
        # Rank 0 is in another call and would count as absent here, so its deadline must pass first.
        found = outcome_of(lambda: group.barrier(60.0))
    meet(rank, range(culprit), directory, "told")
    if rank == 0:
        os.kill(pids[culprit], signal.SIGKILL)
    destroy_distributed_environment()
    return found


@pytest.mark.parametrize("name", ["barrier", "all_reduce", "recv_object", "send of 64 MiB"])
def test_a_stopped_rank_is_named_and_called_stopped(name: str) -> None:
    """A stopped rank counts as missing at the deadline, and the text gives its state."""
    for found in run_ranks(one_is_stopped, 3, name, expect_dead=[2])[:2]:
        assert (found["kind"], found["missing"]) == ("CommTimeoutError", [2]), found
        assert "stopped" in found["text"]


def one_is_interrupted(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as group:
        group.barrier()
        if rank == 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            found = outcome_of(group.barrier)
            timer.join()
        elif rank == 2:
            meet(rank, range(world_size), directory, "told")
            return outcome_of(group.barrier)
        else:
            found = outcome_of(group.barrier)
        meet(rank, range(world_size), directory, "told")
        return found


def test_the_interruption_of_a_rank_is_told_to_the_others(ranks4: RankPool) -> None:
    """Ctrl-C raises `KeyboardInterrupt` in one rank, and `PeerLostError` naming it in the others."""
    found = ranks4.run(one_is_interrupted)
    assert found[1]["kind"] == "KeyboardInterrupt"
    for rank in (0, 2, 3):
        assert (found[rank]["kind"], found[rank]["peers"]) == ("PeerLostError", [1]), found[rank]
    assert "interrupted" in found[0]["text"]


def one_leaves(rank: int, world_size: int, directory: Path, name: str) -> dict[str, Any] | None:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        found = None
        culprit = world_size - 1
        if rank == culprit:
            meet(rank, range(world_size), directory, "waits")
            group.destroy()
        else:
            tell_when_waiting(group, directory)
            call = WAITS[name] if rank == 0 or name in EVERYONE_WAITS else WAITS["barrier"]
            found = outcome_of(lambda: call(group, culprit, None))
        meet(rank, range(world_size), directory, "told")
        group.destroy()
        first.barrier()
        return found


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_destroyed_its_group_is_named(ranks4: RankPool, name: str) -> None:
    """Ranks that wait for a rank that left learn so; its other groups are not disturbed."""
    for rank, found in enumerate(ranks4.run(one_leaves, name)[:3]):
        assert (found["kind"], found["peers"]) == ("PeerLostError", [3]), (rank, found)
        assert found["seconds"] < PROMPT_S
        assert "destroyed" in found["text"]


def leave_and_end(rank: int, world_size: int, directory: Path, marks: str) -> dict[str, Any] | None:
    """Rank 1 sends its part, destroys its groups and ends; rank 0 still waits for rank 2."""
    join_world(rank, world_size, directory)
    group = get_world_group()
    group.barrier()
    if rank == 1:
        meet(rank, range(world_size), directory, "waits")
        group.gather_object("part 1")
        destroy_distributed_environment()
        os._exit(0)
    found = None
    if rank == 0:
        tell_when_waiting(group, directory)
        found = outcome_of(lambda: group.gather_object("part 0"))
    else:
        meet(rank, range(world_size), directory, "waits")
        wait_until((Path(marks) / "ended").exists, "the end of rank 1")
        group.gather_object("part 2")
    meet(rank, [0, 2], directory, "told")
    destroy_distributed_environment()
    return found


class Ended:
    """Say when the process of rank 1 has been gone for half a second, in which rank 0 looks several times."""

    def __init__(self, marks: Path) -> None:
        """Use a directory for the mark."""
        self._marks = marks

    def __call__(self, pids: Sequence[int]) -> None:
        """Wait for the end."""
        wait_until(lambda: has_ended(pids[1]), "the end of rank 1")
        time.sleep(0.5)
        (self._marks / "ended").touch()


@pytest.mark.guarantee("D7")
def test_a_rank_that_leaves_in_order_and_ends_is_not_lost(tmp_path: Path) -> None:
    """What it sent before is received: a call that waits for another rank goes on."""
    ended = Ended(tmp_path)
    found = run_ranks(leave_and_end, 3, str(tmp_path), expect_dead=[1], while_running=ended)[0]
    assert found["value"] == ["part 0", "part 1", "part 2"], found


def lose_a_reader(
    rank: int, world_size: int, directory: Path, own: bool, sends: bool
) -> list[dict[str, Any]] | None:
    """Kill reader 2 of a queue. Reader 1 waits for a message; the writer sends on, or does something else."""
    join_world(rank, world_size, directory)
    group = new_group(get_world_group())
    if own:
        group.enable_broadcaster()
    end: Any = group.mq_broadcaster if own else group.create_mq_broadcaster(0)
    meet(rank, range(world_size), directory, "ready")
    if rank == 2:
        be_killed()
    found = []
    if rank == 0:
        if not sends:
            wait_until((directory / "found-1").exists, "reader 1")

        def fill() -> None:
            while True:
                end.enqueue(bytes(1 << 20))

        found = [outcome_of(fill)]
    else:

        def empty() -> None:
            while True:
                group.broadcast_object() if own else end.dequeue()

        found = [outcome_of(empty)]
        (directory / "found-1").touch()
    found.append(outcome_of(group.barrier))
    meet(rank, [0, 1], directory, "told")
    group.destroy()
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("G18")
@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_the_death_of_a_reader_is_told_to_the_other_readers(own: bool, sends: bool) -> None:
    """Whoever finds it breaks the group: the writer when it needs room, or a reader that waits."""
    for first, second in run_ranks(lose_a_reader, 3, own, sends, expect_dead=[2])[:2]:
        assert (first["kind"], first["peers"]) == ("PeerLostError", [2]), first
        assert first["seconds"] < PROMPT_S
        assert second["kind"] == "GroupBrokenError"
