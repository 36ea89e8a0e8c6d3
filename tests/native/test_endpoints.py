"""The native endpoints of a ring: what is not sent or is refused, messages that come bit by bit, owners."""

import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from shm_broadcast import _core, codec
from shm_broadcast.errors import UsageError
from shm_broadcast.layout import FIELDS, LINE, PAGE, RECORD_FIELDS, Field, RecordKind, record_bytes
from tests.queues import RefusedError, background, bare_ring, put_word, refuse, ring_write, word
from tests.unit.shm_broadcast.codec_samples import Point
from tests.waiting import sleeping_in, wait_until

FILLED, CONSUMED = FIELDS["filled"], FIELDS["consumed"]
PAYLOAD, FLAGS, TOTAL = (RECORD_FIELDS[name] for name in ("payload_bytes", "flags", "total_bytes"))
LONG = bytes(range(256)) * 400
"""More than 64 KiB, so that it is streamed where it fits one record."""


def ends(data_bytes: int = 64 * PAGE) -> tuple[mmap.mmap, _core.WriteEndpoint, _core.ReadEndpoint]:
    """Return a ring and both of its ends."""
    memory = bare_ring(data_bytes)
    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse)
    return memory, writer, _core.ReadEndpoint(memory, 0, codec.build_owned, "adaptive", refuse)


def write(memory: mmap.mmap, frame: bytes, done: int = 0) -> int:
    """Write what there is room for, on the general way."""
    return ring_write(memory, frame, (), done, 0, 0)


# --- what is not sent --------------------------------------------------------------------------------------------


class Unknown:
    """Of no type that can be carried."""


def full(port: _core.WriteEndpoint) -> None:
    """Leave no room for more than a few bytes."""
    while port.send_now(bytes(1000), 0) is None:
        pass


