"""Reads that are interrupted, overtaken by another thread, or met by an overwritten ring."""

import _thread
import copy
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, product
from types import FrameType
from typing import Any

import numpy as np
import pytest

from shm_broadcast import codec
from shm_broadcast.errors import CommTimeoutError, DecodeError, GroupBrokenError, InternalError, UsageError
from shm_broadcast.layout import FIELDS
from shm_broadcast.queue import QueueReader, dequeue_any
from shm_broadcast.settings import MIN_RING_BYTES
from tests.handlers import Interrupt, handling_at, raising_at
from tests.queues import background, fill, memory_of, put_word, queue
from tests.waiting import wait_until

INTERRUPTS: list[type[BaseException]] = []
"""What the next decoding of a `Touchy` raises."""

LATE_INTERRUPTS: list[type[BaseException]] = []
"""What the next decoding of a `Scaled` raises once it has changed what it got."""


@dataclass
class Touchy:
    """Its decoding can be interrupted."""

    data: Any


@dataclass
class Scaled:
    """Its decoding changes what it gets in place."""

    weights: Any
    rest: Any


@dataclass
class Striking:
    """A key that announces SIGALRM when it is compared, and then runs no Python code in which a handler could raise."""

    __eq__ = staticmethod(_thread.interrupt_main)  # type: ignore[assignment]

    def __hash__(self) -> int:
        """Return the hash of the signal's number, so that it is compared with that."""
        return hash(int(signal.SIGALRM))


def read(reader: QueueReader, call: str) -> Any:
    """Return a copy of the next message, read by `dequeue`, `try_dequeue` or `loan`."""
    if call == "dequeue":
        return reader.dequeue(10.0)
    if call == "loan":
        with reader.loan(10.0) as lent:
            return copy.deepcopy(lent)
    while not (found := reader.try_dequeue())[0]:
        time.sleep(0.001)
    return found[1]


def build(data: dict[str, Any]) -> Touchy:
    """Decode, or raise."""
    if INTERRUPTS:
        raise INTERRUPTS.pop()
    return Touchy(data["data"])


def scale(data: list[Any]) -> Scaled:
    """Change an array and a bytearray in place."""
    weights, rest = data
    weights *= 3
    text = bytes(rest)
    rest.clear()
    if LATE_INTERRUPTS:
        raise LATE_INTERRUPTS.pop()
    return Scaled(weights, text)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    codec.register_type(Touchy, encode=lambda each: {"data": each.data}, decode=build)
    codec.register_type(Scaled, encode=lambda each: [each.weights, each.rest], decode=scale)
    codec.register_type(Striking)


@pytest.mark.guarantee("B6")
@pytest.mark.parametrize("call", ["dequeue", "try_dequeue", "loan"])
@pytest.mark.parametrize("nbytes", [10, 30_000, 200_000, 900_000])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_a_message_whose_decoding_is_interrupted_stays_the_next(
    call: str, nbytes: int, interrupt: type[BaseException]
) -> None:
    """This holds for a message in one record, a streamed one and one in parts."""
    message = Touchy(np.arange(nbytes, dtype=np.uint8))

    def send() -> None:
        writer.enqueue(message, 20.0)
        writer.enqueue("next", 20.0)

    with queue(ring_bytes=4 * MIN_RING_BYTES) as (writer, [reader]):
        with background(send):
            for _ in range(2):
                INTERRUPTS.append(interrupt)
                with pytest.raises(interrupt):
                    read(reader, call)
            assert np.array_equal(read(reader, call).data, message.data)
            assert reader.dequeue(10.0) == "next"
        assert reader.statistics().messages == 2


@pytest.mark.guarantee("R14")
@pytest.mark.parametrize("call", ["read", "try_read"])
def test_a_strike_at_any_place_of_a_read_whose_type_is_refused_leaves_the_message(call: str) -> None:
    """The type is a function, into which nothing can be decoded. The next read gets the message in any case."""
    with queue() as (writer, [reader]):

        def refuse() -> None:
            with pytest.raises(UsageError, match="decode to"):
                getattr(reader._ring, call)(type_=lambda: None)

        for step in count():
            writer.enqueue(step)
            is_struck = raising_at(step, refuse, ("shm_broadcast/ring/reader.py", "codec/__init__.py"))
            assert reader.dequeue(10.0) == step
            if not is_struck:
                break
        assert step > 3


