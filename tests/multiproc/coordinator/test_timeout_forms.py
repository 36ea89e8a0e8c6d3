"""The calls of a group take a deadline as a number or as a timedelta."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import GroupCoordinator, ReduceOperation, get_world_group
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment
from tests.harness import RankPool
from tests.worlds import new_group, outcome_of, world

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
