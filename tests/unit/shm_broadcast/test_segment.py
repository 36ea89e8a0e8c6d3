"""Shared memory without a name is sealed and reserved; other memory is refused."""

import fcntl
import gc
import itertools
import math
import mmap
import os
import tempfile
import threading
from contextlib import closing
from typing import Any, NoReturn

import pytest

from shm_broadcast import segment
from shm_broadcast.errors import CapabilityError, CommTimeoutError, DecodeError, PeerLostError
from shm_broadcast.segment import Handover, Hello, Segment, take_over
from tests.handlers import handling_at
from tests.queues import named_memory_of, queue, segments_of

ADD_SEALS = 1033
NO_SHRINK, NO_GROW, NO_MORE = 2, 4, 1
NBYTES = 5 * 4096


@pytest.mark.guarantee("B15")
def test_a_segment_is_zeroed_private_and_reserved() -> None:
    """`create` reserves every page, other users cannot open the memory, and it has no file name."""
    before = named_memory_of()
    made = Segment.create(NBYTES)
    status = os.fstat(made.descriptor)
    assert status.st_blocks * 512 >= NBYTES
    assert (status.st_size, status.st_nlink) == (NBYTES, 0)
    assert made.memory[:] == bytes(NBYTES)
    assert not os.get_inheritable(made.descriptor)
    assert named_memory_of() == before
    made.close()
    made.close()
    assert segments_of() == []


