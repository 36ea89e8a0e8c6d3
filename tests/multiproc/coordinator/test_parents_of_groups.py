"""Ranks that create groups among themselves notice that the group which they have already is broken."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator import GroupCoordinator, ParallelGroups
from coordinator.layout import ParallelLayout
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from device_comm.health import GroupHealth
from tests.handlers import Interrupt, alarm_in
from tests.harness import RankPool
from tests.ports import free_port
from tests.waiting import wait_until
from tests.worlds import ApartPool, meet, outcome_of, world

WITHIN_S = 10.0
"""Until a rank that waits in vain has its error; a creation waits for 300 s."""


def sub_group(group: GroupCoordinator) -> None:
    group.create_subgroup([0, 1])


def split(group: GroupCoordinator) -> None:
    group.split_group([[0, 1], [2, 3]])


def layout(group: GroupCoordinator) -> None:
    ParallelGroups.create(ParallelLayout(tensor=4), world=group)


CREATIONS = {"sub_group": sub_group, "split": split, "layout": layout}


def interrupted(group: GroupCoordinator) -> None:
    """Wait for a message that never comes until a signal handler raises."""

    def interrupt() -> None:
        raise Interrupt

    try:
        with alarm_in("_wait", interrupt):
            group.recv(torch.Size([1]), torch.float32, 0)
    except Interrupt:
        return
    raise AssertionError("the call was not interrupted")


def breaks(rank: int, world_size: int, directory: Path, creation: str, ends: bool) -> dict[str, Any] | None:
    """Interrupt rank 3 in a call of the group while the others create groups; rank 0 ends at its error if `ends`."""
    create: Callable[[GroupCoordinator], None] = CREATIONS[creation]
    with world(rank, world_size, directory) as group:
        group.barrier()
        # A rank that is still in the barrier when the group breaks would find that there.
        meet(rank, range(world_size), directory, "begun")
        found = None
        if rank == 3:
            interrupted(group)
        else:
            # The last one to come finds rank 0 ended when it looks for the first time.
            time.sleep(0.7 * rank)
            found = outcome_of(lambda: create(group))
            if rank == 0 and ends:
                os._exit(3)
        # Nobody leaves before all have their error, which must not be that somebody has left.
        (directory / f"has-ended-{rank}").touch()
        for other in (1, 2, 3) if ends else range(4):
            wait_until((directory / f"has-ended-{other}").exists, f"the error of rank {other}")
        return found


def check(found: dict[str, Any]) -> None:
    assert (found["kind"], found["peers"]) == ("PeerLostError", [3]), found
    assert "interrupted: rank 3 (Interrupt)" in found["text"]
    assert found["seconds"] < WITHIN_S


@pytest.mark.guarantee("G39")
@pytest.mark.parametrize("creation", CREATIONS)
@pytest.mark.parametrize("place", ["one host", "four hosts"])
def test_a_creation_ends_with_the_failure_of_the_group_that_its_ranks_have(
    ranks4: RankPool, creation: str, place: str
) -> None:
    """All ranks that wait for the interrupted one raise what a call of the group would, and not a time-out."""
    pool = ranks4 if place == "one host" else ApartPool(ranks4)
    *waiting, own = pool.run(breaks, creation, False)
    assert own is None
    for found in waiting:
        check(found)


@pytest.mark.guarantee("G39")
@pytest.mark.parametrize("place", ["one host", "four hosts"])
def test_the_rank_at_fault_for_a_creation_is_named_behind_the_end_of_one_that_had_noticed_it(
    ranks4: RankPool, place: str
) -> None:
    """Rank 0 ends its process when it has its error. Ranks 1 and 2 name rank 3 all the same."""
    pool = ranks4 if place == "one host" else ApartPool(ranks4)
    _, second, third, _ = pool.run(breaks, "sub_group", True, expect_dead=[0])
    check(second)
    check(third)


def breaks_slowly(rank: int, world_size: int, directory: Path) -> dict[str, Any] | None:
    """Do as `breaks` does; on ranks 1 and 2 the group takes 1.5 s to let its connections go."""
    abort = GroupHealth.abort

    def slowly(health: GroupHealth) -> None:
        if rank in (1, 2):
            time.sleep(1.5)
        abort(health)

    with mock.patch.object(GroupHealth, "abort", slowly):
        return breaks(rank, world_size, directory, "sub_group", ends=True)


@pytest.mark.guarantee("G39")
@pytest.mark.parametrize("place", ["one host", "four hosts"])
def test_the_rank_at_fault_is_named_by_whichever_thread_of_a_creation_finds_it_first(
    ranks4: RankPool, place: str
) -> None:
    """The caller's thread looks for the reason, too, while the one that agrees still breaks the group for it."""
    pool = ranks4 if place == "one host" else ApartPool(ranks4)
    _, second, third, _ = pool.run(breaks_slowly, expect_dead=[0])
    check(second)
    check(third)


