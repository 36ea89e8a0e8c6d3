"""What is read of a queue's memory from outside: how far readers are, and nothing that makes no sense."""

import mmap
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from coordinator.diagnosis import queues
from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.model import Page, Queue
from coordinator.diagnosis.queues import Ring, decode_ring, read_rings
from shm_broadcast import _core
from shm_broadcast.errors import DecodeError
from shm_broadcast.layout import FIELDS, LINE, PAGE, data_offset
from shm_broadcast.segment import Segment
from shm_broadcast.status.page import own_page
from tests.queues import bare_ring, put_word, queue

MUTATIONS = 20_000


def own() -> Page:
    """Return what the page of this process says."""
    return decode_page(_core.status_copy(own_page().segment.memory), records=False)


def own_ring(name: str = "steps") -> Ring:
    """Return the queue of this process with a name, as others see it."""
    (ring,) = (ring for ring in read_rings([(own(), os.getpid())]) if ring.name == name)
    return ring


def test_each_reader_is_shown_with_its_lag() -> None:
    """In messages and in bytes, with the time of its last progress, and the processes of both sides."""
    with queue(readers=2) as (writer, readers):
        before = own_ring()
        assert (before.messages, before.published_ns, before.fault) == (0, 0, "")
        for number in range(3):
            writer.enqueue(bytes(number * 1000))
        assert len(readers[1].dequeue()) == 0
        ring = own_ring()
        assert (ring.messages, ring.is_channel, ring.is_closed, ring.writer_waits) == (3, False, False, False)
        assert (ring.pid, {reader.pid for reader in ring.readers}) == (os.getpid(), {os.getpid()})
        slow, fast = ring.readers
        assert (slow.behind_messages, fast.behind_messages) == (3, 2)
        assert slow.behind_bytes > fast.behind_bytes > 3000
        assert slow.progress_ns == 0 < ring.published_ns < fast.progress_ns
        assert {slow.state, fast.state} == {"attached"}
        assert ring.capacity_bytes >= slow.behind_bytes


def test_an_end_that_looks_around_for_a_moment_is_shown_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting end's word is 0 while it looks around, at the first or at the second look; nothing else has moved."""
    with queue(readers=2) as (writer, _):
        put = partial(put_word, writer._ring._memory)
        for now, then in ((1, 0), (0, 1), (1, 1), (0, 0)):

            def look_around(_: float, then: int = then) -> None:
                put(FIELDS["waiting"], then)
                put(FIELDS["parked"], then, LINE)

            put(FIELDS["waiting"], now)
            put(FIELDS["parked"], now, LINE)
            monkeypatch.setattr(queues, "time", SimpleNamespace(sleep=look_around))
            ring = own_ring()
            assert ring.writer_waits is bool(now or then)
            assert [reader.waits for reader in ring.readers] == [False, bool(now or then)]
        put(FIELDS["parked"], 0, LINE)


