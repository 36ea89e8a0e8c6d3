"""What the page and dumps say of collectives in shared memory: their waits in numbers, nothing that they carry."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.dump import encode_dump, take_dump
from coordinator.diagnosis.model import Counters
from coordinator.group import GroupCoordinator
from coordinator.parallel_state import destroy_distributed_environment, get_world_group
from shm_broadcast import _core
from shm_broadcast.status.layout import FIRST_BUCKET_NS
from shm_broadcast.status.page import own_page
from tests.harness import RankPool, run_ranks
from tests.worlds import join_world, meet, new_group, outcome_of, world

LATE_S = 0.3
CALLS = 3

SECRET = "the words of a user's prompt"
NAME = "a-group-that-is-shown"
"""The name of a group, which is there to be found."""


def counters(group: GroupCoordinator) -> Counters:
    """Return what the page counts of the all-reduces of a group."""
    page = decode_page(_core.status_copy(own_page().segment.memory))
    (shown,) = (each for each in page.groups if each.name == group.unique_name and each.state == "usable")
    (lane,) = (lane for lane in shown.lanes if lane.plane == "shared")
    (found,) = (each for each in lane.counters if each.call == "all_reduce")
    return found


def waits_for_a_late_rank(rank: int, world_size: int, directory: Path) -> list[dict[str, Any]]:
    """Make calls to which rank 1 comes late; return by how much each has moved the counters."""
    found = []
    with world(rank, world_size, directory) as group:
        tensor = torch.ones(4)
        group.all_reduce(tensor)
        for _ in range(CALLS):
            before = counters(group)
            if rank == 1:
                time.sleep(LATE_S)
            began = time.monotonic_ns()
            group.all_reduce(tensor)
            took_ns = time.monotonic_ns() - began
            after = counters(group)
            moved = [now - then for then, now in zip(before.waits, after.waits, strict=True)]
            found.append(
                {
                    "waited_ns": after.waited_ns - before.waited_ns,
                    "buckets": {place: number for place, number in enumerate(moved) if number},
                    "sleeps": after.sleeps - before.sleeps,
                    "polled_ns": after.polled_ns - before.polled_ns,
                    "took_ns": took_ns,
                }
            )
    return found


def test_a_wait_is_counted_with_its_length_its_sleeps_and_its_polling(ranks2: RankPool) -> None:
    """A rank that waits for a late one polls at first, then sleeps; its wait is in the bucket of its length."""
    waiting, late = ranks2.run(waits_for_a_late_rank)
    for each in (*waiting, *late):
        (place,) = each["buckets"]
        assert each["buckets"][place] == 1
        assert each["waited_ns"] < FIRST_BUCKET_NS << place
        assert place == 0 or each["waited_ns"] >= FIRST_BUCKET_NS << (place - 1)
        assert 0 <= each["polled_ns"] <= each["took_ns"]
        assert each["waited_ns"] <= each["took_ns"]
    for each in waiting:
        assert each["waited_ns"] > LATE_S / 2 * 1e9
        assert each["sleeps"] >= 1
        assert 0 < each["polled_ns"] < each["waited_ns"]
    for each in late:
        assert each["waited_ns"] < LATE_S / 2 * 1e9


def carries_secrets(rank: int, world_size: int, directory: Path, record: str) -> dict[str, bool]:
    """Send a text in every form, leave some of it unread, and look for it in what others may read."""
    secret = SECRET.encode()
    join_world(rank, world_size, directory, record_dir=record)
    group = new_group(get_world_group(), NAME)
    group.enable_broadcaster()
    tensor = torch.tensor(list(secret), dtype=torch.uint8)
    assert bytes(group.all_reduce(tensor if rank == 0 else torch.zeros_like(tensor)).tolist()) == secret
    group.all_gather(tensor)
    group.broadcast(tensor, src=0)
    assert group.broadcast_object({SECRET: SECRET} if rank == 0 else None, src=0) == {SECRET: SECRET}
    group.broadcast_tensor_dict({SECRET: tensor} if rank == 0 else None, src=0)
    if rank == 0:
        group.send_object(SECRET, dst=1)
        group.send(tensor, dst=1)
    group.barrier()
    read = _core.status_copy(own_page().segment.memory), encode_dump(take_dump([os.getpid()]))
    assert all(NAME.encode() in each for each in read)
    found = {"page": secret in read[0], "dump": secret in read[1]}
    if rank == 0:
        assert outcome_of(lambda: group.barrier(timeout_s=0.3))["kind"] == "CommTimeoutError"
    meet(rank, range(world_size), directory, "failed")
    group.destroy()
    destroy_distributed_environment()
    return found


@pytest.mark.guarantee("S3")
def test_neither_page_nor_dump_holds_what_calls_carry(tmp_path: Path) -> None:
    """Nor does the dump of a failure, or the file that outlives the processes: unread messages are not in them."""
    record = tmp_path / "record"
    assert run_ranks(carries_secrets, 2, str(record)) == [{"page": False, "dump": False}] * 2
    files = [path for path in record.rglob("*") if path.is_file()]
    assert len(files) >= 3, "a page of each rank, and a dump"
    for path in files:
        assert NAME.encode() in path.read_bytes(), path
        assert SECRET.encode() not in path.read_bytes(), path
