"""A reader's descriptor and `adequeue`, in selectors and asyncio, for writers on this host and on others."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

from shm_broadcast import _core, codec, transports
from shm_broadcast.endpoint import RemoteKeys, RemoteSettings
from shm_broadcast.errors import ClosedError, CommTimeoutError, PeerLostError, UsageError
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from shm_broadcast.ring.signal import _end_all
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.threads import DaemonThread
from tests.idle import spent
from tests.waiting import running

LONG_S = 30.0
LARGE = 3 << 20
"""More bytes than half of a ring, so that a message comes in parts."""
RING = BroadcastSettings(ring_bytes=1 << 20)

WRITER = """
import sys, time
from shm_broadcast.queue import QueueWriter
writer = QueueWriter.create("steps", [0])
print(writer.handle.to_bytes(writer.key).hex(), writer.key.hex(), flush=True)
writer.wait_until_ready(30)
writer.enqueue("last words")
sys.stdin.read()
"""


@contextmanager
def queue(kind: str, **remote: Any) -> Iterator[tuple[QueueWriter, QueueReader]]:
    """Yield both ends of a queue over shared memory or over TCP."""
    if kind == "local":
        writer = QueueWriter.create("steps", [0], RING)
        reader = QueueReader.open(writer.handle, writer.key, 0, LONG_S)
    else:
        keys = RemoteKeys.generate()
        writer = QueueWriter.create(
            "steps",
            remote_readers={0: keys.public},
            bind_address="127.0.0.1",
            remote=RemoteSettings(**remote),
        )
        reader = QueueReader.open(writer.handle, writer.key, 0, LONG_S, remote_keys=keys)
    writer.wait_until_ready(LONG_S)
    with writer, reader:
        yield writer, reader


both = pytest.mark.parametrize("kind", ["local", "remote"])


def is_readable(reader: QueueReader, timeout_s: float = 0.0) -> bool:
    """Ask `poll`, which takes objects with `fileno`."""
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def taken(reader: QueueReader) -> Any:
    """Return the next message as a selector's user does: wait, then try."""
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        assert is_readable(reader, LONG_S)
        found, value = reader.try_dequeue()
        if found:
            return value
    raise AssertionError("no message came")


@both
@pytest.mark.guarantee("R17")
def test_the_descriptor_is_readable_while_there_is_a_message(kind: str) -> None:
    """It becomes readable with a message and unreadable with the last one, whichever call reads it."""
    with queue(kind) as (writer, reader):
        reads: list[Callable[[], object]] = [
            lambda: reader.dequeue(LONG_S),
            lambda: reader.try_dequeue()[1],
            lambda: dequeue_any([reader], LONG_S)[1],
            lambda: exchanged(reader),
            lambda: asyncio.run(reader.adequeue(LONG_S)),
            lambda: lent(reader),
        ]
        assert not is_readable(reader)
        for turn, read in enumerate(reads * 3):
            assert not is_readable(reader, 0.01)
            writer.enqueue(turn)
            writer.enqueue([turn])
            assert is_readable(reader, LONG_S)
            assert read() == turn
            assert is_readable(reader, LONG_S)
            assert read() == [turn]
            assert not is_readable(reader)


def exchanged(reader: QueueReader) -> object:
    """Return the next object as callers on one host do who save Python frames."""
    if not isinstance(reader.endpoint, _core.ReadEndpoint):
        return reader.dequeue(LONG_S)
    assert reader.endpoint.exchange(None) is _core.NOTHING
    return reader.endpoint.message


def lent(reader: QueueReader) -> object:
    """Return the next object by a loan."""
    with reader.loan(LONG_S) as value:
        return value


@pytest.mark.guarantee("R17")
def test_a_signal_that_comes_late_makes_the_descriptor_readable_for_one_read() -> None:
    """The thread was held up before it wrote the eventfd, and a read has asked for the next signal meanwhile."""
    with queue("local") as (writer, reader):
        assert not is_readable(reader)
        for number in range(2):
            os.eventfd_write(reader.fileno(), 1)
            assert is_readable(reader)
            assert reader.try_dequeue() == (False, None)
            assert not is_readable(reader)
            writer.enqueue(number)
            assert taken(reader) == number


