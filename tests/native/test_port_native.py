"""The native ends of a ring: what they leave to the general way, what they refuse, messages that come bit by bit."""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from shm_broadcast import _core, codec
from shm_broadcast.errors import UsageError
from tests.queues import PAGE, RECORD_HEADER, background, bare_ring
from tests.unit.codec_samples import Point

FILLED = 96
FLAGS, MESSAGE, TOTAL = PAGE + 8, PAGE + 16, PAGE + 24
LONG = bytes(range(256)) * 400
"""More than 64 KiB, so that it is streamed where it fits one record."""


def ends(data_bytes: int = 64 * PAGE) -> tuple[mmap.mmap, _core.WritePort, _core.ReadPort]:
    """Return a ring and both of its ends."""
    memory = bare_ring(data_bytes)
    return memory, _core.WritePort(memory, codec.describe), _core.ReadPort(memory, 0, codec.build_owned)


def get(memory: mmap.mmap, offset: int) -> int:
    """Return a word of 8 bytes."""
    return int(struct.unpack_from("Q", memory, offset)[0])


def put(memory: mmap.mmap, offset: int, value: int, form: str = "Q") -> None:
    """Overwrite a word."""
    struct.pack_into(form, memory, offset, value)


def write(memory: mmap.mmap, frame: bytes, done: int = 0) -> int:
    """Write what there is room for, on the general way."""
    return _core.ring_write(memory, frame, (), done, 0, 0)


# --- what is not sent --------------------------------------------------------------------------------------------


class Unknown:
    """Of no type that can be carried."""


def full(port: _core.WritePort) -> None:
    """Leave no room for more than a few bytes."""
    while port.send(bytes(1000)):
        pass


