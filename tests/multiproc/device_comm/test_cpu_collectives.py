"""Collectives on CPU tensors over shared memory between processes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from coordinator import DisagreementError
from device_comm.cpu.communicator import SharedMemoryCommunicator
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from tests.harness import RankPool
from tests.worlds import world


def shown(error: DisagreementError) -> str:
    """Return the views of an error; its text must show the same ones."""
    assert list(error.views) == [0, 1]
    for rank, view in error.views.items():
        assert f"rank {rank}: {view}" in str(error)
    return "; ".join(error.views.values())


def differ(rank: int, world_size: int, directory: Path) -> list[str]:
    with world(rank, world_size, directory) as group:
        texts = []
        for tensor in (
            torch.ones(4 + rank),
            torch.ones(4, dtype=torch.float32 if rank else torch.float64),
        ):
            with pytest.raises(DisagreementError) as caught:
                group.all_reduce(tensor)
            texts.append(shown(caught.value))
        with pytest.raises(DisagreementError) as caught:
            (group.all_reduce if rank else group.all_gather)(torch.ones(4))
        texts.append(shown(caught.value))
        with pytest.raises(DisagreementError) as caught:
            group.all_reduce(torch.ones(4), ReduceOperation.MAX if rank else ReduceOperation.SUM)
        texts.append(shown(caught.value))
        # No data was moved, and the group is intact.
        assert group.all_reduce(torch.ones(3)).tolist() == [world_size] * 3
        return texts


@pytest.mark.guarantee("D13")
def test_ranks_that_disagree_are_all_told_what_each_called(ranks2: RankPool) -> None:
    """If sizes, dtypes, calls or reductions differ, every rank raises a `DisagreementError` and the group goes on."""
    for sizes, dtypes, calls, reductions in ranks2.run(differ):
        assert "4 elements" in sizes
        assert "5 elements" in sizes
        assert "float32" in dtypes
        assert "float64" in dtypes
        assert "all_reduce" in calls
        assert "all_gather" in calls
        assert "SUM" in reductions
        assert "MAX" in reductions


def sums_of_many_sizes(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        assert isinstance(group.device_communicator, SharedMemoryCommunicator)
        for elements in (1, 1000, 65_536, 300_001, 3_000_000):
            inputs = [
                torch.randn(elements, generator=torch.Generator().manual_seed(each)).bfloat16()
                for each in range(world_size)
            ]
            expected = reduce_in_rank_order(inputs, ReduceOperation.SUM)
            assert torch.equal(group.all_reduce(inputs[rank]), expected)
            group.all_reduce_(inputs[rank])
            assert torch.equal(inputs[rank], expected)


@pytest.mark.guarantee("D14")
def test_sums_of_any_size_have_the_reference_bits_on_more_ranks_than_cores(ranks4: RankPool) -> None:
    """The sums go through one slot or many, in one shot or two, in place or not."""
    ranks4.run(sums_of_many_sizes)


def share_one_core(rank: int, world_size: int, directory: Path) -> int:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with world(rank, world_size, directory) as group:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
            for turn in range(300):
                assert torch.equal(
                    group.all_reduce(torch.full((64,), rank + turn)), torch.full((64,), 1 + 2 * turn)
                )
            return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.guarantee("D14")
def test_ranks_that_share_one_core_sometimes_sleep_for_each_other(ranks2: RankPool) -> None:
    """A rank that waits for one on its own core sleeps, and may wake up on another core. The sums are right."""
    assert sum(ranks2.run(share_one_core)) > 0
