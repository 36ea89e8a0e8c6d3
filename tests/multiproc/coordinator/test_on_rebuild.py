"""What belongs to an epoch: captured graphs, and the callbacks that make them anew."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import CapturedGraph
from coordinator.elastic.joining import join_distributed_environment
from coordinator.errors import (
    ClosedError,
    CommError,
    DisagreementError,
    GroupBrokenError,
    PeerLostError,
    StaleGraphError,
)
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import destroy_distributed_environment
from coordinator.settings import CoordinatorSettings
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import elastic_groups, end, failing, use
from tests.waiting import wait_until
from tests.worlds import meet

TIMEOUT_S = 20.0
SETTINGS = CoordinatorSettings.resolve(timeout_s=10.0)


class Graph:
    """Stands for a graph of CUDA, which holds what it was captured with."""

    def __init__(self, groups: ParallelGroups) -> None:
        self.groups = groups
        self.replays = 0

    def replay(self) -> None:
        """Do what was captured."""
        self.replays += 1
        self.groups.world.all_reduce(torch.ones(1))


class Engine:
    """Captures a graph for each epoch."""

    def __init__(self) -> None:
        self.graphs: list[CapturedGraph[Graph]] = []

    def capture(self, groups: ParallelGroups) -> None:
        """Capture, together with the other ranks, after a warm-up call."""
        with groups.graph_capture() as context:
            groups.world.all_reduce(torch.ones(1))
            graph = Graph(groups)
        self.graphs.append(context.captured(graph))

    def replay(self) -> None:
        """Replay the last graph."""
        self.graphs[-1].replay()


def refused(call: Callable[[], object]) -> tuple[str, str]:
    """Return with what a call is refused, and its text."""
    with pytest.raises(CommError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


# --- graphs ---------------------------------------------------------------------------------------------------


def outlives_its_groups(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    groups, engine = elastic_groups(rank, world_size, directory), Engine()
    engine.capture(groups)
    engine.replay()
    with groups.tp.graph_capture() as context:
        pass
    alone = context.captured(Graph(groups))
    meet(rank, range(world_size), directory, "captured")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert failing(groups) is PeerLostError
    broken = refused(engine.replay)[0]
    new = groups.rebuild(timeout_s=TIMEOUT_S)
    old, (name, text) = engine.graphs[-1], refused(engine.replay)
    with pytest.raises(StaleGraphError) as caught:
        alone.check()
    epochs = [caught.value.captured_epoch, caught.value.current_epoch]
    engine.capture(new)
    engine.replay()
    plan = new.prepare(leave=[1], timeout_s=TIMEOUT_S)
    engine.replay()
    after = plan.commit()
    planned = refused(engine.replay)
    if after is None:
        destroy_distributed_environment()
    else:
        engine.capture(after)
        engine.replay()
        end(after)
        assert refused(engine.replay)[0] == "ClosedError", "after `destroy`"
    return {
        "broken": broken,
        "rebuilt": [name, text],
        "epochs": epochs,
        "planned": list(planned),
        "replays": old.graph.replays,
    }


@pytest.mark.guarantee("E20")
def test_a_graph_of_an_earlier_epoch_is_refused_before_it_is_replayed() -> None:
    """While its groups are broken, behind a rebuild, behind a commit, and when they were destroyed; not before."""
    found = run_ranks(outlives_its_groups, 3, expect_dead=[1])
    for rank in (0, 2):
        each = found[rank]
        assert each["broken"] == "GroupBrokenError"
        name, text = each["rebuilt"]
        assert name == "StaleGraphError"
        assert "captured in epoch 0" in text
        assert "epoch 1 have" in text
        assert each["epochs"] == [0, 1]
        name, text = each["planned"]
        assert name == "StaleGraphError"
        assert "captured in epoch 1" in text
        assert "epoch 2 have" in text
        assert each["replays"] == 1, "a graph that was refused did nothing"


# --- callbacks ------------------------------------------------------------------------------------------------


def calls_back(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    order: list[str] = []
    engine = Engine()

    def capture(groups: ParallelGroups) -> None:
        assert groups.change is not None
        order.append(f"capture for {groups.change.epoch}, {groups.world.world_size} ranks")
        engine.capture(groups)

    def count(groups: ParallelGroups) -> None:
        order.append(f"count {int(groups.world.all_reduce(torch.ones(1)).item())}")

    joins = rank == world_size - 1
    if joins:
        wait_until((directory / "rebuilt").exists, "the others", TIMEOUT_S)
        groups = join_distributed_environment(
            f"file://{directory}/store", settings=SETTINGS, timeout_s=TIMEOUT_S, on_rebuild=[capture, count]
        )
    else:
        groups = elastic_groups(rank, world_size - 1, directory)
        groups.on_rebuild(capture)
        groups.on_rebuild(count)
        meet(rank, range(world_size - 1), directory, "ready")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert failing(groups) is PeerLostError
        groups = groups.rebuild(timeout_s=TIMEOUT_S)
        (directory / "rebuilt").touch()
        wait_until(lambda: groups.pending_members() == 1, "a process that joins", TIMEOUT_S)
        groups.world.barrier()
        planned = groups.prepare(join=1, timeout_s=TIMEOUT_S).commit()
        assert planned is not None
        groups = planned
    engine.replay()
    if joins:
        groups.destroy()
    else:
        end(groups)
    return {"order": order}


@pytest.mark.guarantee("E21")
def test_callbacks_get_the_new_groups_in_order_on_each_member() -> None:
    """Behind a rebuild and behind a commit, with calls that need all members; those of a process that joins, too."""
    found = run_ranks(calls_back, 4, expect_dead=[1])
    second = ["capture for 2, 3 ranks", "count 3"]
    for rank in (0, 2):
        assert found[rank]["order"] == ["capture for 1, 2 ranks", "count 2", *second]
    assert found[3]["order"] == second


def fails_in_a_callback(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    groups, calls = elastic_groups(rank, world_size, directory), 0

    def capture(new: ParallelGroups) -> None:
        nonlocal calls
        calls += 1
        if rank == 0 and calls == 1:
            raise RuntimeError("out of memory")
        new.world.all_reduce(torch.ones(1))
        new.tp.barrier()

    groups.on_rebuild(capture)
    meet(rank, range(world_size), directory, "ready")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert failing(groups) is PeerLostError
    told = []
    while True:
        try:
            new = groups.rebuild(timeout_s=TIMEOUT_S)
            break
        except (RuntimeError, PeerLostError, GroupBrokenError) as error:
            told.append([type(error).__name__, str(error)])
    assert new.change is not None
    found = {"told": told, "calls": calls, "epoch": new.change.epoch, "sums": use(new)}
    end(new)
    with pytest.raises(ClosedError):
        groups.world.barrier()
    return found


@pytest.mark.guarantee("E21")
def test_an_error_of_a_callback_breaks_the_new_groups_on_all_ranks_which_may_try_again() -> None:
    """It is raised as it is where it arose; the others, which wait in their callback, are told; no rank is lost."""
    found = run_ranks(fails_in_a_callback, 3, expect_dead=[1])
    first, _, other = found
    assert first["told"] == [["RuntimeError", "out of memory"]]
    assert len(other["told"]) == 1
    name, text = other["told"][0]
    assert name in ("PeerLostError", "GroupBrokenError")
    assert "on_rebuild" in text
    for rank, each in enumerate((first, other)):
        assert each["calls"] == 2
        assert each["epoch"] == 2
        assert each["sums"] == [1.0, float(rank), 1.0]


def fails_behind_a_commit(rank: int, world_size: int, directory: Path) -> list[Any]:
    groups, calls = elastic_groups(rank, world_size, directory), 0

    def capture(new: ParallelGroups) -> None:
        nonlocal calls
        calls += 1
        if rank == 0 and calls == 1:
            raise RuntimeError("out of memory")
        new.world.barrier()

    groups.on_rebuild(capture)
    plan = groups.prepare(leave=[2], timeout_s=TIMEOUT_S)
    name = ""
    try:
        after = plan.commit()
    except (RuntimeError, PeerLostError, GroupBrokenError) as error:
        name, after = type(error).__name__, groups.rebuild(timeout_s=TIMEOUT_S)
    status = plan.status().phase
    if after is None:
        destroy_distributed_environment()
        return [name, status, calls]
    assert after.change is not None
    found = [name, status, calls, after.change.epoch, *use(after)]
    end(after)
    return found


@pytest.mark.thorough
@pytest.mark.guarantee("E21")
def test_an_error_of_a_callback_behind_a_commit_keeps_the_change() -> None:
    """The rank that leaves calls nothing; `rebuild` of the old record goes on from the new groups."""
    first, second, left = run_ranks(fails_behind_a_commit, 3)
    assert first == ["RuntimeError", "committed", 2, 2, 1.0, 0.0, 1.0]
    assert second[0] in ("PeerLostError", "GroupBrokenError")
    assert second[1:] == ["committed", 2, 2, 1.0, 1.0, 1.0]
    assert left == ["", "committed", 0]


def dies_in_a_callback(rank: int, world_size: int, directory: Path) -> list[Any]:
    groups = elastic_groups(rank, world_size, directory)

    def capture(new: ParallelGroups) -> None:
        if rank == 2 and new.world.world_size == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        new.world.all_reduce(torch.ones(1))

    groups.on_rebuild(capture)
    meet(rank, range(world_size), directory, "ready")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert failing(groups) is PeerLostError
    tries = 0
    while True:
        tries += 1
        try:
            groups = groups.rebuild(timeout_s=TIMEOUT_S)
            break
        except PeerLostError:
            continue
    found = [tries, groups.world.world_size, *use(groups)]
    end(groups)
    return found


@pytest.mark.thorough
@pytest.mark.guarantee("E21")
def test_a_rank_that_dies_in_its_callback_is_left_out_by_the_next_try() -> None:
    """`rebuild` of the same record goes on from the groups that were made, and calls the callbacks again."""
    found = run_ranks(dies_in_a_callback, 4, expect_dead=[1, 2])
    assert [found[0], found[3]] == [[2, 2, 1.0, 0.0, 1.0], [2, 2, 1.0, 1.0, 1.0]]


def registers_differently(rank: int, world_size: int, directory: Path) -> str:
    groups = elastic_groups(rank, world_size, directory)
    if rank == 0:
        groups.on_rebuild(use)
    with pytest.raises(DisagreementError) as caught:
        groups.prepare(leave=[2], timeout_s=TIMEOUT_S)
    use(groups)
    end(groups)
    return str(caught.value)


@pytest.mark.guarantee("E21")
def test_ranks_with_different_numbers_of_callbacks_refuse_a_change() -> None:
    """Their calls would not match; the groups serve on."""
    for text in run_ranks(registers_differently, 3):
        assert "on_rebuild callbacks: '1' (rank 0), '0' (rank 1)" in text


def joins_and_fails(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Rank 2 joins and fails in its callback; the others wait for it in theirs, and go on without it."""

    def capture(new: ParallelGroups) -> None:
        if rank == 2:
            raise RuntimeError("out of memory")
        new.world.barrier()

    if rank == 2:
        wait_until((directory / "ready-0").exists, "the others", TIMEOUT_S)
        with pytest.raises(RuntimeError, match="out of memory"):
            join_distributed_environment(
                f"file://{directory}/store", settings=SETTINGS, timeout_s=TIMEOUT_S, on_rebuild=[capture]
            )
        meet(rank, range(world_size), directory, "gone on")
        return {}
    groups = elastic_groups(rank, world_size - 1, directory)
    groups.on_rebuild(capture)
    meet(rank, range(world_size - 1), directory, "ready")
    wait_until(lambda: groups.pending_members() == 1, "a process that joins", TIMEOUT_S)
    groups.world.barrier()
    plan = groups.prepare(join=1, timeout_s=TIMEOUT_S)
    with pytest.raises((PeerLostError, GroupBrokenError)) as caught:
        plan.commit()
    new = groups.rebuild(timeout_s=TIMEOUT_S)
    assert new.change is not None
    found = {"text": str(caught.value), "epoch": new.change.epoch, "lost": new.change.lost, "sums": use(new)}
    meet(rank, range(world_size), directory, "gone on")
    end(new)
    return found


@pytest.mark.thorough
@pytest.mark.guarantee("E21")
def test_a_process_that_fails_in_its_callback_while_it_joins_is_left_out() -> None:
    """It raises its own error; the others are told, and go on without it, later if its process lives on in silence."""
    found = run_ranks(joins_and_fails, 3)
    for rank in (0, 1):
        each = found[rank]
        assert "on_rebuild" in each["text"]
        assert (each["epoch"], list(each["lost"])) == (2, [2])
        assert each["sums"] == [1.0, float(rank), 1.0]
