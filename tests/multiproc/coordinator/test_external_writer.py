"""A group's queue whose writer is no rank but the engine's own process, as in engines with an executor."""

import copy
import os
import pickle
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator import ExternalWriter
from shm_broadcast import codec
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import CommError, UsageError
from shm_broadcast.handle import KEY_BYTES, new_key
from shm_broadcast.queue import QueueReader, QueueWriter
from tests.harness import RankPool, run_ranks
from tests.queue_ranks import DEADLINE_S, Marks, ended_with, offer
from tests.worlds import ApartPool, new_group, outcome_of, world

STEPS = 50


def be_engine_or_worker(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Run the engine in the last process, which joins no world and is killed in the end, and workers in the others."""
    marks = Marks(directory)
    workers = world_size - 1
    if rank == workers:
        writer = offer(marks, range(workers), writer=-1)
        writer.wait_until_ready(DEADLINE_S)
        for step in range(STEPS):
            writer.enqueue(("step", step))
        for worker in range(workers):
            marks.wait(f"read-{worker}")
        os.kill(os.getpid(), signal.SIGKILL)
    handle, key = map(bytes.fromhex, marks.wait("queue--1").split())
    with world(rank, workers, directory) as group:
        group.enable_broadcaster()
        own = group.mq_broadcaster
        # One of the workers gets no handle, as on a host without the engine.
        given = None if rank == 1 else ExternalWriter(handle, key)
        steps = group.create_mq_broadcaster(0, given, blocking=rank >= 0)
        assert isinstance(steps, QueueReader)
        assert [steps.dequeue(DEADLINE_S) for _ in range(STEPS)] == [("step", step) for step in range(STEPS)]
        assert group.mq_broadcaster is own
        assert group.broadcast_object({"plan": rank}) == {"plan": 0}
        marks.mark(f"read-{rank}")
        found = ended_with(lambda: steps.dequeue(DEADLINE_S))
        # The engine's death does not break the group, which has lost no rank. The caller decides what to do.
        assert group.broadcast_object(["after", rank], 1) == ["after", 1]
        return found


@pytest.mark.guarantee("G19")
def test_workers_read_what_a_process_outside_of_the_group_writes() -> None:
    """Every worker gets every step, even one that got no handle. The engine's death ends only the queue."""
    told = run_ranks(be_engine_or_worker, 4, expect_dead=[3])[:3]
    assert [each["kind"] for each in told] == ["PeerLostError"] * 3, told


def misuse(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Pass wrong values, most of them on rank 1 alone, and use the group after each."""
    queues = [QueueWriter.create(f"engine-{rank}", readers) for readers in ([0, 1], [0, 5])]
    good, lacking = (ExternalWriter(queue.handle, queue.key) for queue in queues)
    gone = QueueWriter.create("gone", [0, 1])
    late = ExternalWriter(gone.handle.to_bytes(gone.key), gone.key)
    gone.close()
    offers: dict[str, Any] = {
        "no value": queues[0].handle,
        "a rank is missing": lacking,
        "another key": ExternalWriter(queues[0].handle.to_bytes(queues[0].key), new_key()),
        "nobody is there": late,
    }
    found = {}
    with world(rank, world_size, directory) as group:
        for name, bad in offers.items():
            given = bad if rank == 1 else None
            found[name] = outcome_of(partial(group.create_mq_broadcaster, 0, given))
            assert group.broadcast_object(name) == name
        found["two queues"] = outcome_of(lambda: group.create_mq_broadcaster(0, good))
        reader: Any = group.create_mq_broadcaster(0, good if rank == 1 else None)
        if rank == 1:
            queues[0].enqueue("used")
        assert reader.dequeue(DEADLINE_S) == "used"
        group.barrier()
        with new_group(group) as other:
            again = outcome_of(lambda: other.create_mq_broadcaster(0, good if rank == 1 else None))
            assert again["kind"] == "CapabilityError"
    for queue in queues:
        queue.close()
    return found


@pytest.mark.guarantee("G19")
def test_a_wrong_handle_on_one_rank_raises_on_all(ranks2: RankPool) -> None:
    """A wrong value, a handle without all ranks, a wrong key or two queues raise a `UsageError` on every rank."""
    for each in ranks2.run(misuse):
        kinds = {name: outcome["kind"] for name, outcome in each.items()}
        assert kinds.pop("nobody is there") == "CapabilityError"
        assert set(kinds.values()) == {"UsageError"}, kinds
        assert (
            "rank 1: external_writer_handle must be an ExternalWriter, not QueueHandle"
            in each["no value"]["text"]
        )
        assert "has no readers [1], but [0, 5]" in each["a rank is missing"]["text"]
        assert "forged, or was made with another key" in each["another key"]["text"]
        assert "not the same queue on ranks [0, 1]" in each["two queues"]["text"]


def leave(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Destroy the group that reads; return the error of the writer, which is in rank 0's process."""
    writer = QueueWriter.create("engine", [0, 1]) if rank == 0 else None
    with writer or nullcontext():
        with world(rank, world_size, directory) as group:
            group.create_mq_broadcaster(
                0, None if writer is None else ExternalWriter(writer.handle, writer.key)
            )
        return {} if writer is None else ended_with(lambda: writer.enqueue(bytes(100_000), 5.0))


@pytest.mark.guarantee("G19")
def test_the_readers_are_closed_with_the_group(ranks2: RankPool) -> None:
    """After `destroy` the writer's error says that its readers left."""
    assert ranks2.run(leave)[0]["kind"] == "PeerLostError"


@pytest.mark.guarantee("G19")
def test_the_key_is_in_no_text_and_in_no_copy() -> None:
    """Neither its text, a pickle, a copy nor a message of ours can contain the key."""
    with QueueWriter.create("steps", [0]) as queue:
        for handle in (queue.handle, queue.handle.to_bytes(queue.key)):
            value = ExternalWriter(handle, queue.key, RemoteKeys.generate())
            for text in (repr(value), str(value), f"{value}", f"{[value]}"):
                assert repr(queue.key)[2:-1] not in text
                assert queue.key.hex() not in text
            for spread in (pickle.dumps, copy.copy, copy.deepcopy, codec.encode):
                with pytest.raises(UsageError):
                    spread(value)
            with pytest.raises(AttributeError):
                value.key = bytes(KEY_BYTES)  # type: ignore[misc]
        assert repr(ExternalWriter(queue.handle, queue.key)) == "<ExternalWriter 'steps'>"


@pytest.mark.parametrize(
    ("handle", "key", "remote_keys"),
    [
        ("handle", bytes(KEY_BYTES), None),
        (b"", bytes(3), None),
        (b"", None, None),
        (b"", bytes(KEY_BYTES), b"k"),
    ],
)
def test_parts_of_the_wrong_type_are_refused(handle: Any, key: Any, remote_keys: Any) -> None:
    """The error does not show the key."""
    with pytest.raises(CommError) as refused:
        ExternalWriter(handle, key, remote_keys)
    assert "\\x00" not in str(refused.value)


def join_after_a_refusal(rank: int, world_size: int, directory: Path) -> None:
    """Refuse a broadcast on rank 1, then open the queue of which only rank 0 has the handle."""
    marks = Marks(directory)
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 1:
            with pytest.raises(UsageError):
                group.broadcast_flag("no flag", 0)  # type: ignore[arg-type]
        else:
            assert group.broadcast_flag(flag=True, src=0)
        given = None
        if rank == 0:
            writer = offer(marks, range(world_size), writer=-1)
            given = ExternalWriter(writer.handle, writer.key)
        steps: Any = group.create_mq_broadcaster(0, given)
        if rank == 0:
            writer.enqueue("step")
        assert steps.dequeue(DEADLINE_S) == "step"
        assert group.broadcast_object(rank, 1) == 1
        group.barrier()
        if rank == 0:
            writer.close()


@pytest.mark.guarantee("G19")
@pytest.mark.parametrize("kind", [RankPool, ApartPool])
def test_the_offer_of_a_queue_is_no_message_of_a_refused_broadcast(ranks2: RankPool, kind: Any) -> None:
    """What is left of a broadcast that a rank has refused belongs to no call after it."""
    pool = ranks2 if kind is RankPool else kind(ranks2)
    pool.run(join_after_a_refusal, timeout_s=60.0)
