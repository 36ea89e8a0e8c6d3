"""Groups that are created again on the ranks that are left."""

import dataclasses
import os
import signal
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.diagnosis.decoding import decode_page
from coordinator.elastic.joining import join_distributed_environment
from coordinator.elastic.layouts import LayoutRule, Placement
from coordinator.errors import (
    ClosedError,
    CommError,
    DisagreementError,
    ExcludedError,
    GroupBrokenError,
    PeerLostError,
    UsageError,
)
from coordinator.groups import ParallelGroups
from coordinator.layout import ParallelLayout
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment
from shm_broadcast import _core
from shm_broadcast.status.page import own_page
from tests.harness import run_ranks
from tests.ports import free_port
from tests.waiting import wait_until
from tests.worlds import meet, world

TIMEOUT_S = 20.0


def elastic_groups(rank: int, world_size: int, directory: Path, tensor: int = 1) -> ParallelGroups:
    """Join an elastic world, and create groups in it."""
    init_distributed_environment(
        world_size, rank, f"file://{directory}/store", backend="gloo", timeout=10.0, elastic=True
    )
    return ParallelGroups.from_sizes(tensor_parallel_size=tensor)


def use(groups: ParallelGroups) -> list[float]:
    """Return the sums of the ranks' numbers in some groups."""
    found = []
    for group in (groups.world, groups.tp, groups.dp):
        found.append(group.all_reduce(torch.tensor([float(groups.world.rank)])).item())
        group.barrier()
    groups.world.broadcast_object({"step": 1})
    return found


def failing(groups: ParallelGroups, timeout_s: float | None = None) -> type[CommError]:
    """Call the world group until it fails; return with what."""
    while True:
        try:
            groups.world.barrier(timeout_s=timeout_s)
        except CommError as error:
            return type(error)


def end(groups: ParallelGroups) -> None:
    """Leave groups and world."""
    groups.destroy()
    destroy_distributed_environment()


def shown_rank() -> list[int | None]:
    """Return rank and world size in this process's status page."""
    page = decode_page(_core.status_copy(own_page().segment.memory))
    return [page.rank, page.world_size]


def goes_on(rank: int, world_size: int, directory: Path, victim: int) -> dict[str, Any]:
    groups = elastic_groups(rank, world_size, directory)
    use(groups)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    assert failing(groups) is PeerLostError
    groups = groups.rebuild(progress=10 + rank, timeout_s=TIMEOUT_S)
    sums = use(groups)
    change = groups.change
    assert change is not None
    found = {
        "rank": groups.world.rank,
        "sums": sums,
        "epoch": change.epoch,
        "lost": list(change.lost),
        "progress": list(change.progress),
        "name": groups.tp.unique_name,
        "shown": shown_rank(),
    }
    end(groups)
    return found


@pytest.mark.guarantee("E5")
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_ranks_that_are_left_go_on(victim: int) -> None:
    """Whichever rank is killed, the others have new groups, with ranks without gaps in the old order."""
    found = [each for each in run_ranks(goes_on, 3, victim, expect_dead=[victim]) if each is not None]
    left = [rank for rank in range(3) if rank != victim]
    assert [each["rank"] for each in found] == [0, 1]
    assert all(each["sums"] == [1.0, float(each["rank"]), 1.0] for each in found)
    assert all(each["lost"] == [victim] for each in found)
    assert all(each["progress"] == [10 + rank for rank in left] for each in found)
    assert len({each["epoch"] for each in found}) == 1
    assert [each["shown"] for each in found] == [[0, 2], [1, 2]], "in the status page"
    assert all(each["name"] == f"tp:0@{each['epoch']}" for each in found)


def one_after_the_other(rank: int, world_size: int, directory: Path) -> list[list[int]]:
    groups = elastic_groups(rank, world_size, directory)
    found = []
    for victim in range(world_size - 1):
        use(groups)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        assert failing(groups) is PeerLostError
        before = groups
        groups = groups.rebuild(timeout_s=TIMEOUT_S)
        with pytest.raises(ClosedError):
            before.tp.barrier()
        assert groups.change is not None
        found.append([groups.change.epoch, *groups.change.lost, groups.world.world_size])
    assert use(groups) == [0.0, 0.0, 0.0]
    end(groups)
    return found


@pytest.mark.guarantee("E6")
def test_groups_are_rebuilt_again_and_again() -> None:
    """Each time the first rank is killed, until one is left; its old groups are destroyed each time."""
    *_, found = run_ranks(one_after_the_other, 4, expect_dead=[0, 1, 2])
    assert [each[1:] for each in found] == [[0, 3], [0, 2], [0, 1]]
    epochs = [each[0] for each in found]
    assert epochs == sorted(set(epochs))


