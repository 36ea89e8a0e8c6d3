"""Decode the copy of a status page. Nothing in it is trusted: what makes no sense is an error, and never a crash."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from coordinator.diagnosis.model import Clock, Counters, Group, Lane, Page, Queue, Record
from shm_broadcast.errors import DecodeError
from shm_broadcast.status.kinds import ALGORITHMS, KINDS
from shm_broadcast.status.layout import (
    MAGIC,
    NOBODY,
    PAGE_BYTES,
    TABLES,
    VERSION,
    GroupState,
    LaneState,
    Outcome,
)

__all__ = ["decode_lateness", "decode_page"]

_FORMS: Final = {name: table.form for name, table in TABLES.items()}
# How many numbers each word is a list of; 0 for a single number or a text.
_COUNTS: Final = {
    name: [
        (word, int(field.form[:-1]) if field.form[:-1] and field.form[-1] != "s" else 0)
        for word, field in table.fields.items()
    ]
    for name, table in TABLES.items()
}
# The word behind the sequence number tells in each table whether a place is in use. One form reads those of all places.
_USED: Final = {
    name: struct.Struct("<" + f"4xI{table.nbytes - 8}x" * table.number)
    for name, table in TABLES.items()
    if name not in ("header", "records")
}
# The numbers of all records, which are their first words: most places of a young process are free.
_COMMITS: Final = struct.Struct("<" + f"Q{TABLES['records'].nbytes - 8}x" * TABLES["records"].number)
# Of a record: its number, when it began, the lane, the last rank, and by how much that was late.
_LATENESS: Final = struct.Struct("<Q16xQ8xHH16xI")
_LATEST_NS: Final = 2**63 - 1
_NO_ROOT: Final = (NOBODY, 0xFFFFFFFF)
_ROOTLESS: Final = frozenset(
    {"barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "recv_any", "other"}
)


def decode_page(copy: bytes, records: bool = True, newest: int = TABLES["records"].number) -> Page:
    """Return what a page says.

    Args:
        copy: What `_core.status_copy` has returned, or the bytes of a file with the same layout.
        records: Whether to decode calls that have ended: 4,096 of them take over ten times as long as all the rest.
        newest: How many of them at most, the newest ones.

    Raises:
        DecodeError: It is no page of this version, or holds values that cannot be.
    """
    if len(copy) != PAGE_BYTES:
        raise DecodeError(f"a status page has {PAGE_BYTES} bytes, this has {len(copy)}")
    header = _row(copy, "header", 0)
    if header["magic"] != MAGIC:
        raise DecodeError("this is no status page: it does not begin with !GCSTAT1")
    if header["version"] != VERSION:
        raise DecodeError(
            f"the status page has version {header['version']}, and this release reads version {VERSION}: "
            "use the release of the process that wrote it"
        )
    clock = _Clock(header["ticks"], header["monotonic_ns"], header["rate"])
    counters = _counters(copy)
    lanes = _rows(copy, "lanes")
    groups = _groups(copy, lanes, counters, clock)
    return Page(
        pid=header["pid"],
        start_ticks=header["start_ticks"],
        pid_namespace=header["pid_namespace"],
        time_namespace=header["time_namespace"],
        boot_id=_text(header["boot_id"]),
        hostname=_text(header["hostname"]),
        rank=header["rank"] if header["rank"] >= 0 else None,
        world_size=header["world_size"],
        stack_signal=header["stack_signal"],
        refused=header["refused"],
        created_ns=header["monotonic_ns"],
        realtime_ns=header["realtime_ns"],
        calls=header["records"],
        groups=tuple(sorted(groups.values(), key=lambda group: group.created_ns)),
        queues=tuple(
            Queue(_text(row["name"]), row["inode"], row["offset"], row["reader"], row["descriptor"])
            for row in _rows(copy, "queues").values()
        ),
        records=tuple(_records(copy, header["records"], newest, lanes, groups, clock)) if records else (),
        clock=Clock(header["clock"], header["ticks"], header["monotonic_ns"], header["rate"]),
    )


def decode_lateness(
    copy: bytes, page: Page, newest: int
) -> dict[tuple[str, int, str], list[tuple[int, int]]]:
    """Return which ranks were late in the newest calls; cheap enough for a look every second.

    Args:
        copy: As in `decode_page`.
        page: What that has returned.
        newest: How many calls at most.

    Returns:
        For a group's name, its epoch and a plane: the place in the group of the rank that came last, and by how many
        nanoseconds, for each call of which that is known.
    """
    table, lanes = TABLES["records"], _rows(copy, "lanes")
    groups = _rows(copy, "groups")
    clock = _Clock(page.clock.ticks, page.clock.monotonic_ns, page.clock.rate)
    found: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
    names: dict[int, tuple[tuple[str, int, str], int]] = {}
    for place, lane in lanes.items():
        group = groups.get(lane["group"] - 1)
        if group is not None:
            key = _text(group["name"]), group["epoch"], _text(lane["plane"])
            names[place] = key, group["created_ns"]
    for ahead in range(min(newest, table.number)):
        place = (page.calls - 1 - ahead) % table.number
        index, begin, lane_place, last, late_ns = _LATENESS.unpack_from(
            copy, table.offset + place * table.nbytes
        )
        name = names.get(lane_place)
        # The same checks as for whole records: it is complete, and of the group that has the lane now.
        if last == NOBODY or name is None or not index or (index - 1) % table.number != place:
            continue
        if clock.ns(begin) >= name[1]:
            found.setdefault(name[0], []).append((last, late_ns))
    return found


class _Clock(NamedTuple):
    """The page's clock."""

    ticks: int
    monotonic_ns: int
    rate: int

    def ns(self, ticks: int) -> int:
        """Return a time of the clock on CLOCK_MONOTONIC, within what 63 bits hold; 0 stays 0."""
        if not ticks:
            return 0
        return min(max(self.monotonic_ns + ((ticks - self.ticks) * self.rate >> 32), 0), _LATEST_NS)