@both
@pytest.mark.guarantee("R17")
def test_a_selector_reads_everything(kind: str) -> None:
    """No message is missed or comes twice, with pauses around the moment at which the reader has read all."""
    count = 600
    with queue(kind) as (writer, reader), selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)

        def write() -> None:
            for number in range(count):
                writer.enqueue((number, bytes(LARGE if number % 100 == 50 else 10)), LONG_S)
                if number % 3 == 0:
                    time.sleep(number % 7 * 2e-5)

        thread = threading.Thread(target=write)
        thread.start()
        expected = 0
        while expected < count:
            assert selector.select(LONG_S)
            found, value = reader.try_dequeue()
            if found:
                assert value[0] == expected
                expected += 1
        thread.join()
        assert not is_readable(reader)


@both
@pytest.mark.guarantee("R17")
def test_the_end_of_a_queue_stays_readable(kind: str) -> None:
    """After the writer has closed, the descriptor stays readable, and each read raises."""
    with queue(kind) as (writer, reader):
        assert not is_readable(reader)
        writer.enqueue("last")
        threading.Thread(target=writer.close).start()
        assert taken(reader) == "last"
        assert is_readable(reader, LONG_S)
        with pytest.raises(ClosedError):
            taken(reader)
        assert is_readable(reader)
        with pytest.raises(ClosedError, match="adequeue"):
            asyncio.run(reader.adequeue(LONG_S))


