"""Leaving a group takes bounded time, is allowed in any state, and loses nothing that was sent."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.group import GroupCoordinator
from device_comm.cpu import shared_memory
from tests.handlers import raising_at
from tests.harness import RankPool, run_ranks
from tests.leaks import Snapshot, leaked_since
from tests.waiting import sleeping_in, wait_until
from tests.worlds import LARGE, WAITS, meet, new_group, outcome_of, world

SHORT_S = 0.4
# What should take seconds may take this long: far above any bound under test, far below the harness's limit.
BOUNDED_S = 20.0


def destroyed_in_time(group: GroupCoordinator) -> float:
    start = time.monotonic()
    group.destroy()
    group.destroy()
    return time.monotonic() - start


def destroy_after_timeout(rank: int, world_size: int, directory: Path, name: str) -> list[float]:
    with world(rank, world_size, directory) as first, new_group(first) as group:
        if rank == 0:
            outcome_of(lambda: WAITS[name](group, 1, SHORT_S))
        meet(rank, range(world_size), directory, "failure_record")
        return [destroyed_in_time(group), outcome_of(group.barrier)["kind"] == "ClosedError"]


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("name", ["barrier", "all_reduce of 1 MiB", "recv_object", "send of 64 MiB"])
def test_destroy_after_a_timeout_is_bounded_and_idempotent(ranks2: RankPool, name: str) -> None:
    """`destroy` of a broken group returns, also the second time, and the group is closed afterwards."""
    for seconds, is_closed in ranks2.run(destroy_after_timeout, name):
        assert seconds < BOUNDED_S
        assert is_closed


def destroy_with_open_handles(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        handles = []
        if rank == 0:
            # No peer ever answers these; each has the default deadline of ten minutes.
            for _ in range(4):
                handles.append(group.device_communicator.irecv(torch.zeros(8), 1))
                handles.append(group.device_communicator.isend(torch.zeros(LARGE // 8), 1))
                handles.append(group.isend_object(bytes(LARGE // 8), 1))
            meet(rank, range(world_size), directory, "sent")
        else:
            meet(rank, range(world_size), directory, "sent")
            meet(rank, range(world_size), directory, "destroyed")
        seconds = destroyed_in_time(group)
        if rank == 0:
            meet(rank, range(world_size), directory, "destroyed")
        outcomes = [outcome_of(handle.wait)["kind"] for handle in handles]
        handles.clear()
        first.barrier()
        return [seconds, outcomes]


@pytest.mark.guarantee("G9")
def test_destroy_with_transfers_in_flight_is_bounded_and_ends_their_handles(ranks2: RankPool) -> None:
    """`destroy` does not wait for transfers that cannot finish; their handles raise `ClosedError`."""
    for seconds, outcomes in ranks2.run(destroy_with_open_handles):
        assert seconds < BOUNDED_S
        assert set(outcomes) <= {"ClosedError"}


def destroy_wakes(rank: int, world_size: int, directory: Path, name: str) -> list[Any]:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        if rank != 0:
            meet(rank, range(world_size), directory, "end")
            group.destroy()
            return []
        times = []

        def destroy() -> None:
            wait_until(lambda: sleeping_in("_wait"), "the call asleep")
            times.append(destroyed_in_time(group))

        thread = threading.Thread(target=destroy)
        thread.start()
        found = outcome_of(lambda: WAITS[name](group, 1, None))
        thread.join()
        meet(rank, range(world_size), directory, "end")
        return [found, times[0]]


@pytest.mark.guarantee("G9")
@pytest.mark.guarantee("D9")
@pytest.mark.parametrize("name", WAITS)
def test_destroy_from_another_thread_wakes_a_waiting_call(ranks2: RankPool, name: str) -> None:
    """A call with the default deadline, or none, raises `ClosedError` when its group is destroyed."""
    found, seconds = ranks2.run(destroy_wakes, name)[0]
    assert found["kind"] == "ClosedError", found
    assert found["seconds"] < BOUNDED_S
    assert seconds < BOUNDED_S


def destroy_untouched(rank: int, world_size: int, directory: Path) -> float:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        if rank == 0:
            seconds = destroyed_in_time(group)
            meet(rank, range(world_size), directory, "destroyed")
            return seconds
        meet(rank, range(world_size), directory, "destroyed")
        return destroyed_in_time(group)


def test_destroy_is_not_collective(ranks2: RankPool) -> None:
    """One rank can destroy its group while the other does nothing, and destroys its own later."""
    assert all(seconds < BOUNDED_S for seconds in ranks2.run(destroy_untouched))


def last_words(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        if rank == 0:
            for number in range(50):
                group.send_object(number, 1)
            group.destroy()
            meet(rank, range(world_size), directory, "destroyed")
            return []
        # Receive late: rank 0's `destroy` gives its sends several seconds.
        time.sleep(0.5)
        received = [group.recv_object(0) for _ in range(50)]
        meet(rank, range(world_size), directory, "destroyed")
        group.destroy()
        return received


def test_what_was_sent_before_destroy_still_arrives(ranks2: RankPool) -> None:
    """A `destroy` right after sends of small objects, which do not wait, loses none of them."""
    assert ranks2.run(last_words)[1] == list(range(50))


def last_transfers(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        if rank == 0:
            # The handles are dropped.
            group.isend_object(bytes(LARGE // 8), 1)
            group.isend_tensor_dict({"x": torch.ones(LARGE // 32), "y": torch.ones(8)}, 1)
            group.destroy()
            meet(rank, range(world_size), directory, "destroyed")
            return []
        time.sleep(0.3)  # rank 0 is in destroy by now
        received = [len(group.recv_object(0)), (group.recv_tensor_dict(0) or {})["x"].sum().item()]
        meet(rank, range(world_size), directory, "destroyed")
        group.destroy()
        return received


def test_large_transfers_that_nobody_waited_for_still_arrive(ranks2: RankPool) -> None:
    """`destroy` gives transfers in flight several seconds to arrive, even if their handles were dropped."""
    assert ranks2.run(last_transfers)[1] == [LARGE // 8, LARGE // 32]


def destroy_after_peer_death(rank: int, world_size: int, directory: Path) -> Any:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        outcomes = []
        if rank == 0:
            handles = [group.isend_object(bytes(LARGE // 8), 1) for _ in range(3)]
            meet(rank, range(world_size), directory, "sent")
            meet(rank, range(world_size), directory, "left")
            outcomes = [outcome_of(handle.is_completed) for handle in handles]
            outcomes.append(outcome_of(lambda: group.isend_object(1, 1)))
        else:
            meet(rank, range(world_size), directory, "sent")
            group.destroy()
            meet(rank, range(world_size), directory, "left")
        return [destroyed_in_time(group), outcomes]


def test_handles_of_transfers_to_a_rank_that_left_raise_typed_errors(ranks2: RankPool) -> None:
    """Such a handle raises `PeerLostError` when asked and breaks the group; later sends are refused."""
    (seconds, outcomes), _ = ranks2.run(destroy_after_peer_death)
    assert seconds < BOUNDED_S
    assert [each["kind"] for each in outcomes] == ["PeerLostError"] * 3 + ["GroupBrokenError"], outcomes
    assert outcomes[0]["peers"] == [1]


def destroy_twice_at_once(rank: int, world_size: int, directory: Path) -> bool:
    with world(rank, world_size, directory) as first:
        for _ in range(10):
            group = new_group(first)
            threads = [threading.Thread(target=group.destroy) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        first.barrier()
    return True


def test_threads_may_destroy_a_group_at_the_same_time(ranks2: RankPool) -> None:
    """Concurrent calls of `destroy` release the group's resources once."""
    assert ranks2.run(destroy_twice_at_once) == [True, True]


