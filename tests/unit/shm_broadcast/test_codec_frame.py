"""The layout of a message, and the result of a typed decode."""

import dataclasses
import struct
from typing import Any, TypedDict

import msgspec
import numpy as np
import pytest
import torch

from shm_broadcast import _core
from shm_broadcast.codec import Message, decode, encode
from shm_broadcast.codec.wire_format import Code
from shm_broadcast.errors import DecodeError, UsageError
from tests.unit.shm_broadcast.codec_samples import Point, Request, same

OBJECT = {"a": b"x" * 5000, "b": [torch.ones(3000), 1], "c": bytearray(b"y" * 2049), "d": np.zeros(777)}


@pytest.mark.guarantee("C6")
@pytest.mark.parametrize(
    "obj", [OBJECT, {"ts": 0, "i": 1}, None, b"x" * 2048], ids=["large", "tiny", "none", "bytes"]
)
def test_all_layouts_of_a_message_are_one_frame(obj: Any) -> None:
    """`to_bytes`, `write_into` and `segments` give the same `nbytes` bytes."""
    message = encode(obj)
    frame = message.to_bytes()
    target = bytearray(b"\xff" * (message.nbytes + 7))
    assert (
        message.write_into(target) == message.write_into(memoryview(target)) == message.nbytes == len(frame)
    )
    assert bytes(target) == frame + b"\xff" * 7
    assert b"".join(message.segments()) == frame
    assert all(view.format == "B" and view.ndim == 1 and view.contiguous for view in message.segments())
    for view in (frame, bytearray(frame), memoryview(frame), memoryview(bytearray(b"." + frame))[1:]):
        assert same(decode(view), obj)


@pytest.mark.guarantee("C6")
def test_the_frame_is_as_documented() -> None:
    """Prefix, table and alignment are as the table in codec.py says."""
    message = encode(OBJECT)
    frame = message.to_bytes()
    magic, version, flags, total, tree, buffers = struct.unpack_from("<4sB3sQQQ", frame)
    assert (magic, version, flags, total, buffers) == (b"GCBC", 1, bytes(3), len(frame), 4)
    table = (32 + tree + 7) // 8 * 8
    entries = struct.unpack_from("<4Q", frame, table)
    # The top byte of an entry says what its buffer becomes: bytes, data, a bytearray, data.
    assert [entry >> 56 for entry in entries] == [1, 0, 2, 0]
    lengths = tuple(entry & (1 << 56) - 1 for entry in entries)
    assert lengths == tuple(view.nbytes for view in message.buffers) == (5000, 12000, 2049, 6216)
    assert len(message.header) == table + 32
    offset = len(message.header)
    for buffer, nbytes in zip(message.buffers, lengths, strict=True):
        start = (offset + 63) // 64 * 64
        assert not any(frame[offset:start])
        assert frame[start : start + nbytes] == buffer
        offset = start + nbytes
    assert offset == total


def test_the_tree_is_plain_msgpack() -> None:
    """Any msgpack library can read the tree."""
    frame = encode({"step": 1, "t": [None, True, -5, 1 << 40, 1.5, "é", b"b"], 3: {}}).to_bytes()
    tree = struct.unpack_from("<Q", frame, 16)[0]
    expected = {"step": 1, "t": [None, True, -5, 1 << 40, 1.5, "é", b"b"], 3: {}}
    assert msgspec.msgpack.decode(frame[32 : 32 + tree]) == expected


def test_native_and_python_constants_agree() -> None:
    """Python's codes lie in the ranges that the native core leaves to Python."""
    codes = {name: code for name, code in vars(Code).items() if name.isupper() and code}
    assert len(set(codes.values())) == len(codes)
    data = {"NUMPY_ARRAY", "NUMPY_SCALAR", "TORCH_TENSOR"}
    assert all(_core.FIRST_DATA_CODE <= codes[name] < 128 for name in data)
    assert all(_core.FIRST_HOOK_CODE <= codes[name] < _core.FIRST_DATA_CODE for name in codes.keys() - data)


