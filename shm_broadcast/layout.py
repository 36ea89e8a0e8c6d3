"""The layout of a ring in shared memory: every offset, size and code of it that Python knows.

The native core declares the same structures in `csrc/ring/ring.hpp`; a test compiles them and compares each offset and
size with this module. `DESIGN.md` holds the output of `tables()`, which another test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple

__all__ = [
    "FIELDS",
    "LINE",
    "MAX_READERS",
    "PAGE",
    "RECORD_FIELDS",
    "Field",
    "ReaderState",
    "RecordKind",
    "data_offset",
    "record_bytes",
    "segment_bytes",
    "tables",
]

LINE: Final = 64
"""Bytes of a cache line. Records, their headers and the words of each side begin at multiples of it."""

PAGE: Final = 4096
"""The data area begins at a multiple of this."""

MAX_READERS: Final = 1024

_READERS: Final = 3 * LINE
"""Where the line of reader 0 begins; one line for each reader follows."""


class ReaderState(IntEnum):
    """What a reader's `state` says."""

    ABSENT = 0
    ATTACHED = 1
    LEFT = 2


class RecordKind(IntEnum):
    """What a record holds."""

    WHOLE = 0
    SKIP = 1
    PART = 2
    LAST_PART = 3
    STREAMED = 4


class Field(NamedTuple):
    """One word.

    Attributes:
        offset: Bytes from the beginning of the segment, or of the record; of reader 0 for a field of each reader.
        form: Its size, as `struct` names it: "Q" 8 bytes, "I" 4; unsigned, in native order.
        meaning: For the table.
        writer: The side that writes it.
    """

    offset: int
    form: str
    meaning: str
    writer: str = "writer"


FIELDS: Final[Mapping[str, Field]] = {
    "magic": Field(0, "Q", "`!GCRING1`", "creator, before anyone else maps the segment"),
    "version": Field(8, "I", "version of the layout, 2", "creator"),
    "readers": Field(12, "I", "number of places for readers, R", "creator"),
    "data_offset": Field(16, "Q", "offset of the data: 192 + 64 R, rounded up to a page", "creator"),
    "data_bytes": Field(24, "Q", "bytes of the data, a multiple of 64", "creator"),
    "generation": Field(32, "Q", "number of the queue, which the handle names too", "creator"),
    "published": Field(64, "Q", "bytes of records that readers may read; never decreases"),
    "messages": Field(72, "Q", "whole messages published"),
    "stamp_ns": Field(80, "Q", "time of the last publication, CLOCK_MONOTONIC in ns"),
    "sequence": Field(
        88,
        "I",
        "futex word of the readers; changes with each publication, announcement, close, leave and stir",
        "any side that wakes",
    ),
    "closed": Field(92, "I", "1 once the writer has closed the queue"),
    "filled": Field(96, "Q", "position up to which the last streamed record is there"),
    "space": Field(128, "I", "futex word of the writer; changes with each wake-up of it", "readers, closer"),
    "waiting": Field(132, "I", "1 while the writer sleeps or is about to"),
    "consumed": Field(192, "Q", "bytes that this reader has given back; never decreases", "reader"),
    "reader_messages": Field(200, "Q", "whole messages given back", "reader"),
    "progress_ns": Field(208, "Q", "time of the last release, CLOCK_MONOTONIC in ns", "reader"),
    "parked": Field(
        216,
        "I",
        "number of its threads that sleep on `sequence` or are about to; bit 31 while its descriptor awaits a signal",
        "reader",
    ),
    "state": Field(
        220, "I", ", ".join(f"{each.value} {each.name.lower()}" for each in ReaderState), "reader"
    ),
}
"""The words in front of the data area, in order."""

RECORD_FIELDS: Final[Mapping[str, Field]] = {
    "payload_bytes": Field(0, "Q", "bytes of the payload"),
    "flags": Field(
        8, "I", ", ".join(f"{each.value} {each.name.lower().replace('_', ' ')}" for each in RecordKind)
    ),
    "tag": Field(
        12,
        "I",
        "that of a channel's message, equal in all of its parts, or of a group's call in its queue; else 0",
    ),
    "message": Field(16, "Q", "number of the message, from 1; the same in all of its parts"),
    "total_bytes": Field(24, "Q", "bytes of the whole message"),
}
"""The header in front of each payload, which begins a line later."""


def _rounded(nbytes: int, to: int) -> int:
    return (nbytes + to - 1) // to * to


def data_offset(readers: int) -> int:
    """Return where the data area of a ring for `readers` begins."""
    return _rounded(_READERS + LINE * readers, PAGE)


def segment_bytes(ring_bytes: int, readers: int) -> int:
    """Return the size of a segment with at least `ring_bytes` for records."""
    return data_offset(readers) + _rounded(ring_bytes, PAGE)


def record_bytes(payload: int) -> int:
    """Return what a record with a payload of so many bytes takes, with its header."""
    return LINE + _rounded(payload, LINE)


def tables() -> str:
    """Return both tables of `DESIGN.md`, as Markdown."""
    lines = ["| offset | bytes | word | meaning | written by |", "|---|---|---|---|---|"]
    for name, field in FIELDS.items():
        of_reader = field.offset >= _READERS
        offset = f"{field.offset} + {LINE} i" if of_reader else str(field.offset)
        who = f"{field.writer} i" if of_reader else field.writer
        lines.append(f"| {offset} | {_size(field)} | `{name}` | {field.meaning} | {who} |")
    lines += ["| data offset | … | | records | writer |", "", f"A record, at a multiple of {LINE}:", ""]
    lines += ["| offset | bytes | word | meaning |", "|---|---|---|---|"]
    for name, field in RECORD_FIELDS.items():
        lines.append(f"| {field.offset} | {_size(field)} | `{name}` | {field.meaning} |")
    lines.append(f"| {LINE} | … | | payload: a frame of the codec, or a piece of one |")
    return "\n".join(lines)


def _size(field: Field) -> int:
    return 8 if field.form == "Q" else 4
