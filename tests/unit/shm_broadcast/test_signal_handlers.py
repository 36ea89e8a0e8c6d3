"""Signal handlers that raise, and that call again, while messages are read and written."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from shm_broadcast import _core, codec
from shm_broadcast.errors import DecodeError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.queue import QueueReader, dequeue_any
from shm_broadcast.settings import MIN_RING_BYTES
from tests.handlers import is_swallowing
from tests.harness import run_ranks
from tests.queues import background, queue
from tests.remotes import remote_queue
from tests.waiting import wait_in, wait_until


@dataclass
class Numbered:
    """Its decoding runs Python code, which a handler can interrupt."""

    number: int


# What takes a second or two may take this long on a busy machine.
BOUNDED_S = 60.0
# How many exceptions of a handler must have struck inside of the calls of a test, and of a thorough one, which goes on
# until it has seen them but no longer than `LONG_S`.
FEW, MANY, LONG_S = 6, 1000, 300.0


class AlarmError(ValueError):
    """What the handler raises: a kind of error that decoding raises too."""


class Interrupted(Numbered):
    """An alarm goes off whenever one is described or built."""


class Bad(Numbered):
    """None can be built."""


def describe(each: Numbered) -> dict[str, int]:
    """Describe an object, during an alarm if this is the thread whose calls are tested."""
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGALRM)
    return {"number": each.number}


def build(data: dict[str, int]) -> Interrupted:
    """Build one during an alarm."""
    signal.raise_signal(signal.SIGALRM)
    return Interrupted(data["number"])


def refuse(_data: dict[str, int]) -> Bad:
    """Raise what a handler raises, without an alarm."""
    raise AlarmError("not of a handler")


class Alarms:
    """A handler of alarms that raises once each time that it is armed.

    Attributes:
        driver: The function that arms it, in whose own code it does not raise: from Python 3.12 on an exception of a
            handler that runs where a loop jumps back is not caught by a `try` around that loop.
    """

    def __init__(self) -> None:
        """Begin unarmed."""
        self.is_armed = False
        self.count = 0
        self._is_looking = False
        self.driver: CodeType | None = None

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        """Raise if it is armed, unless Python would swallow the exception here."""
        if not self.is_armed or self._is_looking:
            return
        # On a busy machine the next alarm comes during this look, which would go ever deeper.
        self._is_looking = True
        try:
            # From Python 3.12 on the next alarm may strike where this begins: what counts is where the first one
            # struck.
            while frame is not None and frame.f_code is type(self).__call__.__code__:
                frame = frame.f_back
            may_raise = (frame is None or frame.f_code is not self.driver) and not is_swallowing(frame)
        finally:
            self._is_looking = False
        if may_raise:
            self.is_armed = False
            self.count += 1
            raise AlarmError("the time is up")


@contextmanager
def alarms(interval_s: float) -> Iterator[Alarms]:
    """Let a handler run every `interval_s` seconds."""
    handler = Alarms()
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
    try:
        yield handler
    finally:
        handler.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


def register() -> None:
    """Let the codec carry the classes of this module."""
    codec.register_type(Interrupted, encode=describe, decode=build)
    codec.register_type(Bad, encode=lambda each: {"number": each.number}, decode=refuse)
    codec.register_type(
        Numbered, encode=lambda each: {"number": each.number}, decode=lambda data: Numbered(data["number"])
    )


def dequeue(reader: QueueReader, seen: list[int]) -> None:
    """Note the number of the next message."""
    message = reader.dequeue(20.0)
    seen.append(message[0].number)


def dequeue_typed(reader: QueueReader, seen: list[int]) -> None:
    """Note the number of the next message, which is converted."""
    message = reader.dequeue(20.0, list)
    seen.append(message[0].number)


def exchange(reader: QueueReader, seen: list[int]) -> None:
    """Note the number of the next message, read as `broadcast_object` does."""
    endpoint: Any = reader.endpoint
    while (message := endpoint.exchange(None)) is _core.NOTHING and (
        message := endpoint.message
    ) is _core.NOTHING:
        pass
    seen.append(message[0].number)


def try_dequeue(reader: QueueReader, seen: list[int]) -> None:
    """Note the number of the next message if it is there."""
    found, message = reader.try_dequeue()
    if found:
        seen.append(message[0].number)


def loan(reader: QueueReader, seen: list[int]) -> None:
    """Note the number of the next message, which is lent."""
    with reader.loan(20.0) as message:
        seen.append(message[0].number)


def dequeue_one(reader: QueueReader, seen: list[int]) -> None:
    """Note the number of the next message, read from one of several queues."""
    _, message = dequeue_any([reader], 20.0)
    seen.append(message[0].number)


READS = {each.__name__: each for each in (dequeue, dequeue_typed, exchange, try_dequeue, loan, dequeue_one)}


def read_among_alarms(
    rank: int, world_size: int, directory: Path, name: str, nbytes: int, count: int, least: int
) -> None:
    """Read `count` messages of a thread at a time, while a handler raises every 0.2 ms, until it has raised enough."""
    del rank, world_size, directory
    register()
    read, seen, raised = READS[name], list[int](), 0

    def send(first: int) -> None:
        payload = "x" * nbytes if nbytes < 1000 else np.zeros(nbytes, np.uint8)
        for number in range(first, first + count):
            writer.enqueue([Numbered(number), payload], 60.0)

    with queue(ring_bytes=16 * MIN_RING_BYTES) as (writer, [reader]), alarms(0.0002) as handler:
        handler.driver = read_among_alarms.__code__
        end = time.monotonic() + (BOUNDED_S if least <= FEW else LONG_S)
        while raised < least:
            total = len(seen) + count
            with background(partial(send, len(seen))) as outcome:
                while len(seen) < total:
                    if time.monotonic() > end:
                        handler.is_armed = False
                        ends: Any = (writer.endpoint, reader.endpoint)
                        numbers = [each.messages for each in ends]
                        pytest.fail(f"{len(seen)} of {total} messages, {numbers}, {raised} raised, {outcome}")
                    try:
                        while len(seen) < total:
                            # Each time, because Python swallows what a handler raises inside of a callback of a weak
                            # reference.
                            handler.is_armed = True
                            read(reader, seen)
                        handler.is_armed = False
                    except AlarmError:
                        pass
                handler.is_armed = False
            raised = handler.count
            assert outcome == [None]
            assert seen == list(range(total))
            if least <= FEW:
                break
    assert raised >= least


SIZES = pytest.mark.parametrize(("nbytes", "count"), [(10, 20_000), (100_000, 3_000), (900_000, 300)])


@pytest.mark.slow
@pytest.mark.guarantee("R14")
@pytest.mark.parametrize("name", READS)
@SIZES
def test_no_alarm_loses_or_repeats_a_message(name: str, nbytes: int, count: int) -> None:
    """Each message comes once and in order, whole, streamed or in parts, while a handler raises every 0.2 ms.

    In a process of its own: once torch.compile has installed a frame evaluator in a process, Python runs handlers also
    between the return of a function and the assignment of its result, which is then lost.
    """
    run_ranks(read_among_alarms, 1, name, nbytes, count, FEW, timeout_s=3 * BOUNDED_S)


@pytest.mark.thorough
@pytest.mark.guarantee("R14")
@pytest.mark.parametrize("name", READS)
@SIZES
def test_no_alarm_of_a_thousand_loses_or_repeats_a_message(name: str, nbytes: int, count: int) -> None:
    """The same, until a thousand exceptions have struck inside of a read."""
    run_ranks(read_among_alarms, 1, name, nbytes, count, MANY, timeout_s=LONG_S + BOUNDED_S)


def write_among_alarms(
    rank: int, world_size: int, directory: Path, nbytes: int, count: int, least: int
) -> None:
    """Write `count` messages at a time to a thread, while a handler raises every 0.2 ms, until it has raised enough."""
    del rank, world_size, directory
    register()
    payload: Any = "x" * nbytes if nbytes < 1000 else np.zeros(nbytes, np.uint8)
    seen: list[int] = []

    def receive(total: int) -> None:
        while len(seen) < total:
            seen.append(reader.dequeue(60.0)[0].number)

    with queue(ring_bytes=16 * MIN_RING_BYTES) as (writer, [reader]), alarms(0.0002) as handler:
        handler.driver = write_among_alarms.__code__
        end = time.monotonic() + (BOUNDED_S if least <= FEW else LONG_S)
        sent = 0
        while handler.count < least:
            total = sent + count
            with background(partial(receive, total)) as outcome:
                while sent < total:
                    assert time.monotonic() < end, (sent, total, handler.count)
                    try:
                        while sent < total:
                            handler.is_armed = True
                            writer.enqueue([Numbered(sent), payload], 60.0)
                            handler.is_armed = False
                            sent = writer.statistics().messages
                    except AlarmError:
                        pass
                    handler.is_armed = False
                    # The alarm may have struck behind the last step of the call.
                    sent = writer.statistics().messages
            assert outcome == [None]
            assert seen == list(range(total))
            if least <= FEW:
                break
    assert handler.count >= least


WHOLE = pytest.mark.parametrize(("nbytes", "count"), [(10, 20_000), (100_000, 3_000)])


@pytest.mark.slow
@pytest.mark.guarantee("R14")
@WHOLE
def test_no_alarm_cuts_or_repeats_a_message_that_is_written(nbytes: int, count: int) -> None:
    """A message is sent whole or not at all, as the writer's statistics tell. Those in parts are tested elsewhere."""
    run_ranks(write_among_alarms, 1, nbytes, count, FEW, timeout_s=3 * BOUNDED_S)


