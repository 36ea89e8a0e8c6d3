"""Collectives among ranks on several hosts when ranks die, stop, come late, leave or disagree."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator import DisagreementError
from coordinator.parallel_state import destroy_distributed_environment, get_world_group
from device_comm.cpu.several_hosts import levels
from device_comm.cpu.several_hosts.wires import Swap
from device_comm.reduction import ReduceOperation
from shm_broadcast.errors import CapabilityError
from shm_broadcast.segment import Segment
from tests.harness import RankPool, run_ranks
from tests.rank_exit import RankExit
from tests.samples import sampled
from tests.waiting import wait_until
from tests.worlds import (
    HostsPool,
    hierarchical,
    join_world,
    meet,
    new_group,
    outcome_of,
    run_at,
    tell_when_waiting,
    world,
)

PROMPT_S = 20.0
# Only ranks that come within half of a deadline of each other are sure to know of each other, and a busy machine may
# keep a rank back for 0.3 s.
SHORT_S = 1.5

CALLS: dict[str, Any] = {
    "all_reduce": lambda group, s: group.all_reduce(torch.ones(8), timeout_s=s),
    "large all_reduce": lambda group, s: group.all_reduce(torch.ones(3 << 20), timeout_s=s),
    "all_gather": lambda group, s: group.all_gather(torch.ones(8), timeout_s=s),
    "all_gatherv": lambda group, s: group.device_communicator.all_gatherv(
        torch.ones([4, 4, 0, 0][group.rank_in_group]), 0, [4, 4, 0, 0], timeout_s=s
    ),
    "broadcast": lambda group, s: group.broadcast(torch.ones(8), 1, timeout_s=s),
    "reduce_scatter": lambda group, s: group.reduce_scatter(torch.ones(8), timeout_s=s),
}


def survive(
    rank: int, world_size: int, directory: Path, name: str, culprit: int, death: str
) -> list[dict[str, Any]]:
    join_world(rank, world_size, directory)
    try:
        group = get_world_group()
        group.barrier()
        CALLS[name](group, 30.0)
        meet(rank, range(world_size), directory, "ready")
        if rank == culprit:
            meet(rank, range(world_size), directory, "waits")
            if death == "exit":
                raise RankExit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        tell_when_waiting(group, directory)
        found = [outcome_of(lambda: CALLS[name](group, None)), outcome_of(group.barrier)]
        meet(rank, [each for each in range(world_size) if each != culprit], directory, "told")
        return found
    finally:
        if rank != culprit:
            destroy_distributed_environment()


@pytest.mark.guarantee("D7")
@pytest.mark.parametrize(
    ("name", "places", "death", "culprit"),
    sampled(
        3,
        [
            (*case, culprit)
            for case in (
                ("all_reduce", "AABB", "kill"),
                ("all_gather", "ABAB", "exit"),
                ("broadcast", "AABB", "kill"),
                ("reduce_scatter", "ABBB", "kill"),
            )
            for culprit in range(4)
        ],
    ),
)
def test_the_death_of_any_rank_is_told_to_all(name: str, places: str, death: str, culprit: int) -> None:
    """All other ranks raise a `PeerLostError` that names only the dead rank, which may be a leader or not."""
    arguments = (list(places), __name__, "survive", name, culprit, death)
    found = run_ranks(run_at, 4, *arguments, expect_dead=[culprit])
    for rank, outcomes in enumerate(found):
        if rank != culprit:
            first, second = outcomes
            assert (first["kind"], first["peers"]) == ("PeerLostError", [culprit]), (rank, first)
            assert first["seconds"] < PROMPT_S
            assert (second["kind"], second["cause"]) == ("GroupBrokenError", "PeerLostError")


def wait_for_stopped(
    rank: int, world_size: int, directory: Path, name: str, culprit: int
) -> dict[str, Any] | None:
    join_world(rank, world_size, directory)
    group = get_world_group()
    pids = group.all_gather_object(os.getpid())
    CALLS[name](group, 30.0)
    meet(rank, range(world_size), directory, "ready")
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = outcome_of(lambda: CALLS[name](group, 1.0))
    meet(rank, [each for each in range(world_size) if each != culprit], directory, "told")
    if rank == (culprit + 1) % world_size:
        os.kill(pids[culprit], signal.SIGKILL)
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("D6")
@pytest.mark.parametrize(
    ("culprit", "name", "places"),
    sampled(
        3,
        [
            (culprit, *case)
            for culprit in range(4)
            for case in (("all_reduce", "AABB"), ("broadcast", "ABAB"))
        ],
    ),
)
def test_a_stopped_rank_is_named_by_all(name: str, places: str, culprit: int) -> None:
    """A rank names it even if it waits for its leader, which waits for another leader, which waits for that rank."""
    found = run_ranks(
        run_at, 4, list(places), __name__, "wait_for_stopped", name, culprit, expect_dead=[culprit]
    )
    for rank, each in enumerate(found):
        if rank != culprit:
            assert (each["kind"], each["missing"]) == ("CommTimeoutError", [culprit]), (rank, each)
            assert "stopped" in each["text"]


def come_late(rank: int, world_size: int, directory: Path, name: str, culprit: int) -> list[dict[str, Any]]:
    with world(rank, world_size, directory) as group:
        CALLS[name](group, 30.0)
        if rank == culprit:
            meet(rank, range(world_size), directory, "failure_record")
        found = [outcome_of(lambda: CALLS[name](group, SHORT_S))]
        if rank != culprit:
            meet(rank, range(world_size), directory, "failure_record")
        return [*found, outcome_of(group.barrier)]


@pytest.mark.guarantee("D6")
@pytest.mark.guarantee("D8")
@pytest.mark.parametrize(("name", "culprit"), sampled(3, product(CALLS, (1, 2))))
def test_every_waiting_rank_and_the_late_one_name_the_late_one(
    ranks4: RankPool, name: str, culprit: int
) -> None:
    """Ranks on both hosts name it, and when the late rank comes it gets the same error."""
    for rank, (first, second) in enumerate(HostsPool(ranks4, "AABB").run(come_late, name, culprit)):
        assert (first["kind"], first["missing"]) == ("CommTimeoutError", [culprit]), (rank, first)
        assert (second["kind"], second["cause"]) == ("GroupBrokenError", "CommTimeoutError"), (rank, second)


def over_a_slow_line(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Begin a call of many pieces, rank 1 once rank 0 has reported, over a line that takes 50 ms for each of them."""
    poll = Swap.poll

    def slow(swap: Swap, slice_s: float) -> bool:
        time.sleep(min(slice_s, 0.05))
        return slice_s >= 0.05 and poll(swap, slice_s - 0.05)

    with (
        world(rank, world_size, directory) as group,
        mock.patch.object(levels, "PIECE_BYTES", 64),
        mock.patch.object(Swap, "poll", slow),
    ):
        store = group._health._status_store
        if rank == 1:
            wait_until(lambda: store.arrivals("device"), "the other rank has reported")
        found = outcome_of(lambda: group.all_reduce(torch.ones(200 * 16), timeout_s=3.0))
        meet(rank, range(world_size), directory, "told")
        return found


