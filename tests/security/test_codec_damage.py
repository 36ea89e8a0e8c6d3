"""Frames that are cut, changed or random give an object or DecodeError, and the next message arrives."""

import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast.codec import decode, encode
from shm_broadcast.errors import DecodeError
from tests.hostile_frames import BYTEARRAY, BYTES, DATA, GOOD, frame_of, refused, tried
from tests.unit.shm_broadcast.codec_samples import VALUES, Key

pytestmark = pytest.mark.usefixtures("the_next_message_arrives")

SEEDS = [
    GOOD,
    VALUES,
    [np.zeros(3, [("a", "i4"), ("b", "U3")]), torch.ones(2, 3), np.float32(1), torch.Size([1])],
]


@pytest.mark.guarantee("C10")
def test_every_truncation_is_refused() -> None:
    """A frame cut anywhere, or one byte too long, is refused."""
    frame = encode({**GOOD, "b": b"z" * 2048}).to_bytes()
    for end in [*range(700), *range(700, len(frame), 37)]:
        refused(frame[:end])
    refused(frame + b"\0")


def claims_fixed(frame: bytes, end: int) -> bytes:
    """Return the frame cut at `end`, with a prefix that matches the cut."""
    cut = bytearray(frame[:end])
    struct.pack_into("<Q", cut, 8, end)
    struct.pack_into("<Q", cut, 16, end - 32)
    return bytes(cut)


@pytest.mark.guarantee("C10")
def test_every_truncation_of_the_tree_is_refused() -> None:
    """A tree cut anywhere is refused even if the prefix matches the cut."""
    frame = encode(
        [VALUES["enums"], VALUES["datetimes"], Key("a", 1), np.arange(3), torch.ones(3)]
    ).to_bytes()
    for end in range(32, 32 + struct.unpack_from("<Q", frame, 16)[0]):
        with pytest.raises(DecodeError):
            decode(claims_fixed(frame, end))


@pytest.mark.guarantee("C10")
@pytest.mark.filterwarnings("ignore")
def test_every_flipped_byte_is_harmless() -> None:
    """A frame with one changed byte decodes to an object or raises DecodeError."""
    seeds = [
        GOOD,
        SEEDS[2],
        {name: VALUES[name] for name in ("enums", "flags", "datetimes", "keys of every type", "structs")},
    ]
    for seed in seeds:
        frame = bytearray(encode(seed).to_bytes())
        head = 32 + struct.unpack_from("<Q", frame, 16)[0] + 64
        for position in range(min(len(frame), head)):
            kept = frame[position]
            for change in (0x01, 0x80, 0xFF, kept ^ 0xC9):
                frame[position] = kept ^ change
                tried(bytes(frame))
            frame[position] = kept


@pytest.mark.guarantee("C10")
@pytest.mark.filterwarnings("ignore")
@given(st.binary(max_size=200), st.lists(st.binary(max_size=80), max_size=3))
def test_random_trees_are_harmless(tree: bytes, buffers: list[bytes]) -> None:
    """Random bytes, as the tree of a frame or as a whole frame, give an object or a DecodeError."""
    for kind in (DATA, BYTES, BYTEARRAY):
        tried(frame_of(tree, *buffers, kinds=(kind,) * len(buffers)))
    tried(tree)


@pytest.mark.guarantee("C10")
@pytest.mark.filterwarnings("ignore")
def test_random_changes_are_harmless() -> None:
    """Frames with several changed, moved or repeated bytes give an object or a DecodeError."""
    source = random.Random(20)
    frames = [
        encode(seed).to_bytes()[:4000]
        for seed in (GOOD, SEEDS[2], VALUES["builtin subclasses"], VALUES["enums"])
    ]
    for _ in range(4000):
        frame = bytearray(source.choice(frames))
        for _ in range(source.randint(1, 6)):
            start = source.randrange(32, len(frame))
            match source.randrange(3):
                case 0:
                    frame[start] = source.choice(
                        (0, 0x80, 0x90, 0xC0, 0xC9, 0xDD, 0xFF, source.randrange(256))
                    )
                case 1:
                    del frame[start : start + source.randrange(8)]
                case _:
                    frame[start:start] = frame[start : start + source.randrange(8)]
        struct.pack_into("<Q", frame, 8, len(frame))
        tried(bytes(frame), copy=source.random() < 0.5)