@pytest.mark.parametrize(
    ("prepare", "obj"),
    [(full, bytes(1000)), (full, LONG), (lambda _: None, bytes(64 * PAGE // 2))],
    ids=["no room", "no room for a stream", "longer than a record"],
)
def test_what_cannot_be_sent_at_once_is_returned_encoded(
    prepare: Callable[[Any], object], obj: object
) -> None:
    """Nothing of the ring and no count is another than before; the message can be written from where it is."""
    memory, port, _ = ends()
    prepare(port)
    before = memory[:], port.messages, port.nbytes
    encoded = port.send_now(obj, 0)
    assert encoded is not None
    assert codec.decode(codec.Message(*encoded).to_bytes()) == obj
    assert port.write_now(*encoded[:2], 0) is False
    assert (memory[:], port.messages, port.nbytes) == before


@pytest.mark.parametrize("obj", [Unknown(), [1, {"a": Unknown()}]])
def test_what_cannot_be_encoded_changes_nothing(obj: object) -> None:
    """The error is handed on with the place in the object, and no byte of the ring is another than before."""
    memory, port, _ = ends()
    before = memory[:]
    for send in (port.send, port.exchange, lambda each: port.send_now(each, 0)):
        with pytest.raises(RefusedError) as caught:
            send(obj)
        assert caught.value.reason == _core.LOOK_UNENCODABLE
        assert memory[:] == before
    port.send("next")
    assert port.messages == 1


def test_ctrl_c_while_an_object_is_described_goes_up() -> None:
    """An ordinary exception is told as an object that cannot be encoded; KeyboardInterrupt goes through as it is."""
    memory = bare_ring()
    raised: list[type[BaseException]] = [KeyboardInterrupt, SystemExit, ValueError, UsageError, MemoryError]

    def describe(_obj: object) -> Any:
        raise raised[0]

    port = _core.WriteEndpoint(memory, describe, "adaptive", refuse)
    before = memory[:]
    while raised:
        with pytest.raises(RefusedError if issubclass(raised[0], Exception) else raised[0]):
            port.send([Point(1)])
        raised.pop(0)
        assert memory[:] == before
    port.send("next")


def test_describing_may_close_the_endpoint() -> None:
    """Code of the application that runs within `send` can end it: then nothing is published."""
    memory = bare_ring()

    def describe(obj: object) -> Any:
        port.close(refuse)
        return codec.describe(obj)

    port = _core.WriteEndpoint(memory, describe, "adaptive", refuse)
    before = memory[:]
    with pytest.raises(RefusedError) as caught:
        port.send(Point(1))
    assert caught.value.reason == _core.LOOK_UNUSABLE
    assert memory[:] == before


def test_a_call_inside_of_a_call_is_refused() -> None:
    """Describing or building an object must not use the same end: it would come between, or wait for itself."""
    memory = bare_ring(16 * PAGE)
    reasons: list[int] = []

    def inside(call: Callable[[], object]) -> None:
        with pytest.raises(RefusedError) as caught:
            call()
        reasons.append(caught.value.reason)

    def describe(obj: object) -> Any:
        inside(lambda: port.send("inner"))
        return codec.describe(obj)

    def build(code: int, meta: object, body: object) -> object:
        inside(reader.receive)
        inside(lambda: reader.receive_within(0, 0))
        return codec.build_owned(code, meta, body)

    port = _core.WriteEndpoint(memory, describe, "adaptive", refuse)
    reader = _core.ReadEndpoint(memory, 0, build, "adaptive", refuse)
    port.send([Point(1)])
    assert reader.receive() == [Point(1)]
    assert reasons == [_core.LOOK_REENTRANT] * 3


def test_a_second_thread_waits_for_its_turn_within_its_deadline() -> None:
    """While one thread waits for a message another one's deadline passes, and one without a deadline is served next."""
    _, port, reader = ends()
    with background(reader.receive) as first:
        wait_until(lambda: reader.is_busy, "the thread in its call", poll_s=0.001)
        assert reader.receive_within(0, 0) is _core.NOTHING
        with pytest.raises(RefusedError) as caught:
            reader.receive(20_000_000)
        assert caught.value.reason == _core.LOOK_LATE

        def receive_next() -> Any:
            return reader.receive()

        with background(receive_next) as second:
            wait_until(lambda: sleeping_in("receive_next"), "the second thread asleep")
            port.send(1)
            port.send(2)
    assert (first, second) == ([1], [2])


class Acting(TorchFunctionMode):
    """Acts once, when something is first asked of a tensor."""

    def __init__(self, act: Callable[[], object]) -> None:
        """Do `act`."""
        super().__init__()
        self._acts = [act]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Act, then do what was asked."""
        if self._acts:
            self._acts.pop()()
        return func(*args, **(kwargs or {}))


def test_ctrl_c_while_a_tensor_is_looked_at_goes_up() -> None:
    """It is no reason to describe the tensor in another way; an ordinary exception is."""
    codec.encode(torch.zeros(1))
    _, writer, reader = ends()

    def interrupt() -> None:
        raise KeyboardInterrupt

    def fail() -> None:
        raise RuntimeError("not now")

    message = [torch.ones(2)]
    for encode in (codec.encode, writer.send, writer.exchange):
        with Acting(interrupt), pytest.raises(KeyboardInterrupt):
            encode(message)
    with Acting(fail):
        assert writer.send_now(message, 0) is None
    assert torch.equal(reader.receive_within(0, 0)[0], message[0])


@pytest.mark.guarantee("B19")
def test_a_forked_child_sends_and_receives_nothing() -> None:
    """Both ends do nothing in a child, and go on in the parent."""
    memory, port, reader = ends()
    assert port.send_now(1, 0) is None
    before = memory[:]
    child = os.fork()
    if child == 0:
        refusals = []
        for call in (lambda: port.send(2), lambda: reader.receive_within(0, 1000)):
            try:
                call()
            except RefusedError as error:
                refusals.append(error.reason)
        is_inert = refusals == [_core.LOOK_UNUSABLE] * 2
        os._exit(0 if is_inert and memory[:] == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert port.send_now(3, 0) is None
    assert [reader.receive_within(0, 0), reader.receive_within(0, 0)] == [1, 3]


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("magic", 0),
        ("version", 1),
        ("readers", 0),
        ("readers", 1025),
        ("data_offset", 64),
        ("data_bytes", 2**63),
        ("data_bytes", 65),
    ],
)
def test_a_mapping_that_holds_no_ring_is_refused(name: str, value: int) -> None:
    """No port is made on memory that is not laid out as ours."""
    memory = bare_ring()
    put_word(memory, FIELDS[name], value)
    for make in (
        lambda: _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse),
        lambda: _core.ReadEndpoint(memory, 0, codec.build_owned, "adaptive", refuse),
    ):
        with pytest.raises(ValueError, match="holds no ring of this version"):
            make()
    # Nothing of the attempt keeps the mapping.
    memory.close()


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (_core.WriteEndpoint, (bytearray(0), codec.describe, "spin", refuse)),
        (_core.WriteEndpoint, (bytearray(5 * PAGE), codec.describe, "spin", refuse)),
        (_core.WriteEndpoint, (bytes(5 * PAGE), codec.describe, "spin", refuse)),
        (_core.WriteEndpoint, (None, codec.describe, "spin", refuse)),
        (_core.WriteEndpoint, (bare_ring(), codec.describe, "nap", refuse)),
        (_core.WriteEndpoint, (bare_ring(), codec.describe)),
        (_core.ReadEndpoint, (bare_ring(), 1, codec.build_owned, "spin", refuse)),
        (_core.ReadEndpoint, (bare_ring(), -1, codec.build_owned, "spin", refuse)),
        (_core.ReadEndpoint, (bare_ring(), 2**32, codec.build_owned, "spin", refuse)),
        (_core.ReadEndpoint, (bare_ring(), 2**64, codec.build_owned, "spin", refuse)),
        (_core.ReadEndpoint, (bare_ring(), "0", codec.build_owned, "spin", refuse)),
        (_core.ReadEndpoint, (bare_ring(), 0, codec.build_owned)),
        (ends()[2].receive_within, ()),
        (ends()[2].receive_within, (0,)),
        (ends()[2].receive_within, (0, 0, 0)),
        (ends()[2].receive_within, (-1, 0)),
        (ends()[2].receive_within, (0, 2**64)),
        (ends()[2].receive_within, (0.5, 0)),
        (ends()[2].receive_within, ("a", 0)),
        (ends()[2].receive, ("a",)),
        (ends()[2].receive, (0, 0)),
        (ends()[2].end_loan, (0,)),
        (ends()[1].send, ()),
        (ends()[1].send_now, (1,)),
        (ends()[1].send_now, (1, -1)),
        (ends()[1].write, (b"abc",)),
        (ends()[1].write, (b"abc", [])),
        (ends()[1].write, (b"", ())),
        (ends()[1].write_now, (b"abc", (1,), 0)),
    ],
)
def test_wrong_arguments_are_python_errors(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Each is refused before memory is touched."""
    with pytest.raises((ValueError, TypeError, OverflowError, BufferError)):
        make(*arguments)


# --- what is received --------------------------------------------------------------------------------------------


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


# --- waiting ---------------------------------------------------------------------------------------------------


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


# --- threads and the end -----------------------------------------------------------------------------------------


@pytest.mark.guarantee("B7")
def test_a_close_from_another_thread_waits_for_the_call() -> None:
    """The mapping goes when the receiving call has ended, which leaving the ring brings about."""
    memory, port, reader = ends()
    with background(lambda: reader.receive_within(0, 20_000_000_000)) as outcome:
        wait_until(lambda: reader.is_busy, "the thread in its call", poll_s=0.001)
        reader.close(refuse)
        port.close(refuse)
        with pytest.raises(BufferError):
            memory.close()
        _core.ring_end(memory, 0)
    assert outcome == [_core.NOTHING]
    with pytest.raises(RefusedError):
        reader.receive_within(0, 0)
    memory.close()


@pytest.mark.guarantee("B1", "B21", "B22")
def test_streams_pass_between_threads() -> None:
    """Readers that copy behind the writer get every byte of every message, in order."""
    memory = bare_ring(256 * PAGE, readers=2)
    port = _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse)
    readers = [_core.ReadEndpoint(memory, index, codec.build_owned, "adaptive", refuse) for index in (0, 1)]
    messages = [
        [number, bytes([number]) * (70_000 + 5000 * number), [bytearray(LONG)]] for number in range(60)
    ]

    def read(reader: _core.ReadEndpoint) -> list[Any]:
        received: list[Any] = []
        deadline = time.monotonic() + 30.0
        while len(received) < len(messages) and time.monotonic() < deadline:
            value = reader.receive_within(20_000, 50_000_000)
            if value is not _core.NOTHING:
                received.append(value)
        return received

    def is_sent(message: list[Any]) -> bool:
        return port.send_now(message, 0) is None

    with background(lambda: read(readers[0])) as first, background(lambda: read(readers[1])) as second:
        for message in messages:
            wait_until(partial(is_sent, message), f"room for message {message[0]}", 30.0, 0.0001)
    assert first == [messages]
    assert second == [messages]


def test_sending_from_many_threads_tears_nothing() -> None:
    """While one thread copies a long message, the others wait for their turn."""
    memory, port, reader = ends(1024 * PAGE)
    sent: list[int] = []

    def send(number: int) -> None:
        message = bytes([number]) * (200_000 * (number % 2) + 1)
        sent.extend(number for _ in range(50) if port.send_now(message, 0) is None)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    received: list[int] = []
    while any(thread.is_alive() for thread in threads) or _core.ring_wait(memory, 0, 0, 0) == 1:
        value = reader.receive_within(0, 1_000_000)
        if value is not _core.NOTHING:
            assert value == bytes([value[0]]) * (200_000 * (value[0] % 2) + 1)
            received.append(value[0])
    for thread in threads:
        thread.join()
    assert sorted(received) == sorted(sent)
    assert port.messages == reader.messages == len(sent) > 0