def destroyed_while_posting(rank: int, world_size: int, directory: Path) -> list[str]:
    with world(rank, world_size, directory) as first:
        kinds = []
        for delay_ms in range(12):
            group = new_group(first, destroy_timeout_s=0.2)
            timer = threading.Timer(delay_ms / 1000, group.destroy)
            timer.start()
            kind = "NoneType"
            while kind == "NoneType":
                kind = outcome_of(lambda: group.isend_object(bytes(1 << 18), 1 - rank))["kind"]  # noqa: B023
            kinds.append(kind)
            timer.join()
            meet(rank, range(world_size), directory, f"destroyed-{delay_ms}")
        return kinds


def test_a_call_that_is_just_being_posted_is_closed_too(ranks2: RankPool) -> None:
    """A call raises `ClosedError`, or that the peer left, whenever another thread destroys the group."""
    for kinds in ranks2.run(destroyed_while_posting):
        assert set(kinds) <= {"ClosedError", "PeerLostError", "GroupBrokenError"}


DESTROYING = (
    "coordinator/group.py",
    "coordinator/calls.py",
    "coordinator/group_registry.py",
    "queues/group_queues.py",
    "bootstrap/group_parts.py",
    "device_comm/health.py",
)


def interrupt_destroy(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Interrupt `destroy` at every third place, a group for each; return the places, and what stayed of which."""
    left = list[Any]()
    with world(rank, world_size, directory) as first:
        for step in count(0, 3):
            before = descriptors()
            group = new_group(first)
            group.enable_broadcaster()
            meet(rank, range(world_size), directory, f"created {step}")
            if rank == 0:
                if not raising_at(step, group.destroy, DESTROYING):
                    (directory / "all").touch()
                # Where that has come before anything was begun, this does all.
                group.destroy()
                if (more := descriptors() - before) > 0:
                    left.append([step, more])
            else:
                found = outcome_of(group.barrier)
                assert (found["kind"], found["peers"]) == ("PeerLostError", [0]), found
                group.destroy()
            meet(rank, range(world_size), directory, f"destroyed {step}")
            if (directory / "all").exists():
                return [step, left]
    raise AssertionError("the places come to an end")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.guarantee("G9")
def test_a_destroy_that_is_interrupted_anywhere_leaves_nothing(ranks2: RankPool) -> None:
    """What a signal handler raises ends a wait; the other rank learns that this one has left."""
    (steps, left), _ = ranks2.run(interrupt_destroy)
    assert steps > 30
    assert left == []


def break_in_the_middle_of_a_message(
    rank: int, world_size: int, directory: Path, marks: str
) -> dict[str, Any]:
    shared_memory.host_id = lambda: f"host {rank}"  # so that the ranks connect by Gloo
    before = Snapshot.take()
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        data = torch.full((LARGE,), 1 - rank, dtype=torch.uint8)
        meet(rank, range(world_size), directory, "ready")
        if rank == 0:
            found = outcome_of(lambda: group.send(data, 1, timeout_s=SHORT_S))
            Path(marks, "failed").touch()
        else:
            handle = group.irecv(data, 0)
            wait_until(lambda: data[0] != 0, "the first bytes", poll_s=0.0)
            os.kill(os.getpid(), signal.SIGSTOP)
            found = outcome_of(handle.wait)
        seconds = destroyed_in_time(group)
        is_whole = bool(data[-1] == 1)
    return {**found, "destroy": seconds, "whole": is_whole, "left": leaked_since(before)}


def resume_once_the_other_failed(marks: Path, pids: Sequence[int]) -> None:
    stat = Path(f"/proc/{pids[1]}/stat")
    wait_until(lambda: stat.read_text().rpartition(") ")[2].startswith("T"), "rank 1 to stop")
    wait_until((marks / "failed").exists, "the time-out of rank 0")
    os.kill(pids[1], signal.SIGCONT)


@pytest.mark.guarantee("G9")
def test_a_message_that_breaks_in_its_middle_leaves_nothing(tmp_path: Path) -> None:
    """Neither a thread that waits nor the group's connections. Errors, `destroy` and the end of the process go on."""
    resume = partial(resume_once_the_other_failed, tmp_path)
    sender, receiver = run_ranks(
        break_in_the_middle_of_a_message, 2, str(tmp_path), check_leaks=False, while_running=resume
    )
    assert not receiver["whole"]
    for each in (sender, receiver):
        assert (each["kind"], each["missing"]) == ("CommTimeoutError", [1])
        assert each["destroy"] < BOUNDED_S
        assert each["left"] == []