@pytest.mark.thorough
@pytest.mark.guarantee("R14")
@WHOLE
def test_no_alarm_of_a_thousand_cuts_or_repeats_a_message_that_is_written(nbytes: int, count: int) -> None:
    """The same, until a thousand exceptions have struck inside of a write."""
    run_ranks(write_among_alarms, 1, nbytes, count, MANY, timeout_s=LONG_S + BOUNDED_S)


@pytest.mark.guarantee("R14")
@pytest.mark.parametrize("read", [dequeue, loan])
@pytest.mark.parametrize("nbytes", [10, 100_000, 900_000])
def test_what_a_handler_raises_inside_a_hook_passes_unchanged(
    read: Callable[[QueueReader, list[int]], None], nbytes: int
) -> None:
    """It is no `DecodeError`, and the message whose decoding it interrupted comes with the next read."""
    seen: list[int] = []

    def send() -> None:
        for number in range(2):
            writer.enqueue([Interrupted(number), np.zeros(nbytes, np.uint8)], 20.0)

    with (
        queue(ring_bytes=4 * MIN_RING_BYTES) as (writer, [reader]),
        background(send),
        alarms(60.0) as handler,
    ):
        handler.is_armed = True
        with pytest.raises(AlarmError):
            read(reader, seen)
        read(reader, seen)
        read(reader, seen)
    assert seen == [0, 1]