def _row(copy: bytes, name: str, place: int) -> dict[str, Any]:
    """Return a row of a table. A list of numbers is a tuple."""
    table = TABLES[name]
    words = _FORMS[name].unpack_from(copy, table.offset + place * table.nbytes)
    row, at = {}, 0
    for word, count in _COUNTS[name]:
        row[word] = words[at : at + count] if count else words[at]
        at += count or 1
    return row


def _rows(copy: bytes, name: str) -> dict[int, dict[str, Any]]:
    """Return the rows of a table of which each place is in use or free, by their places; those in use alone."""
    table = TABLES[name]
    used = _USED[name].unpack_from(copy, table.offset)
    return {place: _row(copy, name, place) for place, is_used in enumerate(used) if is_used}


def _text(data: bytes) -> str:
    """Return a text without what a terminal might obey: whoever shows it need not know where it came from."""
    text = data.partition(b"\0")[0].decode(errors="replace")
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def _name(kind: int) -> str:
    return KINDS[kind] if kind < len(KINDS) else "other"


def _code(kind: type[GroupState | LaneState | Outcome], value: int) -> str:
    """Return the name of a code."""
    try:
        return kind(value).name.lower()
    except ValueError:
        raise DecodeError(f"the status page holds {kind.__name__} {value}, which there is none") from None


def _algorithm(kind: int, lane: str) -> str:
    return ALGORITHMS.get(kind, lane)


def _root(kind: int, value: int) -> int | None:
    return None if value in _NO_ROOT or _name(kind) in _ROOTLESS else value


