"""Planned changes: ranks leave and join while the others serve."""

import atexit
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.elastic import Plan
from coordinator.elastic.joining import join_distributed_environment
from coordinator.errors import ClosedError, CommTimeoutError, DisagreementError, ExcludedError, UsageError
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_current_groups,
    init_distributed_environment,
    initialize_model_parallel,
)
from coordinator.settings import CoordinatorSettings
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import elastic_groups, end, failing, use
from tests.waiting import wait_until

TIMEOUT_S = 20.0


def grows(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    first = world_size - 1
    if rank == first:
        wait_until((directory / "serving").exists, "the others", TIMEOUT_S)
        groups = join_distributed_environment(
            f"file://{directory}/store",
            settings=CoordinatorSettings.resolve(timeout_s=10.0),
            timeout_s=2 * TIMEOUT_S,  # how long it waits for the others is its own choice
        )
    else:
        groups = elastic_groups(rank, first, directory)
        use(groups)
        (directory / "serving").touch()
        if rank == 0:
            wait_until(lambda: groups.pending_members() == 1, "a process that joins", TIMEOUT_S)
        groups.world.barrier()
        plan = groups.prepare(join=1, progress=7, timeout_s=TIMEOUT_S)
        assert use(groups) == [1.0, float(rank), 1.0], "the old groups serve on"
        before = plan.status()
        old = groups
        start = time.monotonic()
        committed = plan.commit()
        assert time.monotonic() - start < TIMEOUT_S
        assert committed is not None
        groups = committed
        assert (before.phase, before.may_end, plan.status().phase) == ("prepared", (), "committed")
        with pytest.raises(ClosedError):
            old.dp.barrier()
        with pytest.raises(UsageError, match="committed"):
            plan.abort()
    sums = use(groups)
    found = {"rank": groups.world.rank, "sums": sums, "name": groups.dp.unique_name}
    assert groups.change is not None
    assert (groups.change.joined, groups.change.progress) == ((first,), (7, 7, 0))
    if rank != first:
        end(groups)
    else:
        groups.destroy()
    return found


@pytest.mark.guarantee("E8")
def test_a_process_joins_while_the_others_serve() -> None:
    """It gets the last rank, in groups of the next epoch; the old groups work until the commit, and not beyond."""
    found = run_ranks(grows, 3)
    for rank, each in enumerate(found):
        assert each == {"rank": rank, "sums": [3.0, float(rank), 3.0], "name": "dp:0@1"}


def shrinks(rank: int, world_size: int, directory: Path) -> list[Any]:
    groups = elastic_groups(rank, world_size, directory)
    with pytest.raises(UsageError, match="is no change of 3 ranks"):
        groups.prepare()
    with pytest.raises(UsageError, match="is no change of 3 ranks"):
        groups.prepare(leave=[3])
    plan = groups.prepare(leave=[0], timeout_s=TIMEOUT_S)
    after = plan.commit()
    assert plan.status().may_end == (0,)
    if after is None:
        destroy_distributed_environment()
        return ["left", plan.status().operation_id]
    found = [after.world.rank, *use(after), plan.status().operation_id]
    end(after)
    return found


@pytest.mark.guarantee("E8")
def test_a_rank_leaves_while_the_others_serve() -> None:
    """It gets no groups any more, may end, and the others have ranks without gaps."""
    assert run_ranks(shrinks, 3) == [
        ["left", "epoch-1"],
        [0, 1.0, 0.0, 1.0, "epoch-1"],
        [1, 1.0, 1.0, 1.0, "epoch-1"],
    ]


def aborts(rank: int, world_size: int, directory: Path) -> list[str]:
    groups = elastic_groups(rank, world_size, directory)
    told = []
    plan: Plan[ParallelGroups] = groups.prepare(leave=[2], timeout_s=TIMEOUT_S)
    if rank == 1:
        plan.abort("the request is gone")
    else:
        with pytest.raises(DisagreementError) as caught:
            plan.commit()
        told.append(str(caught.value))
    assert plan.status().phase == "aborted"
    assert plan.status().may_end == ()
    assert use(groups) == [3.0, float(rank), 3.0], "the old groups serve on"
    for options in ({"leave": [rank]}, {"leave": [1], "join": 0, "timeout_s": 3.0 + rank}):
        with pytest.raises(DisagreementError, match="ranks disagree: call|ranks disagree: timeout_s"):
            groups.prepare(**{"timeout_s": TIMEOUT_S, **options})  # type: ignore[arg-type]
    with pytest.raises(CommTimeoutError, match="the ranks that are to join did not come"):
        groups.prepare(join=1, timeout_s=1.0)
    again = groups.prepare(leave=[2], timeout_s=TIMEOUT_S).commit()
    if again is None:
        destroy_distributed_environment()
    else:
        use(again)
        end(again)
    return told


@pytest.mark.guarantee("E8")
def test_a_change_that_is_given_up_leaves_the_old_groups_as_they_were() -> None:
    """One rank aborts it, ranks ask for different changes, or nobody joins: all can try again."""
    first, _, last = run_ranks(aborts, 3)
    assert first == last == ["commit: the change was given up, the old groups serve on: the request is gone"]


def joins_with_other_settings(rank: int, world_size: int, directory: Path) -> str:
    if rank == world_size - 1:
        wait_until((directory / "serving").exists, "the others", TIMEOUT_S)
        with pytest.raises(DisagreementError) as caught:
            join_distributed_environment(f"file://{directory}/store", timeout_s=TIMEOUT_S)
        return str(caught.value)
    groups = elastic_groups(rank, world_size - 1, directory)
    (directory / "serving").touch()
    with pytest.raises(DisagreementError) as caught:
        groups.prepare(join=1, timeout_s=TIMEOUT_S)
    use(groups)
    end(groups)
    return str(caught.value)


@pytest.mark.guarantee("E8")
def test_a_process_with_other_settings_is_refused_on_all_ranks() -> None:
    """The reason names the setting and the ranks; the ranks that serve go on."""
    for text in run_ranks(joins_with_other_settings, 3):
        assert "new ranks disagree: setting timeout_s: '10.0' (ranks 0, 1), '600.0' (rank 2)" in text


def dies_before_the_commit(rank: int, world_size: int, directory: Path) -> list[Any]:
    groups = elastic_groups(rank, world_size, directory)
    plan = groups.prepare(leave=[0], timeout_s=TIMEOUT_S)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DisagreementError) as caught:
        plan.commit()
    failing(groups)
    groups = groups.rebuild(timeout_s=TIMEOUT_S)
    found = [str(caught.value).rpartition(": ")[2], groups.world.rank, *use(groups)]
    end(groups)
    return found


