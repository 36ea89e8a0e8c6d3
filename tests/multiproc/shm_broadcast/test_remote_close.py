"""Closing an end of the transport to other hosts: by a signal handler inside of a call, and interrupted by one."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count, product
from typing import Any

import pytest

from shm_broadcast import codec
from shm_broadcast.endpoint import RemoteKeys, RemoteSettings
from shm_broadcast.errors import ClosedError, CommTimeoutError, PeerLostError
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.remote.writer import RemoteWriter
from shm_broadcast.settings import MIN_RING_BYTES, BroadcastSettings
from tests.handlers import PLACES, Interrupt, alarm_in, ctrl_c, handling_at, raising_at
from tests.queue_ranks import DEADLINE_S
from tests.queues import background
from tests.remotes import HERE, MEGABYTE, out_of_reach, remote_queue
from tests.samples import sampled
from tests.waiting import running, wait_until


def descriptors() -> int:
    """Return how many descriptors are open."""
    return len(os.listdir("/proc/self/fd"))


def threads_of(end: Any) -> list[threading.Thread]:
    """Return the thread of one end of the transport, if it runs."""
    return [thread for thread in running() if thread is end._thread]


@pytest.mark.guarantee("R7", "R14")
@pytest.mark.parametrize(
    "local", [pytest.param([], marks=pytest.mark.thorough), [2]], ids=["remote", "mixed"]
)
def test_a_writers_close_that_a_handler_interrupts_is_finished(local: list[int]) -> None:
    """Wherever a handler raises, a second call leaves no thread and no descriptor, and the readers get everything."""
    for step in count():
        before = descriptors()
        with remote_queue(local=local, heartbeat_s=0.05) as (writer, readers):
            writer.enqueue(step, DEADLINE_S)
            is_interrupted = raising_at(step, writer.close)
            writer.close()
            assert not threads_of(writer._remote), step
            for reader in readers.values():
                assert reader.dequeue(DEADLINE_S) == step
                with pytest.raises(ClosedError, match="the writer closed"):
                    reader.dequeue(DEADLINE_S)
        assert descriptors() == before, step
        if not is_interrupted:
            break
    assert step > 20


@pytest.mark.guarantee("R7", "R14")
def test_a_readers_close_that_a_handler_interrupts_is_finished() -> None:
    """Wherever a handler raises, a second call leaves no thread and no descriptor, and the writer learns of it."""

    def loses(writer: QueueWriter) -> bool:
        try:
            writer.enqueue("on", DEADLINE_S)
        except PeerLostError:
            return True
        return False

    for step in count():
        before = descriptors()
        with remote_queue() as (writer, readers):
            readers[1].fileno()
            is_interrupted = raising_at(step, readers[1].close)
            readers[1].close()
            assert not threads_of(readers[1]._ring), step
            wait_until(partial(loses, writer), "the writer's error")
        assert descriptors() == before, step
        if not is_interrupted:
            break
    assert step > 10


@pytest.mark.guarantee("R3", "R7")
@pytest.mark.parametrize("is_written", [True, False])
def test_a_close_beside_an_enqueue_sends_what_the_local_readers_have(*, is_written: bool) -> None:
    """It waits for nobody: whether the ring has the message of the other thread is certain once the ring is closed."""
    with remote_queue(local=[2], lost_after_s=60.0) as (writer, readers):
        remote = writer._remote
        assert isinstance(remote, RemoteWriter)
        remote.reserve(codec.encode("last"), DEADLINE_S, lambda: int(is_written))
        with background(writer.close) as closed:
            if is_written:
                assert readers[1].dequeue(DEADLINE_S) == "last"
            with pytest.raises(ClosedError, match="the writer closed"):
                readers[1].dequeue(DEADLINE_S)
        assert closed == [None]
        assert remote.complete()


@pytest.mark.slow
@pytest.mark.guarantee("B7", "R3")
@pytest.mark.parametrize("nbytes", [1_500_000, 6_000_000], ids=["stream", "parts"])
def test_a_close_by_another_thread_divides_no_readers(nbytes: int) -> None:
    """Whenever it comes, all readers, on this host and on others, get the same messages before the end."""
    message = bytes(nbytes)
    pauses = random.Random(nbytes)  # the same in every run

    def send(writer: QueueWriter) -> None:
        while True:
            writer.enqueue(message)

    for _ in range(30):
        with remote_queue(local=[2, 3], lost_after_s=20.0, ring_bytes=4 * MEGABYTE) as (writer, readers):
            with ExitStack() as stack:
                counts = [
                    stack.enter_context(background(partial(read_all, each))) for each in readers.values()
                ]
                ended = stack.enter_context(background(partial(send, writer)))
                time.sleep(pauses.uniform(0.002, 0.03))
                writer.close()
            assert isinstance(ended[0], ClosedError)
            assert counts[0] == counts[1] == counts[2]


@pytest.mark.guarantee("R7")
def test_ctrl_c_ends_the_close_of_a_writer_whose_reader_is_out_of_reach() -> None:
    """It ends the wait for the reader soon, though the reader has two minutes, and nothing is left."""
    before = descriptors()
    with out_of_reach() as writer:
        start = time.monotonic()
        with alarm_in("close", ctrl_c), pytest.raises(KeyboardInterrupt):
            writer.close()
        assert time.monotonic() - start < 30.0
        assert not threads_of(writer._remote)
        writer.close()
    assert descriptors() == before


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its error."""
    try:
        return call()
    except (ClosedError, CommTimeoutError) as error:
        return error