@pytest.mark.guarantee("D6")
@pytest.mark.parametrize("places", ["AB", "AABB"])
def test_a_rank_whose_waits_are_all_short_has_come(places: str) -> None:
    """A call takes many waits, of which the late rank's are too short to report; in all it takes longer than that."""
    with RankPool(len(places), brief=True) as pool:
        for found in HostsPool(pool, places).run(over_a_slow_line):
            assert (found["kind"], found["missing"]) == ("CommTimeoutError", []), found
            assert "all_reduce" in found["text"]


def come_within_the_deadline(rank: int, world_size: int, directory: Path) -> list[float]:
    with world(rank, world_size, directory) as group:
        # 0.1 s longer than a rank waits before it tells the status store where.
        time.sleep(0.6 * rank)
        result = group.all_reduce(torch.ones(3), timeout_s=60.0)
        time.sleep(0.6 * (world_size - rank))
        group.broadcast(result, 1, timeout_s=60.0)
        return [float(each) for each in result]


def test_ranks_that_come_one_after_the_other_are_waited_for(ranks4: RankPool) -> None:
    """No error is raised within the deadline."""
    assert HostsPool(ranks4, "ABAB").run(come_within_the_deadline) == [[4.0] * 3] * 4


def destroyed_meanwhile(rank: int, world_size: int, directory: Path, waiting: int) -> dict[str, Any] | None:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        found = None
        if rank == waiting:
            timer = threading.Timer(0.5, group.destroy)
            timer.start()
            found = outcome_of(lambda: group.all_reduce(torch.ones(8)))
            timer.join()
        meet(rank, range(world_size), directory, "told")
        group.destroy()
        first.barrier()
        return found