@pytest.mark.guarantee("E8")
def test_a_rank_that_dies_before_the_commit_ends_the_change_for_all() -> None:
    """They are told who it was. The one that was to leave is still a member, and goes on with the other."""
    found = run_ranks(dies_before_the_commit, 3, expect_dead=[2])
    assert found[:2] == [["member(s) 2 ended", 0, 1.0, 0.0, 1.0], ["member(s) 2 ended", 1, 1.0, 1.0, 1.0]]


def half_a_replica_leaves(rank: int, world_size: int, directory: Path) -> list[Any]:
    groups = elastic_groups(rank, world_size, directory, tensor=2)
    with pytest.raises(DisagreementError) as caught:
        groups.prepare(leave=[3], timeout_s=TIMEOUT_S)
    after = groups.prepare(leave=[2, 3], timeout_s=TIMEOUT_S).commit()
    told = str(caught.value).partition(": ")[2]
    if after is None:
        destroy_distributed_environment()
        return [told]
    found = [told, *use(after), after.tp.ranks]
    end(after)
    return found


@pytest.mark.guarantee("E8")
def test_a_rank_that_is_not_named_never_leaves() -> None:
    """Its replica would lose a rank that leaves, so that the change is refused, until it is named too."""
    found = run_ranks(half_a_replica_leaves, 4)
    told = "the layout has no place for rank(s) [2]: let them leave too"
    assert found[2:] == [[told], [told]]
    assert found[:2] == [[told, 1.0, 1.0, 0.0, [0, 1]], [told, 1.0, 1.0, 1.0, [0, 1]]]


def comes_too_late(rank: int, world_size: int, directory: Path, told: str) -> None:
    groups = elastic_groups(rank, world_size, directory)
    plan = groups.prepare(leave=[2], timeout_s=TIMEOUT_S)
    if rank < 2:
        committed = plan.commit()
        assert committed is not None
        use(committed)
        end(committed)
        return
    store = groups._membership().world.line().store
    wait_until(lambda: store.check(["1/decision"]), "the others' commit", TIMEOUT_S)
    with pytest.raises(ExcludedError) as caught:
        groups.rebuild(timeout_s=TIMEOUT_S)
    Path(told).write_text(str(caught.value))
    os.kill(os.getpid(), signal.SIGKILL)  # the others wait for it before they free what it may use


@pytest.mark.guarantee("E3")
def test_a_rank_that_leaves_and_rebuilds_instead_is_excluded(tmp_path: Path) -> None:
    """It comes to the commit too late, finds its groups broken, and calls `rebuild` as after any failure."""
    told = tmp_path / "told"
    run_ranks(comes_too_late, 3, str(told), expect_dead=[2])
    assert told.read_text().endswith("the others go on without this rank, as members [0, 1] of epoch 1")


