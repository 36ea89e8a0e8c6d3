"""Groups that end together: the calls of all end before the first of them frees what a kernel may use."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from coordinator import parallel_state
from coordinator.group import GroupCoordinator
from coordinator.groups import destroy_together, groups_of_process, set_default_groups, set_world_group
from coordinator.host.open_sends import OpenSends
from coordinator.layout import ParallelLayout
from coordinator.settings import CoordinatorSettings
from coordinator.testing import FakeGroupCoordinator, fake_groups
from tests.handlers import raising_at


class Watched:
    """What happens to groups, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        self.limits: list[float] = []
        self._patch = monkeypatch

    def watch(self, group: Any) -> None:
        """Note the end of the group's calls and of its communicator."""
        communicator, name = group.device_communicator, group.unique_name
        destroy: Callable[[], None] = communicator.destroy

        def end_calls(timeout_s: float) -> None:
            self.seen.append(("end_calls", name))
            self.limits.append(timeout_s)

        def destroyed() -> None:
            self.seen.append(("destroy", name))
            destroy()

        self._patch.setattr(communicator, "end_calls", end_calls)
        self._patch.setattr(communicator, "destroy", destroyed)

    def check(self, names: list[str]) -> None:
        """Check that exactly these groups have ended, in this order, and their calls before."""
        steps = [name for step, name in self.seen if step == "end_calls"]
        assert sorted(set(steps)) == sorted(names)
        first = [step for step, _ in self.seen].index("destroy")
        assert {name for _, name in self.seen[:first]} == set(names)
        assert [name for step, name in self.seen if step == "destroy"] == names


@pytest.mark.guarantee("D75")
def test_the_calls_of_all_groups_end_first_within_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is the longest of the groups'."""
    watched = Watched(monkeypatch)
    groups = [
        FakeGroupCoordinator(0, 2, group_name=name, settings=CoordinatorSettings(destroy_timeout_s=limit_s))
        for name, limit_s in (("a", 3.0), ("b", 7.0))
    ]
    for group in groups:
        watched.watch(group)
    destroy_together(groups)
    watched.check([group.unique_name for group in groups])
    assert 6.0 < watched.limits[1] <= watched.limits[0] <= 7.0


@pytest.mark.guarantee("D75")
def test_a_record_of_groups_ends_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In reverse order of creation; a world that the record does not own is left alone."""
    record = fake_groups(ParallelLayout(tensor=2), 0)
    watched = Watched(monkeypatch)
    groups = list(dict.fromkeys(record.by_name().values()))
    for group in groups:
        watched.watch(group)
    object.__setattr__(record, "owns_world", False)
    record.destroy()
    names = [group.unique_name for group in reversed(groups) if group is not record.world]
    ended = [name for step, name in watched.seen if step == "destroy"]
    assert sorted(ended) == sorted(names)
    watched.check(ended)
    record.world.destroy()


@pytest.mark.guarantee("D75")
def test_the_environment_ends_together_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world group is no part of the default groups, and its kernels end as early."""
    record = fake_groups(ParallelLayout(tensor=2), 0)
    world = FakeGroupCoordinator(0, 2, group_name="outer")
    watched = Watched(monkeypatch)
    for group in (*dict.fromkeys(record.by_name().values()), world):
        watched.watch(group)
    set_default_groups(record)
    set_world_group(world)
    assert not dist.is_initialized()
    parallel_state.destroy_distributed_environment()
    ended = [name for step, name in watched.seen if step == "destroy"]
    assert ended[-1] == world.unique_name
    watched.check(ended)


def process_groups() -> list[GroupCoordinator]:
    """Make fake groups those of the process, and return all of them."""
    record = fake_groups(ParallelLayout(tensor=2, pipeline=2), 0)
    world = FakeGroupCoordinator(0, 4, group_name="outer")
    set_default_groups(record)
    set_world_group(world)
    return [*record.owned(), world]


@pytest.mark.guarantee("G9")
def test_an_interrupt_ends_the_waits_of_groups_that_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the end of the first one: all are released without waiting, and the error arrives."""
    groups, waits = process_groups(), list[float]()
    flush = OpenSends.flush

    def interrupted(self: OpenSends, timeout_s: float, unfinished: Any) -> None:
        waits.append(timeout_s)
        if len(waits) == 1:
            raise KeyboardInterrupt
        flush(self, timeout_s, unfinished)

    monkeypatch.setattr(OpenSends, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel_state.destroy_distributed_environment()
    assert all(group._health.is_closed for group in groups)
    assert waits[0] > 0.0
    assert set(waits[1:]) == {0.0}
    parallel_state.destroy_distributed_environment()
    assert groups_of_process() == (None, None)


ENDING = ("coordinator/groups.py", "coordinator/parallel_state.py", "coordinator/group.py")


@pytest.mark.guarantee("G9")
def test_groups_whose_common_end_is_interrupted_anywhere_are_ended_by_another_call() -> None:
    """The process knows its groups until all of them have ended."""
    ends: list[Callable[[], None]] = [
        parallel_state.destroy_distributed_environment,
        parallel_state.destroy_model_parallel,
    ]
    for end in ends:
        step, comes = 0, True
        while comes:
            groups = process_groups()
            comes = raising_at(step, end, ENDING)
            end()
            assert all(group._health.is_closed for group in groups[:-1]), step
            assert groups_of_process()[0] is None, step
            parallel_state.destroy_distributed_environment()
            assert groups[-1]._health.is_closed, step
            step += 1
        assert step > 20
