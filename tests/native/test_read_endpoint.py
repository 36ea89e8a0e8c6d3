"""The native reading endpoint of a ring: whole records, parts, streams, and records that make no sense."""

import mmap
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast import _core, codec
from shm_broadcast.layout import FIELDS, LINE, PAGE, RECORD_FIELDS, Field, RecordKind, record_bytes
from tests.queues import LONG, RefusedError, background, bare_ring, ends, put_word, refuse, ring_write, word
from tests.waiting import wait_until

FILLED, CONSUMED, PUBLISHED = (FIELDS[name] for name in ("filled", "consumed", "published"))
PAYLOAD, FLAGS, TOTAL = (RECORD_FIELDS[name] for name in ("payload_bytes", "flags", "total_bytes"))


def write(memory: mmap.mmap, frame: bytes, done: int = 0) -> int:
    """Write as much of a frame as there is room for; return how far it is written."""
    return ring_write(memory, frame, (), done, 0, 0)


# --- what is received -----------------------------------------------------------------------------------------


def test_without_a_message_there_is_nothing() -> None:
    """`receive_within` returns NOTHING if there is no message. None is a message."""
    _, writer, reader = ends()
    assert reader.receive_within(0, 0) is _core.NOTHING
    start = time.monotonic_ns()
    assert reader.receive_within(1_000_000, 20_000_000) is _core.NOTHING
    assert time.monotonic_ns() - start >= 21_000_000
    assert reader.waited_ns >= 21_000_000
    assert writer.send_now(None, 0) is None
    assert reader.receive_within(0, 0) is None
    assert (reader.messages, reader.is_assembling) == (1, False)


@pytest.mark.guarantee("B9")
@pytest.mark.parametrize("nbytes", [1, 31, 32, 100, 1000, 5000, 20_000])
def test_a_frame_of_nonsense_leaves_the_next_message(nbytes: int) -> None:
    """The decoder's error is raised once, also for a message in parts. The next message arrives."""
    memory, writer, reader = ends(2 * PAGE)
    frame, done = bytes([7]) * nbytes, 0
    caught: list[RefusedError] = []
    while done < nbytes:
        done = write(memory, frame, done)
        try:
            assert reader.receive_within(0, 0) is _core.NOTHING
        except RefusedError as error:
            caught.append(error)
    while not caught:
        try:
            assert reader.receive_within(0, 0) is _core.NOTHING
        except RefusedError as error:
            caught.append(error)
    assert writer.send_now("next", 0) is None
    assert reader.receive_within(0, 0) == "next"


@pytest.mark.guarantee("B4")
@pytest.mark.parametrize("ring_bytes", [2 * PAGE, 64 * PAGE], ids=["a part", "a stream"])
def test_a_piece_of_a_message_prolongs_no_wait(ring_bytes: int) -> None:
    """The time of a call is that of its waits together, though the rest of a message is awaited for itself."""
    memory, _, reader = ends(ring_bytes)
    message = codec.encode(LONG)
    ring_write(memory, message.header, message.buffers, 0, 0, 0)
    published = word(memory, PUBLISHED)
    put_word(memory, PUBLISHED, 0)
    put_word(memory, FILLED, LINE + 100)

    def publish_a_piece() -> None:
        time.sleep(0.5)
        put_word(memory, PUBLISHED, published)
        _core.ring_stir(memory)

    start = time.monotonic()
    with background(publish_a_piece):
        assert reader.receive_within(0, 1_000_000_000) is _core.NOTHING
        waited_s = time.monotonic() - start
    assert reader.is_assembling
    assert 1.0 <= waited_s < 1.15


@pytest.mark.guarantee("B4")
def test_the_wait_for_a_turn_prolongs_no_wait() -> None:
    """A call that has waited for another thread waits for its message only as long as is left."""
    _, _, reader = ends()
    with background(lambda: reader.receive_within(0, 250_000_000)):
        wait_until(lambda: reader.is_busy, "the other thread in its call", poll_s=0.001)
        start = time.monotonic()
        assert reader.receive_within(0, 300_000_000) is _core.NOTHING
        waited_s = time.monotonic() - start
    assert 0.3 <= waited_s < 0.45


PART = (PAGE - LINE) // 2 // LINE * LINE
"""Payload of a part in a ring of two pages."""

SECOND = PAGE + record_bytes(PART)


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize(
    ("at", "field", "value"),
    [
        (SECOND, FLAGS, RecordKind.WHOLE),
        (SECOND, FLAGS, RecordKind.LAST_PART),
        (SECOND, FLAGS, RecordKind.STREAMED),
        (SECOND, FLAGS, 5),
        (SECOND, RECORD_FIELDS["message"], 2),
        (SECOND, TOTAL, 20_001),
        (PAGE, TOTAL, 0),
        (PAGE, TOTAL, 2**63),
        (PAGE, TOTAL, 100),
        (PAGE, TOTAL, PART),
        (PAGE, PAYLOAD, 2**64 - 1),
    ],
)
def test_parts_that_do_not_fit_together_are_told(at: int, field: Field, value: int) -> None:
    """A part that does not fit the parts before it raises an error, each time that the reader looks."""
    memory, _, reader = ends(2 * PAGE)
    frame = codec.encode(bytes(20_000)).to_bytes()
    assert record_bytes(PART) < write(memory, frame) < len(frame)
    put_word(memory, field, value, at)

    def receive_all() -> None:
        for _ in range(3):
            assert reader.receive_within(0, 0) is _core.NOTHING

    for _ in range(3):
        with pytest.raises(RefusedError):
            receive_all()