def orphan() -> tuple[QueueReader, subprocess.Popen[str]]:
    """Return a reader and the process of its writer."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    handle, key = (bytes.fromhex(word) for word in process.stdout.readline().split())
    return QueueReader.open(handle, key, 0, LONG_S), process


@pytest.mark.slow
@pytest.mark.guarantee("R17")
@pytest.mark.guarantee("R18")
@pytest.mark.parametrize("kind", ["selector", "asyncio"])
def test_the_death_of_the_writer_wakes_who_waits(kind: str) -> None:
    """What the writer sent is read, then both kinds of waits end with `PeerLostError`."""
    reader, process = orphan()
    with reader, process:
        assert taken(reader) == "last words"
        assert not is_readable(reader)
        descriptor = reader.fileno()
        threading.Timer(0.2, process.kill).start()
        with pytest.raises(PeerLostError):
            taken(reader) if kind == "selector" else asyncio.run(reader.adequeue(LONG_S))
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert poller.poll(0)  # the next read raises too


@both
@pytest.mark.guarantee("R18")
def test_adequeue_lets_the_loop_go_on(kind: str) -> None:
    """Other tasks run meanwhile; time-outs lose nothing; a type is converted to; a second loop goes on."""

    async def reading(writer: QueueWriter, reader: QueueReader) -> None:
        waiting = asyncio.create_task(reader.adequeue(LONG_S, type=tuple[int, ...]))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        with pytest.raises(CommTimeoutError, match=r"adequeue .* within 0\.1 s"):
            await reader.adequeue(0.1)
        writer.enqueue([1, 2])
        assert await waiting == (1, 2)
        writer.enqueue(bytes(100), LONG_S)
        assert await reader.adequeue() == bytes(100)

    with queue(kind) as (writer, reader):
        for _ in range(2):
            asyncio.run(reading(writer, reader))
        assert not is_readable(reader)


@both
@pytest.mark.guarantee("R18")
def test_a_cancelled_call_takes_no_message(kind: str) -> None:
    """Calls are cancelled before, while and after a message comes; all messages are read in order."""
    count = 150

    async def reading(reader: QueueReader) -> list[int]:
        seen: list[int] = []
        while len(seen) < count:
            task = asyncio.create_task(reader.adequeue(LONG_S))
            await asyncio.sleep((len(seen) % 4) * 2e-4)
            task.cancel()
            try:
                seen.append(await task)
            except asyncio.CancelledError:
                continue
        return seen

    with queue(kind) as (writer, reader):

        def write() -> None:
            for number in range(count):
                writer.enqueue(number, LONG_S)
                time.sleep(3e-4)

        thread = threading.Thread(target=write)
        thread.start()
        assert asyncio.run(reading(reader)) == list(range(count))
        thread.join()


class Halt(BaseException):
    """What a signal handler raises."""


@pytest.mark.guarantee("R14", "R17", "R18")
def test_a_message_that_an_interrupted_read_left_is_readable() -> None:
    """It keeps the descriptor readable until a read hands it out, also if a conversion puts it back."""

    def interrupted(*_: object) -> None:
        raise Halt

    with queue("local") as (writer, reader):
        for number in range(3):
            assert not is_readable(reader)
            writer.enqueue([number])
            # As if a handler raised between the two steps of a read.
            endpoint: Any = reader.endpoint
            assert endpoint.exchange(None) is _core.NOTHING
            assert is_readable(reader)
            with mock.patch.object(codec, "convert", interrupted), pytest.raises(Halt):
                asyncio.run(reader.adequeue(LONG_S, type=tuple[int, ...]))
            assert is_readable(reader)
            assert asyncio.run(reader.adequeue(LONG_S, type=tuple[int, ...])) == (number,)


@pytest.mark.guarantee("R15", "R17")
def test_a_descriptor_that_a_handler_interrupts_is_made_by_the_next_call() -> None:
    """One thread alone serves it, and a call inside of the interrupted one is refused."""
    with queue("local") as (writer, reader):
        start = DaemonThread.start
        refused: list[str] = []

        def interrupted(thread: DaemonThread) -> None:
            start(thread)
            with pytest.raises(UsageError) as raised:
                reader.fileno()
            refused.append(str(raised.value))
            raise Halt

        with mock.patch.object(DaemonThread, "start", interrupted), pytest.raises(Halt):
            reader.fileno()
        assert len(refused) == 1
        assert "fileno" in refused[0]
        for number in range(3):
            assert not is_readable(reader)
            writer.enqueue(number)
            assert taken(reader) == number
        assert [each.name for each in threading.enumerate()].count("group-coordinator-fileno") == 1


@both
@pytest.mark.guarantee("R18")
def test_several_tasks_share_the_messages(kind: str) -> None:
    """Each message reaches one of the tasks that wait."""

    async def reading(writer: QueueWriter, reader: QueueReader) -> None:
        tasks = [asyncio.create_task(reader.adequeue(LONG_S)) for _ in range(5)]
        await asyncio.sleep(0.02)
        for number in range(5):
            writer.enqueue(number)
            await asyncio.sleep(0.001)
        assert sorted(await asyncio.gather(*tasks)) == list(range(5))

    with queue(kind) as (writer, reader):
        asyncio.run(reading(writer, reader))


@pytest.mark.guarantee("R18")
def test_adequeue_beside_a_loan_of_another_thread_lets_the_processor_sleep() -> None:
    """The message on loan keeps the descriptor readable; the call looks once in a millisecond until it may read."""
    with queue("local") as (writer, reader):
        lent, is_over = threading.Event(), threading.Event()

        def lend() -> None:
            with reader.loan(LONG_S):
                lent.set()
                is_over.wait(LONG_S)

        writer.enqueue("lent")
        writer.enqueue("next")
        thread = threading.Thread(target=lend)
        thread.start()
        assert lent.wait(LONG_S)
        looks = mock.Mock(side_effect=reader._ring.try_read)
        with mock.patch.object(reader._ring, "try_read", looks):
            threading.Timer(0.3, is_over.set).start()
            start = time.monotonic()
            assert asyncio.run(reader.adequeue(LONG_S)) == "next"
            assert looks.call_count <= (time.monotonic() - start) * 1000 + 2
        thread.join()


@both
@pytest.mark.guarantee("R18")
def test_close_wakes_who_awaits(kind: str) -> None:
    """`close` from another thread ends the wait with `ClosedError`, and leaves no thread or descriptor."""
    with queue(kind) as (_, reader):
        before = len(os.listdir("/proc/self/fd"))
        threading.Timer(0.1, reader.close).start()
        with pytest.raises(ClosedError):
            asyncio.run(reader.adequeue(LONG_S))
        reader.close()
        assert len(os.listdir("/proc/self/fd")) < before
        assert not running("group-coordinator-fileno")
        with pytest.raises(ClosedError, match="fileno"):
            reader.fileno()


@both
@pytest.mark.guarantee("R17")
@pytest.mark.guarantee("B19")
def test_a_forked_child_leaves_the_descriptor_alone(kind: str) -> None:
    """In the child `fileno` raises, and its end disturbs nothing; the parent reads on."""
    with queue(kind) as (writer, reader):
        assert not is_readable(reader)
        child = os.fork()
        if child == 0:
            try:
                reader.fileno()
            except UsageError:
                _end_all()  # as at the exit of an interpreter
                reader.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert not is_readable(reader)
        writer.enqueue("on")
        assert taken(reader) == "on"


@pytest.mark.guarantee("R17")
def test_a_child_forked_while_the_thread_receives_does_not_wait_for_it() -> None:
    """The thread of a remote end, which the child has not, may hold the end's lock: `fileno` raises without it."""
    with queue("remote") as (_, reader):
        far: Any = reader._ring
        is_held, is_forked = threading.Event(), threading.Event()

        def hold() -> None:
            with far._lock:
                is_held.set()
                is_forked.wait(LONG_S)

        thread = threading.Thread(target=hold)
        thread.start()
        assert is_held.wait(LONG_S)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits
            try:
                reader.fileno()
            except UsageError:
                os._exit(0)
            os._exit(1)
        is_forked.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0