def with_replicas(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    groups = elastic_groups(rank, world_size, directory, tensor=2)
    use(groups)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failing(groups)
    try:
        groups = groups.rebuild(timeout_s=TIMEOUT_S)
    except ExcludedError as error:
        end(groups)
        return {"excluded": str(error)}
    assert groups.change is not None
    found = {"sums": use(groups), "moved": sorted(groups.change.old_to_new.items()), "tp": groups.tp.ranks}
    end(groups)
    return found


@pytest.mark.guarantee("E3")
def test_a_replica_that_has_lost_a_rank_is_dropped() -> None:
    """Two of four ranks share a layer: rank 0 has lost the other half of its model and is excluded, 2 and 3 go on."""
    first, _, *others = run_ranks(with_replicas, 4, expect_dead=[1])
    assert "as members [2, 3] of epoch 1" in first["excluded"]
    for rank, found in enumerate(others):
        assert found == {"sums": [1.0, 1.0, float(rank)], "moved": [[2, 0], [3, 1]], "tp": [0, 1]}


def refuses(rank: int, world_size: int, directory: Path) -> list[str]:
    groups = elastic_groups(rank, world_size, directory)
    use(groups)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert failing(groups) is PeerLostError
    texts = []
    for options in ({"min_members": 3}, {"min_members": 1 + rank}, {"layout": ranks_of_parity(rank)}):
        with pytest.raises(DisagreementError) as caught:
            groups.rebuild(timeout_s=TIMEOUT_S, **options)
        texts.append(str(caught.value).partition(": ")[2])
        with pytest.raises(GroupBrokenError):  # as it was, and not destroyed
            groups.world.barrier()
    groups = groups.rebuild(timeout_s=TIMEOUT_S, min_members=2)
    use(groups)
    assert groups.change is not None
    texts.append(str(groups.change.epoch))
    end(groups)
    return texts


def ranks_of_parity(rank: int) -> LayoutRule:
    """Return a rule that is no pure function: each rank chooses another order."""

    def choose(layout: ParallelLayout, ranks: Collection[int]) -> Placement:
        kept = sorted(ranks, reverse=rank > 0)
        return Placement(dataclasses.replace(layout, data=len(kept)), tuple(kept))

    return choose


@pytest.mark.guarantee("E4")
def test_a_refusal_is_raised_on_all_ranks_and_can_be_followed_by_another_try() -> None:
    """Too few members, different arguments, rules that disagree: the groups stay as they were, until all agree."""
    first, _, other = run_ranks(refuses, 3, expect_dead=[1])
    assert first == other
    few, differing, rules, epoch = first
    assert few == "2 members are left, min_members is 3"
    assert differing == (
        "ranks disagree: call: 'rebuild with min_members=1' (rank 0), 'rebuild with min_members=3' (rank 2)"
    )
    assert "it must be a pure function" in rules
    assert epoch == "4"


def stopped(rank: int, world_size: int, directory: Path, victim: int, marks: str) -> str:
    groups = elastic_groups(rank, world_size, directory)
    use(groups)
    meet(rank, range(world_size), directory, "ready")
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)  # until the others have gone on
    failing(groups, timeout_s=1.0)
    try:
        groups = groups.rebuild(timeout_s=3.0)
    except ExcludedError as error:
        end(groups)
        Path(marks, "excluded").touch()
        return f"excluded: {error}"
    Path(marks, f"rebuilt-{rank}").touch()
    wait_until(Path(marks, "excluded").exists, "the stopped rank to find out", 30.0)
    # It has disturbed nobody.
    found = use(groups)
    end(groups)
    return f"went on: {found}"


@pytest.mark.guarantee("E3")
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_was_stopped_is_excluded_and_disturbs_nobody(tmp_path: Path, victim: int) -> None:
    """A majority goes on without it. When it runs again, it fails in its old groups, and is told that it is out."""
    others = [rank for rank in range(3) if rank != victim]

    def resume(pids: Sequence[int]) -> None:
        for rank in others:
            wait_until((tmp_path / f"rebuilt-{rank}").exists, "the others to go on", 40.0)
        os.kill(pids[victim], signal.SIGCONT)

    found = run_ranks(stopped, 3, victim, str(tmp_path), while_running=resume)
    assert found.pop(victim).startswith("excluded: ")
    assert found == ["went on: [1.0, 0.0, 1.0]", "went on: [1.0, 1.0, 1.0]"]


def without_elastic(rank: int, world_size: int, directory: Path) -> str:
    with (
        world(rank, world_size, directory),
        ParallelGroups.from_sizes() as groups,
        pytest.raises(UsageError, match="elastic=True") as caught,
    ):
        groups.rebuild()
    return str(caught.value)


@pytest.mark.guarantee("E7")
def test_a_world_that_ends_with_rank_0_is_refused() -> None:
    """At its start, if `elastic` was asked for; else when it is to be rebuilt. Nothing is sent."""
    run_ranks(without_elastic, 2)
    with pytest.raises(UsageError, match="outlives every rank"):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", backend="gloo", elastic=True)


@pytest.mark.guarantee("E7")
def test_a_launcher_whose_store_rank_0_serves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`env://` is elastic only under an agent whose store outlives the ranks. Nothing is connected before."""
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(UsageError, match="outlives every rank.*env:// without an agent's store"):
        init_distributed_environment(backend="gloo", elastic=True)


def one_is_elastic(rank: int, world_size: int, directory: Path) -> str:
    with pytest.raises(DisagreementError) as caught:
        init_distributed_environment(
            world_size, rank, f"file://{directory}/store", backend="gloo", timeout=10.0, elastic=rank == 0
        )
    return str(caught.value)


@pytest.mark.guarantee("E7")
def test_ranks_that_differ_in_elastic_do_not_start() -> None:
    """Some could rebuild their groups, and would wait for those that cannot."""
    for text in run_ranks(one_is_elastic, 2):
        assert "elastic: 'True' (rank 0), 'False' (rank 1)" in text


def test_a_run_of_somebody_else_is_not_joined(tmp_path: Path) -> None:
    """Nor one that is not there: a process that joins trusts what it reads in the directory."""
    with pytest.raises(UsageError, match="no run that could be joined goes on in"):
        join_distributed_environment(f"file://{tmp_path}/nothing")
    (tmp_path / "generation-0123456789abcdef").mkdir(mode=0o755)
    (tmp_path / "current").write_text("generation-0123456789abcdef")
    with pytest.raises(UsageError, match="not a directory of mode 0700"):
        join_distributed_environment(f"file://{tmp_path}")
    with pytest.raises(UsageError, match="must be a store or file:///DIRECTORY"):
        join_distributed_environment("tcp://127.0.0.1:1")
