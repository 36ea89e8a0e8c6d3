"""The queues of a group on two hosts use shared memory on the writer's host and TCP to the other one."""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import shm_broadcast.queue
from coordinator import ExternalWriter
from coordinator.group import GroupCoordinator
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import PeerLostError
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from tests.hosts import ADDRESSES, report, run_on_two_hosts
from tests.leaks import Snapshot, leaked_since
from tests.ports import listening_addresses
from tests.probes import requires
from tests.queue_ranks import DEADLINE_S, Marks
from tests.waiting import running, wait_until
from tests.worlds import outcome_of

pytestmark = requires("network_namespaces")

PORTS = (29700, 29709)
STEPS = 20
# A number of bytes that takes several parts and exceeds every kernel buffer.
LARGE = 8 << 20
DESTROY_S = 2.0
SLACK_S = 8.0


def settings_of(ports: str = f"{PORTS[0]}-{PORTS[1]}", **settings: Any) -> CoordinatorSettings:
    return CoordinatorSettings.resolve({}, create_timeout_s=DEADLINE_S, remote_ports=ports, **settings)


def group_of_all(name: str, **settings: Any) -> GroupCoordinator:
    world = get_world_group()
    return GroupCoordinator(
        [world.ranks], world.local_rank, "gloo", False, group_name=name, settings=settings_of(**settings)
    )


def told_by(end: Any) -> dict[str, Any]:
    """Return the transport and the counts of an endpoint in a form that JSON can hold."""
    told, remote = end.statistics(), end.handle.remote
    return {
        "writer": end.handle.writer,
        "local": list(end.handle.ranks),
        "remote": [] if remote is None else list(remote.ranks),
        "address": "" if remote is None else remote.address,
        "port": 0 if remote is None else remote.port,
        "messages": told.messages,
        "capacity": told.capacity_bytes,
        "is_segment": end.handle.segment_bytes > 0,
    }


