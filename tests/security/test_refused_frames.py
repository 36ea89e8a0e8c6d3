"""A refused frame costs the group nothing: the next good message arrives, and other groups go on.

The tests send below the API, under the host plane's tags, as a rank with other code would. This part has no secrets
(S6): the host and device planes of one host connect over loopback, and only the queue passes secrets between
processes.
"""

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from coordinator.group import GroupCoordinator
from coordinator.host.shared import SharedHostPlane
from coordinator.host.tags import BROADCAST_TAG, GATHER_TAG, OBJECT_TAG, TENSOR_DICT_TAG
from shm_broadcast.codec import encode, register_type
from tests.harness import RankPool
from tests.queues import ring_write
from tests.worlds import ApartPool, meet, outcome_of, world

GOOD = {"next": ["good", 1]}


class Unknown(msgspec.Struct, frozen=True):
    """Registered on rank 0 alone."""

    number: int


def frames() -> dict[str, bytes]:
    """Return bytes that are not valid messages, by name."""
    good = encode({"a": [1, 2, 3]}).to_bytes()
    return {
        "random": os.urandom(200),
        "zeros": bytes(100),
        "one byte": b"\x80",
        "a pickle": b"cos\nsystem\n(S'true'\ntR.",
        "a frame cut short": good[:-9],
        "a frame with a wrong tree": good[:32] + b"\xc1" * (len(good) - 32),
        "another version": good[:4] + b"\x7f" + good[5:],
        "an unknown class": encode(Unknown(1)).to_bytes(),
    }


NAMES = [
    "random",
    "zeros",
    "one byte",
    "a pickle",
    "a frame cut short",
    "a frame with a wrong tree",
    "another version",
    "an unknown class",
]


def send_raw(group: GroupCoordinator, frame: bytes | bytearray, peer: int, tag: int) -> None:
    host = group._host
    if isinstance(host, SharedHostPlane):
        memory = host._channels._sender(peer, "raw").memory
        assert ring_write(memory, bytes(frame), (), 0, 0, 0, tag) == len(frame)
    else:
        data = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        host.isend_tensor(data, peer, None, tag).wait()


def way(ranks: RankPool, apart: bool) -> RankPool | ApartPool:
    """Return the pool itself, or one whose ranks pretend to be on different hosts."""
    return ApartPool(ranks) if apart else ranks


RECEIVES: dict[str, tuple[int, Callable[[GroupCoordinator], Any], Callable[[GroupCoordinator], Any]]] = {
    "recv_object": (OBJECT_TAG, lambda group: group.recv_object(0), lambda group: group.send_object(GOOD, 1)),
    "recv_tensor_dict": (
        TENSOR_DICT_TAG,
        lambda group: group.recv_tensor_dict(0),
        lambda group: group.send_tensor_dict(GOOD, 1),
    ),
    "broadcast_object": (
        BROADCAST_TAG,
        lambda group: group.broadcast_object(None, 0),
        lambda group: group.broadcast_object(GOOD, 0),
    ),
    "broadcast_tensor_dict": (
        BROADCAST_TAG,
        lambda group: group.broadcast_tensor_dict(None, 0),
        lambda group: group.broadcast_tensor_dict(GOOD, 0),
    ),
}
"""By name the tag, what rank 1 calls to receive, and how rank 0 sends it something good."""


def refuse_and_go_on(rank: int, world_size: int, directory: Path, name: str, frame: str) -> list[Any]:
    tag, receive, send = RECEIVES[name]
    if rank == 0:
        register_type(Unknown, name="tests.security.Unknown")
    with world(rank, world_size, directory) as group:
        if rank == 0:
            if tag == BROADCAST_TAG:
                group._order.skip()  # the frame stands for the message of a broadcast, which has a number
            send_raw(group, frames()[frame], 1, tag)
            send(group)
            group.barrier()
            return []
        refused = outcome_of(lambda: receive(group))
        received = receive(group)
        group.barrier()
        return [refused, received]


def refuse_unnumbered(rank: int, world_size: int, directory: Path, name: str) -> list[Any]:
    tag, receive, send = RECEIVES[name]
    found: list[Any] = []
    with world(rank, world_size, directory) as group:
        for value in ("text", [1, False], [1, 0, "three"], None):
            if rank == 0:
                group._order.skip()
                send_raw(group, encode(value).to_bytes(), 1, tag)
                send(group)
            else:
                found += [outcome_of(lambda: receive(group)), receive(group)]
            group.barrier()
    return found


