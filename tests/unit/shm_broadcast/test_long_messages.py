"""Long messages: they are streamed in one record or sent in parts, and copied once to where they stay."""

import gc
import struct
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast import _core, codec
from shm_broadcast.errors import DecodeError
from shm_broadcast.layout import FIELDS, LINE, PAGE, RECORD_FIELDS, RecordKind
from shm_broadcast.settings import MIN_RING_BYTES
from tests.harness import run_ranks
from tests.queues import background, bare_ring, memory_of, put_word, queue, refuse, ring_write, word
from tests.unit.shm_broadcast.codec_samples import Point, same

MIB = 1 << 20
HUGE = 2 * MIB
"""Larger blocks are aligned to this number of bytes."""
KINDS = ("bytes", "bytearray", "array", "tensor")


def made(kind: str, nbytes: int, seed: int = 0) -> Any:
    """Return an object of `nbytes` whose content differs from that of others."""
    data = np.resize(np.random.default_rng(nbytes + seed).integers(0, 256, 4093, dtype=np.uint8), nbytes)
    match kind:
        case "bytes":
            return data.tobytes()
        case "bytearray":
            return bytearray(data)
        case "array":
            return data
        case _:
            return torch.from_numpy(data)


def mixed(ring_bytes: int, seed: int = 0) -> dict[str, Any]:
    """Return one message with objects of all kinds, from nothing to three times the ring, nested and repeated."""
    sizes = (1, 2047, 2049, 65_535, ring_bytes // 2, 3 * ring_bytes)
    each = [made(kind, size, seed) for size in sizes for kind in KINDS]
    none = [made(kind, 0) for kind in KINDS]
    big = np.arange(ring_bytes // 8).reshape(-1, 2)
    return {
        "each": [value for one in each for value in (one, none)],
        "again": (each[8], each[8], {"deep": [none, big, [big, Point(1)]]}),
        "shapes": [
            big.T,
            np.zeros((0, 3)),
            torch.ones(3, 0),
            torch.ones(ring_bytes // 8, 2).to(torch.bfloat16),
        ],
        "text": "é" * ring_bytes,
    }


def memories(obj: Any) -> list[np.ndarray]:
    """Return flat views of everything in a message that can be written to."""
    match obj:
        case dict():
            return [view for value in obj.values() for view in memories(value)]
        case list() | tuple():
            return [view for value in obj for view in memories(value)]
        case bytearray():
            return [np.frombuffer(obj, np.uint8)] if obj else []
        case np.ndarray():
            return [obj.reshape(-1, order="A").view(np.uint8)] if obj.size else []
        case torch.Tensor():
            return [obj.view(torch.uint8).reshape(-1).numpy()] if obj.numel() else []
        case _:
            return []


def exchanged(ends: Any, *messages: Any) -> list[Any]:
    """Send messages on a thread and return what arrives."""
    writer, [reader] = ends

    def send() -> None:
        for message in messages:
            writer.enqueue(message, 30.0)

    with background(send) as outcome:
        received = [reader.dequeue(30.0) for _ in messages]
    assert outcome == [None]
    return received


@pytest.mark.guarantee("B1", "B21")
@pytest.mark.parametrize("ring_bytes", [MIN_RING_BYTES, MIB, 32 * MIB], ids=["least", "parts", "streamed"])
@pytest.mark.slow
def test_long_messages_arrive_equal_in_memory_of_their_own(ring_bytes: int) -> None:
    """Every object equals what was sent, can be written to, and shares no byte with anything else."""
    scale = min(ring_bytes, MIB)
    sent = [mixed(scale, seed) for seed in range(3)]
    with queue(ring_bytes=ring_bytes) as ends:
        first, second, third = exchanged(ends, *sent)
    for arrived, original in zip((first, second, third), sent, strict=True):
        assert same(arrived, original)
    views = [view for message in (first, second, third) for view in memories(message)]
    assert all(view.flags.writeable for view in views)
    spans = sorted((view.ctypes.data, view.nbytes) for view in views)
    assert all(at + nbytes <= following for (at, nbytes), (following, _) in pairwise(spans))
    for view in memories(first):
        view[:] = 0xAA
    gc.collect()
    assert same(second, sent[1])
    assert same(third, sent[2])


@pytest.mark.guarantee("B21")
@pytest.mark.slow
@pytest.mark.parametrize("ring_bytes", [MIB, 64 * MIB], ids=["parts", "streamed"])
def test_a_long_message_is_copied_once(ring_bytes: int) -> None:
    """Arrays and tensors lie where the reader copied the bytes; bytes objects take no more memory than their length."""
    nbytes = 16 * MIB
    with queue(ring_bytes=ring_bytes) as ends:
        array, tensor = exchanged(ends, [made("array", nbytes), made("tensor", nbytes)])[0]
        # Memory of the reader's own is aligned so; a copy by numpy or torch would hardly be.
        assert array.ctypes.data % HUGE == tensor.data_ptr() % HUGE == 0
        for kind in KINDS:
            message = made(kind, nbytes)
            tracemalloc.start()
            try:
                (arrived,) = exchanged(ends, message)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < (nbytes if kind in ("bytes", "bytearray") else 0) + MIB
            assert same(arrived, message)


@pytest.mark.guarantee("B21")
def test_what_has_arrived_outlives_the_queue() -> None:
    """Objects of long messages do not change when both endpoints are closed."""
    sent = mixed(MIB)
    with queue(ring_bytes=8 * MIB) as ends:
        (arrived,) = exchanged(ends, sent)
    with queue(ring_bytes=8 * MIB) as others:
        exchanged(others, mixed(MIB, 5))
    gc.collect()
    assert same(arrived, sent)


def private_bytes() -> int:
    """Return the private memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell")


def use_and_give_back(rank: int, world_size: int, directory: Path) -> None:
    with queue(ring_bytes=64 * MIB) as ends:
        exchanged(ends, [made("array", 4 * MIB)])
        before = private_bytes()
        sent = [made("array", 12 * MIB, seed) for seed in range(10)]
        (arrived,) = exchanged(ends, sent)
        places = {array.ctypes.data for array in arrived}
        assert len(places) == 10
        del arrived, sent
        gc.collect()
        assert private_bytes() - before < 64 * MIB + 24 * MIB
        for _ in range(5):
            (arrived,) = exchanged(ends, made("array", 12 * MIB))
            assert arrived.ctypes.data in places
            del arrived
    gc.collect()
    assert private_bytes() - before < 24 * MIB


@pytest.mark.guarantee("B21")
@pytest.mark.slow
def test_memory_that_is_given_back_is_used_again_and_bounded() -> None:
    """At most 64 MiB wait for the next message, which gets the same memory; a closed queue keeps none of it."""
    # In a process of its own: what other tests left to the allocator would count.
    run_ranks(use_and_give_back, 1)


def pass_on(memory: Any, writer: _core.WriteEndpoint, reader: _core.ReadEndpoint, obj: Any) -> Any:
    """Send one object and receive it, turn by turn."""
    if writer.send_now(obj, 0) is None:
        return reader.receive_within(0, 0)
    message, done, value = codec.encode(obj), 0, _core.NOTHING
    while value is _core.NOTHING:
        if done < message.nbytes:
            done = ring_write(memory, message.header, message.buffers, done, 0, 0)
        value = reader.receive_within(0, 0)
    assert done == message.nbytes
    return value


@pytest.mark.guarantee("B1", "B21")
@given(
    st.integers(1, 96),
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(KINDS), st.integers(0, 300_000) | st.integers(0, 5000)), max_size=5
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_any_sizes_pass_through_any_ring(pages: int, messages: list[list[tuple[str, int]]]) -> None:
    """Messages of any length, cut anywhere in header or buffers, arrive as they were sent."""
    memory = bare_ring(pages * PAGE)
    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse)
    reader = _core.ReadEndpoint(memory, 0, codec.build_owned, "adaptive", refuse)
    for message in messages:
        obj = [made(kind, nbytes) for kind, nbytes in message]
        assert same(pass_on(memory, writer, reader, obj), obj)
        assert not reader.is_assembling
    reader.close(refuse)
    writer.close(refuse)
    memory.close()


# --- bytes that are no message -----------------------------------------------------------------------------------

TREE, BUFFERS = 16, 24
BAD: dict[str, tuple[int, int]] = {
    "magic": (0, 0),
    "version": (4, 2),
    "flags": (4, 0x101),
    "total less": (8, 5),
    "total more": (8, 2**62),
    "tree longer than the frame": (TREE, 2**62),
    "tree of all ones": (TREE, 2**64 - 1),
    "tree less": (TREE, 3),
    "tree that wraps": (TREE, 2**64 - 32),
    "buffers many": (BUFFERS, 2**60),
    "buffers of all ones": (BUFFERS, 2**64 - 1),
    "no buffers": (BUFFERS, 0),
    "a buffer more": (BUFFERS, 4),
    "a buffer less": (BUFFERS, 2),
    "kind": (-24, 100_000 | 2 << 56),
    "unknown kind": (-24, 100_000 | 9 << 56),
    "first shorter": (-24, 99_900 | 1 << 56),
    "first longer": (-24, 110_000 | 1 << 56),
    "first huge": (-24, (1 << 56) - 1 | 1 << 56),
    "last shorter": (-8, 99_999),
    "last longer": (-8, 100_001),
    "last of all ones": (-8, 2**64 - 1),
}
"""The damage: an offset in the prefix, or from the end of the table, and the word that is written there."""


def malformed(name: str) -> tuple[codec.Message, bytes]:
    """Return a message with three buffers, and its header with one word wrong."""
    message = codec.encode([made("bytes", 100_000), made("bytearray", 100_000), made("array", 100_000)])
    header = bytearray(message.header)
    offset, value = BAD[name]
    at = offset if offset >= 0 else len(header) + offset
    if offset == 4:
        struct.pack_into("<I", header, at, value)
    else:
        struct.pack_into("<Q", header, at, value)
    assert bytes(header) != message.header
    return message, bytes(header)


@pytest.mark.guarantee("B9", "C10")
@pytest.mark.parametrize("name", BAD)
def test_a_malformed_header_costs_one_message(name: str) -> None:
    """An invalid prefix or table raises DecodeError, in parts and streamed, and the next message arrives."""
    message, header = malformed(name)
    with queue() as (writer, [reader]):
        memory, done = memory_of(writer), 0
        found = False
        while not found:
            if done < message.nbytes:
                done = ring_write(memory, header, message.buffers, done, 0, 0)
            try:
                found = reader.try_dequeue()[0]
                assert not found, "a malformed message was taken for one"
            except DecodeError:
                break
        assert done == message.nbytes
        writer.enqueue("next", 1.0)
        assert reader.dequeue(1.0) == "next"
    with queue(ring_bytes=2 * MIB) as (writer, [reader]):
        memory = memory_of(writer)
        writer.enqueue([made("bytes", 100_000), made("bytearray", 100_000), made("array", 100_000)], 1.0)
        assert word(memory, RECORD_FIELDS["flags"], PAGE) == RecordKind.STREAMED
        memory[PAGE + LINE : PAGE + LINE + len(header)] = header
        with pytest.raises(DecodeError):
            reader.dequeue(1.0)
        (arrived,) = exchanged((writer, [reader]), made("bytes", 200_000))
        assert arrived == made("bytes", 200_000)


@pytest.mark.guarantee("B9")
def test_a_claim_of_more_memory_than_there_is_takes_none() -> None:
    """A message that claims an absurd length does no harm: the reader waits for its bytes and allocates nothing."""
    before = private_bytes()
    memory = bare_ring(16 * PAGE)
    reader = _core.ReadEndpoint(memory, 0, codec.build_owned, "adaptive", refuse)
    header = codec.encode(made("array", 200_000)).header
    assert ring_write(memory, header, (memoryview(bytes(200_000)),), 0, 0, 0) > 0
    claimed = 1 << 55
    frame = bytearray(header)
    struct.pack_into("<Q", frame, 8, claimed)
    start = (len(header) + 63) // 64 * 64
    struct.pack_into("<Q", frame, len(frame) - 8, claimed - start)
    memory[PAGE + LINE : PAGE + LINE + len(frame)] = bytes(frame)
    put_word(memory, RECORD_FIELDS["total_bytes"], claimed, PAGE)
    assert reader.receive_within(0, 0) is _core.NOTHING
    assert reader.is_assembling
    assert private_bytes() - before < 8 * MIB


@pytest.mark.guarantee("B22")
def test_a_writer_that_never_ends_its_stream_loses_that_message_alone() -> None:
    """The reader reads the messages before, then says what it waits for, and loses nothing when the rest comes."""
    with queue(ring_bytes=MIB) as (writer, [reader]):
        memory = memory_of(writer)
        writer.enqueue("before", 1.0)
        writer.enqueue(made("bytes", 200_000), 1.0)
        end = word(memory, FIELDS["filled"])
        put_word(memory, FIELDS["filled"], end - 1)
        assert reader.dequeue(1.0) == "before"
        assert reader.try_dequeue() == (False, None)
        start = time.monotonic()
        with pytest.raises(Exception, match="no end of the message"):
            reader.dequeue(0.05)
        assert time.monotonic() - start >= 0.05
        with pytest.raises(Exception, match="no end of the message"), reader.loan(0.05):
            pass
        put_word(memory, FIELDS["filled"], end)
        with reader.loan(1.0) as value:
            assert value == made("bytes", 200_000)
        writer.enqueue("next", 1.0)
        assert reader.dequeue(1.0) == "next"
