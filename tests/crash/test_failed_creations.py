"""A creation that fails leaves nothing, also if its ranks connect after all, or are interrupted while they give up."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from coordinator.bootstrap import creation, fork_guard
from coordinator.bootstrap.group_parts import GroupProcessGroups
from coordinator.errors import CapabilityError, ClosedError
from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups
from coordinator.host import process_groups
from coordinator.layout import ParallelLayout
from coordinator.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from tests.crash.test_interrupts import PROMPT_S, interrupt
from tests.handlers import Interrupt, handling_at, raising_at
from tests.harness import RankPool
from tests.leaks import Snapshot, leaked_since
from tests.waiting import wait_until
from tests.worlds import ApartPool, join_world, meet, new_group, outcome_of, world


def groups_of_torch() -> int:
    known: Any = dist.distributed_c10d
    return len(known._world.pg_map)


def connected_late(rank: int, world_size: int, directory: Path) -> list[Any]:
    connect, goes_on = GroupProcessGroups.connect_device, threading.Event()

    def connect_later(self: GroupProcessGroups) -> Any:
        goes_on.wait()
        return connect(self)

    with world(rank, world_size, directory) as group:
        before = Snapshot.take(), groups_of_torch(), list(fork_guard._protected)
        with mock.patch.object(GroupProcessGroups, "connect_device", connect_later):
            create = partial(new_group, group)
            found = interrupt(create) if rank == 0 else outcome_of(create)
        meet(rank, range(world_size), directory, "given-up")
        goes_on.set()
        left = leaked_since(before[0])
        wait_until(lambda: groups_of_torch() == before[1], "torch to forget the group")
        wait_until(lambda: list(fork_guard._protected) == before[2], "its end")
        meet(rank, range(world_size), directory, "looked")
        with new_group(group) as again:
            again.barrier()
        return [found["kind"], found["seconds"] < PROMPT_S, left]


@pytest.mark.guarantee("G37")
def test_ranks_that_connect_once_the_creation_has_failed_keep_no_connection(ranks2: RankPool) -> None:
    """Nobody gets the process group whose thread was left behind: it is destroyed as soon as it is connected."""
    found = ApartPool(ranks2).run(connected_late)
    assert found == [["KeyboardInterrupt", True, []], ["PeerLostError", True, []]]


def test_a_process_group_that_comes_too_late_is_destroyed() -> None:
    """Who connects it is told so."""
    groups = GroupProcessGroups("tp:0", [0, 1], "gloo", "127.0.0.1", 20.0)
    early, late = mock.sentinel.early, mock.sentinel.late
    with mock.patch.object(dist, "destroy_process_group") as destroy:
        groups.adopt(early)
        groups.destroy()
        with pytest.raises(ClosedError, match="destroyed while a process group was connected"):
            groups.adopt(late)
        groups.destroy()
    assert [call.args for call in destroy.call_args_list] == [(early,), (late,)]
    assert not fork_guard._protected.keys() & {id(early), id(late)}


HANDING_OVER = (
    *(
        "coordinator/group.py",
        "coordinator/groups.py",
        "coordinator/parallel_state.py",
        "coordinator/calls.py",
    ),
    *("bootstrap/group_parts.py", "coordinator/layout.py", "/contextlib.py"),
)


CREATIONS: dict[str, Callable[[], GroupCoordinator | ParallelGroups | None]] = {
    "initialize_model_parallel": initialize_model_parallel,
    "create": lambda: ParallelGroups.create(ParallelLayout()),
    "from_device_mesh": lambda: ParallelGroups.from_device_mesh(
        init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    ),
    "split_group": lambda: get_world_group().split_group([[0]]),
    "split_group without this rank": lambda: get_world_group().split_group(color=-1),
    "create_subgroup": lambda: get_world_group().create_subgroup([0]),
    "constructor": lambda: GroupCoordinator([[0]], 0, "gloo", True, True),
}


def struck_while_handing_over(rank: int, world_size: int, directory: Path, name: str) -> int:
    """Strike a creation at every other place, and the other rank at those between; return how many there were."""
    made, bind, step, comes = list[GroupCoordinator](), GroupCoordinator._bind, rank, True

    def watched(self: GroupCoordinator, *args: Any) -> None:
        bind(self, *args)
        made.append(self)  # so that the collector does not destroy it

    def create(returned: list[GroupCoordinator | ParallelGroups | None]) -> None:
        try:
            returned.append(CREATIONS[name]())
        except Interrupt:
            # The traceback still refers to all that the call has made.
            assert all(group._health.is_closed for group in made), step
            raise

    init_distributed_environment(1, 0, f"file://{directory}/{rank}", backend="gloo")
    with mock.patch.object(GroupCoordinator, "_bind", watched):
        while comes:
            returned = list[GroupCoordinator | ParallelGroups | None]()
            comes = raising_at(step, partial(create, returned), HANDING_OVER)
            for each in returned:
                if each is not None:
                    each.destroy()
            destroy_model_parallel()
            assert all(group._health.is_closed for group in made), step
            made.clear()
            step += 2
    destroy_distributed_environment()
    return step


@pytest.mark.guarantee("G37")
@pytest.mark.parametrize("name", CREATIONS)
def test_groups_that_are_ready_when_an_interrupt_comes_are_destroyed(ranks2: RankPool, name: str) -> None:
    """Their ranks would wait for this one, which does not have the groups. What its caller has is the caller's."""
    for steps in ranks2.run(struck_while_handing_over, name):
        assert steps > 20


