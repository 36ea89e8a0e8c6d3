"""The native functions of the ring raise errors for wrong arguments and overwritten memory, and never crash."""

import mmap
import time
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast import _core, codec
from shm_broadcast.errors import CommError, CommTimeoutError, GroupBrokenError, InternalError
from shm_broadcast.layout import FIELDS, LINE, PAGE, RECORD_FIELDS, ReaderState, RecordKind, record_bytes
from shm_broadcast.settings import MIN_RING_BYTES
from tests.queues import background, bare_ring, memory_of, put_word, queue, refuse, ring_write, word
from tests.waiting import wait_until

IDENTITY = ("magic", "version", "readers", "data_offset", "data_bytes")
POSITIONS = ("published", "consumed", "filled")
RECORD = ("payload_bytes", "flags", "message", "total_bytes")
WRONG = [0, 1, 2, 3, 4, 63, 65, 4095, 4097, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def get(memory: mmap.mmap, *names: str, reader: int = 0) -> list[int]:
    """Return words in front of the data area, of `reader` where each reader has its own."""
    return [word(memory, FIELDS[name], reader * LINE) for name in names]


def first_record(memory: mmap.mmap) -> list[int]:
    """Return the words of the first record of a ring."""
    return [word(memory, RECORD_FIELDS[name], PAGE) for name in RECORD]


def overwrite(memory: mmap.mmap, name: str, value: int) -> None:
    """Overwrite a word in front of the data area, or of the first record."""
    if name in RECORD:
        put_word(memory, RECORD_FIELDS[name], value, PAGE)
    else:
        put_word(memory, FIELDS[name], value)


@pytest.mark.guarantee("B8")
def test_every_field_stands_where_the_layout_says() -> None:
    """The offsets of DESIGN.md are those that the native core uses."""
    memory = bare_ring(2 * PAGE, readers=2, generation=0x1234)
    assert memory[:8] == b"!GCRING1"
    assert get(memory, "version", "readers", "data_offset", "data_bytes") == [2, 2, PAGE, 2 * PAGE]
    assert get(memory, "generation") == [0x1234]
    for reader in (0, 1):
        _core.ring_attach(memory, reader)
    assert ring_write(memory, b"abc", (), 0, 0, 0) == 3
    assert get(memory, "published", "messages", "sequence", "closed", "filled") == [2 * LINE, 1, 1, 0, 0]
    assert get(memory, "stamp_ns") > [0]
    assert first_record(memory) == [3, RecordKind.WHOLE, 1, 3]
    assert memory[PAGE + LINE : PAGE + LINE + 3] == b"abc"
    _core.ring_take(memory, 1)
    _core.ring_release(memory, 1)
    assert get(memory, "consumed", "reader_messages", "state") == [0, 0, ReaderState.ATTACHED]
    assert get(memory, "consumed", "reader_messages", "state", reader=1) == [
        2 * LINE,
        1,
        ReaderState.ATTACHED,
    ]
    assert get(memory, "progress_ns", reader=1) > [0]
    _core.ring_end(memory, 1)
    assert get(memory, "state") + get(memory, "state", reader=1) == [ReaderState.ATTACHED, ReaderState.LEFT]
    _core.ring_end(memory, -1)
    assert get(memory, "closed", "space", "waiting", "parked") == [1, 0, 0, 0]


@pytest.mark.guarantee("B11")
def test_two_threads_sleep_at_one_place_of_a_ring() -> None:
    """The one that wakes first, at the end of its time, takes no wake-up from the other."""
    memory = bare_ring()
    woken: list[float] = []

    def sleep() -> None:
        assert _core.ring_wait_any((memory,), (0,), 0, 8 * 10**9, 0)
        woken.append(time.monotonic())

    with background(sleep) as outcome:
        wait_until(lambda: get(memory, "parked") == [1], "the first thread asleep")
        assert not _core.ring_wait_any((memory,), (0,), 0, 10**7, 0)
        assert get(memory, "parked") == [1]
        sent = time.monotonic()
        ring_write(memory, b"abc", (), 0, 0, 0)
    assert outcome == [None]
    assert get(memory, "parked") == [0]
    assert woken[0] - sent < 4.0


@pytest.mark.guarantee("B1")
def test_a_look_at_a_ring_gives_back_nothing() -> None:
    """Who has no turn, as `dequeue_any`, changes nothing: beside a reader that moves on, it would set that back."""
    memory = bare_ring()
    for nbytes in (1984, 1000):
        ring_write(memory, bytes(nbytes), (), 0, 0, 0)
        _core.ring_take(memory, 0)
        _core.ring_release(memory, 0)
    # This one does not fit behind the others: a skip precedes it.
    assert ring_write(memory, bytes(1500), (), 0, 0, 0) == 1500
    reader = _core.ReadEndpoint(memory, 0, codec.build_owned, "park", refuse)
    before = get(memory, "consumed", "space")
    assert before == [record_bytes(1984) + record_bytes(1000), 0]
    for times in ((0, 0), (1, 0), (0, 1)):
        assert _core.ring_wait(memory, 0, *times) == 1
        assert _core.ring_wait_any((memory,), (0,), *times, 0)
    assert reader.has_news
    assert get(memory, "consumed", "space") == before
    window, *_ = _core.ring_take(memory, 0)
    assert bytes(memoryview(window)) == bytes(1500)
    assert get(memory, "consumed") == [PAGE]


@pytest.mark.guarantee("B8")
def test_a_streamed_record_says_how_far_it_is_filled() -> None:
    """A long message is of the kind STREAMED, and `filled` stands behind its payload when all of it is there."""
    memory = bare_ring(64 * PAGE)
    _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse).send(bytes(100_000))
    nbytes = codec.encode(bytes(100_000)).nbytes
    assert first_record(memory) == [nbytes, RecordKind.STREAMED, 1, nbytes]
    assert get(memory, "filled") == [LINE + nbytes]


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize("name", IDENTITY)
@pytest.mark.parametrize("value", WRONG)
def test_a_ring_with_a_wrong_identity_is_refused(name: str, value: int) -> None:
    """No native function touches memory that is not laid out as a ring of this version."""
    memory = bare_ring()
    before = get(memory, name)
    overwrite(memory, name, value)
    # A ring of a few more readers would look the same; a reader's handle says how many there are.
    if get(memory, name) == before or (name == "readers" and 1 <= value <= 61):
        return
    for call, *arguments in (
        (_core.ring_facts,),
        (ring_write, b"abc", (), 0, 0, 0),
        (_core.ring_wait, 0, 0, 0),
        (_core.ring_take, 0),
        (_core.ring_release, 0),
        (_core.ring_attach, 0),
        (_core.ring_end, -1),
        (_core.ring_state,),
    ):
        with pytest.raises(ValueError, match="holds no ring of this version"):
            call(memory, *arguments)
    with pytest.raises(ValueError, match="holds no ring of this version"):
        _core.ring_wait_any((memory,), (0,), 0, 0, 0)


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize("name", IDENTITY)
@pytest.mark.parametrize("nbytes", [1, 100_000, 1_000_000], ids=["whole", "streamed", "parts"])
def test_an_identity_that_changes_later_does_no_harm(name: str, nbytes: int) -> None:
    """Each endpoint reads the identity once: messages pass or raise, `statistics` raises, and both can be closed."""
    with queue(ring_bytes=64 * PAGE) as (writer, [reader]):
        overwrite(memory_of(writer), name, 77)
        for number in range(4):
            message = bytes([number]) * nbytes
            sent = outcome_of(partial(writer.enqueue, message, 0.0))
            assert sent is None or isinstance(sent, (CommTimeoutError, InternalError, GroupBrokenError)), sent
            received = outcome_of(lambda: reader.dequeue(0.0))
            if sent is None and not isinstance(received, CommError):
                assert received == message
            else:
                allowed = (CommTimeoutError, InternalError, GroupBrokenError)
                assert isinstance(received, allowed), received
        for end in (writer, reader):
            with pytest.raises((InternalError, GroupBrokenError)):
                end.statistics()
        for call in (lambda: writer.enqueue(1), reader.dequeue, reader.try_dequeue):
            with pytest.raises(GroupBrokenError):
                call()


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize("where", [*POSITIONS, *RECORD])
@pytest.mark.parametrize("value", WRONG)
def test_an_overwritten_field_gives_an_error_or_a_message(where: str, value: int) -> None:
    """Whatever the words of the protocol hold, each call returns in time with an error of ours or an object."""
    with queue() as (writer, [reader]):
        memory = memory_of(writer)
        for number in range(3):
            writer.enqueue([number, bytes(100)])
        overwrite(memory, where, value)
        for _ in range(4):
            outcomes = [outcome_of(lambda: reader.dequeue(0.0)), outcome_of(lambda: writer.enqueue(1, 0.0))]
            assert all(isinstance(each, (CommError, list, int, type(None))) for each in outcomes), outcomes
        reader.statistics()


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize("where", [*POSITIONS, *RECORD])
def test_an_overwritten_field_of_a_streamed_record_gives_an_error_or_a_message(where: str) -> None:
    """The same holds while a long message is copied behind the writer, also when it changes half way."""
    for value in WRONG:
        with queue(ring_bytes=64 * PAGE) as (writer, [reader]):
            memory = memory_of(writer)
            writer.enqueue(bytes(80_000))
            overwrite(memory, "filled", get(memory, "filled")[0] - 10_000)
            assert reader.try_dequeue() == (False, None)
            overwrite(memory, where, value)
            for _ in range(4):
                for each in (
                    outcome_of(partial(reader.dequeue, 0.0)),
                    outcome_of(partial(writer.enqueue, 1, 0.0)),
                ):
                    assert isinstance(each, (CommError, bytes, int, type(None))), each
            reader.statistics()