@pytest.mark.parametrize("name", ["broadcast_object", "broadcast_tensor_dict"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_broadcast_without_a_number_is_refused(ranks2: RankPool, name: str, apart: bool) -> None:
    """A valid frame that holds something else than a numbered message is a `DecodeError` that names the sender."""
    found = way(ranks2, apart).run(refuse_unnumbered, name)[1]
    assert len(found) == 8
    for refused, received in zip(found[::2], found[1::2], strict=True):
        assert refused["kind"] == "DecodeError", refused
        assert "rank 0 sent no message of this call" in refused["text"]
        assert received == GOOD


@pytest.mark.parametrize("frame", NAMES)
@pytest.mark.parametrize("name", RECEIVES)
@pytest.mark.parametrize("apart", [False, True])
def test_the_message_after_a_refused_one_arrives(
    ranks2: RankPool, name: str, frame: str, apart: bool
) -> None:
    """The receiver raises `DecodeError` and then receives the next message."""
    refused, received = way(ranks2, apart).run(refuse_and_go_on, name, frame)[1]
    assert refused["kind"] == "DecodeError", refused
    assert received == GOOD


def one_bad_in_a_gather(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        found = []
        if rank == 2:
            send_raw(group, b"garbage", 0, GATHER_TAG)
            # Count the call here, as this rank takes part without calling its method.
            group._gathers.number += 1
        else:
            found.append(outcome_of(lambda: group.gather_object(rank, 0))["kind"])
        found.append(group.gather_object(rank, 0))
        found.append(group.all_gather_object(rank))
        return found


@pytest.mark.parametrize("apart", [False, True])
def test_one_bad_frame_in_a_gather_leaves_none_of_the_others_behind(ranks4: RankPool, apart: bool) -> None:
    """Rank 0 takes all frames before it raises, so the next gather is not confused."""
    found = way(ranks4, apart).run(one_bad_in_a_gather)
    assert found[0] == ["DecodeError", [0, 1, 2, 3], [0, 1, 2, 3]]
    assert found[1] == ["NoneType", None, [0, 1, 2, 3]]


def bad_in_an_all_gather(rank: int, world_size: int, directory: Path, length: int, call: int) -> list[Any]:
    with world(rank, world_size, directory) as group:
        if rank == 1:
            host: Any = group._host
            host._all_gather("all_gather_object", None, struct.pack("<qq", length, call) + bytes(4096))
            first = "sent"
        else:
            first = outcome_of(lambda: group.all_gather_object(rank))["kind"]
        meet(rank, range(world_size), directory, "refused")
        return [first, group.all_gather_object(rank)]


@pytest.mark.parametrize(
    ("length", "call"), [(0, 0), (100, 0), (-1, 0), (-(2**63), 0), (2**62, 0), (100, 2), (100, -1)]
)
def test_a_bad_frame_in_an_all_gather_is_refused_by_every_rank(
    ranks2: RankPool, length: int, call: int
) -> None:
    """No rank allocates the claimed length; every rank raises, and the next all-gather works."""
    assert ranks2.run(bad_in_an_all_gather, length, call) == [["DecodeError", [0, 1]], ["sent", [0, 1]]]


def claims_too_much(rank: int, world_size: int, directory: Path, length: int) -> list[Any]:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            frame = bytearray(encode(bytes(1 << 17)).to_bytes()[: 64 << 10])
            frame[8:16] = struct.pack("<Q", length)
            send_raw(group, frame, 1, OBJECT_TAG)
            meet(rank, range(world_size), directory, "refused")
            return [outcome_of(group.barrier)]
        found = outcome_of(lambda: group.recv_object(0))
        meet(rank, range(world_size), directory, "refused")
        return [found, outcome_of(group.barrier)]


@pytest.mark.parametrize("length", [2**62, 2**64 - 1])
def test_a_frame_that_claims_more_than_there_is_memory_breaks_the_group_at_once(
    ranks2: RankPool, length: int
) -> None:
    """An absurd length breaks the group on both ranks, as the stream has lost its framing."""
    (other,), (found, again) = ApartPool(ranks2).run(claims_too_much, length)
    assert found["kind"] == "CapabilityError", found
    assert str(length) in found["text"]
    assert (again["kind"], again["cause"]) == ("GroupBrokenError", "CapabilityError")
    assert other["kind"] == "GroupBrokenError", other


def modes(rank: int, world_size: int, directory: Path) -> list[list[int]]:
    # The user's umask must not matter.
    before = os.umask(0)
    try:
        with world(rank, world_size, directory) as group:
            root = directory / "rendezvous"
            found = [
                [stat.S_IMODE(path.stat().st_mode), path.stat().st_uid] for path in (root, *root.iterdir())
            ]
            group.barrier()
            return found
    finally:
        os.umask(before)


def test_nobody_else_can_enter_a_rendezvous(ranks2: RankPool) -> None:
    """Only the user can read the directory and its generation; the pointer holds only a name."""
    for found in ranks2.run(modes):
        assert all(owner == os.getuid() for _, owner in found)
        assert all(mode & 0o022 == 0 for mode, _ in found), found
        assert [mode for mode, _ in found].count(0o700) == 2