@pytest.mark.guarantee("R14", "B3")
def test_a_loan_does_not_outlive_its_block_while_what_a_handler_has_raised_is_kept() -> None:
    """Wherever it raises, at the end of the block too, the loan is over and its room is free."""
    places = ("ring/reader.py", "test_interrupted_reads.py")
    with queue() as (writer, [reader]):
        for step in count():
            writer.enqueue(step, 1.0)
            seen: list[int] = []
            raised: list[Interrupt] = []

            def lend(seen: list[int] = seen) -> None:
                with reader.loan(10.0) as lent:
                    seen += [lent]

            def interrupt() -> None:
                raise Interrupt

            try:
                came = handling_at(step, lend, interrupt, places)
            except Interrupt as error:
                raised.append(error)
                came = True
            if not seen:
                seen.append(reader.dequeue(1.0))
            assert seen == [step]
            assert reader.try_dequeue() == (False, None)
            assert reader.statistics().readers[0].behind_bytes == 0
            if not came:
                break
        assert step > 8


def test_a_stack_of_contexts_can_enter_a_loan() -> None:
    """`contextlib.ExitStack` takes the methods of the loan's class in place of those of the loan."""
    with queue() as (writer, [reader]):
        writer.enqueue("lent", 1.0)
        writer.enqueue("next", 1.0)
        with ExitStack() as stack:
            assert stack.enter_context(reader.loan(1.0)) == "lent"
            with pytest.raises(UsageError, match="on loan"):
                reader.dequeue(1.0)
        assert reader.dequeue(1.0) == "next"


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Raise, as the handler of a signal."""
    raise Interrupt


@pytest.mark.guarantee("R14")
@pytest.mark.parametrize("call", ["dequeue", "try_dequeue"])
@pytest.mark.parametrize(
    ("where", "nbytes"),
    [
        *product(["behind the decoding", "in a later function"], [30_000, 100_000, 900_000]),
        *product(["in the function"], [30_000, 100_000]),
    ],
)
def test_a_function_changes_an_interrupted_message_once(call: str, where: str, nbytes: int) -> None:
    """A message in one record, a streamed one and one in parts have the changes of one call of its function.

    Of one in parts, an interrupted function gets what it has left.
    """
    scaled = Scaled(np.arange(nbytes, dtype=np.uint8), bytearray(b"x" * 5000))
    last = Touchy("last") if where == "in a later function" else {int(signal.SIGALRM): 0, Striking(): 0}

    def send() -> None:
        writer.enqueue([scaled, last], 20.0)
        writer.enqueue("next", 20.0)

    with queue(ring_bytes=4 * MIN_RING_BYTES) as (writer, [reader]), background(send):
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for _ in range(1 if where == "behind the decoding" else 2):
                INTERRUPTS[:] = [Interrupt] if where == "in a later function" else []
                LATE_INTERRUPTS[:] = [Interrupt] if where == "in the function" else []
                with pytest.raises(Interrupt):
                    read(reader, call)
        finally:
            signal.signal(signal.SIGALRM, before)
        found = read(reader, call)[0]
        assert np.array_equal(found.weights, scaled.weights * 3)
        assert found.rest == b"x" * 5000
        assert reader.dequeue(10.0) == "next"
        assert reader.statistics().messages == 2


@pytest.mark.guarantee("B10")
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_loan_of_an_overwritten_ring_ends(when: str) -> None:
    """The loan ends with the queue's own error, and the next call says that the queue is broken."""
    with queue() as (writer, [reader]):
        writer.enqueue("a message")
        if when == "before":
            put_word(memory_of(reader), FIELDS["magic"], 0)
        with pytest.raises(InternalError, match="the shared memory was overwritten"), reader.loan(1.0):
            put_word(memory_of(reader), FIELDS["published"], 1)
        with pytest.raises(GroupBrokenError, match="the shared memory was overwritten"):
            reader.dequeue(1.0)


@pytest.mark.guarantee("B10")
def test_waiting_for_several_queues_tells_of_an_overwritten_one() -> None:
    """The error is the queue's own, and names the call."""
    with queue() as (_, [reader]), queue() as (_, [other]):
        put_word(memory_of(reader), FIELDS["magic"], 0)
        with pytest.raises(InternalError, match=r"dequeue_any on queue .* overwritten"):
            dequeue_any([other, reader], 1.0)


