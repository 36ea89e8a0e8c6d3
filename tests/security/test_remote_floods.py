"""A reader of a queue, whose key is right, sends records without end: the writer and the other readers go on."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import zmq

from shm_broadcast.liveness import this_process
from shm_broadcast.remote import writer as remote_writer
from shm_broadcast.remote.reader import RemoteReader
from shm_broadcast.remote.wire import Kind, Record, pack, unpack
from shm_broadcast.remote.writer import RemoteWriter
from tests.queue_ranks import DEADLINE_S
from tests.security.test_remote import dialled, leg, send

INCARNATION = 5
HELLO = msgspec.msgpack.encode(this_process())


def hello(writer: RemoteWriter) -> bytes:
    """Return the greeting of a reader that has received nothing."""
    return pack(Kind.HELLO, writer.endpoint.generation, 0, INCARNATION, HELLO)


def heard(
    rogue: zmq.Socket[bytes], seconds: float, is_whole: Callable[[list[Record]], bool] = bool
) -> list[Record]:
    """Return what the writer sends within some time, and on a busy machine until that is whole."""
    records: list[Record] = []
    start = time.monotonic()
    while (spent := time.monotonic() - start) < seconds or (spent < DEADLINE_S and not is_whole(records)):
        if rogue.poll(20):
            records.append(unpack(rogue.recv(copy=False)))
    return records


def has_data(count: int) -> Callable[[list[Record]], bool]:
    """Return whether so many parts have come, and then a beat."""

    def is_whole(records: list[Record]) -> bool:
        return kinds(records)[Kind.DATA] >= count and records[-1].kind == Kind.BEAT

    return is_whole


def kinds(records: list[Record]) -> Counter[int]:
    """Count the records of each kind."""
    return Counter(record.kind for record in records)


@pytest.mark.guarantee("R10")
def test_a_batch_of_records_is_received_at_once() -> None:
    """The writer's lock is released though more of them wait, and whoever received them is told that."""

    class Endless:
        received = 0

        def recv_multipart(self, *_: object, **__: object) -> list[bytes]:
            self.received += 1
            assert self.received <= 100_000, "there is no end of it"
            return [b"one frame"]

    end: Any = RemoteWriter.__new__(RemoteWriter)
    end._router = Endless()
    assert end._drain()
    assert 0 < end._router.received <= 1000


@pytest.mark.guarantee("R2", "R10")
@pytest.mark.thorough
def test_records_without_end_hold_up_nobody() -> None:
    """While one reader acknowledges all the time, messages pass to another one, within their deadlines."""
    with leg((1, 2)) as (writer, keys), dialled(writer.endpoint, zmq.DEALER, keys[2]) as rogue:
        reader = RemoteReader.open(writer.endpoint, keys[1], 1, "steps", timeout_s=DEADLINE_S)
        rogue.set(zmq.SNDHWM, 1000)
        rogue.send(hello(writer))
        assert unpack(rogue.recv(copy=False)).kind == Kind.WELCOME
        stopped, sent = threading.Event(), [0]

        def flood() -> None:
            end = time.monotonic() + 6.0
            while not stopped.is_set() and time.monotonic() < end:
                with suppress(zmq.Again):
                    for _ in range(200):
                        rogue.send(pack(Kind.ACK, 0, 0, INCARNATION), zmq.NOBLOCK)
                        sent[0] += 1

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            time.sleep(0.3)
            start = time.monotonic()
            for number in range(20):
                send(writer, number)
                assert reader.read(2.0, None) == number
            took_s = time.monotonic() - start
        finally:
            stopped.set()
            thread.join()
            reader.close()
        assert sent[0] > 5000
        assert took_s < 4.0


@pytest.mark.guarantee("R1", "R10")
def test_what_was_sent_again_is_sent_once_more_only_to_who_has_read_it() -> None:
    """Demands to send again are obeyed once; the next one must repeat the number of a beat behind what came then."""
    with leg((1,)) as (writer, keys), dialled(writer.endpoint, zmq.DEALER, keys[1]) as rogue:
        rogue.send(hello(writer))
        for number in range(20):
            send(writer, number)
        first = heard(rogue, 0.3, has_data(20))
        assert kinds(first)[Kind.DATA] == 20
        for _ in range(300):
            rogue.send(pack(Kind.AGAIN, 0, 0, INCARNATION))
        again = heard(rogue, 0.5, has_data(20))
        assert kinds(again)[Kind.DATA] == 20
        beats = [record.third for record in again if record.kind == Kind.BEAT]
        assert beats[-1] not in (0, *(record.third for record in first))
        for _ in range(300):
            rogue.send(pack(Kind.AGAIN, beats[-1], 15, INCARNATION))
        last = heard(rogue, 0.3, has_data(5))
        assert [record.first for record in last if record.kind == Kind.DATA] == [*range(16, 21)]


@pytest.mark.guarantee("R10")
@pytest.mark.thorough
def test_greetings_are_answered_as_often_as_a_reader_says_them() -> None:
    """A flood of them gets few answers, and none over a connection that another one has replaced."""
    with leg((1,)) as (writer, keys), dialled(writer.endpoint, zmq.DEALER, keys[1]) as rogue:
        for _ in range(500):
            rogue.send(hello(writer))
        assert 1 <= kinds(heard(rogue, 0.4))[Kind.WELCOME] < 100
        with dialled(writer.endpoint, zmq.DEALER, keys[1]) as later:
            later.send(hello(writer))
            assert unpack(later.recv(copy=False)).kind == Kind.WELCOME
            rogue.send(hello(writer))
            assert not kinds(heard(rogue, 0.3, lambda _: True))[Kind.WELCOME]
            send(writer, "to the later one")
            assert kinds(heard(later, 0.2, has_data(1)))[Kind.DATA] == 1


def dropped_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log's lines about records that make no sense."""
    return [text for text in caplog.messages if "dropped a reader's record" in text]


@pytest.mark.guarantee("R10")
def test_records_that_make_no_sense_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """The 1st, 2nd, 4th, 8th ... is logged."""
    with (
        caplog.at_level(logging.WARNING, remote_writer.__name__),
        leg((1,)) as (writer, keys),
        dialled(writer.endpoint, zmq.DEALER, keys[1]) as rogue,
    ):
        rogue.send(hello(writer))
        for _ in range(100):
            rogue.send(bytes(10))
        end = time.monotonic() + DEADLINE_S
        while len(dropped_in(caplog)) < 7 and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.1)
    assert len(dropped_in(caplog)) == 7