def broadcast(group: GroupCoordinator, rank: int) -> dict[str, Any]:
    """Broadcast from the queue's writer, and from a rank that is not the writer."""
    group.enable_broadcaster()
    for step in range(STEPS):
        plan = ("step", step, {"a", "b"})
        assert group.broadcast_object(plan if rank == 0 else None) == plan
    tensors = {"ids": torch.arange(LARGE // 8), "step": 7, "small": torch.ones(3)}
    got = group.broadcast_tensor_dict(tensors if rank == 0 else None)
    assert got is not None
    assert got["step"] == 7
    assert torch.equal(got["ids"], tensors["ids"])  # type: ignore[arg-type]
    # Rank 2 writes to no queue.
    assert group.broadcast_object(["other", rank], 2) == ["other", 2]
    group.barrier()
    return {"broadcast": told_by(group.mq_broadcaster), "addresses": listening_addresses()}


def second_writer(group: GroupCoordinator, rank: int) -> dict[str, Any]:
    end: Any = group.create_mq_broadcaster(writer_rank=2)
    if rank == 2:
        end.enqueue({"from": 2})
    else:
        assert end.dequeue(DEADLINE_S) == {"from": 2}
    group.barrier()
    return {"second": told_by(end)}


def answers(group: GroupCoordinator, rank: int) -> dict[str, Any]:
    own: Any
    own, readers = group.create_single_reader_mq_broadcasters(reader_rank_in_group=1, blocking=True)
    for number in range(5):
        own.enqueue([rank, number, bytes(number * 100_000)], DEADLINE_S)
    taken: dict[int, list[int]] = {}
    if rank == 1:
        for _ in range(20):
            index, (sender, number, _) = dequeue_any(readers, DEADLINE_S)  # type: ignore[arg-type]
            assert index == sender
            taken.setdefault(sender, []).append(number)
        assert taken == {sender: list(range(5)) for sender in range(4)}
    group.barrier()
    return {"answer": told_by(own), "readers": [each.handle.writer for each in readers]}  # type: ignore[attr-defined]


def one_rank_fails(group: GroupCoordinator, rank: int) -> dict[str, Any]:
    """Let the writer find no port, then let a reader on its host map no memory; use the group after each."""
    found = {}
    with socket.socket() as taken, group_of_all("narrow", ports="29750-29750") as narrow:
        if rank == 0:
            taken.bind((ADDRESSES[0], 29750))
            taken.listen()
        narrow.barrier()
        found["no port"] = outcome_of(narrow.create_mq_broadcaster)
        assert narrow.broadcast_object(rank) == 0

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PeerLostError("this container shares no abstract names")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shm_broadcast.queue, "take_over", refuse)
        found["no segment"] = outcome_of(group.create_mq_broadcaster)
    assert group.broadcast_object(["after", rank], 0) == ["after", 0]
    return found


def from_outside(group: GroupCoordinator, rank: int) -> dict[str, Any]:
    """Let rank 0's process act as an engine whose writer is no rank. Ranks on the other host have their own keys."""
    keys = RemoteKeys.generate() if rank >= 2 else None
    told = group.all_gather_object(b"" if keys is None else keys.public)
    with ExitStack() as stack:
        own = None
        writer: QueueWriter | None = None
        if rank == 0:
            writer = stack.enter_context(
                QueueWriter.create(
                    "engine",
                    [0, 1],
                    remote_readers={2: told[2], 3: told[3]},
                    bind_address=ADDRESSES[0],
                )
            )
            own = ExternalWriter(writer.handle, writer.key)
        handle, key = group.broadcast_object(
            None if writer is None else (writer.handle.to_bytes(writer.key), writer.key)
        )
        if keys is not None:
            own = ExternalWriter(handle, key, keys)
        end: Any = group.create_mq_broadcaster(external_writer_handle=own)
        if writer is not None:
            writer.enqueue(["from outside", 1])
        assert end.dequeue(DEADLINE_S) == ["from outside", 1]
        group.barrier()
        return {"outside": told_by(end), "is_reader": isinstance(end, QueueReader)}


PARTS = [broadcast, second_writer, answers, from_outside, one_rank_fails]


def healthy(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with group_of_all("first") as group:
        group.enable_broadcaster()
        group.broadcast_object("load every library")
    before = Snapshot.take()
    with group_of_all("steps") as group:
        for part in PARTS:
            found |= part(group, rank)
        group.barrier()
    found["left"] = leaked_since(before)
    return found


def until_error(call: Callable[[], Any]) -> dict[str, Any]:
    """Call until an error of ours is raised; return it."""
    while (found := outcome_of(call))["kind"] == "NoneType":
        time.sleep(0.01)  # this pace keeps the connection to the dead reader from filling first
    return found


def one_dies(rank: int, victim: int, directory: Path) -> dict[str, Any]:
    """Broadcast until this rank learns that the writer, or a rank on the other host, has died.

    A rank that reads what was sent before learns of it a second later than others, and then asks the store why. Rank 0
    serves that until all have learnt of it.
    """
    marks = Marks(directory)
    writer = 1
    group = group_of_all("steps")
    group.enable_broadcaster(writer)
    assert group.broadcast_object("first", writer) == "first"
    group.barrier()
    # A rank that is still in the barrier when another finds the death would raise there.
    marks.mark(f"met-{rank}")
    for other in range(4):
        marks.wait(f"met-{other}")
    if rank == victim:
        report(directory, rank, {})
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    found = until_error(lambda: group.broadcast_object("next", writer))
    found["noticed_s"] = time.monotonic() - started
    marks.mark(f"noticed-{rank}")
    for other in range(4):
        if rank == 0 and other != victim:
            marks.wait(f"noticed-{other}")
    found["again"] = outcome_of(lambda: group.broadcast_object("more", writer))["kind"]
    group.destroy()
    found["threads"] = [each.name for each in running() if "remote" in each.name]
    return found


def one_stops(rank: int, directory: Path) -> dict[str, Any]:
    """Destroy the group while a reader on the other host is stopped; return how long that took."""
    marks = Marks(directory)
    group = group_of_all("steps", remote={"lost_after_s": 120.0}, destroy_timeout_s=DESTROY_S)
    end: Any = group.create_mq_broadcaster(1)
    processes = group.all_gather_object(os.getpid())
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        stat = Path(f"/proc/{processes[3]}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "rank 3 stopped")
        end.enqueue("rank 3 does not take it")
        marks.mark("sent")
    marks.wait("sent")
    started = time.monotonic()
    group.destroy()
    seconds = time.monotonic() - started
    if rank < 3:
        marks.mark(f"left-{rank}")
    if rank == 2:
        marks.wait("left-0")
        marks.wait("left-1")
        os.kill(processes[3], signal.SIGCONT)
    return {"seconds": seconds}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Run ranks 0 and 1 on one host and ranks 2 and 3 on the other; return each rank's findings."""
    return run_on_two_hosts(__name__, "healthy")


Found = list[dict[str, Any]]


@pytest.mark.guarantee("G18")
def test_a_broadcast_goes_by_the_queue_to_both_hosts(found: Found) -> None:
    """The writer's objects and tensor dicts reach its own host through the ring and the other host over TCP."""
    for rank, each in enumerate(found):
        told = each["broadcast"]
        assert (told["local"], told["remote"]) == ([1], [2, 3])
        assert (told["writer"], told["messages"]) == (0, STEPS + 1)
        assert told["address"] == ADDRESSES[0]
        assert PORTS[0] <= told["port"] <= PORTS[1]
        settings = settings_of()
        expected = settings.remote.high_water_bytes if rank >= 2 else settings.broadcast.ring_bytes
        assert told["capacity"] >= expected
        assert (told["capacity"] == settings.remote.high_water_bytes) == (rank >= 2)


@pytest.mark.guarantee("G12")
def test_queues_listen_on_the_hosts_own_address(found: Found) -> None:
    """Every rank listens only on the address of its host that the group uses."""
    for rank, each in enumerate(found):
        assert each["addresses"] == [ADDRESSES[rank // 2]]


@pytest.mark.guarantee("G18")
def test_a_writer_on_either_host_reaches_all(found: Found) -> None:
    """A queue whose writer is on the second host listens there, and the rank beside it reads the ring."""
    for each in found:
        told = each["second"]
        assert (told["local"], told["remote"], told["address"]) == ([3], [0, 1], ADDRESSES[1])
        assert told["messages"] == 1


@pytest.mark.guarantee("G20")
def test_one_reader_takes_answers_from_both_hosts(found: Found) -> None:
    """Each rank writes to its own queue, local or remote, and only the reading rank gets the readers."""
    for rank, each in enumerate(found):
        told = each["answer"]
        assert (told["writer"], told["messages"]) == (rank, 5)
        assert (told["local"], told["remote"]) == (([1], []) if rank < 2 else ([], [1]))
        assert told["is_segment"] == (rank < 2)
        assert each["readers"] == (list(range(4)) if rank == 1 else [])


@pytest.mark.guarantee("G19")
def test_an_external_writer_reaches_both_hosts(found: Found) -> None:
    """Ranks on the other host pass key pairs with the handle. A rank without a handle gets it from the others."""
    for each in found:
        assert each["is_reader"]
        told = each["outside"]
        assert (told["writer"], told["local"], told["remote"]) == (-1, [0, 1], [2, 3])


@pytest.mark.guarantee("G18")
def test_a_rank_that_cannot_open_its_end_fails_all(found: Found) -> None:
    """A port in use, or a segment that cannot be mapped, raises one error on every rank, and the group goes on."""
    for each in found:
        assert each["no port"]["kind"] == "CapabilityError"
        assert "rank 0: no free port on 10.77.0.1 in (29750, 29750)" in each["no port"]["text"]
        assert each["no segment"]["kind"] == "CapabilityError"
        assert "rank 1: open on queue" in each["no segment"]["text"]
        assert "shares no abstract names" in each["no segment"]["text"]


@pytest.mark.guarantee("G9")
def test_queues_between_hosts_leave_nothing(found: Found) -> None:
    """After `destroy` no descriptor and no thread of the queues is left."""
    assert [each["left"] for each in found] == [[]] * 4


@pytest.mark.guarantee("G18")
@pytest.mark.parametrize(
    "victim", [3, pytest.param(1, marks=pytest.mark.thorough)], ids=["a remote reader", "the writer"]
)
def test_a_death_on_either_host_raises_on_all_ranks(victim: int) -> None:
    """Every rank gets a PeerLostError that names the dead rank. The group is then broken and can be destroyed."""
    found = run_on_two_hosts(__name__, f"death of {victim}", dead=[victim])
    for rank, each in enumerate(found):
        if rank != victim:
            assert (each["kind"], each["peers"]) == ("PeerLostError", [victim]), each
            assert each["again"] == "GroupBrokenError"
            assert each["threads"] == []


@pytest.mark.guarantee("G9")
def test_a_stopped_reader_does_not_delay_destroy() -> None:
    """`destroy` takes little more than `destroy_timeout_s`, although the reader would count as lost much later."""
    told = run_on_two_hosts(__name__, "stop of 3")
    assert all(each["seconds"] < DESTROY_S + SLACK_S for each in told), told


def main(directory: Path, scenario: str, rank: int) -> None:
    """Run one rank of a scenario."""
    init_distributed_environment(
        4, rank, f"tcp://{ADDRESSES[0]}:29501", backend="gloo", settings=settings_of()
    )
    what, _, number = scenario.partition(" of ")
    if what == "healthy":
        found = healthy(rank)
    elif what == "stop":
        found = one_stops(rank, directory)
    else:
        found = one_dies(rank, int(number), directory)
    report(directory, rank, found)
    destroy_distributed_environment()
