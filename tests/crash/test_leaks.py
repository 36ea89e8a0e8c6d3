"""Worlds and groups that were destroyed, also after failures, leave nothing in the process."""

import gc
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator import ParallelGroups
from tests.harness import RankPool, run_ranks
from tests.leaks import GRACE_S
from tests.queues import segments_of
from tests.worlds import meet, new_group, outcome_of, small, world

pytestmark = pytest.mark.proof

CYCLES = 30
BROKEN_CYCLES = 5
# The allocator and torch keep some memory from the first cycles; 30 later cycles may add this much.
WARM_UP = 5
RSS_GROWTH_BYTES = 16 << 20


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def held() -> list[int]:
    """Return the numbers of descriptors, of Python's threads, and of all threads, also native ones, once they settle.

    That is some milliseconds after closing: five counts in a row are equal.
    """
    counts: list[list[int]] = []
    while len(counts) < 5 or counts[-5:] != counts[-1:] * 5:
        gc.collect()
        tasks = len(os.listdir("/proc/self/task"))
        counts.append([len(os.listdir("/proc/self/fd")), threading.active_count(), tasks])
        time.sleep(0.05)
    return counts[-1]


def held_again(before: list[int]) -> list[int]:
    """Return `held` once it is as before, or what it still is when threads have had their time to go.

    Python's `join` returns a moment before the kernel takes a thread off its list.
    """
    deadline = time.monotonic() + GRACE_S
    while (now := held()) != before and time.monotonic() < deadline:
        pass
    return now


def use(group: Any) -> None:
    peer = 1 - group.rank_in_group
    group.barrier()
    group.all_reduce(small())
    group.all_gather_object({"rank": group.rank})
    group.isend_object(bytes(1 << 18), peer)
    group.recv_object(peer)
    group.isend_tensor_dict({"x": small(), "y": bytes(1 << 17)}, peer)
    group.recv_tensor_dict(peer)
    group.barrier()


def world_cycle(rank: int, world_size: int, directory: Path, number: int) -> None:
    with world(rank, world_size, directory) as first, new_group(first) as group:
        use(group)


def growth(cycle: Callable[[int], None], cycles: int = CYCLES, warm_up: int = WARM_UP) -> dict[str, Any]:
    for number in range(warm_up):
        cycle(number)
    before, rss = held(), rss_bytes()
    for number in range(warm_up, warm_up + cycles):
        cycle(number)
    return {"before": before, "after": held_again(before), "rss": rss_bytes() - rss}


