"""When a rank dies, handles and futures of pending calls raise, as their blocking forms do."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.parallel_state import destroy_distributed_environment, get_world_group
from tests.harness import run_ranks
from tests.worlds import join_world, meet, outcome_of, tell_when_waiting

# A death is noticed within a second; a busy machine may take a few.
PROMPT_S = 20.0


def wait_for_the_dead(rank: int, world_size: int, directory: Path) -> list[dict[str, Any]]:
    join_world(rank, world_size, directory)
    group = get_world_group()
    group.all_reduce(torch.ones(1), async_op=True).wait()
    meet(rank, range(world_size), directory, "ready")
    if rank == 1:
        meet(rank, range(world_size), directory, "waits")
        os.kill(os.getpid(), signal.SIGKILL)
    tell_when_waiting(group, directory)
    handle = group.all_reduce(torch.ones(1 << 18), async_op=True)
    future = group.barrier(async_op=True).get_future()
    found = [
        outcome_of(handle.wait),
        outcome_of(handle.wait),
        outcome_of(future.wait),
        outcome_of(group.barrier),
    ]
    meet(rank, [other for other in range(world_size) if other != 1], directory, "told")
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("D42")
def test_a_killed_rank_is_named_by_handles() -> None:
    """The handle that waits for a dead rank names it; later handles find the group broken."""
    for rank, found in enumerate(run_ranks(wait_for_the_dead, 3, expect_dead=[1])):
        if rank != 1:
            assert [each["kind"] for each in found] == ["PeerLostError"] * 2 + ["GroupBrokenError"] * 2
            assert found[0]["peers"] == [1]
            assert found[0]["seconds"] < PROMPT_S
