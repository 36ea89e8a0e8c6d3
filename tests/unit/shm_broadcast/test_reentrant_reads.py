"""Calls on a local queue that signal handlers and codec hooks make inside of a call of their own thread."""

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from shm_broadcast import codec
from shm_broadcast.errors import CommTimeoutError, DecodeError, UsageError
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from shm_broadcast.settings import MIN_RING_BYTES
from tests.handlers import alarm_in
from tests.queues import background, queue
from tests.waiting import sleeping_in, wait_until

# What would hang for ever ends behind this time, with an error that fails the test.
RESCUE_S = 30.0
# A refusal waits for nothing; a busy machine may take this long.
AT_ONCE_S = 2.0
INSIDE = "this thread is inside of a call on the queue already"


@dataclass
class Hooked:
    """Its hooks of the codec make the calls of a test."""

    number: int


ENCODING: list[Callable[[], object]] = []
DECODING: list[Callable[[], object]] = []


def describe(hooked: Hooked) -> dict[str, int]:
    """Encode, behind the calls of a test."""
    for call in ENCODING:
        call()
    return {"number": hooked.number}


def build(data: dict[str, int]) -> Hooked:
    """Decode, behind the calls of a test."""
    for call in DECODING:
        call()
    return Hooked(data["number"])


def register() -> None:
    """Let the codec carry a `Hooked`."""
    codec.register_type(Hooked, encode=describe, decode=build)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


@contextmanager
def called_by(hook: list[Callable[[], object]], call: Callable[[], object]) -> Iterator[None]:
    """Let a hook of the codec make a call within the block."""
    hook.append(call)
    try:
        yield
    finally:
        hook.clear()


def lend(reader: QueueReader, timeout_s: float | None) -> Any:
    """Return a copy of what a loan yields."""
    with reader.loan(timeout_s) as message:
        return copy.deepcopy(message)


def exchange(reader: QueueReader, _timeout_s: float | None) -> Any:
    """Read as `broadcast_object` does."""
    endpoint: Any = reader.endpoint
    endpoint.exchange(None)
    return endpoint.message


Read = Callable[[QueueReader, float | None], Any]
READS: dict[str, Read] = {
    "dequeue": lambda reader, timeout_s: reader.dequeue(timeout_s),
    "loan": lend,
    "dequeue_any": lambda reader, timeout_s: dequeue_any([reader], timeout_s)[1],
    "try_dequeue": lambda reader, _: reader.try_dequeue()[1],
}
OUTER: dict[str, Read] = {
    "dequeue": READS["dequeue"],
    "typed": lambda reader, timeout_s: reader.dequeue(timeout_s, Any),
    "loan": lend,
    "exchange": exchange,
}
WAITS = {"dequeue": "dequeue", "typed": "dequeue", "loan": "lend", "exchange": "exchange"}
"""The name of a function in which each of these waits."""


class Refused:
    """Makes a call that must be refused at once, and keeps the texts."""

    def __init__(self, call: Callable[[], object]) -> None:
        """Begin without any text."""
        self.call = call
        self.texts: list[str] = []
        self.has_come = threading.Event()
        self.longest_s = 0.0

    def __call__(self) -> None:
        """Make the call."""
        start = time.monotonic()
        try:
            found = self.call()
        except UsageError as error:
            self.texts.append(str(error) if type(error) is UsageError else repr(error))
        else:
            self.texts.append(f"returned {found!r}")
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        self.has_come.set()

    def check(self, name: str, why: str = INSIDE) -> None:
        """Check that the call was refused once, at once, and by its name."""
        (text,) = self.texts
        assert text.startswith(f"{name} on queue 'steps' ("), text
        assert why in text
        assert self.longest_s < AT_ONCE_S