def _counters(copy: bytes) -> dict[int, list[dict[str, Any]]]:
    """Return the rows of the counters by the place of their lane."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in _rows(copy, "counters").values():
        found.setdefault(row["lane"] - 1, []).append(row)
    return found


def _groups(
    copy: bytes,
    lanes: dict[int, dict[str, Any]],
    counters: dict[int, list[dict[str, Any]]],
    clock: _Clock,
) -> dict[int, Group]:
    """Return the groups by their place."""
    found = {}
    for place, row in _rows(copy, "groups").items():
        is_torn = row["sequence"] % 2 == 1
        # A process that was killed while it wrote may have left words of two groups.
        if not is_torn and row["rank"] >= max(row["world_size"], 1):
            raise DecodeError(f"the status page says place {row['rank']} in a group of {row['world_size']}")
        found[place] = Group(
            name=_text(row["name"]),
            state=_code(GroupState, row["state"]),
            epoch=row["epoch"],
            place=row["rank"],
            world_size=row["world_size"],
            ranks=row["ranks"][: row["world_size"]],
            created_ns=row["created_ns"],
            cause=_text(row["cause"]),
            is_torn=is_torn,
            lanes=tuple(
                _lane(lane, counters.get(index, []), clock)
                for index, lane in lanes.items()
                if lane["group"] == place + 1
            ),
        )
    return found


def _lane(row: dict[str, Any], counters: list[dict[str, Any]], clock: _Clock) -> Lane:
    algorithm = _text(row["algorithm"])
    return Lane(
        plane=_text(row["plane"]),
        algorithm=_algorithm(row["kind"], algorithm),
        state=_code(LaneState, row["state"]),
        call=_name(row["kind"]) if row["begin"] else "",
        number=row["number"],
        count=row["count"],
        nbytes=row["nbytes"],
        root=_root(row["kind"], row["root"]),
        dtype=row["dtype"],
        op=row["op"],
        detail=row["detail"],
        begin_ns=clock.ns(row["begin"]),
        end_ns=clock.ns(row["end"]),
        is_torn=row["sequence"] % 2 == 1 or row["call_sequence"] % 2 == 1,
        counters=tuple(
            Counters(
                _name(each["kind"]),
                _algorithm(each["kind"], algorithm),
                *(each[word] for word in _COUNTED),
            )
            for each in counters
        ),
    )


_COUNTED: Final = (
    "calls",
    "errors",
    "nbytes",
    "waited_ns",
    "last",
    "late_ns",
    "sleeps",
    "polled_ns",
    "waits",
)


def _records(
    copy: bytes,
    calls: int,
    newest: int,
    lanes: dict[int, dict[str, Any]],
    groups: dict[int, Group],
    clock: _Clock,
) -> list[Record]:
    """Return the newest calls that have ended, in order.

    Those that are being written, or whose group is no longer shown, are left out. `calls` have been recorded
    in all, or a few more since the header was copied.
    """
    number, found = TABLES["records"].number, []
    commits = _COMMITS.unpack_from(copy, TABLES["records"].offset)
    for ahead in range(min(newest, number)):
        place = (calls - 1 - ahead) % number
        index = commits[place]
        if not index or (index - 1) % number != place:
            continue
        row = _row(copy, "records", place)
        if row["lane"] not in lanes:
            continue
        lane = lanes[row["lane"]]
        group = groups.get(lane["group"] - 1)
        begin_ns = clock.ns(row["begin"])
        # A lane is used again by a later group when there is no other.
        if group is None or begin_ns < group.created_ns:
            continue
        found.append(
            Record(
                index=index,
                group=group.name,
                epoch=group.epoch,
                plane=_text(lane["plane"]),
                algorithm=_algorithm(row["kind"], _text(lane["algorithm"])),
                call=_name(row["kind"]),
                number=row["number"],
                count=row["count"],
                dtype=row["dtype"],
                op=row["op"],
                root=_root(row["kind"], row["root"]),
                detail=row["detail"],
                begin_ns=begin_ns,
                end_ns=clock.ns(row["end"]),
                last=None if row["last"] == NOBODY else row["last"],
                waited_ns=row["waited_ns"],
                late_ns=row["late_ns"],
                outcome=_code(Outcome, row["outcome"]),
            )
        )
    return sorted(found, key=lambda record: record.index)
