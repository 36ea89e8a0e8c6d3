"""The start of a world that a signal handler interrupts at any place leaves nothing; nobody waits for a start."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from coordinator import parallel_state
from coordinator.bootstrap import blocking_calls, fork_guard, rendezvous
from coordinator.bootstrap.methods.directory import DirectoryRendezvous
from coordinator.bootstrap.rendezvous import init_world, join_later, leave_world
from coordinator.group import GroupCoordinator
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from coordinator.settings import CoordinatorSettings
from tests.crash.test_fork import ended, fork, hard
from tests.handlers import raising_at
from tests.harness import RankPool
from tests.leaks import Snapshot, leaked_since
from tests.waiting import wait_until
from tests.worlds import outcome_of

STARTING = (
    *("/bootstrap/rendezvous.py", "/bootstrap/blocking_calls.py", "/bootstrap/fork_guard.py"),
    "/methods/directory.py",
)


def start(path: Path, world_size: int = 1, **settings: Any) -> None:
    chosen = CoordinatorSettings.resolve({}, **settings)
    init_world(world_size, 0, f"file://{path}", "gloo", chosen)


def struck_anywhere(rank: int, world_size: int, directory: Path) -> int:
    """Strike at every other place, and the other rank at those between; return how many places there were."""
    path = directory / f"meet-{rank}"
    start(path)
    leave_world()
    before, step, comes = Snapshot.take(), rank, True
    while comes:
        comes = raising_at(step, lambda: start(path), STARTING)
        leave_world()
        assert not dist.is_initialized(), step
        assert not path.exists(), step
        assert fork_guard._protected == {}, step
        step += 2
    assert leaked_since(before) == []
    return step


@pytest.mark.guarantee("G9")
@pytest.mark.guarantee("G32")
def test_a_start_that_is_interrupted_anywhere_leaves_nothing(ranks2: RankPool) -> None:
    """Neither torch's world, nor a file. The next start at the same path works."""
    for rank, places in enumerate(ranks2.run(struck_anywhere)):
        assert places > 20, rank


@pytest.mark.guarantee("G32")
@pytest.mark.parametrize("way", ["other rank", "joining later"])
def test_a_process_that_is_interrupted_anywhere_while_it_finds_a_run_leaves_no_link(
    tmp_path: Path, way: str
) -> None:
    """The run would look used for as long as the process lives, and its last rank would not remove it."""
    step, comes = 0, True
    while comes:
        path, left = tmp_path / str(step), list[Callable[[], None]]()
        first = DirectoryRendezvous(path, 0, 2)
        first.join(1.0)

        def come(path: Path = path, left: list[Callable[[], None]] = left) -> None:
            if way == "other rank":
                other = DirectoryRendezvous(path, 1, 2)
                left.append(other.leave)
                other.join(1.0)
            else:
                left.append(join_later(f"file://{path}")[1])

        # The steps in the directory have a thread of their own, for which the caller waits.
        comes = raising_at(step, come, ("/methods/directory.py", "/shm_broadcast/threads.py"))
        for leave in left:
            leave()
        links = [each.name for each in path.glob("generation-*/store-*")]
        assert [name.split("-")[1] for name in links] == ["0"], step
        first.leave()
        step += 1
    assert step > 10


def join_beside(directory: Path, found: list[dict[str, Any]]) -> threading.Thread:
    """Wait in a thread for a second rank, which never comes, and return once it waits."""
    thread = threading.Thread(
        target=lambda: found.append(outcome_of(lambda: start(directory / "meet", 2, create_timeout_s=1.5)))
    )
    thread.start()
    wait_until(
        lambda: rendezvous._attempt is not None and rendezvous._attempt.rendezvous is not None, "the store"
    )
    return thread


