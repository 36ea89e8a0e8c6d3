"""Copy the status page of another process repeatedly, whatever happens to the memory or file that holds it.

A page in a memfd is sealed, and stays mapped. A page in a file of a record directory has no seal: its owner,
who may be another user if root looks, can truncate the file, and an access to a mapping would then end this
process with SIGBUS. So such a page is read, not mapped.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from typing import Final, NamedTuple

from shm_broadcast import _core
from shm_broadcast.errors import DecodeError
from shm_broadcast.segment import is_sealed
from shm_broadcast.status.layout import PAGE_BYTES, TABLES
from shm_broadcast.status.record_file import is_page

__all__ = ["PageMemory", "copy_of_file"]

# As in the native core. A process that is killed while it writes a record leaves it torn for ever.
_TRIES: Final = 1000
_MAGIC_BYTES: Final = 8


class PageMemory:
    """A status page that stays open after its process has ended. One thread uses it; `close` lets it go."""

    def __init__(self, link: str) -> None:
        """Open an entry of /proc/PID/fd.

        Raises:
            DecodeError: It is no page: others may change it, or it has another size.
            OSError: It has gone, or this process may not read it.
        """
        self._memory: mmap.mmap | None = None
        # It may have become something else meanwhile, such as a pipe, whose opening would wait.
        try:
            self._descriptor = os.open(link, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            # The number now is that of a socket, or of something else that has no file.
            raise FileNotFoundError(errno.ENOENT, "the page was closed", link) from error
        try:
            is_fit = is_page(self._descriptor)
            if is_fit and is_sealed(self._descriptor):
                self._memory = mmap.mmap(self._descriptor, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
                self._close_descriptor()
        except BaseException:
            self.close()
            raise
        if not is_fit:
            self.close()
            raise DecodeError(f"{link} is neither a sealed memfd nor a private file of {PAGE_BYTES} bytes")

    def copy(self) -> bytes:
        """Return a copy in which each record is consistent by itself, as `_core.status_copy` does.

        Raises:
            DecodeError: The file was made shorter meanwhile, or cannot be read any more.
        """
        return _core.status_copy(self._memory) if self._memory is not None else copy_of_file(self._descriptor)

    def close(self) -> None:
        """Let the page go. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _Part(NamedTuple):
    """Records of one length that follow each other, each with a number in front that tells whether it is written.

    Attributes:
        offset: Of the first, in the page.
        nbytes: Of one.
        number: Form of the number of one.
        numbers: Form that reads those of all.
        is_call: Whether the number is the `commit` of an ended call; others are odd while their record is written.
    """

    offset: int
    nbytes: int
    number: struct.Struct
    numbers: struct.Struct
    is_call: bool

    def torn(self, before: bytes, after: bytes) -> list[int]:
        """Return the places in the page of records that were written between two copies, or are being written."""
        first, last = (
            self.numbers.unpack_from(before, self.offset),
            self.numbers.unpack_from(after, self.offset),
        )
        if first == last and (self.is_call or not any(number & 1 for number in last)):
            return []
        return [
            self.offset + place * self.nbytes
            for place, (old, new) in enumerate(zip(first, last, strict=True))
            if not self._is_whole(old, new)
        ]

    def record(self, descriptor: int, offset: int) -> bytes:
        """Return the record in a place, marked as torn if it cannot be read in peace."""
        words = b""
        for _ in range(_TRIES):
            (before,) = self.number.unpack(_read(descriptor, self.number.size, offset))
            words = _read(descriptor, self.nbytes, offset)
            (after,) = self.number.unpack(_read(descriptor, self.number.size, offset))
            if self._is_whole(before, after):
                return words
        (found,) = self.number.unpack_from(words)
        return self.number.pack(0 if self.is_call else found | 1) + words[self.number.size :]

    def _is_whole(self, before: int, after: int) -> bool:
        return before == after and (self.is_call or before % 2 == 0)


def _part(table: str, pieces: int = 1) -> _Part:
    """Return a table as a part; `pieces` is how many numbers each of its records has, at equal distances."""
    found, is_call = TABLES[table], table == "records"
    nbytes, form = found.nbytes // pieces, "Q" if is_call else "I"
    number = struct.Struct(f"<{form}")
    numbers = struct.Struct("<" + f"{form}{nbytes - number.size}x" * (found.number * pieces))
    return _Part(found.offset, nbytes, number, numbers, is_call)


# A lane has two numbers: one for what it is, one for what it does.
_PARTS: Final = (_part("groups"), _part("queues"), _part("lanes", 2), _part("counters"), _part("records"))


def copy_of_file(descriptor: int) -> bytes:
    """Return what `_core.status_copy` does, of a file of `PAGE_BYTES`.

    A record in the second of three copies is whole if its number is the same in the first and the third.

    Raises:
        DecodeError: The file was made shorter meanwhile, or cannot be read.
    """
    before, words, after = (_read(descriptor, PAGE_BYTES, 0) for _ in range(3))
    copy = bytearray(words)
    # If the magic number is there, so is the rest of a header that was read after it.
    copy[:_MAGIC_BYTES] = before[:_MAGIC_BYTES]
    for part in _PARTS:
        for offset in part.torn(before, after):
            copy[offset : offset + part.nbytes] = part.record(descriptor, offset)
    return bytes(copy)


def _read(descriptor: int, nbytes: int, offset: int) -> bytes:
    try:
        data = os.pread(descriptor, nbytes, offset)
    except OSError as error:
        raise DecodeError(f"the file of the page cannot be read: {error.strerror}") from error
    if len(data) != nbytes:
        raise DecodeError(f"the file of the page was made shorter: it has less than {offset + nbytes} bytes")
    return data