def test_messages_are_frozen() -> None:
    """A message cannot be changed."""
    with pytest.raises(AttributeError):
        encode(1).nbytes = 3  # type: ignore[misc]


def test_a_bad_target_or_frame_is_a_usage_error() -> None:
    """A small, read-only or missing buffer raises UsageError."""
    message = encode(OBJECT)
    for target in (bytearray(message.nbytes - 1), bytearray(), bytes(message.nbytes), "text", None):
        with pytest.raises(UsageError, match="cannot write a frame"):
            message.write_into(target)  # type: ignore[arg-type]
    released = memoryview(b"abc")
    released.release()
    for frame in ("text", None, [1], memoryview(message.to_bytes())[::2], released):
        with pytest.raises(UsageError, match="decode"):
            decode(frame)  # type: ignore[arg-type]


def test_forged_messages_cannot_write_beyond_the_target() -> None:
    """A message with replaced parts is checked against the target, not against its own size."""
    forged = Message(b"x" * 10, (memoryview(b"y" * 100),), 1)
    with pytest.raises(UsageError, match="too small"):
        forged.write_into(bytearray(163))
    assert forged.write_into(bytearray(164)) == 164


class Step(msgspec.Struct):
    """The type that a receiver asks for."""

    step: int
    tokens: list[int]


class StepDict(TypedDict):
    """The same fields as a TypedDict."""

    step: int


@dataclasses.dataclass
class StepRecord:
    """The same fields as a dataclass."""

    step: int
    tokens: tuple[int, ...] = ()


TYPED: list[tuple[Any, Any, Any]] = [
    ({"step": 1, "tokens": [1, 2]}, Step, Step(1, [1, 2])),
    ({"step": 1, "tokens": [1, 2]}, StepRecord, StepRecord(1, (1, 2))),
    ({"step": 1}, StepDict, {"step": 1}),
    ([1, 2], list[int], [1, 2]),
    ([[1, torch.ones(2)]], list[tuple[int, torch.Tensor]], [(1, torch.ones(2))]),
    (Request("a", [1]), Request, Request("a", [1])),
    ([Point(1)], list[Point], [Point(1)]),
    ({(1, 2): "a"}, dict[tuple[int, int], str], {(1, 2): "a"}),
    (None, int | None, None),
    ("a", Any, "a"),
]


@pytest.mark.guarantee("C8")
@pytest.mark.parametrize(("obj", "wanted", "expected"), TYPED, ids=lambda value: "")
def test_a_typed_decode_returns_the_type(obj: Any, wanted: Any, expected: Any) -> None:
    """The result is an instance of the requested type."""
    assert same(decode(encode(obj).to_bytes(), type=wanted), expected)


@pytest.mark.guarantee("C8")
@pytest.mark.parametrize(
    ("obj", "wanted"),
    [
        ({"step": "1", "tokens": []}, Step),
        ({"step": 1}, Step),
        ([1, "a"], list[int]),
        (1, str),
        ({}, StepDict),
    ],
    ids=lambda value: "",
)
def test_a_mismatch_is_a_decode_error(obj: Any, wanted: Any) -> None:
    """A message that does not fit the requested type raises a DecodeError that names it."""
    with pytest.raises(DecodeError, match="the message is no "):
        decode(encode(obj).to_bytes(), type=wanted)


def test_a_type_that_cannot_be_asked_for_is_a_usage_error() -> None:
    """A type that msgspec cannot convert to raises UsageError."""
    with pytest.raises(UsageError, match="decode to"):
        decode(encode(1).to_bytes(), type=lambda: None)


def test_a_conversion_without_memory_is_no_fault_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MemoryError` passes as it is."""

    def convert(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(msgspec, "convert", convert)
    with pytest.raises(MemoryError):
        decode(encode({"x": 1}).to_bytes(), type=dict[str, int])