@pytest.mark.parametrize(
    ("prepare", "obj"),
    [
        (lambda port: port.hold(True), 1),
        (lambda port: port.close(), 1),
        (full, bytes(1000)),
        (full, LONG),
        (lambda _: None, bytes(64 * PAGE // 2)),
        (lambda _: None, Unknown()),
        (lambda _: None, [1, {"a": Unknown()}]),
    ],
    ids=[
        "held",
        "closed",
        "no room",
        "no room for a stream",
        "longer than a record",
        "unknown",
        "unknown within",
    ],
)
def test_what_cannot_be_sent_at_once_changes_nothing(prepare: Callable[[Any], object], obj: object) -> None:
    """`send` gives False, and no byte of the ring and no count is another than before."""
    memory, port, _ = ends()
    prepare(port)
    before = memory[:], port.messages, port.nbytes
    assert port.send(obj) is False
    assert (memory[:], port.messages, port.nbytes) == before


def test_a_port_that_is_let_go_sends_again() -> None:
    """What a hold prevented passes afterwards; what was sent counts."""
    _, port, reader = ends()
    port.hold(True)
    assert not port.send(1)
    port.hold(False)
    assert port.send(1)
    assert port.messages == 1
    assert port.nbytes == codec.encode(1).nbytes
    reader.hold(True)
    assert reader.receive(0, 0) is _core.NOTHING
    reader.hold(False)
    assert reader.receive(0, 0) == 1
    assert (reader.messages, reader.nbytes) == (1, port.nbytes)


def test_an_exception_of_describing_leaves_the_message_and_ctrl_c_goes_up() -> None:
    """An ordinary exception is left to the general way, which raises it again; KeyboardInterrupt is not swallowed."""
    memory = bare_ring()
    raised: list[type[BaseException]] = [KeyboardInterrupt, SystemExit, ValueError, UsageError, MemoryError]

    def describe(_obj: object) -> Any:
        raise raised[0]

    port = _core.WritePort(memory, describe)
    before = memory[:]
    while raised:
        if issubclass(raised[0], Exception):
            assert port.send([Point(1)]) is False
        else:
            with pytest.raises(raised[0]):
                port.send([Point(1)])
        raised.pop(0)
        assert memory[:] == before
    assert port.send("next")


@pytest.mark.parametrize("act", ["hold", "close"])
def test_describing_may_hold_or_close_the_port(act: str) -> None:
    """Code of the application that runs within `send` can end the port: then nothing is published."""
    memory = bare_ring()

    def describe(obj: object) -> Any:
        if act == "hold":
            port.hold(True)
        else:
            port.close()
        return codec.describe(obj)

    port = _core.WritePort(memory, describe)
    before = memory[:]
    assert port.send(Point(1)) is False
    assert memory[:] == before


def test_describing_may_send() -> None:
    """A message that is sent while another one is encoded comes before that, and both are whole."""
    memory = bare_ring()

    def describe(obj: object) -> Any:
        assert port.send("inner")
        return codec.describe(obj)

    port = _core.WritePort(memory, describe)
    reader = _core.ReadPort(memory, 0, codec.build_owned)
    assert port.send([Point(1)])
    assert [reader.receive(0, 0), reader.receive(0, 0)] == ["inner", [Point(1)]]


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
    for encode in (codec.encode, writer.send):
        with Acting(interrupt), pytest.raises(KeyboardInterrupt):
            encode(message)
    with Acting(fail):
        assert writer.send(message)
    assert torch.equal(reader.receive(0, 0)[0], message[0])


@pytest.mark.guarantee("B19")
def test_a_forked_child_sends_and_receives_nothing() -> None:
    """Both ends do nothing in a child, and go on in the parent."""
    memory, port, reader = ends()
    assert port.send(1)
    before = memory[:]
    child = os.fork()
    if child == 0:
        is_inert = port.send(2) is False and reader.receive(0, 1000) is _core.NOTHING
        os._exit(0 if is_inert and memory[:] == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert port.send(3)
    assert [reader.receive(0, 0), reader.receive(0, 0)] == [1, 3]


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [(0, "Q", 0), (8, "I", 1), (12, "I", 0), (12, "I", 1025), (16, "Q", 64), (24, "Q", 2**63), (24, "Q", 65)],
)
def test_a_mapping_that_holds_no_ring_is_refused(offset: int, form: str, value: int) -> None:
    """No port is made on memory that is not laid out as ours."""
    memory = bare_ring()
    put(memory, offset, value, form)
    for make in (
        lambda: _core.WritePort(memory, codec.describe),
        lambda: _core.ReadPort(memory, 0, codec.build_owned),
    ):
        with pytest.raises(ValueError, match="holds no ring of this version"):
            make()
    # Nothing of the attempt keeps the mapping.
    memory.close()


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (_core.WritePort, (bytearray(0), codec.describe)),
        (_core.WritePort, (bytearray(5 * PAGE), codec.describe)),
        (_core.WritePort, (bytes(5 * PAGE), codec.describe)),
        (_core.WritePort, (None, codec.describe)),
        (_core.WritePort, (bare_ring(),)),
        (_core.ReadPort, (bare_ring(), 1, codec.build_owned)),
        (_core.ReadPort, (bare_ring(), -1, codec.build_owned)),
        (_core.ReadPort, (bare_ring(), 2**32, codec.build_owned)),
        (_core.ReadPort, (bare_ring(), 2**64, codec.build_owned)),
        (_core.ReadPort, (bare_ring(), "0", codec.build_owned)),
        (_core.ReadPort, (bare_ring(), 0)),
        (_core.ReadPort(bare_ring(), 0, codec.build_owned).receive, ()),
        (_core.ReadPort(bare_ring(), 0, codec.build_owned).receive, (0,)),
        (_core.ReadPort(bare_ring(), 0, codec.build_owned).receive, (0, 0, 0)),
        (_core.ReadPort(bare_ring(), 0, codec.build_owned).receive, (-1, 0)),
        (_core.ReadPort(bare_ring(), 0, codec.build_owned).receive, (0, -1)),
        (_core.ReadPort(bare_ring(), 0, codec.build_owned).receive, (0, 2**64)),
        (_core.ReadPort(bare_ring(), 0, codec.build_owned).receive, (0.5, 0)),
        (_core.ReadPort(bare_ring(), 0, codec.build_owned).receive, ("a", 0)),
        (_core.WritePort(bare_ring(), codec.describe).send, ()),
    ],
)
def test_wrong_arguments_are_python_errors(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Each is refused before memory is touched."""
    with pytest.raises((ValueError, TypeError, OverflowError, BufferError)):
        make(*arguments)


# --- what is received --------------------------------------------------------------------------------------------


def test_without_a_message_there_is_nothing() -> None:
    """`receive` gives NOTHING, which is no message: None, for one, is."""
    _, port, reader = ends()
    assert reader.receive(0, 0) is _core.NOTHING
    start = time.monotonic_ns()
    assert reader.receive(1_000_000, 20_000_000) is _core.NOTHING
    assert time.monotonic_ns() - start >= 21_000_000
    assert reader.waited_ns >= 21_000_000
    assert port.send(None)
    assert reader.receive(0, 0) is None
    assert (reader.messages, reader.is_assembling) == (1, False)


@pytest.mark.guarantee("B9")
@pytest.mark.parametrize("nbytes", [1, 31, 32, 100, 1000, 5000, 20_000])
def test_a_frame_of_nonsense_leaves_the_next_message(nbytes: int) -> None:
    """The decoder's error is raised once, also for a message in parts; the one behind it arrives."""
    memory, port, reader = ends(2 * PAGE)
    frame, done = bytes([7]) * nbytes, 0
    caught: list[ValueError] = []
    while done < nbytes:
        done = write(memory, frame, done)
        try:
            assert reader.receive(0, 0) is _core.NOTHING
        except ValueError as error:
            caught.append(error)
    while not caught:
        try:
            assert reader.receive(0, 0) is _core.NOTHING
        except ValueError as error:
            caught.append(error)
    assert port.send("next")
    assert reader.receive(0, 0) == "next"


PART = (PAGE - RECORD_HEADER) // 2 // RECORD_HEADER * RECORD_HEADER
"""Payload of a part in a ring of two pages."""
SECOND = PART + RECORD_HEADER


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (FLAGS + SECOND, "I", 0),
        (FLAGS + SECOND, "I", 3),
        (FLAGS + SECOND, "I", 4),
        (FLAGS + SECOND, "I", 5),
        (MESSAGE + SECOND, "Q", 2),
        (TOTAL + SECOND, "Q", 20_001),
        (TOTAL, "Q", 0),
        (TOTAL, "Q", 2**63),
        (TOTAL, "Q", 100),
        (TOTAL, "Q", PART),
        (PAGE, "Q", 2**64 - 1),
    ],
)
def test_parts_that_do_not_fit_together_are_told(offset: int, form: str, value: int) -> None:
    """A part with other words than the ones before it is `RingCorrupt`, whenever one looks again."""
    memory, _, reader = ends(2 * PAGE)
    frame = codec.encode(bytes(20_000)).to_bytes()
    assert SECOND < write(memory, frame) < len(frame)
    put(memory, offset, value, form)

    def receive_all() -> None:
        for _ in range(3):
            assert reader.receive(0, 0) is _core.NOTHING

    for _ in range(3):
        with pytest.raises(_core.RingCorrupt):
            receive_all()


