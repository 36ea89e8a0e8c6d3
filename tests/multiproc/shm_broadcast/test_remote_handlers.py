"""Signal handlers that call a queue inside of a call of their own thread, or raise, when readers are on other hosts."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count, product
from types import FrameType
from typing import Any

import pytest

from shm_broadcast.codec import Message
from shm_broadcast.endpoint import RemoteKeys, RemoteSettings
from shm_broadcast.errors import CommTimeoutError, UsageError
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from shm_broadcast.remote.ledger import Ledger, Part
from tests.handlers import PLACES, Interrupt, alarm_in, handling_at, raising_at
from tests.queue_ranks import DEADLINE_S
from tests.queues import background
from tests.remotes import HERE, remote_queue
from tests.samples import sampled
from tests.waiting import wait_until


def while_alarmed(nested: Callable[[], Any], call: Callable[[], Any], waits_in: str) -> list[str]:
    """Run `call`, in which a handler calls `nested` during the wait; return what that one raised."""
    errors: list[str] = []

    def handler() -> None:
        try:
            nested()
        except UsageError as error:
            errors.append(str(error))

    with alarm_in(waits_in, handler):
        call()
    return errors


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("call", ["dequeue", "try_dequeue", "loan"])
def test_a_handler_cannot_read_inside_of_a_remote_read(call: str) -> None:
    """It gets an error that names its call, and the interrupted read ends by its deadline; then messages come."""
    with remote_queue() as (writer, readers):
        reader = readers[1]

        def nested() -> None:
            if call == "loan":
                with reader.loan(1.0):
                    pass
            elif call == "dequeue":
                reader.dequeue(1.0)
            else:
                reader.try_dequeue()

        def read() -> None:
            with pytest.raises(CommTimeoutError):
                reader.dequeue(0.6)

        errors = while_alarmed(nested, read, "dequeue")
        assert len(errors) == 1
        assert errors[0].startswith(f"{call} on queue")
        writer.enqueue("next", DEADLINE_S)
        assert reader.dequeue(DEADLINE_S) == "next"


@pytest.mark.guarantee("R15")
def test_a_handler_cannot_write_inside_of_a_write_to_remote_readers() -> None:
    """It gets an error that names its call, and the reader gets what was written, in order."""
    with remote_queue(high_water_bytes=65536) as (writer, readers):
        sent = 0

        def write() -> None:
            nonlocal sent
            try:
                while True:
                    writer.enqueue([sent, bytes(50_000)], 0.6)
                    sent += 1
            except CommTimeoutError:
                return

        errors = while_alarmed(lambda: writer.enqueue("nested", 0.1), write, "enqueue")
        assert len(errors) == 1
        assert errors[0].startswith("enqueue on queue")
        assert [readers[1].dequeue(DEADLINE_S)[0] for _ in range(sent)] == list(range(sent))


def read_once(reader: QueueReader, call: str, seen: list[Any]) -> None:
    """Add the next message to `seen`, unless a handler raises before it is handed out."""
    if call == "loan":
        with reader.loan(DEADLINE_S) as lent:
            seen += [lent]
    elif call == "dequeue":
        seen += [reader.dequeue(DEADLINE_S)]
    elif call == "dequeue_any":
        _, found = dequeue_any([reader], DEADLINE_S)
        seen += [found]
    else:
        is_there, found = reader.try_dequeue()
        seen += [found] if is_there else []


@pytest.mark.guarantee("R14")
@pytest.mark.parametrize("nbytes", [10, pytest.param(3_000_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("call", ["dequeue", "try_dequeue", "loan", "dequeue_any"])
def test_a_handler_that_raises_in_a_remote_read_loses_no_message(call: str, nbytes: int) -> None:
    """Wherever it raises, the interrupted message comes next, once, and in order."""
    with remote_queue(heartbeat_s=0.1) as (writer, readers):
        reader = readers[1]
        for step in count():
            message = [step, bytes(nbytes)]
            writer.enqueue(message, DEADLINE_S)
            writer.enqueue("between", DEADLINE_S)
            if call != "dequeue":  # that one receives the message too
                wait_until(reader._ring.is_ready, "the message")
            seen: list[Any] = []
            is_interrupted = raising_at(step, partial(read_once, reader, call, seen))
            if not seen:
                seen.append(reader.dequeue(DEADLINE_S))
            assert seen == [message], step
            assert reader.dequeue(DEADLINE_S) == "between"
            if not is_interrupted:
                break
        assert step > 20
        assert reader.statistics().messages == 2 * (step + 1)


@pytest.mark.guarantee("R14", "B3")
def test_a_remote_loan_does_not_outlive_its_block_while_what_a_handler_has_raised_is_kept() -> None:
    """Wherever it raises, at the end of the block too, this thread can read the next message."""
    with remote_queue(heartbeat_s=0.1) as (writer, readers):
        reader = readers[1]
        for step in count():
            writer.enqueue(step, DEADLINE_S)
            writer.enqueue("between", DEADLINE_S)
            wait_until(reader._ring.is_ready, "the message")
            seen: list[Any] = []
            raised: list[Interrupt] = []

            def interrupt() -> None:
                raise Interrupt

            try:
                lend = partial(read_once, reader, "loan", seen)
                came = handling_at(step, lend, interrupt, (*PLACES, "test_remote_handlers.py"))
            except Interrupt as error:
                raised.append(error)
                came = True
            if not seen:
                seen.append(reader.dequeue(DEADLINE_S))
            assert seen == [step]
            assert reader.dequeue(DEADLINE_S) == "between"
            if not came:
                break
        assert step > 20


def until_last(reader: QueueReader) -> list[Any]:
    """Return the messages before "last"."""
    return list(iter(partial(reader.dequeue, DEADLINE_S), "last"))


@pytest.mark.guarantee("R3")
def test_a_handler_that_raises_while_a_message_is_copied_parts_no_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Local and remote readers get the same messages after a signal in the copy for the remote ones."""
    with remote_queue(local=[2]) as (writer, readers):
        cut = Ledger.cut

        def interrupted(ledger: Ledger, message: Message) -> list[Part]:
            signal.raise_signal(signal.SIGALRM)
            return cut(ledger, message)

        def handler(_number: int, _frame: FrameType | None) -> None:
            raise Interrupt

        before = signal.signal(signal.SIGALRM, handler)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Ledger, "cut", interrupted)
                with pytest.raises(Interrupt):
                    writer.enqueue("interrupted", DEADLINE_S)
        finally:
            signal.signal(signal.SIGALRM, before)
        writer.enqueue("next", DEADLINE_S)
        writer.enqueue("last", DEADLINE_S)
        assert until_last(readers[1]) == until_last(readers[2])