def test_too_many_queues_to_wait_for_are_refused() -> None:
    """One queue more than the kernel can wait for is refused before anything is read."""
    with queue() as (writer, [reader]):
        writer.enqueue("kept")
        with pytest.raises(UsageError, match="at most 128 queues"):
            dequeue_any([reader] * 129, 1.0)
        assert dequeue_any([reader] * 128, 1.0) == (0, "kept")


@pytest.mark.guarantee("B4")
@pytest.mark.parametrize("lends", [False, True])
def test_waiting_for_a_turn_counts_towards_the_deadline(*, lends: bool) -> None:
    """A call that waits while another thread has the queue ends at its own deadline, and says that one."""

    def read_first() -> None:
        with pytest.raises(CommTimeoutError, match=r"within 0\.6 s"):
            reader.dequeue(0.6)

    with queue() as (_, [reader]), background(read_first):
        endpoint: Any = reader.endpoint
        wait_until(lambda: endpoint.is_busy, "the other thread to wait")
        start = time.monotonic()
        late = pytest.raises(CommTimeoutError, match=r"within 0\.8 s")
        if lends:
            with late, reader.loan(0.8):
                pass
        else:
            with late:
                reader.dequeue(0.8)
        # With a fresh deadline after the other thread's it would take 1.4 s.
        assert 0.8 <= time.monotonic() - start < 1.3


@pytest.mark.guarantee("B4")
def test_a_message_that_is_taken_away_does_not_prolong_a_read() -> None:
    """A signal handler that reads the message before the interrupted call takes it leaves that call its deadline."""
    with queue() as (writer, [reader]):
        ring: Any = reader._ring
        endpoint, fetched = ring.endpoint, list[tuple[int, ...]]()

        class Overtaken:
            """The endpoint, whose first three messages a handler takes after 0.2 s each."""

            def fetch(self, *times_ns: int) -> None:
                fetched.append(times_ns)
                if len(fetched) <= 3:
                    time.sleep(0.2)
                    writer.enqueue("taken away")
                endpoint.fetch(*times_ns)
                if len(fetched) <= 3:
                    assert endpoint.message == "taken away"

            def __getattr__(self, name: str) -> Any:
                return getattr(endpoint, name)

        ring.endpoint = Overtaken()
        start = time.monotonic()
        with pytest.raises(CommTimeoutError, match=r"within 0\.7 s"):
            reader.dequeue(0.7)
        assert time.monotonic() - start < 0.9
        ring.endpoint = endpoint
        writer.enqueue("next")
        assert reader.dequeue(1.0) == "next"


@pytest.mark.guarantee("R14")
@pytest.mark.parametrize("call", ["dequeue", "try_dequeue"])
def test_what_a_handler_raises_in_a_conversion_leaves_the_message(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Also if it is a `DecodeError`, which otherwise means that the message is not of the type."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise DecodeError("of a handler")

    def interrupted(*_: object) -> Any:
        signal.raise_signal(signal.SIGALRM)

    with queue() as (writer, [reader]):
        ring: Any = reader._ring
        read = (lambda: ring.read(1.0, list)) if call == "dequeue" else (lambda: ring.try_read(type_=list)[1])
        writer.enqueue([1])
        writer.enqueue({})
        before = signal.signal(signal.SIGALRM, handler)
        try:
            monkeypatch.setattr(codec, "convert", interrupted)
            with pytest.raises(DecodeError, match="of a handler"):
                read()
        finally:
            signal.signal(signal.SIGALRM, before)
            monkeypatch.undo()
        assert read() == [1]
        with pytest.raises(DecodeError):
            read()
        assert reader.try_dequeue() == (False, None)


def test_a_time_out_names_the_deadline_of_its_own_call() -> None:
    """The deadline of an earlier call does not appear."""
    with queue() as (writer, _):
        writer.enqueue("first", 50.0)
        fill(writer, bytes(20_000))
        endpoint: Any = writer.endpoint
        endpoint.timeout_ns = 200_000_000
        with pytest.raises(CommTimeoutError, match=r"within 0\.2 s"):
            endpoint.exchange(bytes(20_000))
