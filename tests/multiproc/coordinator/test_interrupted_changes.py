"""A signal handler raises in the middle of a change of members: the rank tells the others, and comes back."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coordinator import group_registry
from coordinator.elastic.driver import Driver
from coordinator.elastic.ending import Meeting
from coordinator.elastic.joining import join_distributed_environment
from coordinator.elastic.layouts import Placement
from coordinator.elastic.protocol import Get, Operation, Pause
from coordinator.errors import CommError, CommTimeoutError, DisagreementError, UsageError
from coordinator.groups import ParallelGroups
from coordinator.settings import CoordinatorSettings
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import elastic_groups, end, use
from tests.waiting import wait_until

TIMEOUT_S = 20.0


class StruckError(Exception):
    """What a signal handler raises."""


@contextmanager
def struck_at(is_there: Callable[[Driver, Operation], bool]) -> Iterator[None]:
    """Interrupt the agreement in the block before the first operation for which `is_there` holds."""
    do, strikes = Driver._do, [1]

    def do_or_raise(driver: Driver, wants: Operation) -> Any:
        if strikes and is_there(driver, wants):
            strikes.clear()
            raise StruckError
        return do(driver, wants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "_do", do_or_raise)
        yield
    assert not strikes


def waits_for_members(driver: Driver, wants: Operation) -> bool:
    return isinstance(wants, Pause) and wants.step == "members"


def has_built(driver: Driver, wants: Operation) -> bool:
    return isinstance(wants, Get) and "1/result" in wants.keys and "1/made/0" in wants.keys


def has_built_with_all(driver: Driver, wants: Operation) -> bool:
    if not has_built(driver, wants):
        return False
    wait_until(lambda: driver._store.check(["1/result"]), "the other rank", TIMEOUT_S)
    return True


PLACES = {each.__name__: each for each in (waits_for_members, has_built, has_built_with_all)}


def meet(rank: int, world_size: int, directory: Path) -> None:
    """Return when all ranks have come here."""
    directory.mkdir(exist_ok=True)
    (directory / f"there {rank}").touch()
    wait_until(lambda: len(list(directory.glob("there *"))) == world_size, "the other ranks", TIMEOUT_S)


def use_or_rebuild(groups: ParallelGroups) -> tuple[ParallelGroups, list[float]]:
    """Use groups that another rank may break; return those that have worked."""
    for _ in range(3):
        try:
            return groups, use(groups)
        except CommError:
            groups = groups.rebuild(timeout_s=TIMEOUT_S)
    raise AssertionError("they are broken again and again")


def interrupted_in_rebuild(rank: int, world_size: int, directory: Path, place: str) -> list[Any]:
    groups = elastic_groups(rank, world_size, directory)
    called = list[int]()
    groups.on_rebuild(lambda later: called.append(later.world.world_size))
    meet(rank, world_size, directory)
    if rank == 1:
        with struck_at(PLACES[place]), pytest.raises(StruckError):
            groups.rebuild(timeout_s=TIMEOUT_S)
        (directory / "struck").touch()
    elif place == "waits_for_members":
        wait_until((directory / "struck").exists, "the interrupt", TIMEOUT_S)
    began = time.monotonic()
    later, sums = use_or_rebuild(groups.rebuild(timeout_s=TIMEOUT_S))
    assert time.monotonic() - began < TIMEOUT_S / 3, "nobody has waited for the deadline of a step"
    found = [later.world.world_size, sums[0], later.world.mq_broadcaster is not None, called[-1]]
    end(later)
    groups.destroy()
    return found


@pytest.mark.guarantee("E5", "E9")
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_interrupted_in_a_rebuild_calls_it_once_more(place: str) -> None:
    """Both have working groups then, of both ranks: also if the other had them before, whose call fails at once."""
    assert run_ranks(interrupted_in_rebuild, 2, place) == [[2, 1.0, True, 2]] * 2


def rebuilt(groups: ParallelGroups) -> ParallelGroups:
    """Rebuild them, again if the other rank still plans a change: both are refused then."""
    try:
        return groups.rebuild(timeout_s=TIMEOUT_S)
    except DisagreementError:
        return groups.rebuild(timeout_s=TIMEOUT_S)


def exchanged(groups: ParallelGroups) -> ParallelGroups:
    """Go over to groups of the same ranks as planned, or stay where the change is given up."""
    try:
        plan = groups.prepare(
            layout=lambda layout, ranks: Placement(layout, tuple(sorted(ranks))), timeout_s=TIMEOUT_S
        )
        later = plan.commit()
    except DisagreementError:
        return groups
    assert later is not None
    return later


CHANGES = {each.__name__: each for each in (rebuilt, exchanged)}


def interrupted_at_each_step(rank: int, world_size: int, directory: Path, change: str) -> list[Any]:
    groups, step, strikes = elastic_groups(rank, world_size, directory), 0, 0
    while not (directory / "over").exists():
        meet(rank, world_size, directory / f"{step}")
        done = set[str]()

        def comes(_: Driver, wants: Operation, done: set[str] = done, step: int = step) -> bool:
            done.add("pauses" if isinstance(wants, Pause) else repr(wants))
            return len(done) > step

        later = groups
        if rank == 1:
            try:
                with struck_at(comes):
                    later = CHANGES[change](groups)
            except StruckError:
                strikes += 1
                later = rebuilt(groups)
            except AssertionError:  # it has had fewer steps
                (directory / "over").touch()
        else:
            later = CHANGES[change](groups)
        groups, _ = use_or_rebuild(later)
        meet(rank, world_size, directory / f"{step} done")
        step += 1
    end(groups)
    return [strikes, len(group_registry._groups)]


@pytest.mark.thorough
@pytest.mark.guarantee("E5")
@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_may_be_interrupted_at_each_step_of_a_change(change: str) -> None:
    """Both go on with it each time, and nothing of the epochs between is left."""
    (_, left), (strikes, own) = run_ranks(interrupted_at_each_step, 2, change, timeout_s=200.0)
    assert strikes > 10
    assert (left, own) == (0, 0)


def interrupted_in_commit(rank: int, world_size: int, directory: Path) -> list[Any]:
    groups = elastic_groups(rank, world_size, directory)
    plan = groups.prepare(leave=[2], timeout_s=TIMEOUT_S)
    if rank == 1:
        with mock.patch.object(Meeting, "come", side_effect=StruckError), pytest.raises(StruckError):
            plan.commit()
        assert plan.status().phase == "committed"
        with pytest.raises(UsageError, match="committed"):
            plan.commit()
        with pytest.raises(UsageError, match="call rebuild to go on from it"):
            groups.prepare(leave=[0])
        committed: ParallelGroups | None = groups.rebuild(timeout_s=TIMEOUT_S)
    else:
        began = time.monotonic()
        committed = plan.commit()
        assert time.monotonic() - began < TIMEOUT_S / 3, "nobody waits for the interrupted rank"
    if committed is None:
        end(groups)
        return []
    later, sums = use_or_rebuild(committed)
    found = [later.world.rank, later.world.world_size, sums[0]]
    end(later)
    groups.destroy()
    return found


@pytest.mark.guarantee("E5", "E9")
def test_a_rank_that_is_interrupted_behind_the_decision_goes_on_from_the_new_groups() -> None:
    """The change is made, so that neither its plan nor its old groups lead anywhere; `rebuild` does."""
    assert run_ranks(interrupted_in_commit, 3) == [[0, 2, 1.0], [1, 2, 1.0], []]


def interrupted_in_prepare(rank: int, world_size: int, directory: Path) -> str:
    groups = elastic_groups(rank, world_size, directory)
    meet(rank, world_size, directory)
    told = ""
    if rank == 1:
        before = set(group_registry._groups)
        with struck_at(has_built), pytest.raises(StruckError):
            groups.prepare(leave=[2], timeout_s=TIMEOUT_S)
        assert set(group_registry._groups) == before, "what it had built is destroyed"
    else:
        with pytest.raises(CommError) as caught:
            groups.prepare(leave=[2], timeout_s=TIMEOUT_S).commit()
        told = str(caught.value).rpartition(": ")[2]
    assert use(groups)[0] == 3.0, "the old groups serve on"
    after = groups.prepare(leave=[2], timeout_s=TIMEOUT_S).commit()
    if after is None:
        end(groups)
        return told
    use(after)
    end(after)
    return told


@pytest.mark.guarantee("E8")
def test_a_rank_that_is_interrupted_in_a_planned_change_ends_it_for_all() -> None:
    """The others are told who it was, at once; the old groups serve on, and the change can be made again."""
    told = "member 1 was interrupted (StruckError)"
    assert run_ranks(interrupted_in_prepare, 3) == [told, "", told]


def gives_up_joining(rank: int, world_size: int, directory: Path) -> list[Any]:
    if rank == 1:
        wait_until((directory / "serving").exists, "the other", TIMEOUT_S)
        settings = CoordinatorSettings.resolve(timeout_s=10.0)
        store = f"file://{directory}/store"
        for _ in range(2):
            with pytest.raises(CommTimeoutError, match="nobody has taken it in"):
                join_distributed_environment(store, settings=settings, timeout_s=0.3)
        with struck_at(lambda _, wants: isinstance(wants, Pause)), pytest.raises(StruckError):
            join_distributed_environment(store, settings=settings, timeout_s=TIMEOUT_S)
        (directory / "given up").touch()
        wait_until((directory / "counted").exists, "the other", TIMEOUT_S)
        groups = join_distributed_environment(store, settings=settings, timeout_s=TIMEOUT_S)
        found = use(groups)
        groups.destroy()
        return found
    groups = elastic_groups(0, 1, directory)
    (directory / "serving").touch()
    wait_until((directory / "given up").exists, "the other", TIMEOUT_S)
    assert groups.pending_members() == 0
    (directory / "counted").touch()
    wait_until(lambda: groups.pending_members() == 1, "a process that joins", TIMEOUT_S)
    committed = groups.prepare(join=1, timeout_s=TIMEOUT_S).commit()
    assert committed is not None
    found = use(committed)
    end(committed)
    return found


@pytest.mark.guarantee("E8")
def test_a_process_that_no_longer_waits_to_join_is_not_chosen() -> None:
    """After a timeout and after an interrupt; the process lives on, and may join later."""
    assert run_ranks(gives_up_joining, 2) == [[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]