def spreads(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    first = world_size // 2
    if rank >= first:
        wait_until((directory / "serving").exists, "the others", TIMEOUT_S)
        settings = CoordinatorSettings.resolve(timeout_s=10.0)
        groups = join_distributed_environment(
            f"file://{directory}/store", settings=settings, timeout_s=2 * TIMEOUT_S
        )
    else:
        init_distributed_environment(
            first, rank, f"file://{directory}/store", backend="gloo", timeout=10.0, elastic=True
        )
        initialize_model_parallel(prefill_context_model_parallel_size=first)
        groups = get_current_groups()
        assert groups.ep.token_group is groups.cp
        (directory / "serving").touch()
        wait_until(lambda: groups.pending_members() == first, "processes that join", TIMEOUT_S)
        groups.world.barrier()
        committed = groups.prepare(join=first, timeout_s=TIMEOUT_S).commit()
        assert committed is not None
        groups = committed
    sizes = [groups.layout.data, groups.layout.context]
    # Each rank is an expert, to which all tokens go, and which multiplies by a power of ten of its own.
    rows, *_ = groups.ep.dispatch(torch.ones(1, 1), torch.zeros(1, 1), is_sequence_parallel=False)
    sums = groups.ep.combine(rows * 10.0**groups.world.rank, is_sequence_parallel=False)
    found = {"sizes": sizes, "token_group": groups.ep.token_group, "sums": sums.tolist()}
    groups.world.barrier()
    if rank < first:
        end(groups)
    else:
        groups.destroy()
    return found


@pytest.mark.guarantee("E8")
def test_a_change_that_spreads_tokens_over_two_dimensions_reaches_all_experts() -> None:
    """As in groups that are created with that layout: `ep` itself makes the calls."""
    for each in run_ranks(spreads, 4):
        assert each == {"sizes": [2, 2], "token_group": None, "sums": [[1111.0]]}


def forks(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Fork a child of each rank, which runs what an interpreter runs at its end; the last rank has joined."""
    if rank == world_size - 1:
        wait_until((directory / "serving").exists, "the other", TIMEOUT_S)
        settings = CoordinatorSettings.resolve(timeout_s=10.0)
        groups = join_distributed_environment(
            f"file://{directory}/store", settings=settings, timeout_s=2 * TIMEOUT_S
        )
    else:
        groups = elastic_groups(rank, world_size - 1, directory)
        (directory / "serving").touch()
        wait_until(lambda: groups.pending_members() == 1, "a process that joins", TIMEOUT_S)
        plan = groups.prepare(join=1, timeout_s=TIMEOUT_S)
        child = os.fork()
        if child == 0:
            os._exit(not (refuses(plan.commit) and refuses(plan.abort) and refuses(groups.pending_members)))
        assert os.waitpid(child, 0)[1] == 0
        committed = plan.commit()
        assert committed is not None
        groups = committed
    before = sorted(path.name for path in (directory / "store").rglob("*"))
    groups.world.barrier()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(not (refuses(groups.rebuild) and refuses(groups.prepare)))
    assert os.waitpid(child, 0)[1] == 0
    groups.world.barrier()
    after = sorted(path.name for path in (directory / "store").rglob("*"))
    found = [sorted({*before} - {*after}), groups.pending_members()]
    groups.world.barrier()
    if rank < world_size - 1:
        end(groups)
    else:
        groups.destroy()
    return found


def refuses(call: Callable[[], object]) -> bool:
    """Return whether a call says that it belongs to the process that forked this one."""
    try:
        call()
    except UsageError as error:
        return "the process that forked this one" in str(error)
    return False


@pytest.mark.guarantee("G10")
def test_a_forked_child_neither_changes_members_nor_leaves_for_its_parent() -> None:
    """It is refused at once, and its end removes nothing of the run."""
    assert run_ranks(forks, 2) == [[[], 0]] * 2


def remembers(rank: int, world_size: int, directory: Path) -> list[Any]:
    groups = elastic_groups(rank, world_size, directory)
    groups.on_rebuild(lambda _: None)
    sharded = groups.with_sharding(world_size)
    groups.world.enable_broadcaster()
    groups.world.barrier()
    sharded.destroy()
    destroy_distributed_environment()
    return [sharded._membership().recipe.has_queues, len(sharded._callbacks)]


@pytest.mark.guarantee("E5", "E21")
def test_a_record_remembers_its_queues_and_callbacks() -> None:
    """Though its groups are destroyed, as behind a rebuild that has failed; also with other shards."""
    assert run_ranks(remembers, 2) == [[True, 1]] * 2
