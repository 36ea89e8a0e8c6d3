"""State the layout of a status page: every offset, size and code of it that Python knows.

The native core declares the same structures in `csrc/status/page.hpp`; a test compiles them and compares each offset
and size with this module. `DESIGN.md` holds the output of `tables()`, which another test compares.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple

__all__ = [
    "BUCKETS",
    "DONE",
    "FAILED",
    "FIRST_BUCKET_NS",
    "MAGIC",
    "NAME",
    "NOBODY",
    "PAGE_BYTES",
    "TABLES",
    "VERSION",
    "Field",
    "GroupState",
    "LaneState",
    "Outcome",
    "Table",
    "pack_record",
    "tables",
]

NAME: Final = "group-coordinator-status"
"""The name of the memfd, by which readers find it among the descriptors of a process."""

MAGIC: Final = int.from_bytes(b"!GCSTAT1", "little")
VERSION: Final = 1
NOBODY: Final = 0xFFFF

BUCKETS: Final = 30
FIRST_BUCKET_NS: Final = 256
"""Bucket i of a histogram counts waits below FIRST_BUCKET_NS * 2**i ns, the last one all longer ones."""


class GroupState(IntEnum):
    """What the page says of a group."""

    FREE = 0
    FORMING = 1
    USABLE = 2
    BROKEN = 3
    LEFT = 4


class LaneState(IntEnum):
    """What the process does in a lane; between `POSTED` and the end it waits for others."""

    IDLE = 0
    COMPUTING = 1
    POSTED = 2
    ASLEEP = 3


class Outcome(IntEnum):
    """How a call ended."""

    DONE = 0
    FAILED = 1
    DISAGREED = 2


# What each call writes, as plain numbers: to look up a member of an enum takes a tenth of a microsecond (Python 3.11).
DONE: Final = int(Outcome.DONE)
FAILED: Final = int(Outcome.FAILED)


class Field(NamedTuple):
    """One word, text or list of a record.

    Attributes:
        form: As `struct` names it: unsigned "Q" of 8 bytes, "I" 4, "H" 2, "B" 1; signed "q" and "i"; "40s" a text.
        meaning: For the table.
    """

    form: str
    meaning: str


class Table(NamedTuple):
    """Records of one kind.

    Attributes:
        offset: Where the first begins in the page.
        nbytes: Of one record.
        number: Of the records.
        fields: In order, without gaps.
    """

    offset: int
    nbytes: int
    number: int
    fields: Mapping[str, Field]

    @property
    def form(self) -> struct.Struct:
        """Return the form of a whole record."""
        return struct.Struct("<" + "".join(field.form for field in self.fields.values()))


_SEQUENCE: Final = Field("I", "odd while the record is written")

_HEADER: Final = {
    "magic": Field("Q", "`!GCSTAT1`"),
    "version": Field("I", f"version of the layout, {VERSION}"),
    "clock": Field("I", "what ticks: 0 CLOCK_MONOTONIC in ns, 1 the x86 timestamp counter, 2 CNTVCT_EL0"),
    "page_bytes": Field("Q", "size of the page"),
    "ticks": Field("Q", "the clock at `monotonic_ns`"),
    "monotonic_ns": Field("Q", "CLOCK_MONOTONIC when the page was made"),
    "rate": Field("Q", "nanoseconds per tick, times 2^32"),
    "realtime_ns": Field("q", "CLOCK_REALTIME minus CLOCK_MONOTONIC"),
    "pid": Field("Q", "of the process, in its own namespace"),
    "start_ticks": Field("Q", "start of the process in clock ticks since boot"),
    "pid_namespace": Field("Q", "inode"),
    "time_namespace": Field("Q", "inode"),
    "boot_id": Field("40s", "of the kernel"),
    "hostname": Field("64s", "for people"),
    "rank": Field("i", "rank in the world, or -1"),
    "world_size": Field("I", "ranks of the world, or 0"),
    "stack_signal": Field("I", "signal that makes the process write its stacks, or 0"),
    "refused": Field("I", "groups, queues and lanes for which there was no room"),
    "records": Field("Q", "calls recorded so far"),
}
_GROUP: Final = {
    "sequence": _SEQUENCE,
    "state": Field("I", ", ".join(f"{each.value} {each.name.lower()}" for each in GroupState)),
    "epoch": Field("I", "how often the members have changed"),
    "rank": Field("I", "this process's place in the group"),
    "world_size": Field("I", "members"),
    "reserved": Field("I", "0"),
    "created_ns": Field("Q", "CLOCK_MONOTONIC"),
    "name": Field("160s", "the unique name"),
    "ranks": Field("256H", "global ranks of the first 256 members"),
    "cause": Field("320s", "why it is broken"),
}
_QUEUE: Final = {
    "sequence": _SEQUENCE,
    "state": Field("I", "1 open; 0 the place is free"),
    "inode": Field("Q", "of the segment that holds the ring"),
    "offset": Field("Q", "of the ring in the segment"),
    "reader": Field("i", "this end's place among the readers, or -1 for the writer"),
    "descriptor": Field("I", "of the segment in this process"),
    "name": Field("96s", "of the queue"),
}
_LANE: Final = {
    "sequence": _SEQUENCE,
    "group": Field("I", "place of the group plus 1; 0: the place is free"),
    "plane": Field("24s", "such as `device`"),
    "algorithm": Field("32s", "what carries the calls"),
    "call_sequence": _SEQUENCE,
    "state": Field("B", ", ".join(f"{each.value} {each.name.lower()}" for each in LaneState)),
    "kind": Field("B", "of the last call; see `kinds.py`"),
    "dtype": Field("B", "code of device_comm, or 0"),
    "op": Field("B", "the reduction"),
    "number": Field("Q", "of the call in its plane, or 0"),
    "count": Field("Q", "elements or bytes"),
    "begin": Field("Q", "ticks"),
    "end": Field("Q", "ticks, of the last call that has ended"),
    "detail": Field("Q", "hash of what else is equal on all ranks"),
    "nbytes": Field("Q", "bytes that this rank brings"),
    "root": Field("I", "root of a collective, or the other rank"),
    "call_reserved": Field("I", "0"),
}
_COUNTERS: Final = {
    "sequence": _SEQUENCE,
    "lane": Field("I", "place of the lane plus 1; 0: the place is free"),
    "kind": Field("I", "of the calls"),
    "reserved": Field("I", "0"),
    "calls": Field("Q", "that have ended"),
    "errors": Field("Q", "of these, with an error"),
    "nbytes": Field("Q", "bytes that this rank brought"),
    "waited_ns": Field("Q", "waited for the last rank to come"),
    "last": Field("Q", "calls to which this rank came last"),
    "late_ns": Field("Q", "in these, how long after the one before"),
    "sleeps": Field("Q", "times that it slept"),
    "polled_ns": Field("Q", "polled in waits of more than some microseconds"),
    "waits": Field(f"{BUCKETS}Q", f"histogram of `waited_ns`: bucket i is below {FIRST_BUCKET_NS} * 2^i ns"),
}
_RECORD: Final = {
    "commit": Field("Q", "number of this record, from 1; 0 while it is written"),
    "number": Field("Q", "of the call in its plane"),
    "count": Field("Q", "elements or bytes"),
    "begin": Field("Q", "ticks, when this rank came"),
    "end": Field("Q", "ticks"),
    "lane": Field("H", "place of the lane"),
    "last": Field("H", f"place in the group of the rank that came last, or {NOBODY}"),
    "kind": Field("B", "of the call"),
    "dtype": Field("B", "code of device_comm, or 0"),
    "op": Field("B", "the reduction"),
    "outcome": Field("B", ", ".join(f"{each.value} {each.name.lower()}" for each in Outcome)),
    "root": Field("I", "root, or the other rank"),
    "detail": Field("I", "folded hash"),
    "waited_ns": Field("I", "for the last rank, up to 2^32 - 1"),
    "late_ns": Field("I", "by which the last rank came after the one before, up to 2^32 - 1"),
}


def _laid_out() -> dict[str, Table]:
    shapes = {
        "header": (4096, 1, 4096, _HEADER),
        "groups": (1024, 64, 4096, _GROUP),
        "queues": (128, 64, 64, _QUEUE),
        "lanes": (128, 128, 64, _LANE),
        "counters": (320, 192, 64, _COUNTERS),
        "records": (64, 4096, 4096, _RECORD),
    }
    found, offset = {}, 0
    for name, (nbytes, number, alignment, fields) in shapes.items():
        offset = -(-offset // alignment) * alignment
        found[name] = Table(offset, nbytes, number, fields)
        offset += nbytes * number
    return found


TABLES: Final[Mapping[str, Table]] = _laid_out()
"""The tables of the page, in order."""

PAGE_BYTES: Final = TABLES["records"].offset + TABLES["records"].nbytes * TABLES["records"].number


def pack_record(table: str, **values: object) -> bytes:
    """Return a record without its sequence number; what is not given is 0."""
    found = TABLES[table]
    words: list[object] = []
    for name, field in found.fields.items():
        given = values.get(name)
        count = int(field.form[:-1]) if field.form[:-1] and field.form[-1] != "s" else 0
        if count:
            listed = list(given)[:count] if isinstance(given, (list, tuple)) else []
            words += listed + [0] * (count - len(listed))
        else:
            words.append((b"" if field.form[-1] == "s" else 0) if given is None else given)
    return found.form.pack(*words)[struct.calcsize("I") :]


def tables() -> str:
    """Return the tables of `DESIGN.md`, as Markdown."""
    lines = []
    for name, table in TABLES.items():
        lines += [f"`{name}`: {table.number} of {table.nbytes} bytes from {table.offset}:", ""]
        lines += ["| offset | bytes | word | meaning |", "|---|---|---|---|"]
        offset = 0
        for word, field in table.fields.items():
            nbytes = struct.calcsize("<" + field.form)
            lines.append(f"| {offset} | {nbytes} | `{word}` | {field.meaning} |")
            offset += nbytes
        lines.append("")
    return "\n".join(lines[:-1])