def lent(reader: QueueReader) -> Any:
    """Return the next object by a loan."""
    with reader.loan(0.05) as value:
        return value


READS: dict[str, Callable[[QueueReader], Any]] = {
    "dequeue": lambda reader: reader.dequeue(0.05),
    "try_dequeue": lambda reader: reader.try_dequeue()[1],
    "loan": lent,
    "fileno": lambda reader: reader.fileno() >= 0,
    "statistics": lambda reader: reader.statistics().messages == 0,
}


@pytest.mark.guarantee("R7", "R15")
@pytest.mark.parametrize(("call", "written"), sampled(3, product(READS, (False, True))))
def test_a_handler_may_close_a_remote_reader_in_every_place_of_a_call(call: str, written: bool) -> None:
    """The call returns what it would, or raises ClosedError; then nothing of the reader is left."""
    for step in count():
        before = descriptors()
        with remote_queue(heartbeat_s=0.1) as (writer, readers):
            reader = readers[1]
            far: Any = reader._ring
            if written:
                writer.enqueue("message", DEADLINE_S)
                wait_until(far.is_ready, "the message")
            if step % 2:
                reader.fileno()
            results: list[Any] = []

            def read() -> None:
                results.append(outcome(partial(READS[call], reader)))  # noqa: B023

            has_come = handling_at(step, read, reader.close)
            if not has_come:
                break
            assert not threads_of(far), step
            assert far._context.closed, step
            with pytest.raises(ClosedError):
                reader.dequeue(DEADLINE_S)
        assert descriptors() == before, step
        is_message = written and call in ("dequeue", "try_dequeue", "loan")
        if not isinstance(results[0], ClosedError if written else (ClosedError, CommTimeoutError)):
            assert results[0] in (["message"] if is_message else [True, None]), (step, results)
    assert step > 5


@pytest.mark.guarantee("R7", "R15")
@pytest.mark.parametrize(
    "full", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["sending", "waiting"]
)
@pytest.mark.parametrize(
    "local", [pytest.param([], marks=pytest.mark.thorough), [2]], ids=["remote", "mixed"]
)
def test_a_handler_may_close_a_writer_in_every_place_of_a_call(full: bool, local: list[int]) -> None:
    """The message is sent to all readers or to none, they get the end, and nothing of the writer is left."""
    for step in count():
        before = descriptors()
        with remote_queue(local=local, heartbeat_s=0.1, high_water_bytes=65536) as (writer, readers):
            sent = 1 + full
            for _ in range(sent):
                writer.enqueue(bytes(30_000), DEADLINE_S)
            results: list[Any] = []

            def call() -> None:
                results.append(outcome(partial(writer.enqueue, bytes(30_000), 0.05)))  # noqa: B023

            has_come = handling_at(step, call, writer.close)
            if not has_come:
                break
            end: Any = writer._remote
            assert not threads_of(end), step
            assert end._context.closed, step
            counts = {rank: read_all(reader) for rank, reader in readers.items()}
            assert set(counts.values()) == {sent + (results[0] is None)}, (step, results, counts)
        assert descriptors() == before, step
        errors = (ClosedError, CommTimeoutError) if full else ClosedError
        assert results[0] is None or isinstance(results[0], errors), (step, results)
    assert step > 10