@pytest.mark.guarantee("B15")
def test_a_segment_can_neither_shrink_nor_grow() -> None:
    """No peer can truncate the memory, which would raise SIGBUS in the others."""
    made = Segment.create(NBYTES)
    for size in (0, 4096, 2 * NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(made.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(made.descriptor, ADD_SEALS, 8)
    made.close()


@pytest.mark.guarantee("B15")
def test_both_ends_see_one_memory() -> None:
    """Writes through one mapping are read through the other, also after the first was closed."""
    made = Segment.create(NBYTES)
    adopted = Segment.adopt(os.dup(made.descriptor), NBYTES)
    made.memory[100:103] = b"abc"
    made.close()
    assert adopted.memory[100:103] == b"abc"
    adopted.close()


def memory_file(nbytes: int, seals: int) -> int:
    """Return a memfd of `nbytes` with `seals`."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, ADD_SEALS, seals)
    return descriptor


@pytest.mark.guarantee("B15")
@pytest.mark.parametrize(
    ("nbytes", "seals"),
    [
        (NBYTES, NO_SHRINK | NO_GROW),
        (NBYTES, NO_SHRINK | NO_MORE),
        (NBYTES, NO_GROW | NO_MORE),
        (NBYTES, 0),
        (NBYTES - 1, NO_SHRINK | NO_GROW | NO_MORE),
        (2 * NBYTES, NO_SHRINK | NO_GROW | NO_MORE),
        (0, NO_SHRINK | NO_GROW | NO_MORE),
    ],
)
def test_memory_that_could_change_or_has_another_size_is_refused(nbytes: int, seals: int) -> None:
    """A received segment is mapped only with every seal and the handle's size."""
    with pytest.raises(DecodeError, match=f"not a sealed segment of {NBYTES} bytes"):
        Segment.adopt(memory_file(nbytes, seals), NBYTES)


@pytest.mark.guarantee("B15")
def test_what_is_no_memory_is_refused() -> None:
    """A file, a pipe and a closed descriptor are refused and closed."""
    with tempfile.TemporaryFile() as file:
        file.truncate(NBYTES)
        with pytest.raises(DecodeError):
            Segment.adopt(os.dup(file.fileno()), NBYTES)
    ends = os.pipe()
    for end in ends:
        with pytest.raises(DecodeError, match="not a sealed segment"):
            Segment.adopt(end, NBYTES)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


@pytest.mark.guarantee("B15")
def test_too_little_memory_is_told_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error gives the bytes needed and the bytes free; nothing is allocated."""
    monkeypatch.setattr(segment, "free_memory_bytes", lambda: 20_000_000)
    with pytest.raises(CapabilityError, match="needs 10000000 bytes, 20000000 are free") as caught:
        Segment.create(10_000_000)
    assert caught.value.requirement == "10000000 bytes of memory"
    Segment.create(3_000_000).close()
    with pytest.raises(CapabilityError):
        Segment.create(1 << 60)


@pytest.mark.guarantee("B15")
def test_the_kernels_refusal_is_told_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel lacks pages that seemed free, the same error is raised and nothing is left."""

    def refuse(descriptor: int, start: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(CapabilityError, match=r"needs 20480 bytes, \d+ are free: No space left"):
        Segment.create(NBYTES)
    assert segments_of() == []


@pytest.mark.guarantee("B15")
def test_a_queue_works_without_a_directory_for_shared_memory() -> None:
    """A queue uses memfds and nothing in /dev/shm, which may be absent, tiny or full."""
    before = named_memory_of()
    with queue() as (writer, [reader]):
        writer.enqueue("x")
        assert reader.dequeue(1.0) == "x"
        assert named_memory_of() == before
        assert any("memfd:group-coordinator" in each for each in segments_of())
    assert segments_of() == []


def test_views_of_a_closed_segment_stay_valid() -> None:
    """Memory with views is released with the last view, not before."""
    made = Segment.create(NBYTES)
    view = memoryview(made.memory)
    made.close()
    view[0] = 7
    assert view[0] == 7
    assert isinstance(view.obj, mmap.mmap)


@pytest.mark.parametrize("begins", [True, False])
def test_an_interrupted_start_of_a_handover_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """Ctrl-C in the wait for the beginning of its thread leaves no thread, socket or pidfd, whether it began or not."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if begins:
            start(thread)
        raise KeyboardInterrupt

    def joined(hello: Hello, descriptor: int) -> None:
        os.close(descriptor)

    made = Segment.create(NBYTES)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    handover = Handover(made, bytes(32), {0}, joined)
    with pytest.raises(KeyboardInterrupt):
        handover.start()
    handover.close()
    made.close()


def test_an_offer_that_nobody_keeps_leaves_nothing_open() -> None:
    """An interrupt may come before its owner has stored it; it serves nobody before `start`."""
    made = Segment.create(NBYTES)
    Handover(made, bytes(32), {0}, lambda _hello, descriptor: os.close(descriptor))
    made.close()


def test_a_handler_may_close_an_offer_in_every_place_of_its_close() -> None:
    """Neither call waits for the other one, and the thread ends."""
    for step in itertools.count():
        made = Segment.create(NBYTES)
        handover = Handover(made, bytes(32), {0}, lambda _hello, descriptor: os.close(descriptor))
        handover.start()
        has_come = handling_at(
            step, handover.close, handover.close, ("shm_broadcast/segment.py", "shm_broadcast/threads.py")
        )
        assert handover._thread is not None
        assert not handover._thread.is_alive()
        made.close()
        made.close()
        if not has_come:
            break
    assert step > 5


@pytest.mark.parametrize(("timeout_s", "error"), [(0.0, CommTimeoutError), (math.inf, PeerLostError)])
def test_any_time_is_a_deadline_of_taking_over(timeout_s: float, error: type[Exception]) -> None:
    """Zero and infinity are taken as numbers of seconds, as by all waits."""
    made = Segment.create(NBYTES)
    with closing(Handover(made, bytes(32), {0}, lambda _hello, descriptor: os.close(descriptor))) as handover:
        if timeout_s:
            handover.start()
        with pytest.raises(error):
            take_over(handover.address, b"another key" + bytes(21), 0, NBYTES, timeout_s=timeout_s)
    made.close()


def interrupt(*_: object, **__: object) -> NoReturn:
    """Raise as a signal handler that runs at this place."""
    raise KeyboardInterrupt


def without_memory(*_: object, **__: object) -> NoReturn:
    """Fail as `mmap` does when the kernel has no memory for the page tables."""
    raise OSError(12, "Cannot allocate memory")


class StruckSegment(Segment):
    """A segment in whose constructor a handler raises behind the last step."""

    def __init__(self, *args: Any, **how: Any) -> None:
        """Initialise it, then raise."""
        super().__init__(*args, **how)
        interrupt()


@pytest.mark.parametrize("adopts", [True, False])
@pytest.mark.parametrize("place", ["seals", "mapping", "memory", "end"])
def test_a_segment_that_is_not_completed_closes_its_descriptor_once(
    monkeypatch: pytest.MonkeyPatch, place: str, adopts: bool
) -> None:
    """Whatever fails, the descriptor is closed, and never again: by then its number may be somebody else's."""
    offered = memory_file(NBYTES, NO_SHRINK | NO_GROW | NO_MORE)
    made = StruckSegment if place == "end" else Segment
    caught: BaseException | None = None
    with monkeypatch.context() as patch:
        if place == "seals":
            patch.setattr(fcntl, "fcntl", interrupt)
        elif place != "end":
            patch.setattr(mmap, "mmap", without_memory if place == "memory" else interrupt)
        try:
            made.adopt(offered, NBYTES) if adopts else made.create(NBYTES)
        except (CapabilityError, KeyboardInterrupt) as error:
            caught = error
    assert caught is not None
    if not adopts:
        os.close(offered)
    others = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(2)]
    # The lowest free numbers are taken first, so these include the segment's. What strikes in the constructor holds the
    # segment, which is closed with it.
    assert place == "end" or segments_of() == []
    caught = None
    gc.collect()
    assert segments_of() == []
    for other in others:
        os.fstat(other)
        os.close(other)


def test_an_interrupted_close_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a handler raises behind the system call, the next `close` drops the mapping and closes nothing again."""
    made = Segment.create(NBYTES)
    close = os.close

    def interrupted(descriptor: int) -> None:
        close(descriptor)
        interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.close()
    other = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    made.close()
    assert segments_of() == []
    del made
    os.fstat(other)
    os.close(other)
