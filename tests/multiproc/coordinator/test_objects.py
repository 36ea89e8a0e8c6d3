"""Python objects between ranks: every kind arrives unchanged, and every mistake leaves the group intact."""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch

from coordinator import (
    DecodeError,
    DisagreementError,
    GroupBrokenError,
    GroupCoordinator,
    UsageError,
    register_type,
)
from coordinator.host import gloo
from coordinator.host.gloo import FIRST_BYTES
from device_comm.cpu.communicator import SharedMemoryCommunicator
from shm_broadcast import codec
from tests.engines import refusal
from tests.harness import RankPool
from tests.unit.shm_broadcast.codec_samples import VALUES, Point, same
from tests.waiting import wait_until
from tests.worlds import ApartPool, world

WAYS = ["shared memory", "Gloo"]


@pytest.fixture(params=WAYS)
def place(request: pytest.FixtureRequest) -> str:
    """Run each test on one host, and once more on ranks that seem to be on several."""
    # The fixtures below have no parameters of their own: pytest passes those of a fixture on to the fixture that it
    # overrides, and would end the processes of the session and start new ones at every change.
    return str(request.param)


@pytest.fixture(name="ranks2")
def two_ranks_both_ways(place: str, ranks2: RankPool) -> RankPool | ApartPool:
    """Return two ranks that are on one host or seem to be on several."""
    return ranks2 if place == WAYS[0] else ApartPool(ranks2)


@pytest.fixture(name="ranks4")
def four_ranks_both_ways(place: str, ranks4: RankPool) -> RankPool | ApartPool:
    """Return four ranks that are on one host or seem to be on several."""
    return ranks4 if place == WAYS[0] else ApartPool(ranks4)


ARRAYS: dict[str, Any] = {
    "numpy arrays": [
        np.arange(6).reshape(2, 3),
        np.zeros((0, 4), np.float16),
        np.array(2.5),
        np.float32(1.5),
    ],
    "large arrays": np.arange(50_000, dtype=np.int64),
    "tensors": [torch.arange(6).view(2, 3), torch.tensor(True), torch.ones(2, 3, dtype=torch.bfloat16)],
    "large tensors": [torch.arange(50_000), torch.randn(3, 40_000).t()],
    "what tensors are made of": [torch.Size([1, 2]), torch.float8_e5m2, torch.device("cpu")],
}
OBJECTS = {**VALUES, **ARRAYS}
SIZES = (FIRST_BYTES - 1, FIRST_BYTES, FIRST_BYTES + 1, 1 << 20, 8 << 20)


@dataclasses.dataclass
class Unregistered:
    """A class that no rank registers as a type."""

    x: int = 0


@dataclasses.dataclass
class HalfKnown:
    """A class that only the sender registers."""

    payload: bytes = b""


class Step(msgspec.Struct):
    """The class into which the receiver decodes the dict that the sender sends."""

    number: int
    tokens: tuple[int, ...]


@contextmanager
def known(here: bool) -> Iterator[None]:
    """If `here`, register `HalfKnown` in this process."""
    if here:
        register_type(HalfKnown)
    try:
        yield
    finally:
        if here:
            codec.unregister_type(HalfKnown)


def framed(size: int) -> bytes:
    """Return bytes whose frame has exactly `size` bytes."""
    overhead = codec.encode(bytes(60_000)).nbytes - 60_000
    data = bytes([size % 251]) * (size - overhead)
    assert codec.encode(data).nbytes == size
    return data


def every_kind(rank: int, world_size: int, directory: Path) -> list[str]:
    """Send every kind of object by every route; return the objects that did not arrive as they were sent."""
    wrong = []
    with world(rank, world_size, directory) as group:
        for name, value in OBJECTS.items():
            arrived = {"broadcast": group.broadcast_object(value if rank == 1 else None, src=1)}
            if rank == 0:
                group.send_object(value, 1)
                arrived["send"] = group.recv_object(1)
            else:
                arrived["send"] = group.recv_object(0)
                group.send_object(value, 0)
            first, second = group.all_gather_object(value)
            arrived |= {"all_gather, first": first, "all_gather, second": second}
            gathered = group.gather_object(value, dst=1)
            if rank == 1:
                assert gathered is not None
                arrived |= {"gather": gathered[0], "gather, own": gathered[1]}
            else:
                assert gathered is None
            wrong += [f"{name} by {route}" for route, got in arrived.items() if not same(value, got)]
    return wrong


