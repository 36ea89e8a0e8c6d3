"""A call past its deadline names the same missing ranks on every rank, and the group can be closed in order."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import GroupCoordinator
from tests.harness import RankPool
from tests.worlds import EVERYONE_WAITS, FIRST_WAITS, LARGE, WAITS, meet, new_group, outcome_of, small, world

# Deadline of the short cases.
SHORT_S = 0.4
# What should take seconds may take this long: far above any bound under test, far below the harness's limit.
BOUNDED_S = 20.0


def last_rank_comes_after_the_verdict(
    rank: int, world_size: int, directory: Path, name: str
) -> list[dict[str, Any]]:
    culprit = world_size - 1
    waiting = range(culprit) if name in EVERYONE_WAITS else [0]
    peer = culprit if rank in waiting or name in EVERYONE_WAITS else 0
    with world(rank, world_size, directory) as group:
        found = []
        if rank in waiting:
            found.append(outcome_of(lambda: WAITS[name](group, peer, SHORT_S)))
        meet(rank, range(world_size), directory, "failure_record")
        if rank == culprit:
            found.append(outcome_of(lambda: WAITS[name](group, peer, SHORT_S)))
        if found:
            found.append(outcome_of(group.barrier))
        return found


@pytest.mark.guarantee("D6")
@pytest.mark.guarantee("D8")
@pytest.mark.parametrize("name", EVERYONE_WAITS)
def test_every_waiting_rank_and_the_late_one_name_the_late_one(ranks4: RankPool, name: str) -> None:
    """All four ranks raise with `.missing == (3,)`: the three that waited, and rank 3 when it arrives."""
    for rank, (first, second) in enumerate(ranks4.run(last_rank_comes_after_the_verdict, name)):
        assert first["kind"] == "CommTimeoutError", (rank, first)
        assert first["missing"] == [3], (rank, first)
        assert second["kind"] == "GroupBrokenError", (rank, second)
        assert second["cause"] == "CommTimeoutError", (rank, second)


@pytest.mark.guarantee("D6")
@pytest.mark.guarantee("D8")
@pytest.mark.parametrize("name", FIRST_WAITS)
def test_who_waits_for_one_rank_names_it_and_so_does_that_rank(ranks2: RankPool, name: str) -> None:
    """Rank 0 times out with `.missing == (1,)`; rank 1 arrives late and gets the same; the group is broken."""
    for rank, (first, second) in enumerate(ranks2.run(last_rank_comes_after_the_verdict, name)):
        assert first["kind"] == "CommTimeoutError", (rank, first)
        assert first["missing"] == [1], (rank, first)
        assert second["kind"] == "GroupBrokenError", (rank, second)
        assert second["cause"] == "CommTimeoutError", (rank, second)


def come_at(
    rank: int, world_size: int, directory: Path, delays: list[float | None], deadline_s: float
) -> dict[str, Any] | None:
    with world(rank, world_size, directory) as group:
        group.barrier()
        delay = delays[rank]
        found = None
        if delay is not None:
            time.sleep(delay)
            found = outcome_of(lambda: group.barrier(deadline_s))
        meet(rank, range(world_size), directory, "end")
        return found


@pytest.mark.guarantee("D6")
def test_ranks_that_come_at_0_2_and_4_of_5_seconds_all_name_the_absent_fourth(ranks4: RankPool) -> None:
    """All three arrivals blame only the absent rank, however far apart they came."""
    found = ranks4.run(come_at, [0.0, 2.0, 4.0, None], 5.0)
    assert [each["kind"] for each in found[:3]] == ["CommTimeoutError"] * 3, found
    assert [each["missing"] for each in found[:3]] == [[3]] * 3, found
    assert found[0]["seconds"] >= 5.0


def test_a_rank_that_comes_just_before_the_deadline_is_not_blamed(ranks4: RankPool) -> None:
    """A rank that arrives just before the deadline has no time to report, yet only rank 3 is named."""
    found = ranks4.run(come_at, [0.0, 0.0, 0.9, None], 1.0)
    assert [each["missing"] for each in found[:3]] == [[3]] * 3, found


def test_all_absent_ranks_are_named(ranks4: RankPool) -> None:
    """The two ranks that came name the two that did not."""
    found = ranks4.run(come_at, [0.0, 0.2, None, None], SHORT_S)
    assert [each["missing"] for each in found[:2]] == [[2, 3]] * 2, found


def test_a_rank_that_comes_after_the_deadline_is_too_late(ranks2: RankPool) -> None:
    """Ranks that share memory need no time to find out who is missing: the deadline is kept within 0.4 s."""
    found = ranks2.run(come_at, [0.0, SHORT_S + 0.5], SHORT_S)
    assert [each["missing"] for each in found] == [[1], [1]], found
    assert SHORT_S <= found[0]["seconds"] < SHORT_S + 0.4


def test_a_late_rank_within_the_deadline_is_only_waited_for(ranks4: RankPool) -> None:
    """Ranks that come seconds apart, well within the deadline, all succeed."""
    found = ranks4.run(come_at, [0.0, 0.7, 1.4, 2.1], 60.0)
    assert [each["kind"] for each in found] == ["NoneType"] * 4, found


def deadline_from_settings(rank: int, world_size: int, directory: Path) -> dict[str, Any] | None:
    with world(rank, world_size, directory, timeout_s=SHORT_S) as group:
        found = outcome_of(lambda: group.all_reduce(small())) if rank == 0 else None
        meet(rank, range(world_size), directory, "end")
        return found


def test_the_deadline_of_the_settings_counts_where_the_call_states_none(ranks2: RankPool) -> None:
    """`timeout_s` of the settings ends a collective that gives no deadline."""
    found = ranks2.run(deadline_from_settings)[0]
    assert (found["kind"], found["missing"]) == ("CommTimeoutError", [1])
    assert f"within {SHORT_S} s" in found["text"]


def longer_deadline_for_one_call(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory, timeout_s=SHORT_S) as group:
        group.barrier(30.0)
        if rank == 1:
            # Beyond the deadline of the settings.
            time.sleep(SHORT_S + 1.0)
        return outcome_of(lambda: group.barrier(30.0))


def test_the_deadline_of_a_call_beats_that_of_the_settings(ranks2: RankPool) -> None:
    """The deadline of a call may be longer than that of the settings."""
    found = ranks2.run(longer_deadline_for_one_call)
    assert [each["kind"] for each in found] == ["NoneType", "NoneType"], found
    assert found[0]["seconds"] >= SHORT_S + 0.5


def idle_receivers(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory, timeout_s=SHORT_S) as group:
        queue: Any = group.create_mq_broadcaster()
        results = []
        for receive, send in (
            (lambda: group.broadcast_object(None, 0), lambda: group.broadcast_object("step", 0)),
            (lambda: group.recv_object(0), lambda: group.send_object("step", 1)),
            (
                lambda: (group.recv_tensor_dict(0) or {})["step"],
                lambda: group.send_tensor_dict({"step": "step"}, 1),
            ),
            (lambda: queue.dequeue(timeout_s=None), lambda: queue.enqueue("step")),
        ):
            if rank == 0:
                # Longer than the deadline and its grace.
                time.sleep(SHORT_S + 1.5)
                send()
            else:
                results.append(outcome_of(receive))
        group.barrier(30.0)
        return results


@pytest.mark.guarantee("D9")
def test_idle_receivers_wait_beyond_the_deadline_of_the_settings(ranks2: RankPool) -> None:
    """Receives of objects, dicts and steps without a deadline of their own wait until something comes."""
    received = ranks2.run(idle_receivers)[1]
    assert [each["value"] for each in received] == ["step"] * 4
    assert all(each["seconds"] >= SHORT_S + 1.0 for each in received)


def receivers_beside_a_timeout(rank: int, world_size: int, directory: Path) -> dict[str, Any] | None:
    with world(rank, world_size, directory) as group:
        found = None
        if rank == 0:
            # Rank 1 waits in the same call without a deadline; only rank 2 is missing.
            found = outcome_of(lambda: group.gather_object("x", timeout_s=SHORT_S + 1.0))
        elif rank == 1:
            group.gather_object("y")
            found = outcome_of(lambda: group.recv_object(0))
        meet(rank, range(world_size), directory, "end")
        return found


def test_an_idle_receiver_is_not_blamed_and_learns_of_the_failure(ranks4: RankPool) -> None:
    """The others' time-out wakes a rank in `recv_object` without a deadline, and does not blame it."""
    found = ranks4.run(receivers_beside_a_timeout)
    assert (found[0]["kind"], found[0]["missing"]) == ("CommTimeoutError", [2, 3])
    assert (found[1]["kind"], found[1]["missing"]) == ("CommTimeoutError", [2, 3])


