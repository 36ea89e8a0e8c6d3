"""Point-to-point messages between ranks of one host, over shared memory."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator import CommTimeoutError, GroupCoordinator, PeerLostError, register_type
from device_comm import health
from device_comm.handles import Handle
from shm_broadcast.codec import unregister_type
from tests.channels import channels_of
from tests.harness import RankPool
from tests.multiproc.device_comm import test_channel_opening as opening
from tests.queues import background
from tests.waiting import wait_until
from tests.worlds import meet, new_group, tell_when_waiting, world

LARGE = 9 << 20
"""A number of bytes that exceeds a channel."""


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Return bytes that depend on `seed` and on their position."""
    period = (torch.arange(256, dtype=torch.int64) * 7 + seed).to(torch.uint8)
    return period.repeat(-(-nbytes // 256))[:nbytes]


def crossing(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        own, peers = pattern(LARGE, rank), pattern(LARGE, 1 - rank)
        for _ in range(3):
            group.send(own, 1 - rank)
            assert torch.equal(group.recv((LARGE,), torch.uint8, 1 - rank), peers)
            group.send_object([rank, bytes(LARGE)], 1 - rank)
            assert group.recv_object(1 - rank)[0] == 1 - rank
            group.send_tensor_dict({"x": own, "n": rank}, 1 - rank)
            received = group.recv_tensor_dict(1 - rank)
            assert received is not None
            assert received["n"] == 1 - rank
            assert torch.equal(received["x"], peers)


@pytest.mark.guarantee("D15")
def test_large_messages_that_cross_do_not_deadlock(ranks2: RankPool) -> None:
    """Both ranks send messages that exceed their channels before they receive."""
    ranks2.run(crossing)


def circle(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for turn in range(3):
            group.send_tensor_dict({"x": pattern(LARGE, rank + turn)})
            received = group.recv_tensor_dict()
            assert received is not None
            assert torch.equal(received["x"], pattern(LARGE, (rank - 1) % world_size + turn))


@pytest.mark.guarantee("D15")
def test_large_messages_in_a_circle_do_not_deadlock(ranks4: RankPool) -> None:
    """Every rank sends to the next one before it receives. There are more ranks than cores."""
    ranks4.run(circle)


def roundabout(rank: int, world_size: int, directory: Path) -> Any:
    with world(rank, world_size, directory) as group:
        # Rank 0 waits for rank 1, which waits for rank 2, which first sends rank 0 more than the channel holds.
        if rank == 0:
            first = group.recv_object(1)
            return [first, int(group.recv((LARGE,), torch.uint8, 2).long().sum())]
        if rank == 1:
            group.send_object(group.recv_object(2) + 1, 0)
        if rank == 2:
            group.send(pattern(LARGE, 5), 0)
            group.send_object(41, 1)
        return None


@pytest.mark.guarantee("D15")
def test_a_waiting_receiver_takes_in_what_others_send(ranks4: RankPool) -> None:
    """A large message does not delay its sender if the receiver waits for another rank first."""
    assert ranks4.run(roundabout)[0] == [42, int(pattern(LARGE, 5).long().sum())]


def kinds_out_of_order(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            for turn in range(20):
                group.send_object(("object", turn), 1)
                group.send(torch.full((7,), float(turn)), 1)
                group.send_tensor_dict({"turn": turn, "x": pattern(1 << 20, turn)}, 1)
            assert group.recv_object(1) == "done"
            return
        for turn in range(20):
            received = group.recv_tensor_dict(0)
            assert received is not None
            assert received["turn"] == turn
            assert torch.equal(received["x"], pattern(1 << 20, turn))
        for turn in range(20):
            assert group.recv((7,), torch.float32, 0).tolist() == [float(turn)] * 7
        for turn in range(20):
            assert group.recv_object(0) == ("object", turn)
        group.send_object("done", 0)


@pytest.mark.guarantee("D15")
def test_each_kind_of_message_is_in_order_by_itself(ranks2: RankPool) -> None:
    """Objects, tensors and dicts are sent alternately; they may be received one kind after the other."""
    ranks2.run(kinds_out_of_order)


def handles(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        communicator = group.device_communicator
        if rank == 0:
            tensors = [pattern(LARGE, seed) for seed in range(4)]
            sends = [communicator.isend(tensor, 1) for tensor in tensors]
            group.isend_tensor_dict({"x": tensors[0]}, 1)  # the handle is dropped
            group.send(pattern(10, 9), 1)  # it comes after the others
            for send in sends:
                send.wait()
                send.wait()
                assert send.is_completed()
            assert group.recv_object(1) == "done"
            return
        into = [torch.empty(LARGE, dtype=torch.uint8) for _ in range(4)]
        last = torch.empty(10, dtype=torch.uint8)
        receives = [communicator.irecv(tensor, 0) for tensor in [*into, last]]
        receives[-1].wait()
        assert torch.equal(last, pattern(10, 9))
        for seed, (receive, tensor) in enumerate(zip(receives[:-1], into, strict=True)):
            assert receive.is_completed()
            receive.wait()
            receive.wait()
            assert torch.equal(tensor, pattern(LARGE, seed))
        received = group.recv_tensor_dict(0)
        assert received is not None
        assert torch.equal(received["x"], pattern(LARGE, 0))
        group.send_object("done", 0)


@pytest.mark.guarantee("D11")
def test_handles_may_be_waited_for_twice_in_any_order_or_dropped(ranks2: RankPool) -> None:
    """Large sends proceed in the background. Receives are filled in the order in which they were posted."""
    ranks2.run(handles)


def overlapped(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            tensor = pattern(LARGE, 1)
            handle = group.device_communicator.isend(tensor, 1)
            # Meanwhile this rank makes no call of the group.
            meet(rank, (0, 1), directory, "received")
            assert handle.is_completed()
        else:
            assert torch.equal(group.recv((LARGE,), torch.uint8, 0), pattern(LARGE, 1))
            meet(rank, (0, 1), directory, "received")


def test_a_large_isend_needs_no_further_call(ranks2: RankPool) -> None:
    """The message arrives while its sender makes no call."""
    ranks2.run(overlapped)


def copied(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            block = bytearray(LARGE)
            handle = group.isend_object(block, 1)
            block[:] = b"\1" * LARGE
            handle.wait()
        else:
            assert not any(group.recv_object(0))


def test_an_object_is_encoded_before_isend_object_returns(ranks2: RankPool) -> None:
    """Changes after the call do not arrive, even if the object does not fit into the channel."""
    ranks2.run(copied)


def first_use_at_once(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as first:
        for turn in range(30):
            with new_group(first) as group:
                others = [other for other in range(world_size) if other != rank]
                for other in others if turn % 2 else reversed(others):
                    group.send_object((rank, turn), other)
                for other in others:
                    assert group.recv_object(other) == (other, turn)
                group.barrier()


def test_channels_that_both_ranks_make_at_the_same_time(ranks4: RankPool) -> None:
    """The first rank makes the channel, and the other one finds it."""
    ranks4.run(first_use_at_once)


def leaving(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        if rank == 0:
            group.send_object("last words", 1)
            group.destroy()
            meet(rank, (0, 1), directory, "left")
            return ""
        meet(rank, (0, 1), directory, "left")
        assert group.recv_object(0) == "last words"
        start = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            group.send_object("anybody there?", 0)
        assert time.monotonic() - start < 1.0
        group.destroy()
        return str(caught.value)


def test_what_was_sent_before_its_sender_left_arrives(ranks2: RankPool) -> None:
    """A rank that first uses the channel afterwards also gets the message. A send to the rank that left raises."""
    assert "destroyed by rank 0" in ranks2.run(leaving)[1]


def leaves_in_the_middle(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as first:
        group = new_group(first, destroy_timeout_s=0.4)
        if rank == 0:
            group.device_communicator.isend(pattern(LARGE, 1), 1)
            group.destroy()
            meet(rank, (0, 1), directory, "left")
            return []
        into = torch.empty(LARGE, dtype=torch.uint8)
        handle = group.device_communicator.irecv(into, 0)
        meet(rank, (0, 1), directory, "left")
        start = time.monotonic()
        with pytest.raises(PeerLostError):
            handle.wait()
        group.destroy()
        return [time.monotonic() - start]


def test_a_sender_that_leaves_in_the_middle_of_a_message(ranks2: RankPool) -> None:
    """The receiver has a part of the message, waits without a deadline for the rest, and raises at once."""
    assert ranks2.run(leaves_in_the_middle)[1][0] < 1.0


def silent_peer_leaves(rank: int, world_size: int, directory: Path) -> float:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        if rank == 0:
            meet(rank, (0, 1), directory, "waits")
            group.destroy()
            return 0.0
        tell_when_waiting(group, directory)
        start = time.monotonic()
        with pytest.raises(PeerLostError):
            group.recv_object(0)
        elapsed = time.monotonic() - start
        group.destroy()
        return elapsed


def test_a_receiver_learns_that_a_rank_left_which_never_sent(ranks2: RankPool) -> None:
    """The receiver has made the channel alone. Its wait still ends at once."""
    assert ranks2.run(silent_peer_leaves)[1] < 1.2


def wait_for(handles: list[Handle]) -> None:
    for handle in handles:
        handle.wait()


def two_receivers(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        communicator = group.device_communicator
        if rank == 0:
            for value in range(40):
                group.send(torch.full((5,), value), 1)
            return
        into = [torch.empty(5, dtype=torch.int64) for _ in range(40)]
        posted = [communicator.irecv(tensor, 0) for tensor in into]
        threads = [threading.Thread(target=wait_for, args=(posted[part::4],)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [int(tensor[0]) for tensor in into] == list(range(40))


def test_handles_may_be_waited_for_in_several_threads(ranks2: RankPool) -> None:
    """Each receive gets the message at its position in the order."""
    ranks2.run(two_receivers)


def one_of_many(choose: random.Random, turn: int) -> Any:
    """Return a message of any kind and size that is equal for equal random states."""
    nbytes = choose.choice((0, 1, 63, 500, 4000, 70_000, 300_000, 600_000, 2_000_000))
    kind = choose.randrange(3)
    if kind == 0:
        return ("object", turn, pattern(nbytes, turn).numpy().tobytes())
    if kind == 1:
        return pattern(nbytes, turn)
    return {"turn": turn, "x": pattern(nbytes, turn), "y": {"z": torch.ones(3)}}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


def random_traffic(rank: int, world_size: int, directory: Path, seed: int) -> int:
    """Send to and receive from all ranks. Each rank draws its own order."""
    plan = random.Random(seed)
    pairs = [(src, dst) for src in range(world_size) for dst in range(world_size) if src != dst]
    messages = [(*plan.choice(pairs), plan.getrandbits(32)) for _ in range(60 * world_size)]
    own = random.Random(seed * 100 + rank)
    with world(rank, world_size, directory) as group:
        handles = []
        steps: list[tuple[str, int, Any]] = []
        for turn, (src, dst, draw) in enumerate(messages):
            message = one_of_many(random.Random(draw), turn)
            if src == rank:
                steps.append(("send", dst, message))
            if dst == rank:
                steps.append(("recv", src, message))
        for verb, peer, message in steps:
            if own.random() < 0.05:
                time.sleep(own.random() * 0.01)
            if verb == "send":
                handles += send(group, message, peer, own.random() < 0.5)
            else:
                assert equal(receive(group, message, peer), message)
        for handle in handles:
            handle.wait()
        group.barrier()
        return len(os.listdir("/proc/self/fd"))


def send(group: GroupCoordinator, message: Any, peer: int, at_once: bool) -> list[Any]:
    if isinstance(message, tuple):
        if not at_once:
            return [group.isend_object(message, peer)]
        group.send_object(message, peer)
    elif isinstance(message, dict):
        if not at_once:
            return group.isend_tensor_dict(message, peer)
        group.send_tensor_dict(message, peer)
    elif at_once:
        group.send(message, peer)
    else:
        return [group.device_communicator.isend(message, peer)]
    return []


def receive(group: GroupCoordinator, like: Any, peer: int) -> Any:
    if isinstance(like, tuple):
        return group.recv_object(peer)
    if isinstance(like, dict):
        return group.recv_tensor_dict(peer)
    return group.recv(like.shape, like.dtype, peer)


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_between_more_ranks_than_cores(ranks4: RankPool, seed: int) -> None:
    """Messages of all kinds and sizes arrive whole, once and in order, whether they were sent at once or not."""
    ranks4.run(random_traffic, seed, timeout_s=120)


class Counted:
    """A class that counts how often this process encodes an object of it."""

    encoded = 0


def count_encodings(rank: int, world_size: int, directory: Path) -> int:
    def encode(_obj: Counted) -> bytes:
        Counted.encoded += 1
        return bytes(LARGE // 4 if Counted.encoded % 2 else 10)

    with world(rank, world_size, directory) as group:
        register_type(Counted, encode=encode, decode=lambda _: Counted())
        Counted.encoded = 0
        for _ in range(2):
            # Send to all others, at once or part by part. Then send to one rank, with and without a handle.
            assert isinstance(group.broadcast_object(Counted() if rank == 0 else None), Counted)
        for _ in range(2):
            if rank == 0:
                group.send_object(Counted(), 1)
            elif rank == 1:
                assert isinstance(group.recv_object(0), Counted)
        if rank == 0:
            handle = group.isend_object(Counted(), 1)
            handle.wait()
        elif rank == 1:
            assert isinstance(group.recv_object(0), Counted)
        group.barrier()
        unregister_type(Counted)
        return Counted.encoded


def test_an_object_is_encoded_once_for_all_receivers(ranks4: RankPool) -> None:
    """This holds for any number of receivers, and for objects that fit into the channels and that do not."""
    assert ranks4.run(count_encodings) == [5, 0, 0, 0]


def test_a_long_wait_for_one_rank_looks_for_the_others_ever_less_often() -> None:
    """The pauses of a wait grow from one slice of it to the next, so that a wait for seconds costs next to nothing."""
    with channels_of(2) as ranks:
        channels = ranks[0]
        with mock.patch.object(channels, "drain", wraps=channels.drain) as drain:
            with pytest.raises(CommTimeoutError):
                channels.recv("host", "recv", 1, 1, 1.5)
            # 1, 2, 4 … 64 ms, and then one look for each slice of 0.1 s. A wait that began anew in each slice made 100.
            assert 8 <= drain.call_count <= 40


@pytest.mark.guarantee("D15")
def test_the_waits_of_a_send_to_several_ranks_share_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message to one rank is written by the call itself, that to another waits behind one of another thread."""
    limits: list[float | None] = []
    own, limit_s, slow_s = threading.get_ident(), 20.0, 0.3
    wait = health.GroupHealth.wait

    def slow_wait(self: health.GroupHealth, operation: Any, work: Any, timeout_s: float | None) -> None:
        wait(self, operation, work, timeout_s)
        if threading.get_ident() == own:
            limits.append(timeout_s)
            time.sleep(slow_s)

    with channels_of(3) as (zero, one, two):
        opening.send(zero, "opens", 1)
        opening.send(zero, "opens", 2)
        with background(lambda: opening.send(zero, bytes(LARGE), 2)):
            wait_until(lambda: zero._senders[2]._waiting, "the other thread's message")
            monkeypatch.setattr(health.GroupHealth, "wait", slow_wait)
            with (
                background(lambda: [len(opening.recv(one, 0)) for _ in range(2)]) as at_one,
                background(lambda: [len(opening.recv(two, 0)) for _ in range(3)]) as at_two,
            ):
                zero.send("host", "send", bytes(LARGE), (1, 2), 1, limit_s)
        assert (at_one, at_two) == ([[5, LARGE]], [[5, LARGE, LARGE]])
    assert len(limits) == 2
    assert limits[1] is not None
    assert limits[1] <= limit_s - slow_s