@pytest.mark.guarantee("R14")
def test_what_a_handler_raises_while_an_object_is_described_passes_unchanged() -> None:
    """Nothing was sent then, and the queue goes on."""
    with queue() as (writer, [reader]), alarms(60.0) as handler:
        handler.is_armed = True
        with pytest.raises(AlarmError):
            writer.enqueue(Interrupted(1))
        writer.enqueue(Interrupted(2))
        assert reader.dequeue(5.0).number == 2


@pytest.mark.guarantee("R14")
def test_what_a_handler_raises_while_a_call_looks_around_is_no_failure_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A `ValueError` that strikes while the reader looks for its writer leaves the queue usable."""
    with queue() as (writer, [reader]), alarms(60.0) as handler:
        ring: Any = reader._ring
        before = ring._status

        def status(call: str) -> int:
            handler.is_armed = True
            signal.raise_signal(signal.SIGALRM)
            return int(before(call))

        monkeypatch.setattr(ring, "_status", status)
        with pytest.raises(AlarmError):
            reader.dequeue(0.2)
        monkeypatch.setattr(ring, "_status", before)
        writer.enqueue("next")
        assert reader.dequeue(5.0) == "next"


@pytest.mark.guarantee("R14")
def test_an_error_of_a_hook_itself_is_the_fault_of_the_message() -> None:
    """A `ValueError` that a decode function raises is a `DecodeError`, and the next message comes."""
    with queue() as (writer, [reader]):
        writer.enqueue(Bad(1))
        writer.enqueue("next")
        with pytest.raises(DecodeError, match="Bad refused its data"):
            reader.dequeue(5.0)
        assert reader.dequeue(5.0) == "next"


@pytest.mark.guarantee("R14")
@pytest.mark.parametrize(
    "kind",
    [
        "two arguments",
        "any arguments",
        "method",
        "object",
        "partial",
        "method that deletes",
        "deletes",
        "rebinds",
    ],
)
def test_exceptions_of_handlers_are_told_from_others(kind: str) -> None:
    """A handler may be of any kind and may let its arguments go; a function called by name is none."""

    def two(_number: int, _frame: FrameType | None) -> None:
        raise AlarmError("a handler")

    def any_number(*_arguments: object) -> None:
        raise AlarmError("a handler")

    class Owner:
        """Has a method as a handler."""

        def method(self, _number: int, _frame: FrameType | None) -> None:
            """Raise."""
            raise AlarmError("a handler")

        def deleting(self, number: int, frame: FrameType | None) -> None:
            """Let go of the arguments, and raise."""
            del number, frame
            raise AlarmError("a handler")

        __call__ = deleting

    def deletes(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise AlarmError("a handler")

    def rebinds(_number: int, frame: object) -> None:
        frame = None
        raise AlarmError(f"a handler: {frame}")

    handlers: dict[str, Any] = {
        "two arguments": two,
        "any arguments": any_number,
        "method": Owner().method,
        "object": Owner(),
        "partial": partial(Owner.deleting, Owner()),
        "method that deletes": Owner().deleting,
        "deletes": deletes,
        "rebinds": rebinds,
    }
    handler = handlers[kind]
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(AlarmError) as raised:
            signal.raise_signal(signal.SIGALRM)
        # Asked while the handler is installed, as in a hook that it has interrupted.
        assert raised_by_handler(raised.value)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(AlarmError) as called:
        handler(int(signal.SIGALRM), None)
    assert not raised_by_handler(called.value)


@pytest.mark.guarantee("R14")
def test_what_an_enum_raises_about_its_value_is_no_exception_of_a_handler() -> None:
    """The values SIG_DFL and SIG_IGN of a signal are members of an Enum, and no handlers written in Python."""
    with pytest.raises(ValueError, match="not a valid") as raised:
        signal.Handlers(5)
    assert not raised_by_handler(raised.value)


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("interval_s", [0.0, 0.05])
@pytest.mark.parametrize("is_far", [False, True])
def test_a_refused_call_of_a_handler_does_not_cut_a_long_message(*, interval_s: float, is_far: bool) -> None:
    """A handler that writes while parts of a message are out, and lets each refusal through, breaks nothing."""
    refusals: list[int] = []

    def nested(_number: int, _frame: FrameType | None) -> None:
        refusals.append(1)
        writer.enqueue("from the handler")

    def read() -> None:
        begun.wait(20.0)
        while len(messages) < 2:
            messages.append(reader.dequeue(20.0))

    def strike() -> None:
        # The reader takes nothing yet, so the handler runs while the rest of the message waits for room.
        wait_in("enqueue", main)
        signal.setitimer(signal.ITIMER_REAL, 0.01, interval_s)
        wait_until(lambda: len(refusals) > (3 if interval_s else 0), "the handler's calls")
        begun.set()

    messages: list[Any] = []
    begun, main = threading.Event(), threading.current_thread()
    long = bytes(range(256)) * 8192
    made: Any = remote_queue(local=[0]) if is_far else queue(ring_bytes=4 * MIN_RING_BYTES)
    with made as (writer, readers), background(read), background(strike):
        reader = readers[0]
        before = signal.signal(signal.SIGALRM, nested)
        try:
            with pytest.raises(UsageError, match="inside of a call on the queue already"):
                writer.enqueue(long, 20.0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        writer.enqueue("next", 20.0)
        if is_far:
            assert [readers[1].dequeue(20.0) for _ in range(2)] == [long, "next"]
    assert messages == [long, "next"]
    assert len(refusals) > (3 if interval_s else 0)