@pytest.mark.guarantee("G2")
def test_every_kind_of_object_arrives_unchanged(ranks2: RankPool) -> None:
    """All four routes keep the value and the exact type of everything that the codec carries."""
    assert ranks2.run(every_kind) == [[], []]


def every_size(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for size in SIZES:
            data = framed(size)
            for src in range(world_size):
                assert group.broadcast_object(data if rank == src else None, src=src) == data
            assert group.all_gather_object(data[rank:]) == [data[each:] for each in range(world_size)]
            gathered = group.gather_object(data[rank:], dst=2)
            assert gathered == ([data[each:] for each in range(world_size)] if rank == 2 else None)
            if rank == 3:
                group.send_object(data, 0)
            if rank == 0:
                assert group.recv_object(3) == data


@pytest.mark.guarantee("G2")
def test_a_frame_may_end_anywhere_around_the_first_message(ranks4: RankPool) -> None:
    """Frames of 64 KiB, of one byte less and more, of 1 MiB and of 8 MiB arrive whole from every rank."""
    ranks4.run(every_size)


def uneven_sizes(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for largest in range(world_size):
            size = 300_000 if rank == largest else rank
            lengths = [300_000 if each == largest else each for each in range(world_size)]
            assert list(map(len, group.all_gather_object(bytes(size)))) == lengths
            gathered = group.gather_object(bytes(size))
            assert gathered is None or list(map(len, gathered)) == lengths


def test_gathered_objects_may_differ_in_size(ranks4: RankPool) -> None:
    """The object of any one rank may take two messages while those of the others take one."""
    ranks4.run(uneven_sizes)


def typed(rank: int, world_size: int, directory: Path) -> list[str]:
    plain = {"number": 7, "tokens": [1, 2]}
    with world(rank, world_size, directory) as group:
        if rank == 0:
            for _ in range(2):
                group.send_object(plain, 1)
                group.broadcast_object(plain)
            return []
        assert group.recv_object(0, type=Step) == Step(7, (1, 2))
        assert group.broadcast_object(type=Step) == Step(7, (1, 2))
        texts = [refusal(lambda: group.recv_object(0, type=list[int]), DecodeError)]
        assert group.broadcast_object() == plain
        return texts


def test_a_receiver_may_decode_straight_into_its_type(ranks2: RankPool) -> None:
    """`type=` gives the wanted class. Another message raises a DecodeError, and the next one arrives."""
    _, texts = ranks2.run(typed)
    assert "list[int]" in texts[0]


def unregistered(rank: int, world_size: int, directory: Path) -> list[str]:
    bad = {"steps": [1, {"request": Unregistered()}]}
    with world(rank, world_size, directory) as group:
        texts = []
        if rank == 0:
            calls: list[Callable[[], Any]] = [
                lambda: group.broadcast_object(bad, src=0),
                lambda: group.broadcast_object_list([bad], src=0),
                lambda: group.send_object(bad, 1),
                lambda: group.isend_object(bad, 1),
                lambda: group.gather_object(bad, dst=1),
                lambda: group.broadcast_tensor_dict(bad, src=0),
                lambda: group.send_tensor_dict(bad, 1),
            ]
            if isinstance(group.device_communicator, SharedMemoryCommunicator):
                calls.append(lambda: group.all_gather_object(bad))
            texts = [refusal(call, UsageError) for call in calls]
        else:
            # A refused collective takes its place: the others' calls raise its reason.
            refused: list[Callable[[], Any]] = [
                lambda: group.broadcast_object(src=0),
                lambda: group.broadcast_object_list([None], src=0),
                lambda: group.gather_object(rank, dst=1),
                lambda: group.broadcast_tensor_dict(src=0),
            ]
            if isinstance(group.device_communicator, SharedMemoryCommunicator):
                refused.append(lambda: group.all_gather_object(rank))
            for call in refused:
                assert "rank 0 refused" in refusal(call, DisagreementError)
        assert group.broadcast_object(1 if rank == 0 else None) == 1
        assert group.all_gather_object(rank) == [0, 1]
        assert group.gather_object(rank, dst=1) == ([0, 1] if rank == 1 else None)
        if rank == 0:
            group.send_object("good", 1)
            group.send_tensor_dict({"good": torch.ones(1)}, 1)
        else:
            assert group.recv_object(0) == "good"
            received = group.recv_tensor_dict(0)
            assert received is not None
            assert list(received) == ["good"]
        if not isinstance(group.device_communicator, SharedMemoryCommunicator):
            if rank == 0:
                texts.append(refusal(lambda: group.all_gather_object(bad), UsageError))
            broken = GroupBrokenError if rank == 0 else DisagreementError
            assert "rank 0 refused all_gather_object: " in refusal(
                lambda: group.all_gather_object(rank), broken
            )
    return texts


@pytest.mark.guarantee("G3", "G66")
def test_an_unregistered_class_is_refused_before_anything_is_sent(ranks2: RankPool) -> None:
    """The UsageError names the class and its position in the object. Every later call works on all ranks.

    Over Gloo a gather that one rank has refused ends the group with the next one.
    """
    texts, _ = ranks2.run(unregistered)
    assert len(texts) == 8
    for text in texts:
        assert "test_objects.Unregistered" in text
        assert '["steps"][1]["request"]' in text
        assert "nothing was sent" in text


def half_known(rank: int, world_size: int, directory: Path, size: int) -> list[str]:
    """Send a class that only rank 1 knows by every route; return the receivers' errors."""
    texts = []
    with world(rank, world_size, directory) as group, known(rank == 1):
        bad = HalfKnown(bytes(size)) if rank == 1 else None
        if rank == 1:
            group.broadcast_object(bad, src=1)
            group.broadcast_object("good", src=1)
            group.send_object(bad, 0)
            group.send_object("good", 0)
        else:
            texts.append(refusal(lambda: group.broadcast_object(src=1), DecodeError))
            assert group.broadcast_object(src=1) == "good"
        if rank == 0:
            texts.append(refusal(lambda: group.recv_object(1), DecodeError))
            assert group.recv_object(1) == "good"
        own = bad or bytes(size)
        if rank == 0:
            texts.append(refusal(lambda: group.gather_object(own, dst=0), DecodeError))
        else:
            group.gather_object(own, dst=0)
        assert group.gather_object(rank, dst=0) == (list(range(world_size)) if rank == 0 else None)
        if rank == 1:
            group.all_gather_object(own)
        else:
            texts.append(refusal(lambda: group.all_gather_object(own), DecodeError))
        assert group.all_gather_object(rank) == list(range(world_size))
    return texts


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("size", [10, 200_000])
def test_a_class_that_only_the_sender_knows_is_a_decode_error(ranks4: RankPool, size: int) -> None:
    """The receivers' error names the class. The group is intact, and the next message arrives by every route."""
    texts = ranks4.run(half_known, size)
    assert [len(each) for each in texts] == [4, 0, 2, 2]
    assert all(
        "test_objects.HalfKnown, which is not registered here" in text for each in texts for text in each
    )


def interleaved(rank: int, world_size: int, directory: Path) -> None:
    """Receive messages kind by kind, in another order than they were sent in, in both directions at once."""
    other = 1 - rank
    with world(rank, world_size, directory) as group:
        queue = group.create_mq_broadcaster(0)
        handles = []
        for number in range(20):
            tensor = torch.full((5000,), float(number + 100 * rank))
            handles += group.isend_tensor_dict({"number": number, "x": tensor}, other)
            handles.append(group.isend_object(["object", rank, number], other))
            handles.append(group.isend_object(bytes(100_000 + number), other))
            handles.append(group.device_communicator.isend(tensor + 0.5, other))
            if rank == 0:
                queue.enqueue(["queue", number])  # type: ignore[union-attr]
            assert group.broadcast_object(["broadcast", number] if rank == 0 else None) == [
                "broadcast",
                number,
            ]
            sent = group.broadcast_tensor_dict({"x": tensor + 0.25} if rank == 0 else None)
            assert sent is not None
            assert sent["x"][0] == number + 0.25
            assert group.broadcast(tensor.clone(), src=1)[0] == number + 100
            assert group.all_gather_object(rank) == [0, 1]
            group.barrier()
        for number in range(20):
            value = float(number + 100 * other)
            assert group.recv((5000,), torch.float32, other)[-1] == value + 0.5
            if rank == 1:
                assert queue.dequeue() == ["queue", number]  # type: ignore[union-attr]
            assert group.recv_object(other) == ["object", other, number]
            assert len(group.recv_object(other)) == 100_000 + number
            received = group.recv_tensor_dict(other)
            assert received is not None
            assert received["number"] == number
            assert bool((received["x"] == value).all())
        for handle in handles:
            handle.wait()


def test_kinds_of_traffic_do_not_mix(ranks2: RankPool) -> None:
    """Objects, tensor dicts, tensors, queues and collectives between two ranks each keep their own order."""
    ranks2.run(interleaved)


def far_ahead(rank: int, world_size: int, directory: Path, way: str) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            for number in range(200):
                group.send_object({"number": number}, 1) if way == "send" else group.isend_object(number, 1)
            group.barrier()
        else:
            group.barrier()
            wanted = [{"number": number} if way == "send" else number for number in range(200)]
            assert [group.recv_object(0) for _ in range(200)] == wanted


@pytest.mark.parametrize("way", ["send", "isend"])
def test_small_objects_are_sent_before_anybody_receives(ranks2: RankPool, way: str) -> None:
    """Two hundred objects are sent while the receiver does something else, and they arrive in order."""
    ranks2.run(far_ahead, way)


def both_ways(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        handles = [group.isend_object(bytes(size), 1 - rank) for size in (10, 100_000) for _ in range(100)]
        sizes = [len(group.recv_object(1 - rank)) for _ in handles]
        assert sizes == [10] * 100 + [100_000] * 100
        for handle in handles:
            handle.wait()
            handle.wait()
            assert handle.is_completed()


def test_two_ranks_may_send_to_each_other_before_they_receive(ranks2: RankPool) -> None:
    """`isend_object` never waits for the other rank, which sends too. Handles may be waited for twice."""
    ranks2.run(both_ways)


def bounded(rank: int, world_size: int, directory: Path) -> float:
    begun = directory / "begun"
    with world(rank, world_size, directory) as group, mock.patch.object(gloo, "EAGER_BYTES", 1 << 18):
        if rank == 1:
            wait_until(begun.exists, "the sender's first message")
            time.sleep(0.5)  # twice as long as the sender must have waited at least
            assert [group.recv_object(0)[0] for _ in range(100)] == list(range(100))
            return 0.0
        start = time.monotonic()
        begun.touch()
        for number in range(100):
            group.send_object(bytes([number]) * 50_000, 1)
        return time.monotonic() - start


def test_a_sender_far_ahead_of_its_receiver_waits_for_it(ranks2: RankPool) -> None:
    """Messages that are sent and not yet received take limited memory."""
    sender, _ = ranks2.run(bounded)
    assert sender > 0.25


def early_message(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            group.send_object("early", 1)
        for number in range(100):
            assert group.broadcast_object(number if rank == 0 else None) == number
        gc.collect()
        if rank == 1:
            assert group.recv_object(0) == "early"


def test_a_message_outlives_the_traffic_after_it(ranks2: RankPool) -> None:
    """An object can still be received after a hundred later broadcasts."""
    ranks2.run(early_message)


def farewell(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            for number in range(50):
                group.send_object(number, 1)
        else:
            # Long enough for rank 0 to destroy its world, of which it tells nobody.
            time.sleep(0.7)
            assert [group.recv_object(0) for _ in range(50)] == list(range(50))


def test_what_was_sent_before_destroy_arrives(ranks2: RankPool) -> None:
    """`destroy` waits a little for a receiver that has not yet received its messages."""
    ranks2.run(farewell)


def alternating(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for number in range(200):
            src = number % world_size
            sent = {"number": number, "point": Point(number)} if rank == src else None
            received = group.broadcast_object(sent, src=src)
            assert received["number"] == number
            assert received["point"] == Point(number)


def test_every_rank_may_broadcast_in_turn(ranks4: RankPool) -> None:
    """Two hundred broadcasts with alternating senders arrive in order."""
    ranks4.run(alternating)


def lists(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory) as group:
        mine: list[Any] = [Point(1), (2, "x"), torch.arange(3)] if rank == 1 else [None, None, None]
        result = group.broadcast_object_list(mine, src=1)
        assert result is mine
        assert same(mine, [Point(1), (2, "x"), torch.arange(3)])
        if rank == 0:
            text = refusal(lambda: group.broadcast_object_list([0], src=1), UsageError)
            told = refusal(lambda: group.broadcast_object_list([0, 0], src=1), DisagreementError)
            assert "rank 1 refused broadcast_object_list: obj_list must be a list" in told
        else:
            group.broadcast_object_list([1, 2], src=1)
            text = refusal(lambda: group.broadcast_object_list((1, 2), src=1), UsageError)  # type: ignore[arg-type]
        assert group.broadcast_object_list([rank], src=0) == [0]
    return text


def test_an_object_list_is_filled_in_place(ranks2: RankPool) -> None:
    """The receivers' lists then hold the sender's objects. A list of another length raises a UsageError."""
    first, second = ranks2.run(lists)
    assert "rank 1 sent 2 objects, this rank's list holds 1" in first
    assert "must be a list" in second


def own_objects(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        sent = {"numbers": [1, 2]}
        received = group.broadcast_object(sent, src=0)
        assert (received is sent) == (rank == 0)
        received["numbers"].append(rank)
        assert group.all_gather_object(sent if rank == 0 else received)[rank] == received
        bad_ranks: list[Callable[[GroupCoordinator], Any]] = [
            lambda g: g.broadcast_object(1, src=2),
            lambda g: g.broadcast_object(1, src=-1),
            lambda g: g.send_object(1, rank),
            lambda g: g.send_object(1, True),
            lambda g: g.recv_object(2),
            lambda g: g.gather_object(1, dst=2),
            lambda g: g.broadcast_object(1, timeout_s=0),
        ]
        for call in bad_ranks:
            refusal(lambda call=call: call(group), UsageError)  # type: ignore[misc]
        group.barrier()


def test_ranks_are_checked_before_anything_is_sent(ranks2: RankPool) -> None:
    """A rank outside of the group, one's own rank or no integer raises a UsageError, and the group goes on."""
    ranks2.run(own_objects)


def exchange_beside_a_gather(rank: int, world_size: int, directory: Path) -> list[str]:
    with world(rank, world_size, directory) as group:
        # Longer than what travels in the first round: no rank may wait for a second one.
        own = bytes([rank]) * (10 if rank else 10_000)
        calls: list[Callable[[], Any]] = [
            lambda: group._host.exchange(own),
            lambda: group.all_gather_object(own),
        ]
        with pytest.raises(DisagreementError) as raised:
            calls[rank]()
        assert raised.value.views == {0: "exchange", 1: "all_gather_object"}
        assert group._host.exchange(bytes([rank])) == [b"\0", b"\1"]
        assert group.all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
        return [str(raised.value)]


@pytest.mark.parametrize("apart", [False, True])
def test_an_exchange_never_answers_a_gather_of_objects(ranks2: RankPool, apart: bool) -> None:
    """A program would take the bytes of a group's part for a rank's object. All ranks raise, and the group goes on."""
    pool = ApartPool(ranks2) if apart else ranks2
    for (text,) in pool.run(exchange_beside_a_gather):
        assert "rank 0: exchange; rank 1: all_gather_object" in text
