"""Ends of queues, and the descriptors of readers, whose creation a signal handler interrupts at any place."""

import gc
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import msgspec
import pytest

from shm_broadcast import _core
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import UsageError
from shm_broadcast.layout import ReaderState
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.status.kept_pages import _Kept
from shm_broadcast.threads import made_aside
from tests.handlers import PLACES, Interrupt, alarm_in, raising_at
from tests.queues import memory_of, queue
from tests.remotes import HERE, remote_queue
from tests.waiting import wait_until

OURS = (
    *(each for each in PLACES if each != "/threading.py"),
    *(f"shm_broadcast/{name}.py" for name in ("threads", "descriptors", "segment", "liveness")),
    *(f"shm_broadcast/ring/{name}.py" for name in ("reader", "signal", "writer")),
    *(f"shm_broadcast/status/{name}.py" for name in ("kept_pages", "page")),
)


# Every so many places are struck: there are some hundreds, and each takes a queue.
EACH = [pytest.param(11, id="a sample"), pytest.param(1, id="all", marks=pytest.mark.thorough)]


def open_now() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def keep(made: list[Any], make: Callable[[], object]) -> None:
    """Add what is made to a list."""
    made.append(make())


def interrupt() -> None:
    """Raise, as a handler does."""
    raise Interrupt


@pytest.mark.guarantee("B14", "R14")
@pytest.mark.parametrize("stride", EACH)
@pytest.mark.parametrize("is_far", [False, True], ids=["ring", "ring and connections"])
def test_an_interrupted_create_leaves_nothing_open(*, is_far: bool, stride: int) -> None:
    """No descriptor and no thread of an end that nobody was given is left, and the exception arrives as it is."""
    far: dict[str, Any] = {}
    if is_far:
        far = {"remote_readers": {1: RemoteKeys.generate().public}, "bind_address": HERE}
    before = open_now()
    for step in count(0, stride):
        made: list[QueueWriter] = []
        came = raising_at(step, partial(keep, made, lambda: QueueWriter.create("steps", [0], **far)), OURS)
        assert came != bool(made)
        for end in made:
            end.close(0.0)
        wait_until(lambda: open_now() <= before, f"the end of what step {step} has left", 10.0)
        if not came:
            break
    assert step > 10


@pytest.mark.guarantee("B7", "B14", "R14")
@pytest.mark.parametrize("stride", EACH)
@pytest.mark.parametrize("rank", [0, 1], ids=["ring", "connection"])
def test_an_interrupted_open_leaves_nothing_open(rank: int, stride: int) -> None:
    """Nor a reader that the writer would wait for: if it had come to the ring it has left it."""
    keys = RemoteKeys.generate()
    before = open_now()
    for step in count(0, stride):
        made: list[QueueReader] = []
        with QueueWriter.create("steps", [0], remote_readers={1: keys.public}, bind_address=HERE) as writer:
            open_end = partial(QueueReader.open, writer.handle, writer.key, rank, 10.0, remote_keys=keys)
            came = raising_at(step, partial(keep, made, open_end), OURS)
            assert came != bool(made)
            for end in made:
                end.close()
            [(*_, state)] = _core.ring_state(memory_of(writer))[4]
            assert state != ReaderState.ATTACHED
            writer.close(0.0)
        wait_until(lambda: open_now() <= before, f"the end of what step {step} has left", 10.0)
        if not came:
            break
    assert step > 10


@pytest.mark.guarantee("B14", "R14", "R17")
@pytest.mark.parametrize("stride", EACH)
@pytest.mark.parametrize("is_far", [False, True], ids=["ring", "connection"])
def test_an_interrupted_fileno_leaves_nothing_open(*, is_far: bool, stride: int) -> None:
    """The next call makes the descriptor, and `close` closes it."""
    before = open_now()
    for step in count(0, stride):
        with remote_queue(local=[0]) as (writer, readers):
            reader = readers[1 if is_far else 0]
            came = raising_at(step, reader.fileno, OURS)
            writer.enqueue("message", 10.0)
            assert select.select([reader], [], [], 10.0)[0] == [reader]
            assert reader.dequeue(10.0) == "message"
        wait_until(lambda: open_now() <= before, f"the end of what step {step} has left", 10.0)
        if not came:
            break
    assert step > 5


@pytest.mark.guarantee("B6")
def test_an_interrupt_ends_the_wait_for_a_silent_writer() -> None:
    """An `open` that waits for the writer's answer is over at once, and its thread too."""
    address = f"group-coordinator-{os.getpid()}-silent"
    with queue() as (writer, _), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind("\0" + address)
        silent.listen()
        handle = msgspec.structs.replace(writer.handle, address=address)
        before, start = open_now(), time.monotonic()
        with pytest.raises(Interrupt), alarm_in("open", interrupt):
            QueueReader.open(handle, writer.key, 0, 30.0)
        assert time.monotonic() - start < 5.0
        wait_until(lambda: open_now() <= before, "the end of the thread")


@pytest.mark.guarantee("B14")
def test_what_is_made_for_nobody_is_dropped_by_who_makes_it() -> None:
    """A second interrupt ends the wait for what the first one has given up; it is closed when it is made."""
    may_end, dropped = threading.Event(), list[str]()

    def make() -> str:
        may_end.wait()
        return "made"

    with pytest.raises(Interrupt), alarm_in("made_aside", interrupt):
        made_aside(make, dropped.append, interrupt)
    assert not dropped
    may_end.set()
    wait_until(lambda: dropped == ["made"], "the end of what was made")


@pytest.mark.guarantee("B19")
def test_a_forked_child_is_not_given_what_its_parent_makes() -> None:
    """A handler that forks while something is made: the child gets a `UsageError`, the parent what it has made."""
    children: list[int] = []
    parent = os.getpid()

    def make() -> str:
        wait_until(lambda: children, "the fork")
        return "made"

    made = status = None
    try:
        with alarm_in("made_aside", lambda: children.append(os.fork())):
            made = made_aside(make, lambda _: None, lambda: None)
    except UsageError:
        status = 7
    finally:
        if os.getpid() != parent:
            os._exit(status or 1)
    assert made == "made"
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7


@pytest.mark.guarantee("B14")
def test_a_page_that_was_never_kept_is_let_go_silently() -> None:
    """A handler that raises before a descriptor is stored leaves nothing that has to be closed."""
    before = open_now()
    kept: _Kept | None = _Kept.__new__(_Kept)
    del kept
    assert open_now() == before