def error_text(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        group.barrier()
        found = outcome_of(lambda: group.all_gather(small(), timeout_s=SHORT_S)) if rank == 0 else None
        meet(rank, range(world_size), directory, "end")
        return [os.getpid(), found]


def test_the_text_names_group_rank_and_the_missing_rank_with_pid_and_state(ranks2: RankPool) -> None:
    """The text names the group, the waiting rank and call, the missing rank and the time waited."""
    (_, found), (culprit_pid, _) = ranks2.run(error_text)
    text = found["text"]
    assert "all_gather #1 on 'world:" in text
    assert "(rank 0, 0 of 2)" in text
    assert f"rank 1 (pid {culprit_pid}, alive)" in text
    assert f"within {SHORT_S} s" in text
    assert "destroy" in text


def one_short_deadline(rank: int, world_size: int, directory: Path) -> dict[str, Any] | None:
    with world(rank, world_size, directory) as group:
        found = None if rank == 2 else outcome_of(lambda: group.barrier(1.0 if rank == 0 else 60.0))
        meet(rank, range(world_size), directory, "end")
        return found


def test_the_first_deadline_ends_the_call_on_every_rank(ranks4: RankPool) -> None:
    """The first deadline ends the call on ranks with a longer deadline too."""
    found = ranks4.run(one_short_deadline)
    for rank in (0, 1, 3):
        assert (found[rank]["kind"], found[rank]["missing"]) == ("CommTimeoutError", [2])
        assert found[rank]["seconds"] < 60.0


def large_collective_half_done(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as group:
        if rank == world_size - 1:
            # It stays away until the deadline of the others has passed.
            meet(rank, range(world_size), directory, "end")
            return outcome_of(lambda: group.all_reduce(torch.ones(LARGE // 4)))
        found = outcome_of(lambda: group.all_reduce(torch.ones(LARGE // 4), timeout_s=SHORT_S))
        meet(rank, range(world_size), directory, "end")
        return found


def test_a_large_all_reduce_that_stopped_half_way_names_the_absent_rank(ranks4: RankPool) -> None:
    """The absent rank is named even if the others have already exchanged their parts."""
    found = ranks4.run(large_collective_half_done)
    assert [(each["kind"], each["missing"]) for each in found] == [("CommTimeoutError", [3])] * 4


def second_group(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group, new_group(group) as other:
        found = outcome_of(lambda: group.barrier(SHORT_S)) if rank == 0 else None
        meet(rank, range(world_size), directory, "failure_record")
        total = other.all_reduce(small())
        objects = other.all_gather_object(rank)
        with new_group(other, "late") as late:
            late.barrier()
        return [found, total.tolist(), objects]


def test_another_group_of_the_same_ranks_goes_on(ranks2: RankPool) -> None:
    """A broken group affects neither other groups of the same ranks nor the creation of new ones."""
    for found, total, objects in ranks2.run(second_group):
        assert found is None or found["kind"] == "CommTimeoutError"
        assert total == [2.0 * value for value in range(8)]
        assert objects == [0, 1]


def late_writer(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Rank 0 comes late to a broadcast through the queue, for which rank 1 waits 0.4 s and the others without limit."""
    with (
        world(rank, world_size, directory) as first,
        GroupCoordinator([first.ranks], first.local_rank, "gloo", True, True) as group,
    ):
        assert group.broadcast_object("early") == "early"
        found = None
        if rank:
            found = outcome_of(lambda: group.broadcast_object(None, timeout_s=SHORT_S if rank == 1 else None))
        meet(rank, range(world_size), directory, "given up")
        return found or outcome_of(group.barrier)


@pytest.mark.guarantee("D6")
@pytest.mark.guarantee("G18")
def test_a_time_out_in_a_queue_names_its_writer_on_all_ranks(ranks4: RankPool) -> None:
    """Ranks that wait without a deadline raise it as well, and so does the late writer in its next call that waits."""
    for rank, found in enumerate(ranks4.run(late_writer)):
        assert (found["kind"], found["missing"]) == ("CommTimeoutError", [0]), (rank, found)