@pytest.mark.parametrize("step", [1, 63, 1000, 32 * 1024, 60_000])
def test_a_stream_is_received_only_when_it_is_whole(step: int) -> None:
    """A record that is filled in step by step is copied as far as it is there, also over time-outs."""
    memory, port, reader = ends()
    value = [LONG, bytearray(LONG[:3000]), 1]
    assert port.send(value)
    end = get(memory, FILLED)
    nbytes = codec.encode(value).nbytes
    filled = end - nbytes
    # A few steps through the header one by one, then all of them.
    put(memory, FILLED, filled)
    steps = 0
    while filled < end:
        assert reader.receive(0, 0) is _core.NOTHING
        if steps % 10 == 0:
            assert reader.receive(1000, 1000) is _core.NOTHING
        assert reader.is_assembling
        assert reader.messages == 0
        assert get(memory, 192) == 0
        filled = min(filled + (step if steps < 200 else 32 * 1024), end)
        put(memory, FILLED, filled)
        steps += 1
    assert reader.receive(0, 0) == value
    assert (reader.is_assembling, reader.messages, reader.nbytes) == (False, 1, nbytes)
    assert port.send("next")
    assert reader.receive(0, 0) == "next"


@pytest.mark.guarantee("B22")
def test_a_stream_that_is_never_whole_is_never_received() -> None:
    """One byte less than all is no message, for a port as for the general functions; nothing of it is given back."""
    memory, port, reader = ends()
    assert port.send(LONG)
    put(memory, FILLED, get(memory, FILLED) - 1)
    for _ in range(3):
        assert reader.receive(1000, 1000) is _core.NOTHING
    assert _core.ring_wait(memory, 0, 0, 0) == 0
    for call in (_core.ring_take, _core.ring_release):
        with pytest.raises(ValueError, match="no readable record"):
            call(memory, 0)
    assert get(memory, 192) == 0
    reader.close()
    fresh = _core.ReadPort(memory, 0, codec.build_owned)
    put(memory, FILLED, get(memory, FILLED) + 1)
    assert fresh.receive(0, 0) == LONG


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize(("offset", "form", "value"), [(FILLED, "Q", 0), (PAGE, "Q", 70_000), (PAGE, "Q", 0)])
def test_a_stream_that_shrinks_is_told(offset: int, form: str, value: int) -> None:
    """Fewer bytes than have been there, or another length, are `RingCorrupt`."""
    memory, port, reader = ends()
    assert port.send(LONG)
    put(memory, FILLED, get(memory, FILLED) - 10_000)
    assert reader.receive(0, 0) is _core.NOTHING
    put(memory, offset, value, form)
    for _ in range(3):
        with pytest.raises(_core.RingCorrupt, match="changed"):
            reader.receive(0, 0)


