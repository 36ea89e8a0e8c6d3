"""Codec functions of the application that call the group whose object they encode or decode: refused on every plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from coordinator import DecodeError, GroupCoordinator, UsageError
from coordinator.testing import FakeGroupCoordinator
from shm_broadcast import codec
from shm_broadcast.codec import hooks
from tests.handlers import handling_where
from tests.harness import RankPool
from tests.samples import sampled
from tests.worlds import ApartPool, new_group, world

# A refusal waits for nothing; a busy machine may take this long.
AT_ONCE_S = 2.0
LONG = 1 << 21  # bytes, which are longer than a channel


@dataclass
class Hooked:
    """Its codec functions make the calls of a test."""

    number: int


HOOKS: dict[str, list[Callable[[], object]]] = {"encode": [], "decode": []}


def describe(hooked: Hooked) -> dict[str, int]:
    """Encode, behind the calls of a test."""
    for call in HOOKS["encode"]:
        call()
    return {"number": hooked.number}


def build(data: dict[str, int]) -> Hooked:
    """Decode, behind the calls of a test."""
    for call in HOOKS["decode"]:
        call()
    return Hooked(data["number"])


@contextmanager
def hooked(stage: str, call: Callable[[], object]) -> Iterator[None]:
    """Let the function for `stage` make a call within the block."""
    codec.register_type(Hooked, encode=describe, decode=build)
    HOOKS[stage].append(call)
    try:
        yield
    finally:
        HOOKS[stage].clear()


Call = Callable[[GroupCoordinator, Any], Any]


def value_of(tensor_dict: Any) -> Any:
    """Return the object that a tensor dict holds."""
    return tensor_dict["value"]


def tensors(value: Any) -> dict[str, Any]:
    """Return a tensor dict that holds the object."""
    return {"value": value, "tensor": torch.ones(3)}


# What rank 1 calls with an object of its own, what rank 0 calls for it, and what rank 1 does with the object.
CALLS: dict[str, tuple[Call, Call, str]] = {
    "send_object": (
        lambda group, own: group.send_object(own, 0),
        lambda group, _: group.recv_object(1),
        "encode",
    ),
    "send_object, long": (
        lambda group, own: group.send_object([bytes(LONG), own], 0),
        lambda group, _: group.recv_object(1)[1],
        "encode",
    ),
    "recv_object": (
        lambda group, _: group.recv_object(0),
        lambda group, own: group.send_object(own, 1),
        "decode",
    ),
    "recv_object, long": (
        lambda group, _: group.recv_object(0)[1],
        lambda group, own: group.send_object([bytes(LONG), own], 1),
        "decode",
    ),
    "send_tensor_dict": (
        lambda group, own: group.send_tensor_dict(tensors(own), 0),
        lambda group, _: value_of(group.recv_tensor_dict(1)),
        "encode",
    ),
    "recv_tensor_dict": (
        lambda group, _: value_of(group.recv_tensor_dict(0)),
        lambda group, own: group.send_tensor_dict(tensors(own), 1),
        "decode",
    ),
    "broadcast_object": (
        lambda group, own: group.broadcast_object(own, 1),
        lambda group, own: group.broadcast_object(None, 1),
        "encode",
    ),
    "broadcast_object, received": (
        lambda group, own: group.broadcast_object(None, 0),
        lambda group, own: group.broadcast_object(own, 0),
        "decode",
    ),
    "broadcast_tensor_dict": (
        lambda group, own: value_of(group.broadcast_tensor_dict(tensors(own), 1)),
        lambda group, _: value_of(group.broadcast_tensor_dict(None, 1)),
        "encode",
    ),
    "all_gather_object": (
        lambda group, own: group.all_gather_object(own)[0],
        lambda group, own: group.all_gather_object(own)[1],
        "encode",
    ),
    "all_gather_object, decoded": (
        lambda group, own: group.all_gather_object(own)[0],
        lambda group, own: group.all_gather_object(own)[1],
        "decode",
    ),
    "gather_object": (
        lambda group, own: group.gather_object(own, 0),
        lambda group, own: group.gather_object(own, 0)[1],  # type: ignore[index]
        "encode",
    ),
}

BROADCASTS = [name for name in CALLS if name.startswith("broadcast")]

# What the function calls: what would wait, be combined with a call of the other rank, or come before the object.
INNER: dict[str, Callable[[GroupCoordinator], object]] = {
    "send_object": lambda group: group.send_object(7, 0),
    "recv_object": lambda group: group.recv_object(0),
    "all_gather_object": lambda group: group.all_gather_object(7),
    "all_reduce": lambda group: group.all_reduce(torch.ones(3)),
    "all_reduce_": lambda group: group.all_reduce(torch.ones(3), async_op=True),
    "barrier": lambda group: group.barrier(),
    "gather_object": lambda group: group.gather_object(7, 0),
    "broadcast_object_list": lambda group: group.broadcast_object_list([7], 1),
    "broadcast_tensor_dict": lambda group: group.broadcast_tensor_dict(tensors(7), 1),
}


def refused(rank: int, world_size: int, directory: Path, name: str, by_queue: bool) -> dict[str, Any] | None:
    """Let the codec functions of rank 1 call the group; return what that raised."""
    mine, other, stage = CALLS[name]
    texts: dict[str, Any] = {}
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if by_queue:
            group.enable_broadcaster()

        def nested() -> None:
            for what, call in INNER.items():
                start = time.monotonic()
                try:
                    texts[what] = f"served: {call(group)}"
                except UsageError as error:
                    texts[what] = str(error)
                assert time.monotonic() - start < AT_ONCE_S

        with hooked(stage, nested if rank == 1 else bool):
            found = (mine if rank == 1 else other)(group, Hooked(5))
        assert found in (Hooked(5), None)
        # Nothing went out and no number was taken: the next calls of both ranks belong together.
        assert group.all_gather_object(rank) == [0, 1]
        assert group.broadcast_object(rank, 1) == group.broadcast_object(rank, 1) == 1
        assert group.gather_object(rank, 0) == (None if rank else [0, 1])
        if rank:
            group.send_object("next", 0)
        else:
            assert group.recv_object(1) == "next"
        assert group.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    return texts if rank else None


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize(
    ("name", "where"),
    sampled(5, [*product(CALLS, ("one host", "a host each")), *product(BROADCASTS, ["queue"])]),
)
def test_a_codec_function_cannot_call_the_group_that_carries_its_object(
    ranks2: RankPool, name: str, where: str
) -> None:
    """Each call is refused at once under its own name; the one that carries the object goes on, and so do the next."""
    pool = ApartPool(ranks2) if where == "a host each" else ranks2
    texts = pool.run(refused, name, where == "queue")[1]
    assert texts is not None
    assert texts.keys() == INNER.keys()
    for what, text in texts.items():
        assert text.startswith(f"{what.rstrip('_')} "), text
        assert "while a codec function runs inside of a call of this group on the same thread" in text


def struck(rank: int, world_size: int, directory: Path) -> str | None:
    """Send from a signal handler that interrupts the codec in a send to the same rank."""
    texts: list[str] = []
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 0:
            assert group.recv_object(1) == Decimal(5)
            return None

        def handler() -> None:
            with pytest.raises(UsageError) as caught:
                group.send_object(7, 0)
            texts.append(str(caught.value))

        def is_encoding(frame: FrameType) -> bool:
            return frame.f_code.co_filename == codec.__file__

        assert handling_where(is_encoding, lambda: group.send_object(Decimal(5), 0), handler)
    return texts[0]


@pytest.mark.guarantee("D10")
def test_a_send_of_a_handler_that_interrupts_the_codec_is_refused_under_its_name(ranks2: RankPool) -> None:
    """The channel is in use; the object that the handler interrupted arrives."""
    text = ranks2.run(struck)[1]
    assert text is not None
    assert text.startswith("send_object ")
    assert "this thread is inside of a call on the channel with rank 0 already" in text


@pytest.mark.parametrize("stage", HOOKS)
def test_a_codec_function_may_call_a_group_that_does_not_carry_its_object(stage: str) -> None:
    """As where the application encodes by itself. A function that has raised leaves no mark behind."""
    found: list[Any] = []
    with FakeGroupCoordinator(0, 2) as group:

        def call() -> None:
            found.append(group.all_gather_object(7)[0])

        def fail() -> None:
            raise KeyError

        with hooked(stage, call):
            assert codec.decode(codec.encode(Hooked(5)).to_bytes()) == Hooked(5)
        with hooked(stage, fail), pytest.raises((UsageError, DecodeError), match="KeyError"):
            codec.decode(codec.encode(Hooked(5)).to_bytes())
        call()
    assert found == [7, 7]
    assert not hooks.RUNNING
