"""The native functions of the ring: wrong arguments and overwritten memory give errors, never a crash."""

import mmap
import struct
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast import _core, codec
from shm_broadcast.errors import CommError, CommTimeoutError, GroupBrokenError, InternalError
from shm_broadcast.settings import MIN_RING_BYTES
from tests.queues import PAGE, RECORD_HEADER, bare_ring, memory_of, queue, refuse, ring_write

# Offsets of the fields, as the table in DESIGN.md has them.
IDENTITY = {
    "magic": (0, "Q"),
    "version": (8, "I"),
    "readers": (12, "I"),
    "data offset": (16, "Q"),
    "data bytes": (24, "Q"),
}
GENERATION = 32
PUBLISHED, WRITER_MESSAGES, STAMP, SEQUENCE, CLOSED, FILLED = 64, 72, 80, 88, 92, 96
SPACE_WORD, SPACE_WAITING = 128, 132
CONSUMED, READER_MESSAGES, PROGRESS, PARKED, STATE = 192, 200, 208, 216, 220
RECORD = {"payload bytes": (0, "Q"), "flags": (8, "I"), "message": (16, "Q"), "total bytes": (24, "Q")}
WRONG = [0, 1, 2, 3, 4, 63, 65, 4095, 4097, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def put(memory: mmap.mmap, offset: int, form: str, value: int) -> None:
    """Overwrite one field, cut to its width."""
    struct.pack_into(form, memory, offset, value % 2 ** (8 * struct.calcsize(form)))


def get(memory: mmap.mmap, offset: int, form: str) -> int:
    """Return one field."""
    return int(struct.unpack_from(form, memory, offset)[0])


@pytest.mark.guarantee("B8")
def test_every_field_stands_where_the_layout_says() -> None:
    """The offsets of DESIGN.md are those that the native core uses."""
    memory = bare_ring(2 * PAGE, readers=2, generation=0x1234)
    assert memory[:8] == b"!GCRING1"
    assert [get(memory, *IDENTITY[name]) for name in ("version", "readers", "data offset", "data bytes")] == [
        2,
        2,
        PAGE,
        2 * PAGE,
    ]
    assert get(memory, GENERATION, "Q") == 0x1234
    for reader in (0, 1):
        _core.ring_attach(memory, reader)
    assert ring_write(memory, b"abc", (), 0, 0, 0) == 3
    assert (get(memory, PUBLISHED, "Q"), get(memory, WRITER_MESSAGES, "Q")) == (128, 1)
    assert get(memory, STAMP, "Q") > 0
    assert (get(memory, SEQUENCE, "I"), get(memory, CLOSED, "I")) == (1, 0)
    assert [get(memory, PAGE + offset, form) for offset, form in RECORD.values()] == [3, 0, 1, 3]
    assert memory[PAGE + RECORD_HEADER : PAGE + RECORD_HEADER + 3] == b"abc"
    assert get(memory, FILLED, "Q") == 0
    _core.ring_take(memory, 1)
    _core.ring_release(memory, 1)
    second = 64
    assert (get(memory, CONSUMED, "Q"), get(memory, CONSUMED + second, "Q")) == (0, 128)
    assert get(memory, READER_MESSAGES + second, "Q") == 1
    assert get(memory, PROGRESS + second, "Q") > 0
    assert [get(memory, STATE + second * index, "I") for index in (0, 1)] == [1, 1]
    _core.ring_end(memory, 1)
    assert [get(memory, STATE + second * index, "I") for index in (0, 1)] == [1, 2]
    _core.ring_end(memory, -1)
    assert get(memory, CLOSED, "I") == 1
    assert [get(memory, offset, "I") for offset in (SPACE_WORD, SPACE_WAITING, PARKED)] == [0, 0, 0]


@pytest.mark.guarantee("B8")
def test_a_streamed_record_says_how_far_it_is_filled() -> None:
    """A long message has flag 4, and `filled` stands behind its payload when all of it is there."""
    memory = bare_ring(64 * PAGE)
    _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse).send(bytes(100_000))
    nbytes = codec.encode(bytes(100_000)).nbytes
    assert [get(memory, PAGE + offset, form) for offset, form in RECORD.values()] == [nbytes, 4, 1, nbytes]
    assert get(memory, FILLED, "Q") == RECORD_HEADER + nbytes
    assert _core.RING_STREAMED == 4


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize("name", IDENTITY)
@pytest.mark.parametrize("value", WRONG)
def test_a_ring_with_a_wrong_identity_is_refused(name: str, value: int) -> None:
    """No native function touches memory that is not laid out as ours."""
    memory = bare_ring()
    offset, form = IDENTITY[name]
    before = get(memory, offset, form)
    put(memory, offset, form, value)
    # A ring of a few more readers would look the same; a reader's handle says how many there are.
    if get(memory, offset, form) == before or (name == "readers" and 1 <= value <= 61):
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
        _core.ring_wait_any((memory,), (0,), 0, 0)


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize("name", IDENTITY)
@pytest.mark.parametrize("nbytes", [1, 100_000, 1_000_000], ids=["whole", "streamed", "parts"])
def test_an_identity_that_changes_later_does_no_harm(name: str, nbytes: int) -> None:
    """Each end read it once: messages pass right or end in an error of ours, statistics see it, both ends close."""
    with queue(ring_bytes=64 * PAGE) as (writer, [reader]):
        offset, form = IDENTITY[name]
        put(memory_of(writer), offset, form, 77)
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
@pytest.mark.parametrize("where", ["published", "consumed", "filled", *RECORD])
@pytest.mark.parametrize("value", WRONG)
def test_an_overwritten_field_gives_an_error_or_a_message(where: str, value: int) -> None:
    """Whatever stands in the words of the protocol, each call returns in time with an error of ours or an object."""
    with queue() as (writer, [reader]):
        memory = memory_of(writer)
        for number in range(3):
            writer.enqueue([number, bytes(100)])
        if where in RECORD:
            offset, form = RECORD[where]
            put(memory, PAGE + offset, form, value)
        else:
            offset = {"published": PUBLISHED, "consumed": CONSUMED, "filled": FILLED}[where]
            put(memory, offset, "Q", value)
        for _ in range(4):
            outcomes = [outcome_of(lambda: reader.dequeue(0.0)), outcome_of(lambda: writer.enqueue(1, 0.0))]
            assert all(isinstance(each, (CommError, list, int, type(None))) for each in outcomes), outcomes
        reader.statistics()


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize("where", ["published", "consumed", "filled", *RECORD])
def test_an_overwritten_field_of_a_streamed_record_gives_an_error_or_a_message(where: str) -> None:
    """The same holds while a long message is copied behind the writer, also when it changes half way."""
    offset, form = {
        "published": (PUBLISHED, "Q"),
        "consumed": (CONSUMED, "Q"),
        "filled": (FILLED, "Q"),
        **{name: (PAGE + offset, form) for name, (offset, form) in RECORD.items()},
    }[where]
    for value in WRONG:
        with queue(ring_bytes=64 * PAGE) as (writer, [reader]):
            memory = memory_of(writer)
            writer.enqueue(bytes(80_000))
            put(memory, FILLED, "Q", get(memory, FILLED, "Q") - 10_000)
            assert reader.try_dequeue() == (False, None)
            put(memory, offset, form, value)
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
    [("flags", 0), ("message", 9), ("total bytes", 5), ("total bytes", 2**63), ("flags", 3)],
)
def test_parts_that_do_not_fit_together_are_an_error(field: str, value: int) -> None:
    """A second part with other words than the first is no message: the queue is broken, not the process."""
    with queue() as (writer, [reader]):
        memory, frame = memory_of(writer), bytes(3 * MIN_RING_BYTES)
        assert 0 < ring_write(memory, frame, (), 0, 0, 0) < len(frame)
        part = (MIN_RING_BYTES // 2 - RECORD_HEADER) // 2 // RECORD_HEADER * RECORD_HEADER
        offset, form = RECORD[field]
        put(memory, PAGE + part + RECORD_HEADER + offset, form, value)
        with pytest.raises(InternalError, match="overwritten"):
            reader.dequeue(1.0)
        with pytest.raises(GroupBrokenError):
            reader.dequeue(1.0)


@given(st.binary(min_size=24, max_size=24), st.integers(0, 5), st.integers(1, 5))
def test_random_record_headers_stay_inside_of_the_mapping(words: bytes, flags: int, records: int) -> None:
    """A window that is handed out never reaches beyond what was published."""
    memory = bare_ring()
    for _ in range(records):
        assert ring_write(memory, bytes(300), (), 0, 0, 0) == 300
    memory[PAGE : PAGE + 24] = words[:8] + struct.pack("I", flags) + words[12:]
    for _ in range(records + 2):
        try:
            window, _, _, _ = _core.ring_take(memory, 0)
            assert len(bytes(memoryview(window))) <= PAGE - RECORD_HEADER
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
        (_core.ring_wait_any, ((), (), 0, 0)),
        (_core.ring_wait_any, ((bare_ring(),), (0, 0), 0, 0)),
        (_core.ring_wait_any, ((bare_ring(),) * 129, (0,) * 129, 0, 0)),
        (_core.ring_wait_any, ((bare_ring(), None), (0, 0), 0, 0)),
        (_core.ring_wait_any, ([bare_ring()], (0,), 0, 0)),
        (_core.ring_wait_any, ((bare_ring(),), (1,), 0, 0)),
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
    """Each is refused before memory is touched."""
    with pytest.raises((ValueError, TypeError, OverflowError, BufferError)):
        call(*arguments)


def test_a_full_ring_waits_no_longer_than_told() -> None:
    """The native wait returns when its time is up, with nothing written."""
    memory = bare_ring()
    for _ in range(2):
        assert ring_write(memory, bytes(1900), (), 0, 0, 0) == 1900
    assert ring_write(memory, bytes(1900), (), 0, 1000, 1_000_000) == 0
    assert _core.ring_wait(memory, 0, 0, 0) == 1