@pytest.mark.parametrize("waiting", [0, 1, 2, 3])
def test_destroy_in_another_thread_ends_a_wait(ranks4: RankPool, waiting: int) -> None:
    """A leader, another rank, and a rank that is alone on its host each raise a `ClosedError`."""
    found = HostsPool(ranks4, "AAAB").run(destroyed_meanwhile, waiting)[waiting]
    assert found["kind"] == "ClosedError", found
    assert found["seconds"] < PROMPT_S


def leave_meanwhile(rank: int, world_size: int, directory: Path, culprit: int) -> dict[str, Any] | None:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        found = None
        if rank == culprit:
            meet(rank, range(world_size), directory, "waits")
            group.destroy()
        else:
            tell_when_waiting(group, directory)
            found = outcome_of(lambda: group.all_reduce(torch.ones(8)))
        meet(rank, range(world_size), directory, "told")
        group.destroy()
        first.barrier()
        return found


@pytest.mark.parametrize("culprit", [1, 2])
def test_a_rank_that_destroyed_its_group_is_named(ranks4: RankPool, culprit: int) -> None:
    """The ranks of both hosts name the rank that left, which is a leader or another rank."""
    for rank, found in enumerate(HostsPool(ranks4, "AABB").run(leave_meanwhile, culprit)):
        if rank != culprit:
            assert (found["kind"], found["peers"]) == ("PeerLostError", [culprit]), (rank, found)
            assert found["seconds"] < PROMPT_S