def late(readers: list[QueueReader], timeout_s: float) -> None:
    with pytest.raises(CommTimeoutError):
        dequeue_any(readers, timeout_s)


@pytest.mark.slow
@pytest.mark.guarantee("B20")
def test_waiting_for_64_queues_takes_next_to_no_processor_time() -> None:
    """`dequeue_any` sleeps: it wakes a few times a second, which takes less than 0.5 % of a core."""
    with ExitStack() as stack:
        writers = [stack.enter_context(QueueWriter.create(f"q{i}", [0], RING)) for i in range(64)]
        readers = [
            stack.enter_context(QueueReader.open(each.handle, each.key, 0, LONG_S)) for each in writers
        ]
        idle = spent(lambda: late(readers, 2.0), resource.RUSAGE_THREAD)
        with (
            mock.patch.object(transports, "SLICE_NS", 1_000_000),
            mock.patch.object(transports, "_LOOK_S", 0.004),
        ):
            warm = spent(lambda: late(readers, 1.0), resource.RUSAGE_THREAD)
        assert warm.wakeups > 100
        assert idle.wakeups <= 25  # signals must be seen within 0.2 s
        assert idle.wakeups_per_s * warm.per_wakeup_s < 0.005, (idle, warm)
        writers[40].enqueue("found")
        assert dequeue_any(readers, LONG_S) == (40, "found")


@pytest.mark.guarantee("B20")
@pytest.mark.parametrize("looks_first", [False, True])
def test_the_end_of_one_of_many_writers_ends_a_long_wait(looks_first: bool) -> None:
    """A writer's process that ends during the wait is named, also if another call has noticed the end before."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    handle, key = map(bytes.fromhex, process.stdout.readline().split())
    with (
        process,
        QueueWriter.create("alive", [0], RING) as alive,
        QueueReader.open(alive.handle, alive.key, 0, LONG_S) as first,
        QueueReader.open(handle, key, 0, LONG_S) as second,
    ):
        assert second.dequeue(LONG_S) == "last words"

        def end() -> None:
            process.kill()
            process.wait()
            if looks_first:
                assert second._ring.lost_writer() is not None

        timer = threading.Timer(1.0, end)
        timer.start()
        start = time.monotonic()
        with pytest.raises(PeerLostError, match=str(process.pid)):
            dequeue_any([first, second], LONG_S)
        assert time.monotonic() - start < 10.0
        timer.join()


@both
@pytest.mark.slow
@pytest.mark.guarantee("R17")
def test_waiting_for_a_descriptor_takes_next_to_no_processor_time(kind: str) -> None:
    """Both ends idle, and take less than a fiftieth of a core together: a hundred wake-ups in a second, or fewer."""
    with queue(kind) as (_, reader):
        assert not is_readable(reader)
        idle = spent(lambda: is_readable(reader, 2.0))
    with queue(kind, heartbeat_s=0.005) as (_, reader):
        assert not is_readable(reader)
        warm = spent(lambda: is_readable(reader, 2.0))
    assert idle.wakeups_per_s <= 150
    assert idle.wakeups_per_s * warm.per_wakeup_s < 1 / 50, (idle, warm)