def destroyed_beside(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    mine = directory / str(rank)
    mine.mkdir()
    found = list[dict[str, Any]]()
    thread = join_beside(mine, found)
    destroyed = outcome_of(destroy_distributed_environment)
    refused = outcome_of(lambda: start(mine / "other"))
    is_waiting = thread.is_alive()
    thread.join()
    start(mine / "meet")
    destroy_distributed_environment()
    return {"kinds": [each["kind"] for each in (destroyed, refused, *found)], "is_waiting": is_waiting}


@pytest.mark.guarantee("G9")
def test_a_thread_may_end_the_environment_while_another_one_joins_the_world(ranks2: RankPool) -> None:
    """It does not wait for that: there is nothing to end yet. A second start meanwhile is refused."""
    for found in ranks2.run(destroyed_beside):
        assert found == {"kinds": ["NoneType", "UsageError", "CommTimeoutError"], "is_waiting": True}


def forked_beside(rank: int, world_size: int, directory: Path) -> int:
    mine = directory / str(rank)
    mine.mkdir()
    found = list[dict[str, Any]]()
    thread = join_beside(mine, found)
    with rendezvous._lock:
        child = fork()
        if child == 0:
            try:
                start(mine / "child")
            finally:
                hard()
    status = ended(child)
    thread.join()
    return status if (mine / "child").exists() else -1


@pytest.mark.guarantee("G10")
def test_a_child_of_a_process_that_joins_a_world_can_join_one_of_its_own(ranks2: RankPool) -> None:
    """Its parent's thread, which holds what the parent has locked, is not there."""
    assert ranks2.run(forked_beside) == [0, 0]


def interrupted_behind_the_world(rank: int, world_size: int, directory: Path) -> list[Any]:
    path, found = directory / f"meet-{rank}", list[Any]()
    for _ in range(2):
        with mock.patch.object(parallel_state.logger, "info", side_effect=KeyboardInterrupt) as info:
            join = partial(init_distributed_environment, 1, 0, f"file://{path}", backend="gloo")
            found += [outcome_of(join)["kind"], info.called, dist.is_initialized(), path.exists()]
    join()
    with get_world_group() as group:
        group.barrier()
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("G37")
def test_an_interrupt_while_the_world_is_logged_leaves_the_world(ranks2: RankPool) -> None:
    """Its group is there, but nobody has it. The next start has a group of the world."""
    for found in ranks2.run(interrupted_behind_the_world):
        assert found == ["KeyboardInterrupt", True, False, False] * 2


def interrupted_behind_the_constructor(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Interrupt a start when the group of the world is made, but is not assigned to anything yet."""
    made, initialise = list[GroupCoordinator](), GroupCoordinator.__init__

    def struck(self: GroupCoordinator, *args: Any, **options: Any) -> None:
        initialise(self, *args, **options)
        made.append(self)  # so that the collector does not destroy it
        raise KeyboardInterrupt

    with mock.patch.object(GroupCoordinator, "__init__", struck):
        join = partial(init_distributed_environment, 1, 0, f"file://{directory}/meet-{rank}", backend="gloo")
        kind = outcome_of(join)["kind"]
    return [kind, [group._health.is_closed for group in made], dist.is_initialized()]


@pytest.mark.guarantee("G37")
def test_an_interrupt_as_the_group_of_the_world_is_made_ends_the_group(ranks2: RankPool) -> None:
    """Else the other ranks would wait for this one until the deadline of their next call."""
    assert ranks2.run(interrupted_behind_the_constructor) == [["KeyboardInterrupt", [True], False]] * 2


def followed_by_the_next_world(rank: int, world_size: int, directory: Path) -> list[str]:
    """Interrupt the end of an environment as it begins to end the groups, and start again."""
    join = partial(init_distributed_environment, 1, 0, f"file://{directory}/meet-{rank}", backend="gloo")
    join()
    initialize_model_parallel()
    last = get_world_group()
    with mock.patch.object(parallel_state, "destroy_together", side_effect=KeyboardInterrupt):
        found = [outcome_of(destroy_distributed_environment)["kind"], outcome_of(last.barrier)["kind"]]
    join()
    initialize_model_parallel()
    found += [outcome_of(group.barrier)["kind"] for group in (get_world_group(), get_tp_group())]
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("G9")
def test_the_next_world_ends_the_groups_that_an_interrupted_end_has_left(ranks2: RankPool) -> None:
    """The groups of the last one are closed, and the next ones work."""
    for found in ranks2.run(followed_by_the_next_world):
        assert found == ["KeyboardInterrupt", "ClosedError", "NoneType", "NoneType"]


def interrupted_in_torch(rank: int, world_size: int, directory: Path) -> list[str]:
    """Interrupt a start whose thread stays in torch, and start again before and behind its end."""
    path, initialise = directory / f"meet-{rank}", dist.init_process_group
    is_there, goes_on = threading.Event(), threading.Event()

    def initialise_later(*args: Any, **options: Any) -> None:
        is_there.set()
        goes_on.wait()
        initialise(*args, **options)

    def interrupt(*_: object) -> None:
        if is_there.is_set():
            raise KeyboardInterrupt

    again = partial(start, path)
    with mock.patch.object(dist, "init_process_group", initialise_later):
        with mock.patch.object(blocking_calls, "raise_if_lost", interrupt):
            found = [outcome_of(again)["kind"]]
        with mock.patch.object(rendezvous, "_END_S", 0.05):
            found.append(outcome_of(again)["text"])
        goes_on.set()
        wait_until(lambda: rendezvous._attempt is None, "the end of the thread")
    found += [str(dist.is_initialized()), str(path.exists()), outcome_of(again)["kind"]]
    leave_world()
    return found


@pytest.mark.guarantee("G9")
def test_the_thread_of_an_interrupted_start_ends_the_world_that_it_makes(ranks2: RankPool) -> None:
    """It cannot be told to give up. A start before that waits for a moment, and is refused."""
    for kind, refused, *behind in ranks2.run(interrupted_in_torch):
        assert kind == "KeyboardInterrupt"
        assert "was interrupted, and its thread has not left torch yet" in refused
        assert behind == ["False", "False", "NoneType"]
