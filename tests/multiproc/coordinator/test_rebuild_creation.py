"""The creation of groups in a change of members: its deadline, which ends with it, and what becomes of its failures."""

import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from coordinator.bootstrap.group_parts import GroupProcessGroups
from coordinator.bootstrap.world import World
from coordinator.elastic.part import Recipe
from coordinator.errors import CapabilityError, CommTimeoutError, DisagreementError, GroupBrokenError
from coordinator.groups import ParallelGroups
from coordinator.layout import ParallelLayout
from coordinator.parallel_state import set_custom_all_reduce
from coordinator.settings import CoordinatorSettings
from shm_broadcast.liveness import this_process
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import elastic_groups, end, use
from tests.waiting import wait_until

CREATE_S = CoordinatorSettings().create_timeout_s


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long torch waits in a call of a group that states no limit."""
    backend: Any = cast("Any", group)._get_backend(torch.device("cpu"))
    return cast("timedelta", backend.options._timeout)


def keeps_deadlines(rank: int, world_size: int, directory: Path) -> list[Any]:
    groups = elastic_groups(rank, world_size, directory)
    (directory / f"ready {rank}").touch()
    wait_until(lambda: len(list(directory.glob("ready *"))) == world_size, "the other's groups", 20.0)
    groups = groups.rebuild(timeout_s=20.0)
    use(groups)
    found = [timeout_of(groups.world.cpu_group), timeout_of(groups.dp.device_group)]
    queues: Any = groups.world._queues
    limits = [each.total_seconds() for each in found] + [queues._create_timeout_s, queues._settings.timeout_s]
    end(groups)
    return limits


@pytest.mark.guarantee("E6")
def test_groups_of_a_later_epoch_have_the_deadlines_of_the_settings() -> None:
    """Torch's calls of their process groups, and the creation of queues, though they were created within 7 s."""
    assert run_ranks(keeps_deadlines, 2) == [[CREATE_S, CREATE_S, CREATE_S, 10.0]] * 2


def fails_to_create(rank: int, world_size: int, directory: Path) -> list[str]:
    groups = elastic_groups(rank, world_size, directory)
    (directory / f"ready {rank}").touch()
    wait_until(lambda: len(list(directory.glob("ready *"))) == world_size, "the other's groups", 20.0)
    texts = []
    set_custom_all_reduce(rank == 0)
    with pytest.raises(DisagreementError) as caught:
        groups.rebuild(timeout_s=20.0)
    texts.append(str(caught.value).partition(": ")[2])
    with pytest.raises(GroupBrokenError):  # not destroyed
        groups.world.barrier()
    set_custom_all_reduce(True)
    full = CapabilityError("there is no memory", requirement="shared memory")
    failing = mock.patch.object(ParallelGroups, "_create_again", side_effect=full)
    with failing if rank == 1 else nullcontext(), pytest.raises(DisagreementError) as caught:
        groups.rebuild(timeout_s=3.0)
    texts.append(str(caught.value).partition(": ")[2])
    groups = groups.rebuild(timeout_s=20.0)
    assert groups.world.mq_broadcaster is not None
    use(groups)
    end(groups)
    return texts


@pytest.mark.guarantee("E4")
def test_why_a_rank_cannot_create_its_groups_is_told_on_all_ranks() -> None:
    """Also where a process forbids what its settings allow, and behind the end of the old groups. All may try again."""
    settings = "setting cuda.custom_all_reduce: 'True' (rank 0), 'False' (rank 1)"
    assert run_ranks(fails_to_create, 2) == [[f"new ranks disagree: {settings}", "there is no memory"]] * 2


@pytest.mark.guarantee("E5")
def test_the_groups_of_an_epoch_are_created_within_the_deadline_of_the_change() -> None:
    """A rank that does not come is named behind it, long before `create_timeout_s` has passed."""
    me = this_process()
    world = World(0, 2, dist.HashStore(), lambda: None, {0: me, 1: me})
    recipe = Recipe(ParallelLayout(data=2), (), has_queues=False, has_token_group=False, backend="gloo")
    began = time.monotonic()
    with pytest.raises(CommTimeoutError) as caught:
        ParallelGroups._create_in(world, recipe, recipe.layout, CoordinatorSettings(), 0, 0.2)
    assert caught.value.missing == (1,)
    assert time.monotonic() - began < CREATE_S / 10


def test_a_process_group_with_a_short_deadline_is_not_lent_to_callers() -> None:
    """Torch's calls of it would give up too early, so that callers get another one."""
    groups = GroupProcessGroups("g", [0, 1], "gloo", "127.0.0.1", CREATE_S, None, 2.0)
    groups.host = groups.device = cast("dist.ProcessGroup", object())
    assert groups.for_callers() == (None, None)
    groups.connect_timeout_s = None
    assert groups.for_callers() == (groups.host, groups.device)