def waiting_call(stack: ExitStack, call: str, absent: int) -> tuple[QueueWriter, Callable[[], None]]:
    """Return a writer, and a call of it that waits for reader 1 on this host or reader 2 elsewhere: for `absent`."""
    keys = RemoteKeys.generate()
    brief = RemoteSettings(heartbeat_s=0.1, lost_after_s=0.5, high_water_bytes=65536)
    writer = stack.enter_context(
        QueueWriter.create(
            "steps",
            [1],
            BroadcastSettings(ring_bytes=MIN_RING_BYTES),
            remote_readers={2: keys.public},
            bind_address=HERE,
            remote=brief,
        )
    )
    readers = {
        rank: stack.enter_context(
            QueueReader.open(writer.handle, writer.key, rank, DEADLINE_S, remote_keys=own)
        )
        for rank, own in ((1, None), (2, keys))
        if call == "enqueue" or rank != absent
    }
    if call == "wait_until_ready":
        # It looks every millisecond, and each look has the same places.
        return writer, partial(writer.wait_until_ready, 0.003)
    writer.wait_until_ready(DEADLINE_S)
    message = bytes(20_000)

    def fill() -> None:
        while True:
            writer.enqueue(message, 0.05)
            readers[3 - absent].dequeue(DEADLINE_S)

    with pytest.raises(CommTimeoutError, match=f"rank {absent}"):
        fill()
    return writer, partial(writer.enqueue, message, 0.02)


@pytest.mark.guarantee("R7", "R15")
@pytest.mark.parametrize(("call", "absent"), sampled(3, product(("wait_until_ready", "enqueue"), (1, 2))))
def test_a_handler_may_close_a_writer_that_looks_at_both_kinds_of_readers(call: str, absent: int) -> None:
    """Wherever it comes while the call waits for one of them: nothing of the writer is left when the call has ended."""
    for step in count():
        before = descriptors()
        with ExitStack() as stack:
            writer, wait = waiting_call(stack, call, absent)
            end: Any = writer._remote
            results: list[Any] = []

            def waits() -> None:
                results.append(outcome(wait))  # noqa: B023

            if not handling_at(step, waits, writer.close, (*PLACES, "shm_broadcast/ring/writer.py")):
                break
            assert not threads_of(end), step
            assert end._context.closed, step
            assert isinstance(results[0], ClosedError | CommTimeoutError), (step, results)
        assert descriptors() == before, step
    assert step > 10


@pytest.mark.guarantee("R7")
def test_signals_disturb_neither_creation_nor_close() -> None:
    """Zmq gives calls up at a signal. pyzmq hides that at the end of a context, whose threads would stay."""
    before = descriptors()
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    try:
        for _ in range(300):
            with remote_queue() as (writer, readers):
                writer.enqueue("first", DEADLINE_S)
                assert readers[1].dequeue(DEADLINE_S) == "first"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert descriptors() == before


def read_all(reader: QueueReader) -> int:
    """Return how many messages the reader gets before the writer's end of the queue."""
    messages = 0
    while True:
        try:
            reader.dequeue(DEADLINE_S)
        except ClosedError:
            return messages
        messages += 1


@pytest.mark.guarantee("R7")
@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("which", ["writer", "reader"])
def test_an_end_whose_thread_could_not_be_started_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, which: str, has_begun: bool
) -> None:
    """Ctrl-C during the start of the thread, before or after it runs, leaves no thread and no descriptor."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if has_begun:
            start(thread)
        raise Interrupt

    keys = RemoteKeys.generate()
    create = partial(QueueWriter.create, "steps", remote_readers={1: keys.public}, bind_address=HERE)
    before = descriptors()
    if which == "writer":
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(Interrupt):
                create()
    else:
        with create() as writer, monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(Interrupt):
                QueueReader.open(writer.handle, writer.key, 1, DEADLINE_S, remote_keys=keys)
    assert descriptors() == before
    assert not running("group-coordinator-remote")


@pytest.mark.guarantee("R7")
def test_a_second_thread_that_closes_waits_for_the_first() -> None:
    """When either call returns, everything is closed."""
    with remote_queue() as (writer, readers):
        for end in (readers[1], writer):
            with background(end.close) as other:
                end.close()
                assert not threads_of(end._ring if isinstance(end, QueueReader) else end._remote)
            assert other == [None]
