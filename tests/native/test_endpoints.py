"""The native endpoints of a ring: objects that are not sent, calls that are refused, threads, and closing."""

import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from shm_broadcast import _core, codec
from shm_broadcast.errors import UsageError
from shm_broadcast.layout import FIELDS, PAGE
from tests.queues import LONG, RefusedError, background, bare_ring, ends, put_word, refuse, ring_write
from tests.unit.shm_broadcast.codec_samples import Point
from tests.waiting import sleeping_in, wait_until

# --- what is not sent -----------------------------------------------------------------------------------------


class Unknown:
    """A class that the codec does not know."""


def full(writer: _core.WriteEndpoint) -> None:
    """Fill the ring until less than 1 KB of room is left."""
    while writer.send_now(bytes(1000), 0) is None:
        pass


@pytest.mark.parametrize(
    ("prepare", "obj"),
    [(full, bytes(1000)), (full, LONG), (lambda _: None, bytes(64 * PAGE // 2))],
    ids=["no room", "no room for a stream", "longer than a record"],
)
def test_what_cannot_be_sent_at_once_is_returned_encoded(
    prepare: Callable[[Any], object], obj: object
) -> None:
    """Neither the ring nor a counter changes, and the encoded message can be written later."""
    memory, writer, _ = ends()
    prepare(writer)
    before = memory[:], writer.messages, writer.nbytes
    encoded = writer.send_now(obj, 0)
    assert encoded is not None
    assert codec.decode(codec.Message(*encoded).to_bytes()) == obj
    assert writer.write_now(*encoded[:2], 0) is False
    assert (memory[:], writer.messages, writer.nbytes) == before


@pytest.mark.parametrize("obj", [Unknown(), [1, {"a": Unknown()}]])
def test_what_cannot_be_encoded_changes_nothing(obj: object) -> None:
    """The error names the place in the object, and no byte of the ring changes."""
    memory, writer, _ = ends()
    before = memory[:]
    for send in (writer.send, writer.exchange, lambda each: writer.send_now(each, 0)):
        with pytest.raises(RefusedError) as caught:
            send(obj)
        assert caught.value.reason == _core.LOOK_UNENCODABLE
        assert memory[:] == before
    writer.send("next")
    assert writer.messages == 1


def test_ctrl_c_while_an_object_is_described_goes_up() -> None:
    """An ordinary exception is reported as an object that cannot be encoded. KeyboardInterrupt is raised unchanged."""
    memory = bare_ring()
    raised: list[type[BaseException]] = [KeyboardInterrupt, SystemExit, ValueError, UsageError, MemoryError]

    def describe(_obj: object) -> Any:
        raise raised[0]

    writer = _core.WriteEndpoint(memory, describe, "adaptive", refuse)
    before = memory[:]
    while raised:
        with pytest.raises(RefusedError if issubclass(raised[0], Exception) else raised[0]):
            writer.send([Point(1)])
        raised.pop(0)
        assert memory[:] == before
    writer.send("next")


def test_describing_may_close_the_endpoint() -> None:
    """If code of the application that runs within `send` closes the endpoint, nothing is published."""
    memory = bare_ring()

    def describe(obj: object) -> Any:
        writer.close(refuse)
        return codec.describe(obj)

    writer = _core.WriteEndpoint(memory, describe, "adaptive", refuse)
    before = memory[:]
    with pytest.raises(RefusedError) as caught:
        writer.send(Point(1))
    assert caught.value.reason == _core.LOOK_UNUSABLE
    assert memory[:] == before


def test_a_call_inside_of_a_call_is_refused() -> None:
    """A hook that describes or builds an object must not call the same endpoint."""
    memory = bare_ring(16 * PAGE)
    reasons: list[int] = []

    def inside(call: Callable[[], object]) -> None:
        with pytest.raises(RefusedError) as caught:
            call()
        reasons.append(caught.value.reason)

    def describe(obj: object) -> Any:
        inside(lambda: writer.send("inner"))
        return codec.describe(obj)

    def build(code: int, meta: object, body: object) -> object:
        inside(reader.receive)
        inside(lambda: reader.receive_within(0, 0))
        return codec.build_owned(code, meta, body)

    writer = _core.WriteEndpoint(memory, describe, "adaptive", refuse)
    reader = _core.ReadEndpoint(memory, 0, build, "adaptive", refuse)
    writer.send([Point(1)])
    assert reader.receive() == [Point(1)]
    assert reasons == [_core.LOOK_REENTRANT] * 3


def test_a_second_thread_waits_for_its_turn_within_its_deadline() -> None:
    """While one thread waits, the deadline of a second passes; a third without one gets the next message."""
    _, writer, reader = ends()
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
            writer.send(1)
            writer.send(2)
    assert (first, second) == ([1], [2])


class Acting(TorchFunctionMode):
    """Calls `act` once, when torch first calls a function of a tensor."""

    def __init__(self, act: Callable[[], object]) -> None:
        """Store `act`."""
        super().__init__()
        self._acts = [act]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `act` the first time, then the function."""
        if self._acts:
            self._acts.pop()()
        return func(*args, **(kwargs or {}))


def test_ctrl_c_while_a_tensor_is_looked_at_goes_up() -> None:
    """A KeyboardInterrupt ends the call. After an ordinary exception the tensor is described by Python."""
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
    """Both endpoints refuse every call in a forked child, and still work in the parent."""
    memory, writer, reader = ends()
    assert writer.send_now(1, 0) is None
    before = memory[:]
    child = os.fork()
    if child == 0:
        refusals = []
        for call in (lambda: writer.send(2), lambda: reader.receive_within(0, 1000)):
            try:
                call()
            except RefusedError as error:
                refusals.append(error.reason)
        is_inert = refusals == [_core.LOOK_UNUSABLE] * 2
        os._exit(0 if is_inert and memory[:] == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert writer.send_now(3, 0) is None
    assert [reader.receive_within(0, 0), reader.receive_within(0, 0)] == [1, 3]


def has_passed_in_child(act: Callable[[], bool]) -> bool:
    """Fork, and return whether `act` returned True in the child."""
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            is_right = act()
        finally:
            os._exit(0 if is_right else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.guarantee("G10")
def test_a_child_that_is_forked_while_its_parent_listens_does_not_end_that() -> None:
    """Writers that saw no listener would not wake the parent."""
    bell = mmap.mmap(-1, PAGE)
    seen: list[int] = []

    def listeners() -> int:
        return int.from_bytes(bell[4:8], "little")

    def look() -> None:
        if child := os.fork():
            os.waitpid(child, 0)
            seen.append(listeners())

    try:
        _core.bell_listen(bell, look, 0, 0)
    finally:
        if not seen:
            os._exit(0)
    assert [*seen, listeners()] == [1, 0]


@pytest.mark.guarantee("B19")
@pytest.mark.parametrize("lets_go", [False, True])
def test_a_forked_child_gives_no_loan_back(*, lets_go: bool) -> None:
    """However the child ends the loan that it inherits, the parent's message stays on loan, and the next one comes."""
    memory, writer, reader = ends()
    assert [writer.send_now(each, 0) for each in ("lent", "next")] == [None, None]
    block = _core.LoanBlock()
    block.hold = reader.lend(0)
    reader.lent_bytes = 1
    before = memory[:]

    def end_loan() -> bool:
        if lets_go:
            block.hold = None
        else:
            block.__exit__()
        return memory[:] == before and not reader.is_busy

    assert has_passed_in_child(end_loan)
    block.__exit__()
    assert reader.receive_within(0, 0) == "next"


@pytest.mark.guarantee("B19")
@pytest.mark.parametrize("nbytes", [10, len(LONG), 40 * PAGE])
def test_a_child_that_is_forked_while_a_message_is_decoded_does_not_take_it(nbytes: int) -> None:
    """A message in one record, streamed or in parts is refused to the child, and comes to the parent."""
    memory = bare_ring(64 * PAGE)
    before: list[bytes] = []
    children: list[int] = []
    statuses: list[int] = []

    def build(code: int, meta: object, body: object) -> object:
        if not before:
            before.append(memory[:])
            children.append(os.fork())
            if children[0] != 0:
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
        return codec.build_owned(code, meta, body)

    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse)
    reader = _core.ReadEndpoint(memory, 0, build, "adaptive", refuse)
    for each in ([Point(1), bytes(nbytes)], "next"):
        writer.send(each, 0)
    reason = -1
    try:
        assert reader.receive(10**9) == [Point(1), bytes(nbytes)]
    except RefusedError as error:
        reason = error.reason
    finally:
        if children == [0]:
            os._exit(0 if reason == _core.LOOK_UNUSABLE and memory[:] == before[0] else 1)
    assert statuses == [0]
    assert reader.receive(0) == "next"


@pytest.mark.guarantee("B19")
def test_a_child_that_is_forked_during_a_wait_neither_reads_nor_writes() -> None:
    """What a wait was for comes while the process is forked; the child is refused, and the parent goes on."""
    memory = bare_ring(64 * PAGE)
    before: list[bytes] = []
    children: list[int] = []

    def look_around(reason: int, detail: object) -> Exception | None:
        if reason == _core.LOOK_BEGIN:
            if not has_room:
                _core.ring_release(memory, 0)
            else:
                assert ring_write(memory, codec.encode("read").to_bytes(), (), 0, 0, 0)
            before.append(memory[:])
            children.append(os.fork())
            if children[-1] != 0:
                children[-1] = os.waitstatus_to_exitcode(os.waitpid(children[-1], 0)[1]) + 1
        return refuse(reason, detail)

    def call() -> None:
        reason = -1
        try:
            (reader.receive if has_room else lambda: writer.send(LONG))()
        except RefusedError as error:
            reason = error.reason
        finally:
            if children[-1:] == [0]:
                os._exit(0 if reason == _core.LOOK_UNUSABLE and memory[:] == before[-1] else 1)

    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", look_around)
    reader = _core.ReadEndpoint(memory, 0, codec.build_owned, "adaptive", look_around)
    has_room = True
    call()
    has_room = False
    for _ in range(2):
        writer.send(LONG)
    call()
    assert children == [1, 1]


# --- what is refused ------------------------------------------------------------------------------------------


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
    """No endpoint is created on memory that holds no ring of this version."""
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
        (_core.LoanBlock, (0,)),
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
    """Wrong arguments are refused before the ring is changed."""
    with pytest.raises((ValueError, TypeError, OverflowError, BufferError)):
        make(*arguments)


# --- threads and the end --------------------------------------------------------------------------------------


@pytest.mark.guarantee("B7")
def test_a_close_from_another_thread_waits_for_the_call() -> None:
    """`close` leaves the mapping until the receiving call has ended. Leaving the ring ends that call."""
    memory, writer, reader = ends()
    with background(lambda: reader.receive_within(0, 20_000_000_000)) as outcome:
        wait_until(lambda: reader.is_busy, "the thread in its call", poll_s=0.001)
        reader.close(refuse)
        writer.close(refuse)
        with pytest.raises(BufferError):
            memory.close()
        _core.ring_end(memory, 0)
    assert outcome == [_core.NOTHING]
    with pytest.raises(RefusedError):
        reader.receive_within(0, 0)
    memory.close()


@pytest.mark.guarantee("B1", "B21", "B22")
def test_streams_pass_between_threads() -> None:
    """Readers that copy a message while it is written get every byte of it, in order."""
    memory = bare_ring(256 * PAGE, readers=2)
    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse)
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
        return writer.send_now(message, 0) is None

    with background(lambda: read(readers[0])) as first, background(lambda: read(readers[1])) as second:
        for message in messages:
            wait_until(partial(is_sent, message), f"room for message {message[0]}", 30.0, 0.0001)
    assert first == [messages]
    assert second == [messages]


def test_sending_from_many_threads_tears_nothing() -> None:
    """While one thread copies a long message, the others wait for their turn."""
    memory, writer, reader = ends(1024 * PAGE)
    sent: list[int] = []

    def send(number: int) -> None:
        message = bytes([number]) * (200_000 * (number % 2) + 1)
        sent.extend(number for _ in range(50) if writer.send_now(message, 0) is None)

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
    assert writer.messages == reader.messages == len(sent) > 0
