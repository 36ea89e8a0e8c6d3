"""The calls of a group take a deadline as a number or as a timedelta."""

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator import GroupCoordinator, ReduceOperation, get_world_group
from coordinator.elastic.joining import join_distributed_environment
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment
from tests.harness import RankPool
from tests.worlds import meet, new_group, outcome_of, world

Limit = int | float | timedelta | None


def calls_of(group: GroupCoordinator, rank: int, limit: Limit) -> list[Callable[[], Any]]:
    """Return one call of each kind, with the deadline `limit`."""
    x, other = torch.ones(4), 1 - rank
    return [
        lambda: group.barrier(limit),
        lambda: group.barrier(limit, async_op=True).wait(limit),
        lambda: group.monitored_barrier(limit),
        lambda: group.all_reduce(x, timeout_s=limit),
        lambda: group.all_reduce(x, timeout_s=limit, async_op=True).wait(limit),
        lambda: group.all_reduce(x, ReduceOperation.MAX, timeout_s=limit),
        lambda: group.all_reduce_(x.clone(), timeout_s=limit),
        lambda: group.all_gather(x, timeout_s=limit),
        lambda: group.broadcast(x, timeout_s=limit),
        lambda: group.all_reduce_coalesced([x, x], timeout_s=limit),
        lambda: group.broadcast_object("x", timeout_s=limit),
        lambda: group.broadcast_object_list(["x"], timeout_s=limit),
        lambda: group.broadcast_flag(flag=True, timeout_s=limit),
        lambda: group.all_sum(1, timeout_s=limit),
        lambda: group.all_gather_object("x", timeout_s=limit),
        lambda: group.gather_object("x", timeout_s=limit),
        lambda: group.scatter_object_list([None], ["x", "y"], timeout_s=limit),
        lambda: group.send_object("x", other, timeout_s=limit),
        lambda: group.recv_object(other, timeout_s=limit),
        lambda: group.send(x, other, timeout_s=limit),
        lambda: group.recv([4], torch.float32, other, timeout_s=limit),
        lambda: group.isend(x, other, tag=3, timeout_s=limit).wait(),
        lambda: group.irecv(torch.empty(4), other, tag=3, timeout_s=limit).wait(),
        lambda: group.send_tensor_dict({"x": x}, other, timeout_s=limit),
        lambda: group.recv_tensor_dict(other, timeout_s=limit),
        lambda: group.broadcast_tensor_dict({"x": x}, timeout_s=limit),
    ]


def every_form(rank: int, world_size: int, directory: Path) -> int:
    with world(rank, world_size, directory) as group:
        for limit in (None, 30, 30.0, timedelta(seconds=30)):
            for call in calls_of(group, rank, limit):
                call()
        refused = 0
        for wrong in (-1, float("nan"), True, timedelta(seconds=-1)):
            for call in calls_of(group, rank, wrong):
                outcome = outcome_of(call)
                assert outcome["kind"] == "UsageError", outcome
                assert "timeout_s must be" in outcome["text"], outcome
                refused += 1
        group.barrier()
    return refused


@pytest.mark.guarantee("G33")
def test_calls_take_a_deadline_in_any_form(ranks2: RankPool) -> None:
    """None means the default. What is no time is refused before anything is sent."""
    assert ranks2.run(every_form) == [4 * 26] * 2


def late(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        text = ""
        if rank == 0:
            text = outcome_of(lambda: group.barrier(timedelta(milliseconds=300)))["text"]
        everyone.barrier()
    return text


def test_a_timedelta_is_the_deadline_that_it_says(ranks2: RankPool) -> None:
    """It counts in the same unit as a number."""
    assert "within 0.3 s" in ranks2.run(late)[0]


def started(rank: int, world_size: int, directory: Path) -> list[float]:
    found = []
    for limit in (45, 45.0, timedelta(seconds=45)):
        init_distributed_environment(
            world_size, rank, f"file://{directory}/meeting", backend="gloo", timeout=limit
        )
        found.append(get_world_group().settings.timeout_s)
        get_world_group().barrier()
        destroy_distributed_environment()
    return found


@pytest.mark.guarantee("G33")
def test_a_world_starts_with_a_deadline_in_any_form(ranks2: RankPool) -> None:
    """Users of torch pass a timedelta, others a number."""
    assert ranks2.run(started) == [[45.0] * 3] * 2


def change_members(rank: int, world_size: int, directory: Path) -> list[dict[str, Any]]:
    store = f"file://{directory}/store"
    init_distributed_environment(world_size, rank, store, backend="gloo", elastic=True)
    groups = ParallelGroups.from_sizes(tensor_parallel_size=1)
    refused = []
    wrong: Any
    for wrong in (-1, 0, math.nan, math.inf, True, "5", timedelta(0)):
        refused += [
            outcome_of(partial(groups.rebuild, timeout_s=wrong)),
            outcome_of(partial(groups.prepare, leave=[1], timeout_s=wrong)),
            outcome_of(partial(groups.pending_members, timeout_s=wrong)),
            outcome_of(partial(join_distributed_environment, store, timeout_s=wrong)),
        ]
    for wrong in (0.5, "3", None):
        refused += [
            outcome_of(partial(groups.rebuild, progress=wrong)),
            outcome_of(partial(groups.prepare, leave=[1], progress=wrong)),
            outcome_of(partial(groups.rebuild, min_members=wrong)),
        ]
    groups.world.barrier()  # nothing is broken
    for limit in (None, 30, timedelta(seconds=30)):
        assert groups.pending_members(timeout_s=limit) == 0
        meet(rank, range(world_size), directory, f"usable-{limit}")  # before one of them breaks the groups
        progress: Any = np.int64(3)
        groups = groups.rebuild(progress=progress, timeout_s=limit)
        assert groups.change is not None
        assert groups.change.progress == (3, 3)
    groups.prepare(leave=[1], progress=progress, timeout_s=timedelta(seconds=30)).abort()
    groups.destroy()
    destroy_distributed_environment()
    return refused


@pytest.mark.guarantee("G33")
def test_a_change_of_members_refuses_what_is_no_time_before_it_breaks_a_group(ranks2: RankPool) -> None:
    """`rebuild` broke the groups of all ranks first, and an infinite time ended the others' call in a raw error."""
    for refused in ranks2.run(change_members):
        assert {each["kind"] for each in refused} == {"UsageError"}, refused
        assert all("must be" in each["text"] for each in refused)