def outcome_of(call: Any) -> Any:
    """Return what `call` returns, or the error that it raises."""
    try:
        return call()
    except Exception as error:
        return error


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize(
    ("field", "value"),
    [("flags", 0), ("message", 9), ("total_bytes", 5), ("total_bytes", 2**63), ("flags", 3)],
)
def test_parts_that_do_not_fit_together_are_an_error(field: str, value: int) -> None:
    """A second part whose words contradict the first breaks the queue and not the process."""
    with queue() as (writer, [reader]):
        memory, frame = memory_of(writer), bytes(3 * MIN_RING_BYTES)
        assert 0 < ring_write(memory, frame, (), 0, 0, 0) < len(frame)
        part = (MIN_RING_BYTES // 2 - LINE) // 2 // LINE * LINE
        put_word(memory, RECORD_FIELDS[field], value, PAGE + record_bytes(part))
        with pytest.raises(InternalError, match="overwritten"):
            reader.dequeue(1.0)
        with pytest.raises(GroupBrokenError):
            reader.dequeue(1.0)


@given(st.binary(min_size=24, max_size=24), st.integers(0, 5), st.integers(1, 5))
def test_random_record_headers_stay_inside_of_the_mapping(words: bytes, flags: int, records: int) -> None:
    """A window that is handed out never reaches beyond the published bytes."""
    memory = bare_ring()
    for _ in range(records):
        assert ring_write(memory, bytes(300), (), 0, 0, 0) == 300
    memory[PAGE : PAGE + len(words)] = words
    put_word(memory, RECORD_FIELDS["flags"], flags, PAGE)
    for _ in range(records + 2):
        try:
            window, _, _, _ = _core.ring_take(memory, 0)
            assert len(bytes(memoryview(window))) <= PAGE - LINE
            _core.ring_release(memory, 0)
        except ValueError:
            return


READ_ONLY = memoryview(bytes(3 * PAGE))


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (_core.ring_format, (bytearray(2 * PAGE - 1), 1, 0)),
        (_core.ring_format, (bytearray(2 * PAGE), 0, 0)),
        (_core.ring_format, (bytearray(20 * PAGE), 1025, 0)),
        (_core.ring_format, (bytearray(2 * PAGE), -1, 0)),
        (_core.ring_format, (bytearray(2 * PAGE), 2**64, 0)),
        (_core.ring_format, (READ_ONLY, 1, 0)),
        (_core.ring_format, (bytearray(2 * PAGE), 1)),
        (_core.ring_facts, (bytearray(10),)),
        (_core.ring_facts, (bytearray(0),)),
        (_core.ring_facts, (READ_ONLY,)),
        (_core.ring_facts, (None,)),
        (ring_write, (bare_ring(), b"", (), 0, 0, 0)),
        (ring_write, (bare_ring(), b"abc", (), 3, 0, 0)),
        (ring_write, (bare_ring(), b"abc", (), -1, 0, 0)),
        (ring_write, (bare_ring(), b"abc", (), 0, -1, 0)),
        (ring_write, (bare_ring(), b"abc", [], 0, 0, 0)),
        (ring_write, (bare_ring(), b"abc", (1,), 0, 0, 0)),
        (ring_write, (bare_ring(), 5, (), 0, 0, 0)),
        (_core.ring_wait, (bare_ring(), 1, 0, 0)),
        (_core.ring_wait, (bare_ring(), -1, 0, 0)),
        (_core.ring_wait, (bare_ring(), 0, "a", 0)),
        (_core.ring_wait_any, ((), (), 0, 0, 0)),
        (_core.ring_wait_any, ((bare_ring(),), (0, 0), 0, 0, 0)),
        (_core.ring_wait_any, ((bare_ring(),) * 129, (0,) * 129, 0, 0, 0)),
        (_core.ring_wait_any, ((bare_ring(), None), (0, 0), 0, 0, 0)),
        (_core.ring_wait_any, ([bare_ring()], (0,), 0, 0, 0)),
        (_core.ring_wait_any, ((bare_ring(),), (1,), 0, 0, 0)),
        (_core.ring_take, (bare_ring(), 0)),
        (_core.ring_take, (bare_ring(), 2**32)),
        (_core.ring_release, (bare_ring(), 0)),
        (_core.ring_end, (bare_ring(), -2)),
        (_core.ring_end, (bare_ring(), 1)),
        (_core.ring_attach, (bare_ring(), 1)),
        (_core.ring_attach, (bare_ring(),)),
        (_core.ring_state, (bytearray(5 * PAGE),)),
    ],
)
def test_wrong_arguments_are_python_errors(call: Any, arguments: tuple[Any, ...]) -> None:
    """A function refuses wrong arguments before it touches memory."""
    with pytest.raises((ValueError, TypeError, OverflowError, BufferError)):
        call(*arguments)


def test_a_wait_for_room_ends_at_its_deadline() -> None:
    """The native wait returns when its time is up, and nothing is written."""
    memory = bare_ring()
    for _ in range(2):
        assert ring_write(memory, bytes(1900), (), 0, 0, 0) == 1900
    assert ring_write(memory, bytes(1900), (), 0, 1000, 1_000_000) == 0
    assert _core.ring_wait(memory, 0, 0, 0) == 1