def shared_maps() -> int:
    """Return how many pieces of shared memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd")


BUILDING = "coordinator.bootstrap.group_builder"
GIVING_UP = ("bootstrap/creation.py", "bootstrap/group_builder.py", "device_comm/health.py")
CLOSING = (
    "bootstrap/group_builder.py",
    "bootstrap/group_parts.py",
    "heartbeats/watching.py",
    "/contextlib.py",
)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def struck_while_giving_up(
    rank: int, world_size: int, directory: Path, planted_at: str, places: Sequence[str]
) -> int:
    """Let the creation fail on both ranks, and strike rank 0 at each place of what it does then."""
    step, comes, give_up = 0, True, creation.give_up
    with world(rank, world_size, directory) as group, ExitStack() as patched:
        patched.enter_context(mock.patch.object(creation, "LINGER_S", 0.0))
        with new_group(group) as first:
            first.barrier()
        group.broadcast_object(True, 0)
        before, maps, known = Snapshot.take(), shared_maps(), groups_of_torch()
        while comes:
            strike = partial(handling_at, step, handler=raise_interrupt, places=places)
            with ExitStack() as planted:
                planted.enter_context(mock.patch(planted_at, side_effect=CapabilityError("planted")))
                if rank == 0:
                    struck = lambda *args, strike=strike: strike(lambda: give_up(*args))  # noqa: E731
                    planted.enter_context(mock.patch.object(creation, "give_up", struck))
                found = outcome_of(partial(new_group, group))
            comes = bool(group.broadcast_object(found["kind"] == "KeyboardInterrupt", 0))
            step += 1
        left = leaked_since(before)
        assert left == [], left
        assert (shared_maps(), groups_of_torch()) == (maps, known)
        return step


@pytest.mark.guarantee("G37")
def test_a_rank_that_is_interrupted_while_it_gives_up_leaves_nothing(ranks2: RankPool) -> None:
    """What one handler has kept it from is done all the same."""
    for steps in ranks2.run(struck_while_giving_up, f"{BUILDING}.GroupBuilder.confirm", GIVING_UP):
        assert steps > 10


@pytest.mark.guarantee("G37")
def test_a_rank_that_is_interrupted_while_it_closes_its_connections_leaves_none(ranks2: RankPool) -> None:
    """The groups are connected when the creation fails: what one handler has struck is closed all the same."""
    planted_at = f"{BUILDING}.CreationReport"
    for steps in ApartPool(ranks2).run(struck_while_giving_up, planted_at, CLOSING):
        assert steps > 10


def failed_in_torch(rank: int, world_size: int, directory: Path) -> str:
    """Return how this rank's first start ends, in which torch has no device on rank 0, once a second one works."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no device")

    patch = mock.patch.object(process_groups, "_device_at", refuse) if rank == 0 else nullcontext()
    with patch:
        first = outcome_of(lambda: join_world(rank, world_size, directory, create_timeout_s=0.5))
    meet(rank, range(world_size), directory, "failed")
    with world(rank, world_size, directory, create_timeout_s=20.0) as group:
        group.barrier()
    kind: str = first["kind"]
    return kind


@pytest.mark.guarantee("G9")
def test_a_start_that_fails_in_torch_leaves_the_next_one_alone(ranks2: RankPool) -> None:
    """By torch's count of the process groups that it begins, it names the store's keys: the ranks did not meet."""
    assert ranks2.run(failed_in_torch) == ["NativeError", "CommTimeoutError"]