@pytest.mark.parametrize("step", [1, 63, 1000, 32 * 1024, 60_000])
def test_a_stream_is_received_only_when_it_is_whole(step: int) -> None:
    """The reader copies the bytes of a streamed record that are there, and continues after a time-out."""
    memory, writer, reader = ends()
    value = [LONG, bytearray(LONG[:3000]), 1]
    assert writer.send_now(value, 0) is None
    end = word(memory, FILLED)
    nbytes = codec.encode(value).nbytes
    filled = end - nbytes
    # A few steps through the header one by one, then all of them.
    put_word(memory, FILLED, filled)
    steps = 0
    while filled < end:
        assert reader.receive_within(0, 0) is _core.NOTHING
        if steps % 10 == 0:
            assert reader.receive_within(1000, 1000) is _core.NOTHING
        assert reader.is_assembling
        assert reader.messages == 0
        assert word(memory, CONSUMED) == 0
        filled = min(filled + (step if steps < 200 else 32 * 1024), end)
        put_word(memory, FILLED, filled)
        steps += 1
    assert reader.receive_within(0, 0) == value
    assert (reader.is_assembling, reader.messages, reader.nbytes) == (False, 1, nbytes)
    assert writer.send_now("next", 0) is None
    assert reader.receive_within(0, 0) == "next"


@pytest.mark.guarantee("B22")
def test_a_stream_that_is_never_whole_is_never_received() -> None:
    """A stream that lacks one byte is no message for any function, and its room is not given back."""
    memory, writer, reader = ends()
    assert writer.send_now(LONG, 0) is None
    put_word(memory, FILLED, word(memory, FILLED) - 1)
    for _ in range(3):
        assert reader.receive_within(1000, 1000) is _core.NOTHING
    assert _core.ring_wait(memory, 0, 0, 0) == 0
    for call in (_core.ring_take, _core.ring_release):
        with pytest.raises(ValueError, match="no readable record"):
            call(memory, 0)
    assert word(memory, CONSUMED) == 0
    reader.close(refuse)
    fresh = _core.ReadEndpoint(memory, 0, codec.build_owned, "adaptive", refuse)
    put_word(memory, FILLED, word(memory, FILLED) + 1)
    assert fresh.receive_within(0, 0) == LONG


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize(
    ("at", "field", "value"), [(0, FILLED, 0), (PAGE, PAYLOAD, 70_000), (PAGE, PAYLOAD, 0)]
)
def test_a_stream_that_shrinks_is_told(at: int, field: Field, value: int) -> None:
    """A streamed record whose filled bytes or length shrink raises an error."""
    memory, writer, reader = ends()
    assert writer.send_now(LONG, 0) is None
    put_word(memory, FILLED, word(memory, FILLED) - 10_000)
    assert reader.receive_within(0, 0) is _core.NOTHING
    put_word(memory, field, value, at)
    for _ in range(3):
        with pytest.raises(RefusedError, match="changed"):
            reader.receive_within(0, 0)


@given(st.binary(min_size=24, max_size=24), st.integers(0, 5), st.integers(0, 2**64 - 1), st.booleans())
def test_random_words_stay_inside_of_the_mapping(
    words: bytes, flags: int, filled: int, is_begun: bool
) -> None:
    """With any header and any value of `filled`, a call returns an object or NOTHING, or raises an error."""
    memory, writer, reader = ends(64 * PAGE)
    assert writer.send_now(LONG, 0) is None
    if is_begun:
        put_word(memory, FILLED, word(memory, FILLED) - 10_000)
        assert reader.receive_within(0, 0) is _core.NOTHING
    memory[PAGE : PAGE + len(words)] = words
    put_word(memory, FLAGS, flags, PAGE)
    put_word(memory, FILLED, filled)
    for _ in range(4):
        try:
            reader.receive_within(0, 0)
        except RefusedError:
            continue
    reader.close(refuse)
    writer.close(refuse)
    memory.close()


# --- waiting --------------------------------------------------------------------------------------------------


def test_a_reader_looks_around_when_it_wakes_up_for_an_expected_message() -> None:
    """With messages 5 ms apart it looks around during waits that are far shorter than its slice of 0.4 s."""
    memory, looks = bare_ring(64 * PAGE), []

    def look_around(reason: int, _: object) -> None:
        looks.append((reason, time.monotonic()))

    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse)
    reader = _core.ReadEndpoint(memory, 0, codec.build_owned, "adaptive", look_around)
    is_over = threading.Event()

    def send() -> None:
        while not is_over.wait(0.005):
            writer.send("message")

    with background(send):
        try:
            # On a machine that is busy with other work, messages may come too irregularly to be expected.
            for _ in range(2000):
                looks.clear()
                assert reader.receive(60_000_000_000) == "message"
                began = next((at for reason, at in looks if reason == _core.LOOK_BEGIN), 0.0)
                early = [at for reason, at in looks if reason == _core.LOOK_WAITING and at - began < 0.3]
                if early:
                    break
        finally:
            is_over.set()
    assert early
    reader.close(refuse)
    writer.close(refuse)
