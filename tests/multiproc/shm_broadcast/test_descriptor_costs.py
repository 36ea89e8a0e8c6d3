"""What a reader's descriptor costs the writer: a wake-up for a message to a reader that waits by it, else nothing."""

import os
import select
import threading
from pathlib import Path

import pytest

from tests.queues import queue
from tests.waiting import running, sleeping_in, wait_until

LONG_S = 30.0
SERVING = "group-coordinator-fileno"
COUNT = 200


def is_readable(descriptor: int, timeout_s: float = 0.0) -> bool:
    """Return whether the descriptor is readable, or becomes so in time."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def number_in(path: str, name: str, base: int = 10) -> int:
    """Return a number that a file of the kernel shows behind `name:`."""
    lines = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(lines[name], base)


def signals(descriptor: int) -> int:
    """Return how often the eventfd was written since it was emptied."""
    return number_in(f"/proc/self/fdinfo/{descriptor}", "eventfd-count", 16)


def writes() -> int:
    """Return how many system calls of this thread have written, to files or to eventfds."""
    return number_in("/proc/thread-self/io", "syscw")


def wakeups(thread: threading.Thread) -> int:
    """Return how often a thread has slept."""
    return number_in(f"/proc/self/task/{thread.native_id}/status", "voluntary_ctxt_switches")


def await_sleep() -> None:
    """Wait until the thread of a descriptor sleeps: what wakes it then is counted."""
    wait_until(lambda: sleeping_in("_serve") == 1, "the thread to sleep")


def eventfds() -> int:
    """Return how many eventfds this process has."""
    links = [Path("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    return sum(os.readlink(each) == "anon_inode:[eventfd]" for each in links if each.is_symlink())


@pytest.mark.guarantee("R17")
def test_a_busy_reader_with_a_descriptor_costs_its_writer_nothing() -> None:
    """While a message is there, none of those that follow it wakes the thread of the descriptor or writes the eventfd.

    The thread wakes every 0.4 s by itself.
    """
    with queue() as (writer, [reader]):
        descriptor = reader.fileno()
        [thread] = running(SERVING)
        assert not is_readable(descriptor)
        writer.enqueue("first")
        assert is_readable(descriptor, LONG_S)
        await_sleep()
        woken, signalled, written = wakeups(thread), signals(descriptor), writes()
        for number in range(COUNT):
            writer.enqueue(number)
            await_sleep()
            reader.dequeue(LONG_S)
        assert signals(descriptor) == signalled == 1
        assert writes() == written
        assert wakeups(thread) - woken < COUNT / 4


@pytest.mark.guarantee("R17")
def test_a_reader_that_waits_by_its_descriptor_costs_a_wake_up_for_each_message() -> None:
    """The thread of the descriptor writes the eventfd, and the writer wakes this thread: it writes nothing itself."""
    with queue() as (writer, [reader]):
        descriptor = reader.fileno()
        [thread] = running(SERVING)
        woken = wakeups(thread)
        for number in range(20):
            assert not is_readable(descriptor)
            await_sleep()
            written = writes()
            writer.enqueue(number)
            assert writes() == written
            assert is_readable(descriptor, LONG_S)
            assert signals(descriptor) == 1
            assert reader.try_dequeue() == (True, number)
        assert wakeups(thread) - woken >= 20


@pytest.mark.guarantee("R17")
def test_a_queue_whose_readers_want_no_descriptor_has_no_eventfd() -> None:
    """Neither end makes one or writes to one, and no thread serves it, however the messages are read."""
    before = eventfds()
    with queue() as (writer, [reader]):
        written = writes()
        for number in range(20):
            writer.enqueue(number)
            assert reader.dequeue(LONG_S) == number
            assert reader.try_dequeue() == (False, None)
        assert writes() == written
        assert eventfds() == before
        assert running(SERVING) == []