def disagree(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as group:
        found = outcome_of(lambda: group.all_reduce(torch.ones(5 if rank == 1 else 4), timeout_s=30.0))
        meet(rank, range(world_size), directory, "told")
        return found


def test_ranks_of_one_host_that_disagree_break_the_group(ranks4: RankPool) -> None:
    """Their error shows the call of each. The other host gets this error too, before its deadline."""
    found = HostsPool(ranks4, "AABB").run(disagree)
    assert [each["kind"] for each in found[:2]] == [DisagreementError.__name__] * 2, found
    assert [each["kind"] for each in found[2:]] == ["GroupBrokenError"] * 2, found
    for each in found:
        assert "5 elements" in each["text"]
        assert each["seconds"] < PROMPT_S


def differ_inside(rank: int, world_size: int, directory: Path, name: str) -> dict[str, Any]:
    """Let rank 1 make another call than the ranks of its host and of the other one, then the same call as they do."""
    with world(rank, world_size, directory) as group:
        device, is_other = hierarchical(group), rank == 1
        call: Any = {
            "reductions": lambda: device.all_reduce(
                torch.ones(4), ReduceOperation.MEAN if is_other else ReduceOperation.SUM
            ),
            "ranks that get the result": lambda: device.reduce(torch.ones(4), int(is_other)),
            "roots elsewhere": lambda: device.broadcast(torch.ones(4), 3 if is_other else 2),
            "dimensions": lambda: device.all_gather(torch.ones(2, 2), int(is_other)),
            "names": lambda: (
                device.all_reduce(torch.ones(4)) if is_other else device.reduce(torch.ones(4), 0)
            ),
            "no elements": lambda: device.all_reduce(torch.ones(0 if is_other else 4)),
            "no rows": lambda: device.reduce_scatter(torch.ones(0 if is_other else 4)),
            "no parts": lambda: device.all_gather(torch.ones(0 if is_other else 4)),
            "no bytes": lambda: device.broadcast(torch.ones(0 if is_other else 4), 2),
        }[name]
        found = outcome_of(lambda: (call(), device.all_reduce(torch.ones(4))))
        meet(rank, range(world_size), directory, "told")
        return found


@pytest.mark.guarantee("D69")
@pytest.mark.parametrize(
    "name",
    [
        *("reductions", "ranks that get the result", "roots elsewhere", "dimensions", "names"),
        *("no elements", "no rows", "no parts", "no bytes"),
    ],
)
def test_ranks_of_one_host_compare_the_whole_call(ranks4: RankPool, name: str) -> None:
    """Their shared memory carries only parts of a call, which may be alike where the calls are not."""
    found = HostsPool(ranks4, "AABB").run(differ_inside, name)
    assert [each["kind"] for each in found[:2]] == [DisagreementError.__name__] * 2, found
    assert {each["kind"] for each in found[2:]} <= {"DisagreementError", "GroupBrokenError"}, found
    for rank, each in enumerate(found):
        assert rank > 1 or re.search(r"on this rank: \w+ #1, ", each["text"]), each
        assert each["seconds"] < PROMPT_S


def bring_nothing(rank: int, world_size: int, directory: Path) -> list[list[int]]:
    with world(rank, world_size, directory) as group:
        device = hierarchical(group)
        found = [
            device.all_reduce(torch.ones(0, 3)),
            device.reduce_scatter(torch.ones(0, 3), 0),
            device.reduce_scatter(torch.ones(6, 0), 0),
            device.all_gather(torch.ones(2, 0), 0),
            device.broadcast(torch.ones(0, 3), 1),
            device.all_reduce(torch.ones(1)),
        ]
        return [list(each.shape) for each in found]


@pytest.mark.guarantee("D5")
def test_calls_without_elements_have_a_place_among_the_others(ranks3: RankPool) -> None:
    """Ranks that share a host's memory and one that is alone make them, and the next call works."""
    shapes = [[0, 3], [0, 3], [2, 0], [6, 0], [0, 3], [1]]
    assert HostsPool(ranks3, "AAB").run(bring_nothing) == [shapes] * 3


def hosts_disagree(rank: int, world_size: int, directory: Path, name: str) -> dict[str, Any]:
    with world(rank, world_size, directory) as group:
        late = rank >= 2
        call: Any = {
            "sizes": lambda: group.all_reduce(torch.ones(5 if late else 4)),
            "large sizes": lambda: group.all_reduce(torch.ones(500_001 if late else 400_000)),
            "numbers of leaders": lambda: group.all_reduce(torch.ones(500_001 if late else 4)),
            "calls": lambda: (group.all_gather if late else group.all_reduce)(torch.ones(4)),
            "dtypes": lambda: group.all_reduce(torch.ones(4, dtype=torch.int32 if late else torch.float32)),
            "reductions": lambda: hierarchical(group).reduce_scatter(
                torch.ones(4), 0, ReduceOperation.MAX if late else ReduceOperation.MIN
            ),
            "roots": lambda: group.broadcast(torch.ones(4), 1 if late else 0),
        }[name]
        found = outcome_of(call)
        meet(rank, range(world_size), directory, "told")
        return found


@pytest.mark.parametrize(
    "name", ["sizes", "large sizes", "numbers of leaders", "calls", "dtypes", "reductions", "roots"]
)
def test_hosts_that_disagree_break_the_group(ranks4: RankPool, name: str) -> None:
    """No rank gets a wrong result, and Gloo ends no process. The error on all ranks shows the call of each host."""
    found = HostsPool(ranks4, "AABB").run(hosts_disagree, name)
    kinds = [each["kind"] for each in found]
    assert "DisagreementError" in kinds, found
    assert set(kinds) <= {"DisagreementError", "GroupBrokenError"}, found
    for each in found:
        # That of the first leaders, or of the second ones, which large tensors have.
        assert re.search(
            "the hosts made different calls: rank (0: .*; rank 2: |1: .*; rank 3: )", each["text"]
        ), each
        assert each["seconds"] < PROMPT_S


def without_memory(rank: int, world_size: int, directory: Path, poor: int) -> str:
    create = Segment.create

    def refuse(*_sizes: object) -> Segment:
        raise CapabilityError("no memory here", requirement="shared memory")

    if rank == poor:
        Segment.create = refuse  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(CapabilityError) as caught, world(rank, world_size, directory):
            pass
        return str(caught.value)
    finally:
        Segment.create = create  # type: ignore[method-assign]


def test_one_host_without_memory_raises_on_all_ranks(ranks4: RankPool) -> None:
    """If the second host's leader cannot create its memory, every rank raises a `CapabilityError`."""
    for text in HostsPool(ranks4, "AABB").run(without_memory, 2):
        assert "no memory here" in text


def stay_away(rank: int, world_size: int, directory: Path) -> str:
    """Make three calls, each of several steps on each host; then rank 1 stays away, which rank 0 finds first."""
    with world(rank, world_size, directory) as group:
        for _ in range(3):
            group.all_reduce(torch.ones(8))
        limit_s = 30.0 if rank else 1.0
        found = (
            outcome_of(lambda: group.all_reduce(torch.ones(8), timeout_s=limit_s))
            if rank != 1
            else {"text": ""}
        )
        meet(rank, range(world_size), directory, "expired")
        return str(found["text"])


def test_a_time_out_gives_no_numbers_of_the_steps_on_one_host(ranks4: RankPool) -> None:
    """Ranks of the group count its calls; the shared memory of a host counts the steps of which they are made."""
    for rank, text in enumerate(HostsPool(ranks4, "AABB").run(stay_away)):
        if rank != 1:
            assert "no answer from rank 1 " in text, text
            # It has reported a call only if it had to wait in one for half a second.
            assert all(int(number) <= 3 for number in re.findall(r"last at \w+ #(\d+)", text)), text
