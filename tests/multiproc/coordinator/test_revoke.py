"""Who rebuilds its groups ends the waits of the other ranks, also in groups that have lost nobody."""

import os
import signal
from pathlib import Path

import pytest

from coordinator.errors import ExcludedError, PeerLostError
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import TIMEOUT_S, elastic_groups, end, use

VICTIM = 3


def meets_the_living_only(rank: int, world_size: int, directory: Path) -> str:
    groups = elastic_groups(rank, world_size, directory, tensor=2)
    use(groups)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank < VICTIM - 1:
        groups.tp.barrier()  # rank 2 misses its neighbour there, and does not come to the next line
    group = groups.dp if rank < VICTIM - 1 else groups.tp
    with pytest.raises(PeerLostError) as caught:
        group.barrier()
    assert caught.value.peers == (VICTIM,)
    try:
        groups = groups.rebuild(timeout_s=TIMEOUT_S)
        use(groups)
    except ExcludedError:
        assert rank == VICTIM - 1
    end(groups)
    return str(caught.value)


@pytest.mark.guarantee("E9")
def test_a_rank_that_meets_only_living_ranks_learns_of_the_failure() -> None:
    """Rank 0 shares no group but the world with the lost rank: it is told by rank 2, in the group that they share."""
    first, *_ = run_ranks(meets_the_living_only, 4, expect_dead=[VICTIM])
    assert "barrier #" in first
    assert "on 'dp:0' (rank 0, 0 of 2): lost rank 3 (pid" in first
    assert "found by rank 2 in barrier #" in first


def gives_up(rank: int, world_size: int, directory: Path) -> str:
    groups = elastic_groups(rank, world_size, directory)
    use(groups)
    told = ""
    if rank == 0:
        with pytest.raises(PeerLostError) as caught:
            groups.dp.barrier()
        assert caught.value.peers == (1,)
        told = str(caught.value).partition(": ")[2]
    groups = groups.rebuild(timeout_s=TIMEOUT_S)
    use(groups)
    end(groups)
    return told


@pytest.mark.guarantee("E9")
def test_a_rank_that_rebuilds_for_reasons_of_its_own_is_named() -> None:
    """No group of it has failed: the other one raises `PeerLostError` with it, and both go on."""
    told, _ = run_ranks(gives_up, 2)
    assert told.startswith("interrupted: rank 1 (rebuild) (found by rank 1 in rebuild); the group")