def test_an_end_that_went_on_between_two_looks_is_shown_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer waited at the first look, and has written its message at the second one."""
    with queue() as (writer, _):
        put_word(writer._ring._memory, FIELDS["waiting"], 1)

        def go_on(_: float) -> None:
            put_word(writer._ring._memory, FIELDS["waiting"], 0)
            writer.enqueue("step")

        monkeypatch.setattr(queues, "time", SimpleNamespace(sleep=go_on))
        ring = own_ring()
        assert (ring.writer_waits, ring.messages, ring.readers[0].behind_messages) == (False, 1, 1)


def test_the_end_of_a_queue_and_of_a_reader_are_shown() -> None:
    """A reader that has left, and a writer that has closed."""
    with queue(readers=2) as (writer, readers):
        readers[0].close()
        assert [reader.state for reader in own_ring().readers] == ["left", "attached"]
        writer.close()
        assert own_ring().is_closed


def words(memory: mmap.mmap) -> bytes:
    """Return the words of a bare ring that stand before its data."""
    return bytes(memory[: FIELDS["consumed"].offset + 2 * LINE])


def test_the_words_of_a_hostile_ring_are_refused_or_make_sense() -> None:
    """Of 20,000 changed rings each gives a DecodeError or a ring that can be written as JSON, and nothing else."""
    memory, random_ = bare_ring(readers=2), random.Random(18)
    copy, refused = words(memory), 0
    for _ in range(MUTATIONS):
        copies = [bytearray(copy), bytearray(copy)]
        for changed in copies if random_.random() < 0.7 else copies[1:]:
            at = random_.randrange(0, len(changed) - 8, 4)
            for _ in range(random_.randint(1, 4)):
                word = random_.choice((0, 1, 64, 4096, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
                struct.pack_into("<Q", changed, at, word)
                at = random_.randrange(0, len(changed) - 8, 4)
        try:
            ring = decode_ring(bytes(copies[0]), bytes(copies[1]), len(memory))
        except DecodeError:
            refused += 1
            continue
        assert msgspec.json.decode(msgspec.json.encode(ring), type=Ring) == ring
        assert all(0 <= reader.behind_bytes <= 2**64 for reader in ring.readers)
    assert MUTATIONS / 20 < refused < MUTATIONS


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("magic", 1, "begin with !GCRING1"),
        ("version", 9, "version 9"),
        ("readers", 0, "0 readers"),
        ("readers", 5000, "5000 readers"),
        ("data_offset", 64, "data from 64"),
        ("data_bytes", 0, "0 bytes of data"),
        ("data_bytes", 100, "100 bytes of data"),
        ("data_bytes", 1 << 40, "bytes of data"),
        ("state", 7, "state 7"),
        ("consumed", 1 << 20, "where it cannot be"),
    ],
)
def test_each_word_that_cannot_be_is_named(field: str, value: int, complaint: str) -> None:
    """The row says what is wrong with the memory."""
    memory = bare_ring(readers=2)
    put_word(memory, FIELDS[field], value)
    with pytest.raises(DecodeError, match=complaint):
        decode_ring(words(memory), words(memory), len(memory))


def test_more_than_fits_is_no_lag() -> None:
    """A reader that is attached is never further behind than the ring is long."""
    memory = bare_ring(readers=1)
    _core.ring_attach(memory, 0)
    put_word(memory, FIELDS["published"], 2 * PAGE)
    with pytest.raises(DecodeError, match="where it cannot be"):
        decode_ring(words(memory), words(memory), len(memory))


def test_a_reader_that_passes_between_the_two_looks_is_not_behind() -> None:
    """What was published after the first look may have been read before the second."""
    first, second = bare_ring(readers=1), bare_ring(readers=1)
    for name in ("published", "consumed"):
        put_word(second, FIELDS[name], 640)
    put_word(second, FIELDS["messages"], 2)
    put_word(second, FIELDS["reader_messages"], 2)
    (reader,) = decode_ring(words(first), words(second), len(first)).readers
    assert (reader.behind_bytes, reader.behind_messages) == (0, 0)


@contextmanager
def shown_as(descriptor: int, inode: int | None = None, offset: int = 0) -> Iterator[Page]:
    """Yield a page that says that a descriptor of this process holds a ring."""
    said = Queue("steps", os.fstat(descriptor).st_ino if inode is None else inode, offset, -1, descriptor)
    yield msgspec.structs.replace(own(), queues=(said,))


def fault_of(page: Page, pid: int | None = None) -> str:
    """Return why nothing is known of the only ring that a page shows."""
    (ring,) = read_rings([(page, os.getpid() if pid is None else pid)])
    assert ring.readers == ()
    return ring.fault


def test_a_descriptor_that_is_no_ring_is_not_read() -> None:
    """A pipe is not opened, which would wait; other memory, a wrong inode and a wrong offset are refused."""
    reading, writing = os.pipe()
    unsealed = os.memfd_create("group-coordinator", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 16)
    segment = Segment.create(1 << 16)
    try:
        with shown_as(reading) as page:
            assert "is no memory of a queue" in fault_of(page)
        with shown_as(unsealed) as page:
            assert "is not the memory that the page names" in fault_of(page)
        with shown_as(segment.descriptor, inode=1) as page:
            assert "is not the memory that the page names" in fault_of(page)
        for offset in (1 << 16, (1 << 64) - 1):
            with shown_as(segment.descriptor, offset=offset) as page:
                assert "ends before the ring begins" in fault_of(page)
        with shown_as(segment.descriptor) as page:
            assert "begin with !GCRING1" in fault_of(page)
            queue_ = msgspec.structs.replace(page.queues[0], descriptor=1 << 20)
            assert "has closed it" in fault_of(msgspec.structs.replace(page, queues=(queue_,)))
        _core.ring_format(segment.memory, 1, 7)
        put_word(segment.memory, FIELDS["data_bytes"], 1 << 20)
        with shown_as(segment.descriptor) as page:
            assert "bytes of data, which cannot be" in fault_of(page)
    finally:
        segment.close()
        for descriptor in (reading, writing, unsealed):
            os.close(descriptor)


def test_a_ring_is_read_through_whoever_lives() -> None:
    """The writer has ended, and a reader still has the memory; if all have ended, the row says so."""
    segment = Segment.create(data_offset(1) + PAGE)
    _core.ring_format(segment.memory, 1, 7)
    try:
        with shown_as(segment.descriptor) as page:
            reads = msgspec.structs.replace(page.queues[0], reader=0)
            reader = msgspec.structs.replace(page, rank=3, queues=(reads,))
            (ring,) = read_rings([(page, None), (reader, os.getpid())])
            assert (ring.fault, [each.rank for each in ring.readers]) == ("", [3])
            (ring,) = read_rings([(page, None), (reader, None)])
            assert ring.fault == "all processes that show it have ended"
    finally:
        segment.close()


def test_memory_that_was_not_reserved_stays_so() -> None:
    """A look at a place where a group has no channel yet takes no memory."""
    segment = Segment.create(PAGE, later_bytes=1 << 20)
    try:
        before = Path(f"/proc/self/fd/{segment.descriptor}").stat().st_blocks
        with shown_as(segment.descriptor, offset=8 * PAGE) as page:
            assert "begin with !GCRING1" in fault_of(page)
        assert Path(f"/proc/self/fd/{segment.descriptor}").stat().st_blocks == before
    finally:
        segment.close()
