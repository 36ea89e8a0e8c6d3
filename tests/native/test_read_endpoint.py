"""What the native reading endpoint of a ring makes of records: whole ones, parts, streams and nonsense."""

import mmap
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast import _core, codec
from shm_broadcast.layout import FIELDS, LINE, PAGE, RECORD_FIELDS, Field, RecordKind, record_bytes
from tests.queues import LONG, RefusedError, background, bare_ring, ends, put_word, refuse, ring_write, word

FILLED, CONSUMED = FIELDS["filled"], FIELDS["consumed"]
PAYLOAD, FLAGS, TOTAL = (RECORD_FIELDS[name] for name in ("payload_bytes", "flags", "total_bytes"))


def write(memory: mmap.mmap, frame: bytes, done: int = 0) -> int:
    """Write what there is room for, on the general way."""
    return ring_write(memory, frame, (), done, 0, 0)


# --- what is received -----------------------------------------------------------------------------------------


def test_without_a_message_there_is_nothing() -> None:
    """`receive_within` gives NOTHING, which is no message: None, for one, is."""
    _, port, reader = ends()
    assert reader.receive_within(0, 0) is _core.NOTHING
    start = time.monotonic_ns()
    assert reader.receive_within(1_000_000, 20_000_000) is _core.NOTHING
    assert time.monotonic_ns() - start >= 21_000_000
    assert reader.waited_ns >= 21_000_000
    assert port.send_now(None, 0) is None
    assert reader.receive_within(0, 0) is None
    assert (reader.messages, reader.is_assembling) == (1, False)


@pytest.mark.guarantee("B9")
@pytest.mark.parametrize("nbytes", [1, 31, 32, 100, 1000, 5000, 20_000])
def test_a_frame_of_nonsense_leaves_the_next_message(nbytes: int) -> None:
    """The decoder's error is raised once, also for a message in parts; the one behind it arrives."""
    memory, port, reader = ends(2 * PAGE)
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
    assert port.send_now("next", 0) is None
    assert reader.receive_within(0, 0) == "next"


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
    """A part with other words than the ones before it is told as such, whenever one looks again."""
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
    """A record that is filled in step by step is copied as far as it is there, also over time-outs."""
    memory, port, reader = ends()
    value = [LONG, bytearray(LONG[:3000]), 1]
    assert port.send_now(value, 0) is None
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
    assert port.send_now("next", 0) is None
    assert reader.receive_within(0, 0) == "next"


@pytest.mark.guarantee("B22")
def test_a_stream_that_is_never_whole_is_never_received() -> None:
    """One byte less than all is no message, for a port as for the general functions; nothing of it is given back."""
    memory, port, reader = ends()
    assert port.send_now(LONG, 0) is None
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
    """Fewer bytes than have been there, or another length, are told as such."""
    memory, port, reader = ends()
    assert port.send_now(LONG, 0) is None
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
    """Whatever a header and `filled` say, a call gives an object, nothing, or an error."""
    memory, port, reader = ends(64 * PAGE)
    assert port.send_now(LONG, 0) is None
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
    port.close(refuse)
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