def breaks_unread(rank: int, world_size: int, directory: Path) -> dict[str, Any] | None:
    """Do as `breaks` does; on ranks 1 and 2 the status store does not say what has broken the group."""
    if rank not in (1, 2):
        return breaks(rank, world_size, directory, "sub_group", ends=False)
    with mock.patch.object(GroupHealth, "check_record", return_value=None):
        return breaks(rank, world_size, directory, "sub_group", ends=False)


@pytest.mark.guarantee("G39")
@pytest.mark.parametrize("place", ["one host", "four hosts"])
def test_a_rank_that_cannot_read_the_record_learns_who_is_at_fault_from_the_one_that_could(
    ranks4: RankPool, place: str
) -> None:
    """The outcome of the agreement names the rank, too."""
    pool = ranks4 if place == "one host" else ApartPool(ranks4)
    first, second, third, _ = pool.run(breaks_unread)
    for found in (first, second, third):
        check(found)


def server_ends(rank: int, world_size: int, directory: Path, port: int) -> dict[str, Any] | None:
    """Interrupt rank 3; rank 0, which serves the store, waits for it in a call, and ends at its error."""
    init_distributed_environment(world_size, rank, f"tcp://127.0.0.1:{port}", backend="gloo")
    group, found = get_world_group(), None
    group.barrier()
    meet(rank, range(world_size), directory, "begun")
    if rank == 3:
        interrupted(group)
    elif rank == 0:
        outcome_of(lambda: group.recv(torch.Size([1]), torch.float32, 3))
        os._exit(3)
    else:
        found = outcome_of(lambda: sub_group(group))
    (directory / f"has-ended-{rank}").touch()
    for other in (1, 2, 3):
        wait_until((directory / f"has-ended-{other}").exists, f"the error of rank {other}")
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("G39")
def test_the_rank_at_fault_for_a_creation_is_named_behind_the_end_of_the_store(ranks4: RankPool) -> None:
    """The connection to the store ends before any rank has looked for the failure of the group."""
    _, second, third, _ = ranks4.run(server_ends, free_port(), expect_dead=[0])
    check(second)
    check(third)


def closes(rank: int, world_size: int, directory: Path) -> dict[str, Any] | None:
    """Destroy the group in a handler while rank 0 creates a sub-group; rank 1 never comes."""
    with world(rank, world_size, directory) as group:
        if rank == 1:
            wait_until((directory / "has-ended").exists, "the error of rank 0")
            return None
        with alarm_in("agree", group.destroy):
            found = outcome_of(lambda: group.create_subgroup([0]))
        (directory / "has-ended").touch()
        return found


@pytest.mark.guarantee("G39")
def test_a_creation_ends_when_the_group_of_its_ranks_is_destroyed(ranks2: RankPool) -> None:
    """It raises as any call that waits while the group is destroyed."""
    found, _ = ranks2.run(closes)
    assert found["kind"] == "ClosedError"
    assert found["seconds"] < WITHIN_S
