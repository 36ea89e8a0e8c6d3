"""Read from outside how far the readers of a queue or channel are, and which side waits.

A page says where the ring of an end lies: a descriptor of its process, an inode, an offset. The words of the ring are
read through `/proc/PID/fd`, never mapped: to read a file cannot fail the way an access to memory does, and takes no
memory where the file has none. Nothing is trusted: what makes no sense gives a row with a fault.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Iterable
from typing import Final

import msgspec

from coordinator.diagnosis.model import Page, Queue
from shm_broadcast.errors import DecodeError
from shm_broadcast.layout import FIELDS, LINE, MAX_READERS, ReaderState, data_offset
from shm_broadcast.segment import is_sealed

__all__ = ["Reader", "Ring", "decode_ring", "read_rings"]

_MEMFD: Final = "/memfd:group-coordinator"
_MAGIC: Final = int.from_bytes(b"!GCRING1", "little")
_VERSION: Final = 2
_IDENTITY_BYTES: Final = LINE
_READERS_AT: Final = FIELDS["consumed"].offset
AGAIN_S: Final = 0.005
"""Between the two looks at an end of which the first one says that it does not wait.

Ten times a second a waiting end wakes up and looks around, and its word says meanwhile that it does not wait: in 0.16 %
of 128,000 looks at a writer, on two busy cores. In 2 of the 182 times this took longer than 5 ms.
"""

# A descriptor that is not what its page says might be a pipe or a terminal.
_OPENING: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Reader(msgspec.Struct, frozen=True):
    """A reader of a ring.

    Attributes:
        place: Among the readers of the ring.
        pid: Of its process as that sees it; None if no page shows it.
        rank: Of that process in the world.
        state: "absent", "attached" or "left".
        behind_messages: Whole messages that it has not given back.
        behind_bytes: Bytes of records that it has not given back.
        progress_ns: When it last gave a message back, on CLOCK_MONOTONIC; 0 if it never has.
        waits: Whether a thread of it sleeps until something is published.
    """

    place: int
    pid: int | None
    rank: int | None
    state: str
    behind_messages: int
    behind_bytes: int
    progress_ns: int
    waits: bool


class Ring(msgspec.Struct, frozen=True):
    """A queue, or a channel between two ranks of a group.

    Attributes:
        name: Its name, as an end states it.
        is_channel: Whether it lies in the memory of a group.
        inode: Of the memfd.
        offset: In it.
        pid: Of the writer's process as that sees it; None if no page shows it.
        rank: Of that process in the world.
        capacity_bytes: Room for records.
        messages: Whole messages published.
        published_ns: When the last one was, on CLOCK_MONOTONIC; 0 if none was.
        is_closed: Whether the writer has closed it.
        writer_waits: Whether the writer sleeps until there is room.
        readers: By their places.
        fault: Why nothing more is known; empty if all is.
    """

    name: str
    is_channel: bool
    inode: int
    offset: int
    pid: int | None
    rank: int | None
    capacity_bytes: int = 0
    messages: int = 0
    published_ns: int = 0
    is_closed: bool = False
    writer_waits: bool = False
    readers: tuple[Reader, ...] = ()
    fault: str = ""


def read_rings(pages: Iterable[tuple[Page, int | None]]) -> tuple[Ring, ...]:
    """Return the queues and channels that pages show. Takes `AGAIN_S` if an end of a queue seems not to wait.

    Args:
        pages: Each page, and its process as this one sees it; None if that has ended.
    """
    ends: dict[tuple[int, int], list[tuple[Page, int | None, Queue]]] = {}
    for page, pid in pages:
        for end in page.queues:
            ends.setdefault((end.inode, end.offset), []).append((page, pid, end))
    named = [each for _, each in sorted(ends.items(), key=lambda item: item[1][0][2].name)]
    early = [_read_ring(each) for each in named]
    if not any(map(_may_wait, early)):
        return tuple(early)
    time.sleep(AGAIN_S)
    return tuple(
        _of_two(ring, _read_ring(each)) if _may_wait(ring) else ring
        for ring, each in zip(early, named, strict=True)
    )


def _may_wait(ring: Ring) -> bool:
    """Return whether an end that seems not to wait may do so. A wait for a channel is shown as a call."""
    waits = ring.writer_waits and all(reader.waits for reader in ring.readers)
    return not (ring.is_channel or ring.fault or waits)


def _of_two(early: Ring, late: Ring) -> Ring:
    """Return `late`; if nothing has moved since `early`, those ends wait that did at either look."""
    if _without_waits(early) != _without_waits(late):
        return late
    both = zip(early.readers, late.readers, strict=True)
    return msgspec.structs.replace(
        late,
        writer_waits=early.writer_waits or late.writer_waits,
        readers=tuple(msgspec.structs.replace(now, waits=before.waits or now.waits) for before, now in both),
    )


def _without_waits(ring: Ring) -> Ring:
    readers = tuple(msgspec.structs.replace(reader, waits=False) for reader in ring.readers)
    return msgspec.structs.replace(ring, writer_waits=False, readers=readers)


def _read_ring(ends: list[tuple[Page, int | None, Queue]]) -> Ring:
    """Return the ring that all of `ends` belong to, read through the first of them that shows it."""
    ends = sorted(ends, key=lambda end: end[2].reader)
    first = ends[0][2]
    writer = next((page for page, _, end in ends if end.reader == -1), None)
    ring = Ring(
        name=first.name,
        is_channel=first.offset > 0,
        inode=first.inode,
        offset=first.offset,
        pid=None if writer is None else writer.pid,
        rank=None if writer is None else writer.rank,
    )
    fault = "all processes that show it have ended"
    for _, pid, end in ends:
        if pid is None:
            continue
        try:
            return _completed(ring, *_looks(pid, end), ends)
        except DecodeError as error:
            fault = str(error)
        except PermissionError:
            fault = f"process {pid} does not let this one read it"
        except OSError:
            fault = f"process {pid} has closed it, or has ended"
    return msgspec.structs.replace(ring, fault=fault)


def _looks(pid: int, end: Queue) -> tuple[bytes, bytes]:
    """Return two copies of the words of a ring, one after the other."""
    link = f"/proc/{pid}/fd/{end.descriptor}"
    if not os.readlink(link).startswith(_MEMFD):
        raise DecodeError(f"{link} is no memory of a queue")
    descriptor = os.open(link, _OPENING)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_ino != end.inode or not is_sealed(descriptor):
            raise DecodeError(f"{link} is not the memory that the page names")
        if end.offset + _READERS_AT > status.st_size:
            raise DecodeError(f"{link} ends before the ring begins")
        identity = os.pread(descriptor, _IDENTITY_BYTES, end.offset)
        nbytes = _checked(identity, status.st_size - end.offset)
        first = os.pread(descriptor, nbytes, end.offset)
        return first, os.pread(descriptor, nbytes, end.offset)
    finally:
        os.close(descriptor)


def _word(data: bytes, name: str, reader: int = 0) -> int:
    field = FIELDS[name]
    at = field.offset + (LINE * reader if field.offset >= _READERS_AT else 0)
    return int(struct.unpack_from("<" + field.form, data, at)[0])


def _checked(identity: bytes, room: int) -> int:
    """Return how many bytes the words of a ring take whose file goes on for `room` bytes.

    Raises:
        DecodeError: There is no ring.
    """
    if len(identity) < _IDENTITY_BYTES or _word(identity, "magic") != _MAGIC:
        raise DecodeError("there is no ring: it does not begin with !GCRING1")
    version, readers = _word(identity, "version"), _word(identity, "readers")
    if version != _VERSION:
        raise DecodeError(f"the ring has version {version}, and this release reads version {_VERSION}")
    begin, nbytes = _word(identity, "data_offset"), _word(identity, "data_bytes")
    if not 1 <= readers <= MAX_READERS or begin != data_offset(readers):
        raise DecodeError(f"the ring says {readers} readers and data from {begin}, which cannot be")
    if not nbytes or nbytes % LINE or begin + nbytes > room:
        raise DecodeError(f"the ring says {nbytes} bytes of data, which cannot be")
    return _READERS_AT + LINE * readers


def decode_ring(first: bytes, second: bytes, room: int) -> Ring:
    """Return what two copies of a ring's words say, of which the second was made after the first.

    Args:
        first: From the beginning of the ring to the end of its readers' lines.
        second: The same bytes, later.
        room: How many bytes the file has from the beginning of the ring on.

    Raises:
        DecodeError: It holds no ring, or values that cannot be.
    """
    nbytes = _checked(first, room)
    if len(first) < nbytes or len(second) < nbytes or first[:_IDENTITY_BYTES] != second[:_IDENTITY_BYTES]:
        raise DecodeError("the ring was overwritten during the look at it")
    capacity, readers = _word(first, "data_bytes"), []
    for place in range(_word(first, "readers")):
        state = _word(second, "state", place)
        if state not in tuple(ReaderState):
            raise DecodeError(f"reader {place} of the ring has state {state}, which there is none")
        # What is compared was written in this order: whoever sees a release also sees what was released before.
        lag = _word(first, "published") - _word(second, "consumed", place)
        ahead = _word(first, "consumed", place) - _word(second, "published")
        if ahead > 0 or (state == ReaderState.ATTACHED and lag > capacity):
            raise DecodeError(f"reader {place} of the ring is where it cannot be: its words were overwritten")
        behind = _word(first, "messages") - _word(second, "reader_messages", place)
        readers.append(
            Reader(
                place=place,
                pid=None,
                rank=None,
                state=ReaderState(state).name.lower(),
                behind_messages=max(behind, 0),
                behind_bytes=max(lag, 0),
                progress_ns=_word(second, "progress_ns", place),
                waits=_word(second, "parked", place) != 0,
            )
        )
    return Ring(
        name="",
        is_channel=False,
        inode=0,
        offset=0,
        pid=None,
        rank=None,
        capacity_bytes=capacity,
        messages=_word(second, "messages"),
        published_ns=_word(second, "stamp_ns"),
        is_closed=_word(second, "closed") != 0,
        writer_waits=_word(second, "waiting") != 0,
        readers=tuple(readers),
    )


def _completed(ring: Ring, first: bytes, second: bytes, ends: list[tuple[Page, int | None, Queue]]) -> Ring:
    """Return `ring` with what its words say, and with the processes of its readers."""
    # The room was checked with the file.
    said = decode_ring(first, second, 1 << 63)
    pages = {end.reader: page for page, _, end in ends}
    readers = [
        msgspec.structs.replace(reader, pid=pages[reader.place].pid, rank=pages[reader.place].rank)
        if reader.place in pages
        else reader
        for reader in said.readers
    ]
    return msgspec.structs.replace(
        said,
        name=ring.name,
        is_channel=ring.is_channel,
        inode=ring.inode,
        offset=ring.offset,
        pid=ring.pid,
        rank=ring.rank,
        readers=tuple(readers),
    )
