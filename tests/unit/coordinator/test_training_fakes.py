"""Fakes of what training frameworks ask of groups, and the checks that records make without other ranks."""

import dataclasses

import pytest
import torch

from coordinator import ClosedError, ParallelLayout, UsageError, maybe_get_current_groups
from coordinator.bootstrap.timings import PHASES, CreationReport, StartUpReport
from coordinator.testing import FakeGroupCoordinator, fake_groups


def test_a_fake_record_has_the_groups_of_hybrid_sharding() -> None:
    """A fake record has the layout's groups for every rank."""
    layout = ParallelLayout(data=8, shard=4, tensor=2)
    for rank in range(16):
        with fake_groups(layout, rank) as groups:
            assert maybe_get_current_groups() is groups
            assert groups.root is groups.world
            assert groups.tp.ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert groups.sdp.ranks == [rank // 8 * 8 + rank % 2 + 2 * each for each in range(4)]
            assert groups.rdp.ranks == [rank % 8, rank % 8 + 8]
            assert {*groups.sdp.ranks, *groups.rdp.ranks} <= set(groups.dp.ranks)
    with fake_groups(ParallelLayout(data=4), 1) as groups:
        assert groups.rdp.ranks == groups.dp.ranks == groups.world.ranks
        assert groups.sdp.ranks == [1]


@pytest.mark.parametrize("rank", [-1, 8, True, "0"])
def test_a_rank_outside_of_the_layout_is_refused(rank: int) -> None:
    """A rank outside of the layout is refused, as by the layout itself."""
    with pytest.raises(UsageError):
        fake_groups(ParallelLayout(data=4, shard=2, tensor=2), rank)


@pytest.mark.parametrize("name", ["tp", "cp", "pp", "dp", "ep", "rdp", "sdp"])
def test_rank_0_of_the_world_is_rank_0_of_every_group(name: str) -> None:
    """Rank 0 comes first in each of its groups; the order of other ranks is free."""
    groups = fake_groups(ParallelLayout(data=2), 0)
    second = FakeGroupCoordinator(0, 2, ranks=(1, 0))
    with pytest.raises(UsageError, match=f"in '{name}' it is rank 1"):
        dataclasses.replace(groups, **{name: second})  # type: ignore[arg-type]
    others = fake_groups(ParallelLayout(data=2), 1)
    moved = dataclasses.replace(others, **{name: FakeGroupCoordinator(1, 2)})  # type: ignore[arg-type]
    assert moved.world.rank == 1


def test_a_fake_sub_group_is_a_fake() -> None:
    """A sub-group has the same limits as a real one, and is None for a rank outside."""
    with FakeGroupCoordinator(5, 3, ranks=(3, 5, 9)) as group:
        part = group.create_subgroup([2, 1])
        assert isinstance(part, FakeGroupCoordinator)
        assert (part.ranks, part.rank_in_group) == ([9, 5], 1)
        assert part.unique_name.partition("@")[2].startswith("3/sub:")
        assert part.all_reduce(torch.ones(2)).tolist() == [2, 2]
        assert group.create_subgroup([0, 2]) is None
        for wrong in ([3], [-1], [1, 1], [], [True], "1"):
            with pytest.raises(UsageError):
                group.create_subgroup(wrong)  # type: ignore[arg-type]
    with pytest.raises(ClosedError):
        group.create_subgroup([1])


def test_fakes_of_flags_sums_and_lists() -> None:
    """Results are as if every rank held the same, for each possible source."""
    with FakeGroupCoordinator(1, 3) as group:
        assert [group.broadcast_flag(flag, source) for flag in (True, False) for source in range(3)] == [
            *(True, True, True),
            *(False, False, False),
        ]
        for source in (3, -1, True):
            with pytest.raises(UsageError, match="src"):
                group.broadcast_flag(True, source)
        assert group.all_sum(2).item() == 6
        assert group.all_sum(0.5).item() == 1.5
        into = [torch.zeros(2, 2) for _ in range(3)]
        assert group.all_gather_to_list(torch.ones(2, 2), into)[2] is into[2]
        assert all(each.sum() == 4 for each in into)
        with pytest.raises(UsageError, match="2 outputs for 3 ranks"):
            group.all_gather_to_list(torch.ones(2, 2), into[:2])


def test_a_group_of_one_gathers_a_copy() -> None:
    """The result shares no memory with the argument."""
    own = torch.ones(3)
    with FakeGroupCoordinator(0, 1) as group:
        (gathered,) = group.all_gather_to_list(own)
        gathered.zero_()
        assert own.tolist() == [1, 1, 1]
        assert group.all_sum(7).item() == 7
        assert group.broadcast_flag(True) is True


def test_a_fake_record_has_no_mesh() -> None:
    """A fake record has no device mesh, as it has no process groups."""
    with (
        fake_groups(ParallelLayout(data=2), 0) as groups,
        pytest.raises(UsageError, match="no process group"),
    ):
        groups.device_mesh  # noqa: B018


def test_a_start_up_report_counts_a_common_agreement_once() -> None:
    """Other times add up; phases that took no time are left out of the text."""
    first = CreationReport(name="world:0", world_size=4, together=("world:0",), agreement_s=0.001)
    pair = [
        CreationReport(
            name=name, world_size=2, together=("tp:0", "pp:0"), agreement_s=0.002, shared_memory_s=0.003
        )
        for name in ("tp:0", "pp:0")
    ]
    report = StartUpReport.of([first, *pair])
    assert tuple(report.phases) == PHASES
    assert report.phases["agreement"] == pytest.approx(0.003)
    assert report.total_s == pytest.approx(0.009)
    assert str(pair[0].plus(queue=0.0005)) == "5.5 ms (agreement 2.0, shared memory 3.0, queue 0.5)"
    assert str(report).splitlines()[0] == "all groups: 9.0 ms (agreement 3.0, shared memory 6.0)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.agreement_s = 1.0  # type: ignore[misc]