@contextmanager
def rescued(*ends: QueueReader | QueueWriter) -> Iterator[None]:
    """Close the ends of a queue if the block takes too long, which ends every call on them with an error."""
    rescue = threading.Timer(RESCUE_S, lambda: [end.close() for end in ends])
    rescue.start()
    try:
        yield
    finally:
        rescue.cancel()
        rescue.join()


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("timeout_s", [None, RESCUE_S])
@pytest.mark.parametrize("inner", READS)
@pytest.mark.parametrize("outer", OUTER)
def test_a_handler_cannot_read_inside_of_a_waiting_read(
    outer: str, inner: str, timeout_s: float | None
) -> None:
    """It gets an error that names its call while nothing has come, and the interrupted read gets its message."""
    with queue() as (writer, [reader]), rescued(reader):
        refused = Refused(lambda: READS[inner](reader, timeout_s))

        def send() -> None:
            assert refused.has_come.wait(RESCUE_S)
            for number in range(3):
                writer.enqueue(number)

        with background(send), alarm_in(WAITS[outer], refused):
            assert OUTER[outer](reader, timeout_s) == 0
        assert [reader.dequeue(RESCUE_S) for _ in range(2)] == [1, 2]
        refused.check(inner)
        assert reader.statistics().messages == 3


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("outer", ["dequeue", "loan"])
def test_a_refused_read_of_a_handler_leaves_the_name_of_the_outer_call(outer: str) -> None:
    """The time-out of the interrupted read is that of its own call."""
    with queue() as (_, [reader]):
        refused = Refused(lambda: lend(reader, None))
        late = pytest.raises(CommTimeoutError, match=f"^{outer} on queue")
        with rescued(reader), late, alarm_in(WAITS[outer], refused):
            OUTER[outer](reader, 0.4)
        refused.check("loan")


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("outer", ["dequeue", "loan"])
def test_a_refusal_that_a_handler_lets_through_ends_the_read_and_loses_nothing(outer: str) -> None:
    """The interrupted read raises that error, and the next one gets the message."""
    with queue() as (writer, [reader]), rescued(reader):
        with (
            pytest.raises(UsageError, match="^dequeue on queue 'steps' .*inside of a call"),
            alarm_in(WAITS[outer], lambda: reader.dequeue(None)),
        ):
            OUTER[outer](reader, None)
        writer.enqueue("next")
        assert reader.dequeue(RESCUE_S) == "next"


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("nbytes", [10, 100_000, 900_000], ids=["whole", "streamed", "parts"])
@pytest.mark.parametrize("inner", READS)
@pytest.mark.parametrize("outer", OUTER)
def test_a_hook_cannot_read_the_queue_whose_message_it_decodes(outer: str, inner: str, nbytes: int) -> None:
    """It gets an error that names its call, and its message arrives whole, in order with the next."""
    with queue(ring_bytes=4 * MIN_RING_BYTES) as (writer, [reader]), rescued(reader, writer):
        refused = Refused(lambda: READS[inner](reader, None))

        def send() -> None:
            for number in range(2):
                writer.enqueue([Hooked(number), np.full(nbytes, number, np.uint8)])

        with background(send):
            with called_by(DECODING, refused):
                first = OUTER[outer](reader, None)
            assert first[0] == Hooked(0)
            assert (first[1] == np.zeros(nbytes, np.uint8)).all()
            second = reader.dequeue(RESCUE_S)
        assert second[0] == Hooked(1)
        assert (second[1] == np.ones(nbytes, np.uint8)).all()
        # A message in parts is copied.
        is_lent = outer == "loan" and nbytes < 900_000
        refused.check(inner, why="a message is on loan to this thread" if is_lent else INSIDE)


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("nbytes", [10, 100_000, 900_000], ids=["whole", "streamed", "parts"])
@pytest.mark.parametrize("inner", ["enqueue", "exchange"])
def test_a_hook_cannot_write_to_the_queue_for_which_it_encodes(inner: str, nbytes: int) -> None:
    """It gets an error that names its call, and the message that is being encoded goes out alone and whole."""
    with queue(ring_bytes=4 * MIN_RING_BYTES) as (writer, [reader]), rescued(reader, writer):
        endpoint: Any = writer.endpoint
        call = writer.enqueue if inner == "enqueue" else endpoint.exchange
        refused = Refused(lambda: call("nested"))
        with background(lambda: [reader.dequeue(RESCUE_S) for _ in range(2)]) as outcome:
            with called_by(ENCODING, refused):
                writer.enqueue([Hooked(0), np.ones(nbytes, np.uint8)], RESCUE_S)
            writer.enqueue("next", RESCUE_S)
        (message, following) = outcome[0]
        assert message[0] == Hooked(0)
        assert message[1].sum() == nbytes
        assert following == "next"
        refused.check("enqueue")


@pytest.mark.guarantee("R15")
def test_a_read_that_a_hook_lets_through_is_the_fault_of_its_message() -> None:
    """The call raises it as the error of the hook, and the next message comes."""
    with queue() as (writer, [reader]), rescued(reader):
        writer.enqueue(Hooked(0))
        writer.enqueue("next")
        faulty = pytest.raises(DecodeError, match="inside of a call on the queue already")
        with called_by(DECODING, lambda: reader.dequeue(None)), faulty as raised:
            reader.dequeue(None)
        assert "dequeue on queue 'steps'" in str(raised.value)
        assert reader.dequeue(RESCUE_S) == "next"


@pytest.mark.guarantee("R15")
def test_another_thread_may_read_while_one_is_inside() -> None:
    """It waits for its turn in `dequeue`, and finds nothing by `try_dequeue`, where the same thread is refused."""
    with queue() as (writer, [reader]), rescued(reader):
        refused = Refused(reader.try_dequeue)

        def read_beside() -> Any:
            assert refused.has_come.wait(RESCUE_S)
            assert reader.try_dequeue() == (False, None)
            return dequeue_any([reader], RESCUE_S)

        def send() -> None:
            wait_until(lambda: sleeping_in("dequeue_any"), "the other thread")
            for number in range(2):
                writer.enqueue(number)

        with background(read_beside) as beside, background(send), alarm_in("dequeue", refused):
            own = reader.dequeue(None)
        assert sorted((own, beside[0][1])) == [0, 1]
        refused.check("try_dequeue")
