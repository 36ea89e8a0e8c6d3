"""The queue's transport to readers on other hosts: `close`, forked children and Ctrl-C."""

import os
import time
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import ClosedError, CommTimeoutError, UsageError
from shm_broadcast.queue import QueueWriter
from tests.handlers import alarm_in, ctrl_c
from tests.queue_ranks import DEADLINE_S, blob
from tests.queues import background
from tests.remotes import HERE, counted, out_of_reach, remote_queue, until_full
from tests.waiting import sleeping_in, wait_until


@pytest.mark.guarantee("R7")
def test_close_waits_no_longer_than_its_timeout() -> None:
    """A reader that cannot receive the messages delays `close` for `timeout_s`, not for `lost_after_s`."""
    with out_of_reach() as writer:
        start = time.monotonic()
        writer.close(0.2)
        assert 0.2 <= time.monotonic() - start < 30.0


@pytest.mark.guarantee("R7")
def test_what_was_written_before_close_is_read() -> None:
    """A writer that closes at once loses nothing. Its readers read all messages and then get a ClosedError."""
    with remote_queue(remote=[1, 2]) as (writer, readers):
        for number in range(5):
            writer.enqueue(blob(number, 900_000))
        writer.close()
        for reader in readers.values():
            for number in range(5):
                assert np.array_equal(reader.dequeue(DEADLINE_S), blob(number, 900_000))
            with pytest.raises(ClosedError, match="the writer closed"):
                reader.dequeue(DEADLINE_S)


@pytest.mark.guarantee("R7")
def test_close_wakes_a_waiting_writer_and_a_waiting_reader() -> None:
    """`close` in another thread ends a waiting `dequeue` and a waiting `enqueue`, each with a ClosedError."""
    with remote_queue(high_water_bytes=64 << 10) as (writer, readers):
        until_full(writer, blob(0, 30_000), 0.05)
        with background(lambda: writer.enqueue(blob(0, 60_000))) as sender:
            wait_until(lambda: sleeping_in("_sleep"), "`enqueue` asleep")
            writer.close()
        assert isinstance(sender[0], ClosedError)
        with pytest.raises(ClosedError):
            writer.enqueue(1)
    with remote_queue() as (writer, readers):
        with background(readers[1].dequeue) as got:
            wait_until(lambda: sleeping_in("_sleep"), "`dequeue` asleep")
            readers[1].close()
        assert isinstance(got[0], ClosedError)


@pytest.mark.guarantee("R7")
def test_queues_come_and_go_without_a_trace() -> None:
    """Ten queues leave no thread and no descriptor, and neither does a queue whose readers never came."""
    for _ in range(10):
        with remote_queue() as (writer, readers):
            writer.enqueue(1)
            assert readers[1].dequeue(DEADLINE_S) == 1
    before = len(os.listdir("/proc/self/fd"))
    with QueueWriter.create(
        "steps", remote_readers={1: RemoteKeys.generate().public}, bind_address=HERE
    ) as writer:
        writer.enqueue("nobody will read this")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.guarantee("R7")
@pytest.mark.parametrize("end", [lambda: os._exit(0), lambda: None], ids=["os._exit", "return"])
def test_a_forked_child_is_inert(end: Callable[[], None]) -> None:
    """The child's calls raise, its `close` does nothing, and the parent's queue goes on."""
    with remote_queue() as (writer, readers):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            refused = 0
            for call in (lambda: writer.enqueue(1), readers[1].dequeue, writer.statistics):
                try:
                    call()
                except UsageError:
                    refused += 1
            writer.close()
            readers[1].close()
            end()
            os._exit(0 if refused == 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.enqueue("after")
        assert readers[1].dequeue(DEADLINE_S) == "after"


def interrupted(call: Callable[[], Any], waits_in: str) -> None:
    """Interrupt the wait in `call` as Ctrl-C does."""
    with alarm_in(waits_in, ctrl_c), pytest.raises(KeyboardInterrupt):
        call()


@pytest.mark.guarantee("R7")
def test_ctrl_c_ends_every_wait_and_the_queue_goes_on() -> None:
    """An interrupted `enqueue` has sent nothing, and an interrupted `dequeue` has lost nothing."""
    with remote_queue(high_water_bytes=64 << 10) as (writer, readers):
        interrupted(readers[1].dequeue, "dequeue")
        sent, _ = until_full(writer, blob(0, 30_000), 0.05)
        interrupted(lambda: writer.enqueue(blob(0, 60_000)), "enqueue")
        counted(readers[1], sent)
        writer.enqueue("after", DEADLINE_S)
        assert readers[1].dequeue(DEADLINE_S) == "after"


@pytest.mark.guarantee("R6")
def test_a_reader_that_warns_nobody_sleeps_as_long_as_one_that_warns() -> None:
    """Its wait has passed the time of the first warning; it looks again when the next one would be due."""
    with remote_queue(warn_after_s=0.1) as (_, readers):
        end: Any = readers[1]._ring
        end.warns = False
        looks, sleep = [], end._sleep

        def counting(news: Any, left_s: float) -> None:
            looks.append(left_s)
            sleep(news, left_s)

        end._sleep = counting
        with pytest.raises(CommTimeoutError):
            readers[1].dequeue(0.6)
    assert 0 < len(looks) < 40


@pytest.mark.guarantee("R1", "R7")
@pytest.mark.parametrize("waits", [True, False], ids=["dequeue", "try_dequeue"])
def test_the_last_message_is_read_though_it_and_the_end_come_between_two_looks(waits: bool) -> None:
    """The reader finds no message; then its own thread receives the last one, and that the queue has ended."""
    with remote_queue() as (writer, readers):
        reader, end = readers[1], cast("Any", readers[1]._ring)
        assert reader.fileno() >= 0  # its thread receives at once from now on
        poll, looks = end.poll, []

        def looking() -> bool:
            has_arrived: bool = poll()
            looks.append(has_arrived)
            if looks == [False] * (2 if waits else 1):
                writer.enqueue("last", DEADLINE_S)
                writer.close()
                wait_until(lambda: end._has_ended, "the end at the reader")
            return has_arrived

        end.poll = looking
        assert (reader.dequeue(DEADLINE_S) if waits else reader.try_dequeue()[1]) == "last"
        with pytest.raises(ClosedError):
            reader.dequeue(DEADLINE_S)
    assert looks[0] is False
