"""Frames that the codec would not write, and decoding that must end with an object or a DecodeError."""

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
import torch

from shm_broadcast.codec import decode, encode
from shm_broadcast.errors import DecodeError
from tests.unit.shm_broadcast.codec_samples import Point

__all__ = [
    "BYTEARRAY",
    "BYTES",
    "DATA",
    "GOOD",
    "array",
    "ext",
    "frame_of",
    "hook",
    "packed",
    "refused",
    "tried",
]

GOOD = {"step": 1, "t": (1, {2}), "p": Point(1), "a": np.arange(3), "x": torch.ones(700), "b": b"z" * 3000}

DATA, BYTES, BYTEARRAY = 0, 1, 2
"""What a buffer becomes, as its entry in the table says."""


def frame_of(tree: bytes, *buffers: bytes, kinds: tuple[int, ...] = ()) -> bytes:
    """Return a frame with this tree and these buffers; the buffers are bytes unless `kinds` says otherwise."""
    kinds = kinds or (BYTES,) * len(buffers)
    table = -len(tree) % 8 + len(tree) + 32
    entries = [len(buffer) | kind << 56 for buffer, kind in zip(buffers, kinds, strict=True)]
    body = tree.ljust(table - 32, b"\0") + struct.pack(f"<{len(entries)}Q", *entries)
    frame = bytearray(bytes(32) + body)
    for buffer in buffers:
        frame += bytes(-len(frame) % 64) + buffer
    frame[:32] = struct.pack("<4sB3xQQQ", b"GCBC", 1, len(frame), len(tree), len(buffers))
    return bytes(frame)


def ext(code: int, payload: bytes) -> bytes:
    """Return an extension."""
    return b"\xc9" + struct.pack(">IB", len(payload), code) + payload


def packed(obj: object) -> bytes:
    """Return the tree of an object that needs no buffers."""
    frame = encode(obj).to_bytes()
    return frame[32 : 32 + struct.unpack_from("<Q", frame, 16)[0]]


def hook(code: int, meta: object, body: bytes) -> bytes:
    """Return an extension of a type that Python builds."""
    return ext(code, b"\x92" + packed(meta) + body)


def array(dtype: object, shape: list[Any], data: bytes, code: int = 64) -> bytes:
    """Return an array extension with inline data."""
    return hook(code, [dtype, *shape], b"\xc5" + struct.pack(">H", len(data)) + data)


def refused(frame: bytes) -> str:
    """Check that a frame is refused cheaply by both decoders and a good one then arrives; return the reason."""
    reason = ""
    for copy in (True, False):
        with pytest.raises(DecodeError) as caught:
            decode(frame, copy=copy)
        reason = str(caught.value)
    return reason


def tried(frame: bytes, *, copy: bool = True) -> None:
    """Decode bytes that may be a frame; fail on anything but an object or a DecodeError."""
    with contextlib.suppress(DecodeError):
        decode(frame, copy=copy)
