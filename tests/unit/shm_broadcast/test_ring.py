"""One writer and its readers in one process: records in, records out, whole, once and in order."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast import _core
from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommTimeoutError,
    DecodeError,
    UsageError,
)
from shm_broadcast.layout import LINE, PAGE, segment_bytes
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from shm_broadcast.settings import MIN_RING_BYTES, BroadcastSettings, WaitMode
from tests.queues import background, bare_ring, fill, memory_of, queue, ring_write

MODES: list[WaitMode] = ["adaptive", "spin", "park"]


def content(number: int, nbytes: int) -> bytes:
    """Return `nbytes` that no other number gives."""
    block = np.random.default_rng(number).bytes(min(nbytes, 509))
    return (block * (nbytes // len(block) + 1))[:nbytes] if nbytes else b""


def take_message(memory: Any, reader: int = 0) -> bytes:
    """Return the next message, which must be there in one record, and give it back."""
    window, flags, _, total = _core.ring_take(memory, reader)
    assert flags == 0
    assert len(window) == total
    frame = bytes(memoryview(window))
    _core.ring_release(memory, reader)
    return frame


def pass_through(memory: Any, frame: bytes) -> bytes:
    """Write a message of any length and read it back, turn by turn."""
    done, received = 0, b""
    while len(received) < len(frame):
        if done < len(frame):
            done = ring_write(memory, frame, (), done, 0, 0)
        window, _, _, total = _core.ring_take(memory, 0)
        assert total == len(frame)
        received += bytes(memoryview(window))
        _core.ring_release(memory, 0)
    assert done == len(frame)
    return received


# --- records ---------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("B1")
@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 1000, 1983, 1984])
def test_records_wrap_around_at_every_offset(nbytes: int) -> None:
    """Wherever in the ring a record begins, it and the one behind it arrive as they were written."""
    for line in range(PAGE // LINE):
        memory = bare_ring()
        ahead = line * LINE
        while ahead > 0:
            record = min(ahead, PAGE // 4)
            assert ring_write(memory, b"x" * max(record - LINE, 1), (), 0, 0, 0) > 0
            take_message(memory)
            # The smallest record takes two lines, so an odd start is reached from the line behind it.
            ahead -= max(record, 2 * LINE)
        for number in range(2):
            frame = content(number, nbytes)
            assert ring_write(memory, frame, (), 0, 0, 0) == nbytes
            assert take_message(memory) == frame


@pytest.mark.guarantee("B1")
@pytest.mark.parametrize("nbytes", [1985, 2048, 4032, 4095, 4096, 4097, 3 * PAGE, 10 * PAGE + 1])
def test_messages_longer_than_half_of_the_ring_pass_in_parts(nbytes: int) -> None:
    """A message as long as the ring, or many times longer, arrives whole."""
    memory = bare_ring()
    for number in range(5):
        frame = content(number, nbytes)
        assert pass_through(memory, frame) == frame
        assert pass_through(memory, b"small") == b"small"


@pytest.mark.guarantee("B1")
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1984)), max_size=60))
def test_any_order_of_writes_and_reads_keeps_every_message(steps: list[tuple[bool, int]]) -> None:
    """Whatever the sizes and the turns, what is read is what was written, in order; a full ring takes nothing."""
    memory = bare_ring()
    waiting: list[bytes] = []
    for number, (writes, nbytes) in enumerate(steps):
        if writes:
            frame = content(number, nbytes)
            done = ring_write(memory, frame, (), 0, 0, 0)
            assert done in (0, nbytes)
            if done:
                waiting.append(frame)
            else:
                assert waiting, "an empty ring refused a message"
        elif waiting:
            assert take_message(memory) == waiting.pop(0)
        assert _core.ring_wait(memory, 0, 0, 0) == (1 if waiting else 0)


@pytest.mark.guarantee("B1")
def test_buffers_and_gaps_are_laid_out_as_one_frame() -> None:
    """A frame in pieces is the same bytes in the ring as in one piece, also where a part ends in a gap."""
    header = content(1, 100)
    buffers = tuple(memoryview(content(number, 2000 + 31 * number)) for number in range(5))
    nbytes = len(header)
    for buffer in buffers:
        nbytes = (nbytes + 63) // 64 * 64 + len(buffer)
    expected = bytearray(nbytes)
    _core.write_frame(expected, header, buffers)
    memory = bare_ring()
    done, received = 0, b""
    while len(received) < nbytes:
        if done < nbytes:
            done = ring_write(memory, header, buffers, done, 0, 0)
        received += bytes(memoryview(_core.ring_take(memory, 0)[0]))
        _core.ring_release(memory, 0)
    assert received == bytes(expected)


@pytest.mark.guarantee("B1")
@pytest.mark.parametrize("mode", MODES)
def test_two_threads_agree_on_every_message(mode: WaitMode) -> None:
    """Objects from a few bytes to three rings cross between two threads without loss, in every mode of waiting."""
    rng = np.random.default_rng(3)
    sizes = [int(size) for size in rng.integers(0, 3000, 400)] + [MIN_RING_BYTES // 2, MIN_RING_BYTES]
    sizes += [3 * MIN_RING_BYTES, 10, 3 * MIN_RING_BYTES + 1, 0]
    with queue(wait=mode) as (writer, [reader]):

        def write() -> None:
            for number, size in enumerate(sizes):
                writer.enqueue({"number": number, "bytes": content(number, size)}, 30.0)

        with background(write) as outcome:
            for number, size in enumerate(sizes):
                assert reader.dequeue(30.0) == {"number": number, "bytes": content(number, size)}
        assert outcome == [None]
        with pytest.raises(CommTimeoutError):
            reader.dequeue(0.0)


@pytest.mark.guarantee("B1")
def test_the_last_message_before_a_close_is_read() -> None:
    """A reader that polls while the writer sends and closes gets the message first, then `ClosedError`."""
    for turn in range(100):
        with queue(wait="spin") as (writer, [reader]):

            def finish(writer: QueueWriter = writer, turn: int = turn) -> None:
                writer.enqueue(turn)
                writer.close()

            with background(finish):
                assert reader.dequeue(10.0) == turn
                with pytest.raises(ClosedError):
                    reader.dequeue(10.0)


@pytest.mark.guarantee("B2")
def test_the_slowest_reader_holds_the_writer_back() -> None:
    """While one reader reads nothing, the writer may write one ring; the other reader gets all of that."""
    with queue(readers=2) as (writer, readers):
        sent, full = fill(writer, bytes(1000), lambda: readers[0].dequeue(1.0))
        assert full.missing == (1,)
        assert MIN_RING_BYTES // 2 < sent * 1000 < MIN_RING_BYTES
        for _ in range(sent):
            assert readers[1].dequeue(1.0) == bytes(1000)
        writer.enqueue("again", 1.0)
        assert [reader.dequeue(1.0) for reader in readers] == ["again", "again"]


# --- loans -----------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("B3")
def test_a_loan_aliases_the_ring_and_keeps_its_room() -> None:
    """Arrays on loan lie in the shared memory, and nothing overwrites them before the loan ends."""
    with queue() as (writer, [reader]):
        array = np.arange(3000, dtype=np.int32)
        writer.enqueue(array)
        with reader.loan(1.0) as lent:
            ring = np.frombuffer(memory_of(reader), dtype=np.uint8)
            assert np.shares_memory(lent, ring)
            assert lent.ctypes.data % 64 == 0
            fill(writer, np.zeros(3000, dtype=np.int32))
            assert np.array_equal(lent, array)
        del lent, ring
        writer.enqueue("behind", 1.0)


@pytest.mark.guarantee("B3")
def test_a_loan_ends_after_an_error() -> None:
    """A block that raises releases its message; the next one is read."""
    with queue() as (writer, [reader]):
        writer.enqueue("first")
        writer.enqueue("second")
        with pytest.raises(KeyError), reader.loan(1.0):
            raise KeyError
        assert reader.dequeue(1.0) == "second"


@pytest.mark.guarantee("B3")
def test_a_call_inside_of_a_loan_is_refused() -> None:
    """While a message is on loan it is not read a second time, and none behind it is lost."""
    with queue() as (writer, [reader]):
        writer.enqueue("first")
        writer.enqueue("second")
        with reader.loan(1.0) as lent:
            for call in (reader.dequeue, reader.try_dequeue, lambda: reader.loan(0.0).__enter__()):
                with pytest.raises(UsageError, match="a message is on loan"):
                    call()
            assert lent == "first"
        assert reader.dequeue(1.0) == "second"
        assert reader.try_dequeue() == (False, None)


def test_the_old_name_of_loan_works_and_warns() -> None:
    """`lease` was renamed; code that calls it gets the same object, and a warning where it stands."""
    with queue() as (writer, [reader]):
        writer.enqueue("first")
        with pytest.warns(DeprecationWarning, match="called loan") as caught, reader.lease(1.0) as lent:
            assert lent == "first"
        assert caught[0].filename == __file__
        assert reader.try_dequeue() == (False, None)


@pytest.mark.guarantee("B3")
def test_a_loan_of_a_long_message_is_a_copy() -> None:
    """A message that came in parts leaves its room at once."""
    with (
        queue() as (writer, [reader]),
        background(lambda: writer.enqueue(bytes(200_000), 10.0)),
        reader.loan(10.0) as lent,
    ):
        assert lent == bytes(200_000)
        assert writer.statistics().readers[0].behind_bytes == 0


# --- what is told ----------------------------------------------------------------------------------------------


@pytest.mark.guarantee("B5")
def test_statistics_count_messages_bytes_waits_and_lag() -> None:
    """Both ends tell what they did and how far each reader is, in frozen records."""
    with queue(readers=2) as (writer, readers):
        for _ in range(3):
            writer.enqueue(bytes(100))
        readers[0].dequeue()
        readers[0].dequeue()
        told = writer.statistics()
        assert (told.messages, told.waits, told.capacity_bytes) == (3, 0, MIN_RING_BYTES)
        assert told.nbytes > 300
        assert [reader.rank for reader in told.readers] == [0, 1]
        assert [reader.behind_messages for reader in told.readers] == [1, 3]
        assert 3 * told.readers[0].behind_bytes == told.readers[1].behind_bytes
        assert told.readers[0].progress_s is not None
        assert told.readers[1].progress_s is None
        assert all(reader.is_attached for reader in told.readers)
        readers[0].dequeue(0.05)
        with pytest.raises(CommTimeoutError):
            readers[0].dequeue(0.05)
        told = readers[0].statistics()
        assert (told.messages, told.waits) == (3, 1)
        assert told.waited_s >= 0.03
        with pytest.raises(AttributeError):
            told.messages = 5  # type: ignore[misc]


@pytest.mark.guarantee("B8")
def test_the_mapping_has_the_size_that_the_layout_says() -> None:
    """`segment_bytes` leaves the whole of the ring for records, for any number of readers."""
    for readers in (1, 61, 62, 1024):
        nbytes = segment_bytes(MIN_RING_BYTES + 1, readers)
        memory = bare_ring(nbytes - segment_bytes(0, readers), readers)
        assert _core.ring_facts(memory)[:3] == (readers, 7, MIN_RING_BYTES + PAGE)


def test_bad_parameters_are_refused() -> None:
    """No readers, one twice, too many, a short key, a rank that is none, a ring beyond all memory."""
    for ranks in ([], [1, 1], list(range(1025))):
        with pytest.raises(UsageError, match="readers, each once"):
            QueueWriter.create("steps", ranks)
    with pytest.raises(UsageError, match="has 32 bytes"):
        QueueWriter.create("steps", [0], key=b"short")
    with pytest.raises(CapabilityError, match="are free"):
        QueueWriter.create("steps", [0], BroadcastSettings(ring_bytes=1 << 50))
    with QueueWriter.create("steps", [0]) as writer:
        with pytest.raises(UsageError, match="rank 1 is no reader"):
            QueueReader.open(writer.handle, writer.key, 1)
        with pytest.raises(UsageError):
            writer.enqueue(threading.Lock())
        with pytest.raises(UsageError):
            dequeue_any([])


@pytest.mark.guarantee("B9")
@pytest.mark.parametrize(
    "frame", [b"\x80\x04garbage", b"GCBC" + bytes(60), bytes(5000), b"x"], ids=["a", "b", "c", "d"]
)
def test_bytes_that_are_no_message_cost_one_message(frame: bytes) -> None:
    """Hostile bytes are a `DecodeError` for each way to read, and the next good message arrives."""
    with queue() as (writer, [reader]):

        def plant() -> None:
            assert ring_write(memory_of(writer), frame, (), 0, 0, 0) == len(frame)
            writer.enqueue("good")

        plant()
        with pytest.raises(DecodeError):
            reader.dequeue(1.0)
        assert reader.dequeue(1.0) == "good"
        plant()
        with pytest.raises(DecodeError):
            reader.try_dequeue()
        assert reader.try_dequeue() == (True, "good")
        plant()
        with pytest.raises(DecodeError), reader.loan(1.0):
            pass
        assert reader.dequeue(1.0) == "good"


@pytest.mark.guarantee("B9")
def test_a_long_message_that_is_none_costs_one_message() -> None:
    """The same holds for bytes that come in parts."""
    with queue() as (writer, [reader]):
        frame, done = bytes(3 * MIN_RING_BYTES), 0
        while done < len(frame):
            done = ring_write(memory_of(writer), frame, (), done, 0, 0)
            if done < len(frame):
                assert reader.try_dequeue() == (False, None)
        with pytest.raises(DecodeError):
            reader.dequeue(1.0)
        writer.enqueue("good", 1.0)
        assert reader.dequeue(1.0) == "good"