@pytest.mark.guarantee("R3")
@pytest.mark.parametrize(("nbytes", "then"), sampled(2, product((10, 600_000), ("enqueue", "close", "wait"))))
def test_a_handler_that_raises_in_a_write_parts_no_readers(then: str, nbytes: int) -> None:
    """Wherever it raises, every reader gets the message or none does; with the next call, or soon without one."""
    stack = ExitStack()
    with stack:
        for step in count():
            if step == 0 or then == "close":
                stack.close()
                writer, readers = stack.enter_context(remote_queue(local=[2], heartbeat_s=0.1))
            with (
                background(partial(until_last, readers[2])) as local,
                background(partial(until_last, readers[1])) as remote,
            ):
                writer.enqueue("before", DEADLINE_S)
                is_interrupted = raising_at(step, partial(writer.enqueue, [step, bytes(nbytes)], DEADLINE_S))
                if then == "wait":
                    sent = writer.statistics().messages
                    for reader in readers.values():
                        wait_until(lambda: reader.statistics().messages == sent, "what others got")  # noqa: B023
                elif then == "close":
                    writer.close()
                if then != "close":
                    writer.enqueue("last", DEADLINE_S)
            if then != "close":
                assert local == remote, step
                assert len(local[0]) in (1, 2)
            assert len({end.statistics().messages for end in readers.values()}) == 1, step
            if not is_interrupted:
                break
        assert step > 20


@pytest.mark.guarantee("R3")
@pytest.mark.parametrize("local", [[], [2]])
def test_statistics_tell_whether_a_struck_write_has_sent_its_message(local: list[int]) -> None:
    """Wherever a handler raises, the count of messages tells at once whether the readers get the message."""
    with remote_queue(local=local) as (writer, readers):
        sent: list[Any] = []
        for step in count():
            before = writer.statistics().messages
            is_interrupted = raising_at(
                step, partial(writer.enqueue, step, DEADLINE_S), (*PLACES, "shm_broadcast/transports.py")
            )
            counted = writer.statistics().messages - before
            assert counted in (0, 1)
            sent += [step] * counted
            writer.enqueue(-step, DEADLINE_S)
            sent.append(-step)
            if not is_interrupted:
                break
        writer.enqueue("last", DEADLINE_S)
        assert [until_last(each) for each in readers.values()] == [sent] * len(readers)
        assert step > 20


@pytest.mark.guarantee("R14")
@pytest.mark.parametrize("call", ["enqueue", "wait_until_ready"])
def test_what_a_handler_raises_while_a_writer_waits_passes_unchanged(call: str) -> None:
    """Wherever it raises in a wait for a reader, nothing is sent, and no error of a lock takes its place."""
    own = RemoteKeys.generate().public
    settings = RemoteSettings(high_water_bytes=65536)
    with QueueWriter.create("steps", remote_readers={1: own}, bind_address=HERE, remote=settings) as writer:
        writer.enqueue(bytes(60_000))
        wait = partial(writer.enqueue, bytes(60_000)) if call == "enqueue" else writer.wait_until_ready
        for step in count():
            try:
                assert raising_at(step, partial(wait, 0.02))
            except CommTimeoutError:
                break
            assert writer.statistics().messages == 1
        assert step > 20


@pytest.mark.guarantee("R14")
def test_a_handler_that_raises_between_the_halves_of_a_record_cuts_no_other_record() -> None:
    """The socket looks for signals behind each half that it sends; the next record is not taken for the second half."""
    with remote_queue() as (writer, readers):
        leg: Any = writer._remote
        send, left = leg._send, [1]

        def strike_behind(data: Any, flags: int, copy: bool) -> None:
            send(data, flags, copy)
            if left and copy:  # the first half, which names the connection
                left.pop()
                raise Interrupt

        with leg._lock:  # the thread sends heartbeats
            leg._send = strike_behind
            with pytest.raises(Interrupt):
                leg._beat()
        writer.enqueue("next", DEADLINE_S)
        assert readers[1].dequeue(DEADLINE_S) == "next"
    assert not left