def worlds_in_a_row(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    found = growth(lambda number: world_cycle(rank, world_size, directory, number))
    meet(rank, range(world_size), directory, "end")
    return {**found, "left": sorted(path.name for path in (directory / "rendezvous").glob("*"))}


def everything_in_a_row(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    def cycle(number: int) -> None:
        with (
            world(rank, world_size, directory) as first,
            ParallelGroups.from_sizes(tensor_parallel_size=world_size, shard_size=None) as groups,
        ):
            assert groups.tp.ranks == first.ranks
            part = groups.tp.create_subgroup([1, 0])
            assert part is not None
            use(part)
            assert groups.tp.broadcast_object({"step": number})["step"] == number
            part.destroy()

    found = growth(cycle, 100)
    return {**found, "segments": segments_of()}


def groups_in_a_row(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as first:

        def cycle(number: int) -> None:
            with new_group(first) as group:
                use(group)

        return growth(cycle)


def kept_groups(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    kept = []
    with world(rank, world_size, directory) as first:

        def cycle(number: int) -> None:
            group = new_group(first)
            use(group)
            group.destroy()
            kept.append((group, group.device_communicator))

        return growth(cycle)


def broken_groups_in_a_row(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as first:

        def cycle(number: int) -> None:
            with new_group(first) as group:
                if rank == 0:
                    # Never received: when the group breaks, a transfer with its memory and threads is in flight.
                    group.isend_object(bytes(1 << 20), 1)
                    group.device_communicator.irecv(small(), 1)
                    assert outcome_of(lambda: group.barrier(0.05))["kind"] == "CommTimeoutError"
                meet(rank, range(world_size), directory, f"failure_record-{number}")

        # Each cycle takes more than a second: the deadline and its grace period.
        return growth(cycle, BROKEN_CYCLES, 2)


def many_groups(rank: int, world_size: int, directory: Path, worlds: int, groups: int) -> dict[str, Any]:
    """Create, use and destroy `groups` groups with a queue in each of `worlds` worlds."""

    def cycle(number: int) -> None:
        with world(rank, world_size, directory) as first:
            for at in range(groups):
                group = new_group(first, f"g{at}")
                end: Any = group.create_mq_broadcaster(at % 2)
                use(group)
                if rank == at % 2:
                    end.enqueue({"cycle": number, "x": small()})
                else:
                    assert end.dequeue()["cycle"] == number
                if at % 3:  # else its rank destroys it before the other has used it for the last time
                    group.barrier()
                group.destroy()

    return growth(cycle, worlds, 2)


def assert_nothing_grew(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["after"] == each["before"], each
        assert each["rss"] < RSS_GROWTH_BYTES, each


@pytest.mark.guarantee("G9")
def test_thirty_worlds_in_one_process_leave_nothing(ranks2: RankPool) -> None:
    """Thirty worlds leave no descriptor, thread or memory, and an empty rendezvous directory."""
    found = ranks2.run(worlds_in_a_row, timeout_s=120.0)
    assert_nothing_grew(found)
    assert found[0]["left"] == []


@pytest.mark.guarantee("G9")
@pytest.mark.thorough
def test_a_hundred_starts_in_one_process_leave_nothing(ranks2: RankPool) -> None:
    """A hundred worlds with groups, a queue and a sub-group leave no descriptor, thread, segment or memory."""
    found = ranks2.run(everything_in_a_row, timeout_s=120.0)
    assert_nothing_grew(found)
    assert [each["segments"] for each in found] == [[], []]


def test_thirty_groups_in_one_world_leave_nothing(ranks2: RankPool) -> None:
    """Groups that were created and destroyed leave nothing."""
    assert_nothing_grew(ranks2.run(groups_in_a_row, timeout_s=120.0))


def test_fifty_groups_with_queues_leave_nothing(ranks2: RankPool) -> None:
    """Five worlds with ten groups and queues each leave no descriptor, thread or memory."""
    assert_nothing_grew(ranks2.run(many_groups, 5, 10, timeout_s=120.0))


@pytest.mark.guarantee("G9")
@pytest.mark.thorough
@pytest.mark.long
def test_ten_thousand_groups_with_queues_leave_nothing(ranks2: RankPool) -> None:
    """A hundred worlds with a hundred groups and queues each end with the descriptors, threads and memory of the first.

    It takes minutes, and shows what a leak of two kilobytes a group would show.
    """
    assert_nothing_grew(ranks2.run(many_groups, 100, 100, timeout_s=1500.0))


def test_destroyed_groups_that_somebody_keeps_hold_nothing(ranks2: RankPool) -> None:
    """A destroyed group and its communicators, still referenced, hold no connections."""
    assert_nothing_grew(ranks2.run(kept_groups, timeout_s=120.0))


def test_groups_that_broke_leave_nothing(ranks2: RankPool) -> None:
    """Groups destroyed after a time-out, with transfers in flight, leave nothing."""
    assert_nothing_grew(ranks2.run(broken_groups_in_a_row, timeout_s=120.0))


def solo_worlds(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    def cycle(number: int) -> None:
        with world(0, 1, directory) as group:
            group.barrier()
            group.cpu_group  # noqa: B018 - creates the process group that a group of one does without

    return growth(cycle)


def test_thirty_worlds_of_one_leave_nothing() -> None:
    """Worlds of a single rank leave nothing."""
    assert_nothing_grew(run_ranks(solo_worlds, 1))
