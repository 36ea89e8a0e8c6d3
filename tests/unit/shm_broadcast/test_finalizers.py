"""Finalizers that call a local queue inside of a call of their own thread: refused, and no message is lost."""

import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from shm_broadcast.errors import UsageError
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.settings import MIN_RING_BYTES
from tests.finalizers import KINDS, collecting, finalize
from tests.handlers import handling_at
from tests.queues import background, fill, queue
from tests.unit.shm_broadcast.test_reentrant_reads import (
    DECODING,
    ENCODING,
    READS,
    RESCUE_S,
    Hooked,
    Refused,
    called_by,
    register,
    rescued,
)

# Where a call on a local queue runs Python code, and a finalizer can run.
FILES = tuple(
    f"shm_broadcast/{name}.py"
    for name in ("queue", "timeouts", "codec/__init__", "ring/reader", "ring/writer")
)
SIZES = pytest.mark.parametrize("nbytes", [10, 900_000], ids=["whole", "parts"])


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


def finalizing_once(
    monkeypatch: pytest.MonkeyPatch, end: QueueReader | QueueWriter, kind: str, call: Refused
) -> None:
    """Let the next wait of `end` drop an object whose finalizer makes a call."""
    ring: Any = end._ring
    look = ring.raise_if_lost

    def drop_and_look(name: str) -> None:
        if not call.texts:
            finalize(kind, call)
        look(name)

    monkeypatch.setattr(ring, "raise_if_lost", drop_and_look)


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("inner", READS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_finalizer_cannot_read_inside_of_a_waiting_read(
    monkeypatch: pytest.MonkeyPatch, kind: str, inner: str
) -> None:
    """It gets an error that names its call; the read in which it ran gets the next message, and later ones come."""
    with queue() as (writer, [reader]), rescued(reader):
        refused = Refused(partial(READS[inner], reader, None))
        finalizing_once(monkeypatch, reader, kind, refused)

        def send() -> None:
            assert refused.has_come.wait(RESCUE_S)
            for number in range(3):
                writer.enqueue(number)

        with background(send):
            assert [reader.dequeue(RESCUE_S) for _ in range(3)] == [0, 1, 2]
        refused.check(inner)


@pytest.mark.guarantee("R15")
@SIZES
@pytest.mark.parametrize("kind", KINDS)
def test_a_finalizer_cannot_write_inside_of_a_write_that_waits_for_room(
    monkeypatch: pytest.MonkeyPatch, kind: str, nbytes: int
) -> None:
    """It gets an error that names its call, and puts nothing between, or between the parts of, the others."""
    with queue(ring_bytes=4 * MIN_RING_BYTES) as (writer, [reader]), rescued(writer, reader):
        sent, _ = fill(writer, "before")
        refused = Refused(partial(writer.enqueue, "nested"))
        finalizing_once(monkeypatch, writer, kind, refused)
        long = bytes(nbytes)

        def read() -> list[Any]:
            assert refused.has_come.wait(RESCUE_S)
            return [reader.dequeue(RESCUE_S) for _ in range(sent + 2)]

        with background(read) as outcome:
            writer.enqueue(long, RESCUE_S)
            writer.enqueue("next", RESCUE_S)
        assert outcome == [["before"] * sent + [long, "next"]]
        refused.check("enqueue")


@pytest.mark.guarantee("R15")
@SIZES
@pytest.mark.parametrize("kind", KINDS)
def test_a_finalizer_inside_of_a_hook_can_neither_read_nor_write(kind: str, nbytes: int) -> None:
    """What a hook of the codec drops may call the end that encodes or decodes: both calls are refused by name."""
    with queue(ring_bytes=4 * MIN_RING_BYTES) as (writer, [reader]), rescued(writer, reader):
        reads, writes = Refused(partial(reader.dequeue, None)), Refused(partial(writer.enqueue, "nested"))
        last = threading.Event()

        def send() -> None:
            with called_by(ENCODING, partial(finalize, kind, writes)):
                writer.enqueue([Hooked(0), np.ones(nbytes, np.uint8)], RESCUE_S)
            writer.enqueue("next", RESCUE_S)
            last.wait(RESCUE_S)

        with background(send) as outcome:
            with called_by(DECODING, partial(finalize, kind, reads)):
                message = reader.dequeue(RESCUE_S)
            assert reader.dequeue(RESCUE_S) == "next"
            last.set()
        assert message[0] == Hooked(0)
        assert message[1].sum() == nbytes
        assert outcome == [None]
        reads.check("dequeue")
        writes.check("enqueue")


class Counted:
    """Makes a call whenever the collector comes by inside of another one, and counts how often it was refused."""

    def __init__(self, end: QueueReader | QueueWriter, call: Callable[[], object]) -> None:
        """Begin with no refusal."""
        self.endpoint: Any = end.endpoint
        self.call = call
        self.refused = 0
        self.others: list[object] = []

    def __call__(self) -> bool:
        """Make the call; return that it is to be made again."""
        if self.endpoint.is_busy:
            try:
                self.others.append(self.call())
            except UsageError:
                self.refused += 1
            except BaseException as error:
                self.others.append(error)
        return True


@pytest.mark.guarantee("R15")
@SIZES
@pytest.mark.parametrize("writes", [False, True])
def test_a_collector_that_comes_by_everywhere_disturbs_no_message(*, writes: bool, nbytes: int) -> None:
    """Its finalizers call the end that is in use: each is refused, and the messages come once each and in order."""
    refusals = 300 if nbytes == 10 else 50
    is_over = threading.Event()
    with queue(ring_bytes=4 * MIN_RING_BYTES) as (writer, [reader]), rescued(writer, reader):

        def send() -> int:
            number = 0
            while not is_over.is_set():
                writer.enqueue([Hooked(number), np.full(nbytes, number % 256, np.uint8)], RESCUE_S)
                number += 1
                if writes and counted.refused >= refusals:
                    is_over.set()
            writer.enqueue([Hooked(-1), None], RESCUE_S)
            return number

        def read() -> list[int]:
            found: list[int] = []
            while True:
                hooked, content = reader.dequeue(RESCUE_S)
                if hooked.number < 0:
                    return found
                assert (content == np.full(nbytes, hooked.number % 256, np.uint8)).all()
                found.append(hooked.number)
                if not writes and counted.refused >= refusals:
                    is_over.set()

        nested = partial(writer.enqueue, "nested") if writes else partial(reader.dequeue, None)
        counted = Counted(writer if writes else reader, nested)
        outcome: list[Any]
        # What the hook makes lets the collector run inside of the call.
        makes_some = called_by(ENCODING if writes else DECODING, lambda: [[] for _ in range(3)])
        if writes:
            with makes_some, background(read) as outcome, collecting(counted):
                sent = send()
            (found,) = outcome
        else:
            with makes_some, background(send) as outcome, collecting(counted):
                found = read()
            (sent,) = outcome
        assert found == list(range(sent))
        assert counted.others == []
        assert counted.refused >= refusals
        assert reader.try_dequeue() == (False, None)


@pytest.mark.guarantee("R15")
@SIZES
@pytest.mark.parametrize("kind", KINDS)
def test_a_finalizer_that_reads_at_any_place_of_a_read_is_refused_or_served(kind: str, nbytes: int) -> None:
    """Each message goes to one of the two calls, or stays the next, wherever the finalizer runs."""
    outcomes = set()
    with queue(ring_bytes=16 * MIN_RING_BYTES) as (writer, [reader]), rescued(writer, reader):
        for step in count():
            found: list[int] = []

            def take(found: list[int] = found) -> None:
                found.append(reader.dequeue(RESCUE_S)[0])

            def nested(take: Callable[[], None] = take) -> None:
                try:
                    take()
                    outcomes.add("served")
                except UsageError:
                    outcomes.add("refused")

            def send() -> None:
                for number in range(3):
                    writer.enqueue([number, bytes(nbytes)], RESCUE_S)

            with background(send):
                came = handling_at(step, take, partial(finalize, kind, nested), FILES)
                while len(found) < 3:
                    take()
            assert sorted(found) == [0, 1, 2]
            assert found[2] == 2
            if not came:
                break
        assert step > 5
        assert reader.statistics().messages == 3 * (step + 1)
    assert "served" in outcomes


@pytest.mark.guarantee("R15")
@SIZES
@pytest.mark.parametrize("kind", KINDS)
def test_a_finalizer_that_writes_at_any_place_of_a_write_is_refused_or_served(kind: str, nbytes: int) -> None:
    """Every message that was not refused comes once and whole, wherever the finalizer runs."""
    outcomes = set()
    with queue(ring_bytes=4 * MIN_RING_BYTES) as (writer, [reader]), rescued(writer, reader):
        for step in count():
            sent = ["outer", "last"]

            def nested(sent: list[str] = sent) -> None:
                try:
                    writer.enqueue(["nested", b""], RESCUE_S)
                    sent.append("nested")
                    outcomes.add("served")
                except UsageError:
                    outcomes.add("refused")

            def read() -> list[str]:
                found = [""]
                while found[-1] != "last":
                    name, content = reader.dequeue(RESCUE_S)
                    assert len(content) == (nbytes if name == "outer" else 0)
                    found.append(name)
                return found[1:]

            with background(read) as outcome:
                message = ["outer", bytes(nbytes)]
                came = handling_at(
                    step, partial(writer.enqueue, message, RESCUE_S), partial(finalize, kind, nested), FILES
                )
                writer.enqueue(["last", b""], RESCUE_S)
            assert sorted(outcome[0]) == sorted(sent)
            if not came:
                break
        assert step > 3
    assert "served" in outcomes
