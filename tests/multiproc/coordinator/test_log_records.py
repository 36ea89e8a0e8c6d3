"""What the log records of a group say: its creation, a refused call, and a queue of its own."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import CommTimeoutError, ParallelGroups, ParallelLayout, UsageError
from shm_broadcast.queue import QueueReader
from tests.harness import RankPool
from tests.log_records import fields_of, records_of
from tests.worlds import world

Found = list[list[Any]]


def found(records: list[logging.LogRecord]) -> Found:
    """Return the logger, the level and the fields of each record."""
    return [[record.name, record.levelname, fields_of(record)] for record in records]


def creation(rank: int, world_size: int, directory: Path) -> Found:
    with records_of("coordinator") as records, world(rank, world_size, directory) as group:
        del group
        ParallelGroups.create(ParallelLayout(tensor=world_size)).destroy()
    return found(records)


def test_the_records_of_a_creation_have_fields(ranks2: RankPool) -> None:
    """They name the group, this rank, and what carries its tensors; the record on all groups names no single one."""
    for rank, records in enumerate(ranks2.run(creation)):
        assert {level for _, level, _ in records} == {"INFO"}
        made = {"group": "world:0", "rank": rank, "call": "create", "algorithm": "shared memory"}
        assert ["coordinator.group", "INFO", made] in records
        joined = {"group": "world:0", "rank": rank, "call": "init_distributed_environment"}
        assert ["coordinator.parallel_state", "INFO", joined] in records
        assert records[-1] == ["coordinator.groups", "INFO", {"rank": rank, "call": "create"}]


def refusal_and_slow_queue(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory, broadcast={"warn_after_s": 0.05}) as group:
        with records_of("coordinator.calls", logging.DEBUG) as refused, pytest.raises(UsageError):
            group.send(torch.ones(1), dst=world_size)
        queue = group.create_mq_broadcaster(0)
        with records_of("shm_broadcast") as slow:
            if isinstance(queue, QueueReader):
                with pytest.raises(CommTimeoutError):
                    queue.dequeue(0.5)
        group.barrier()
        return {"name": group.unique_name, "refused": found(refused), "slow": found(slow)[:1]}


def test_a_refused_call_and_a_slow_read_have_fields(ranks2: RankPool) -> None:
    """The refusal at DEBUG, the read at WARNING, both with the group and the global rank."""
    for rank, seen in enumerate(ranks2.run(refusal_and_slow_queue)):
        group = {"group": seen["name"], "rank": rank}
        assert seen["refused"] == [["coordinator.calls", "DEBUG", {**group, "call": "send"}]]
        expected = {**group, "queue": f"{seen['name']}/1", "call": "dequeue"}
        slow = [["shm_broadcast.ring.writer", "WARNING", expected]] if rank == 1 else []
        assert seen["slow"] == slow