@given(st.binary(min_size=24, max_size=24), st.integers(0, 5), st.integers(0, 2**64 - 1), st.booleans())
def test_random_words_stay_inside_of_the_mapping(
    words: bytes, flags: int, filled: int, is_begun: bool
) -> None:
    """Whatever a header and `filled` say, a call gives an object, nothing, or an error."""
    memory, port, reader = ends(64 * PAGE)
    assert port.send(LONG)
    if is_begun:
        put(memory, FILLED, get(memory, FILLED) - 10_000)
        assert reader.receive(0, 0) is _core.NOTHING
    memory[PAGE : PAGE + 24] = words[:8] + struct.pack("I", flags) + words[12:]
    put(memory, FILLED, filled)
    for _ in range(4):
        try:
            reader.receive(0, 0)
        except (_core.RingCorrupt, ValueError, MemoryError):
            continue
    reader.close()
    port.close()
    memory.close()


# --- threads and the end -----------------------------------------------------------------------------------------


@pytest.mark.guarantee("B7")
def test_a_close_from_another_thread_waits_for_the_call() -> None:
    """The mapping goes when the receiving call has ended, which leaving the ring brings about."""
    memory, port, reader = ends()
    with background(lambda: reader.receive(0, 20_000_000_000)) as outcome:
        while not reader.is_busy:
            time.sleep(0.001)
        assert reader.receive(0, 0) is _core.NOTHING, "a second call finds the port in use"
        reader.close()
        port.close()
        with pytest.raises(BufferError):
            memory.close()
        _core.ring_end(memory, 0)
    assert outcome == [_core.NOTHING]
    assert reader.receive(0, 0) is _core.NOTHING
    memory.close()


@pytest.mark.guarantee("B1", "B21", "B22")
def test_streams_pass_between_threads() -> None:
    """Readers that copy behind the writer get every byte of every message, in order."""
    memory = bare_ring(256 * PAGE, readers=2)
    port = _core.WritePort(memory, codec.describe)
    readers = [_core.ReadPort(memory, index, codec.build_owned) for index in (0, 1)]
    messages = [
        [number, bytes([number]) * (70_000 + 5000 * number), [bytearray(LONG)]] for number in range(60)
    ]

    def read(reader: _core.ReadPort) -> list[Any]:
        received: list[Any] = []
        deadline = time.monotonic() + 30.0
        while len(received) < len(messages) and time.monotonic() < deadline:
            value = reader.receive(20_000, 50_000_000)
            if value is not _core.NOTHING:
                received.append(value)
        return received

    with background(lambda: read(readers[0])) as first, background(lambda: read(readers[1])) as second:
        for message in messages:
            deadline = time.monotonic() + 30.0
            while not port.send(message):
                assert time.monotonic() < deadline
                time.sleep(0.0001)
    assert first == [messages]
    assert second == [messages]


def test_sending_from_many_threads_tears_nothing() -> None:
    """While one thread copies a long message, the port is in use for the others, which are told so."""
    memory, port, reader = ends(1024 * PAGE)
    sent: list[int] = []

    def send(number: int) -> None:
        sent.extend(number for _ in range(50) if port.send(bytes([number]) * (200_000 * (number % 2) + 1)))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    received: list[int] = []
    while any(thread.is_alive() for thread in threads) or _core.ring_wait(memory, 0, 0, 0) == 1:
        value = reader.receive(0, 1_000_000)
        if value is not _core.NOTHING:
            assert value == bytes([value[0]]) * (200_000 * (value[0] % 2) + 1)
            received.append(value[0])
    for thread in threads:
        thread.join()
    assert sorted(received) == sorted(sent)
    assert port.messages == reader.messages == len(sent) > 0
