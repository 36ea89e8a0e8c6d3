"""Bring the times of status pages to one clock.

CLOCK_MONOTONIC starts anew with each boot and is shifted by time namespaces. Pages of one boot and one time namespace
have one clock: they count the same ticks, and one of them says how long a tick takes, so that processes whose rates
differ by a millionth agree after hours. Two clocks can be compared only by calls: no rank leaves a call in
which all meet before the last one has come. With o the offset from clock B to clock A, each such call says

    latest begin on A - earliest end on B  <=  o  <=  earliest end on A - latest begin on B

The offset is the middle of what all calls leave, and its error half of the width. Over many minutes clocks drift apart
by parts in a million, and the bounds may contradict each other; how much they had to be widened is part of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from coordinator.diagnosis.model import Page, Record
from coordinator.diagnosis.same_calls import PageGroups, ambiguous_groups, carrier_of

__all__ = ["Alignment", "Meeting", "Offset", "align", "find_offsets"]

_UNBOUNDED: Final = float("inf")
# In these calls all ranks meet if shared memory carries them; over a process group of the host plane all
# ranks meet in every numbered call.
_MEETING: Final = frozenset({"barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"})
_SHARED_PLANES: Final = frozenset({"shared", "shared host"})


class Meeting(msgspec.Struct, frozen=True):
    """What one clock shows of a call in which all ranks meet.

    Attributes:
        begin_ns: When the last rank of this clock came.
        end_ns: When the first rank of this clock was through.
    """

    begin_ns: int
    end_ns: int


class Offset(msgspec.Struct, frozen=True):
    """How one clock relates to the first one.

    Attributes:
        offset_ns: Add it to times of the clock to get those of the first.
        error_ns: By how much it may be wrong; None if no call ties the clocks.
        contradiction_ns: By how much each bound had to be widened because the calls contradict each other.
        calls: How many calls tie it to other clocks.
    """

    offset_ns: int
    error_ns: int | None
    contradiction_ns: int
    calls: int


class Alignment(msgspec.Struct, frozen=True):
    """The common clock of some pages.

    Attributes:
        times: For each page, what turns a time of it into one of the common clock, in ns.
        clocks: For each page, the number of its clock.
        offsets: For each clock, how it relates to the first one.
        hosts: For each clock, the name of its host.
    """

    times: tuple[Callable[[int], int], ...]
    clocks: tuple[int, ...]
    offsets: tuple[Offset, ...]
    hosts: tuple[str, ...]


def find_offsets(
    meetings: Iterable[Mapping[int, Meeting]], clocks: int, guesses: Sequence[int] = ()
) -> list[Offset]:
    """Return how each clock relates to clock 0.

    Args:
        meetings: For each call what the clocks show of it, by clock.
        clocks: How many clocks there are.
        guesses: For each clock the offset that counts if no call ties it to clock 0; by default 0.
    """
    bounds = [[0.0 if a == b else _UNBOUNDED for b in range(clocks)] for a in range(clocks)]
    calls = [0] * clocks
    for meeting in meetings:
        if len(meeting) < 2:
            continue
        for first, here in meeting.items():
            calls[first] += 1
            for second, there in meeting.items():
                if first != second:
                    # At most this is the offset of `second` minus that of `first`.
                    bounds[first][second] = min(bounds[first][second], here.end_ns - there.begin_ns)
    widened = _contradiction(bounds)
    paths = _shortest(bounds, widened)
    found = [Offset(0, 0, 0, calls[0])]
    for clock in range(1, clocks):
        highest, lowest = paths[0][clock], -paths[clock][0]
        if highest == _UNBOUNDED:
            found.append(Offset(guesses[clock] if guesses else 0, None, 0, calls[clock]))
            continue
        middle, half = int(highest + lowest) // 2, -(int(lowest - highest) // 2)
        found.append(Offset(middle, half + widened, widened, calls[clock]))
    return found


def _shortest(bounds: list[list[float]], widened: int) -> list[list[float]]:
    """Return the least sum of bounds, each widened, on any way from one clock to another (Floyd and Warshall)."""
    clocks = range(len(bounds))
    paths = [[bounds[a][b] + (widened if a != b else 0) for b in clocks] for a in clocks]
    for middle in clocks:
        for a in clocks:
            for b in clocks:
                paths[a][b] = min(paths[a][b], paths[a][middle] + paths[middle][b])
    return paths


def _contradiction(bounds: list[list[float]]) -> int:
    """Return by how many ns each bound must be widened, at least, so that all of them can hold; 0 if they can."""

    def holds(widened: int) -> bool:
        paths = _shortest(bounds, widened)
        return all(paths[clock][clock] >= 0 for clock in range(len(bounds)))

    if holds(0):
        return 0
    low, high = 0, 1
    while not holds(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def align(pages: Sequence[Page]) -> Alignment:
    """Return the common clock of `pages`, which is that of the first page."""
    numbers: dict[tuple[object, ...], int] = {}
    clocks = tuple(numbers.setdefault(_clock_of(page), len(numbers)) for page in pages)
    references = [pages[clocks.index(number)] for number in range(len(numbers))]
    own = [_onto(page, references[clock]) for page, clock in zip(pages, clocks, strict=True)]
    offsets = find_offsets(
        _meetings(pages, clocks, own) if len(numbers) > 1 else (),
        len(numbers),
        [reference.realtime_ns - references[0].realtime_ns for reference in references] if references else [],
    )
    times = [
        partial(_shifted, time, offsets[clock].offset_ns) if offsets[clock].offset_ns else time
        for time, clock in zip(own, clocks, strict=True)
    ]
    return Alignment(
        tuple(times), clocks, tuple(offsets), tuple(reference.hostname for reference in references)
    )


def _clock_of(page: Page) -> tuple[object, ...]:
    return page.boot_id, page.time_namespace, page.clock.source


def _shifted(time: Callable[[int], int], offset_ns: int, ns: int) -> int:
    return time(ns) + offset_ns


def _onto(page: Page, reference: Page) -> Callable[[int], int]:
    """Return what turns a time of `page` into one of `reference`, which counts the same ticks at its own rate."""
    own, other = page.clock, reference.clock
    if own == other or not own.rate or not other.rate:
        return int

    def time(ns: int) -> int:
        ticks = own.ticks + ((ns - own.monotonic_ns) << 32) // own.rate
        return other.monotonic_ns + ((ticks - other.ticks) * other.rate >> 32)

    return time


def _meets(record: Record) -> bool:
    """Return whether the record is of a call that no rank leaves before all have come.

    The device plane of a process group is left out: on an accelerator its calls end when they are queued.
    """
    if not record.number or record.outcome != "done":
        return False
    if record.plane == "host":
        return carrier_of(record) == "process group" and (record.call == "barrier" or record.count > 0)
    return (
        record.plane in _SHARED_PLANES
        and record.call in _MEETING
        and (record.call == "barrier" or record.count > 0)
    )


def _meetings(
    pages: Sequence[Page], clocks: Sequence[int], times: Sequence[Callable[[int], int]]
) -> list[dict[int, Meeting]]:
    """Return what the clocks show of each call in which all ranks meet."""
    found: dict[tuple[object, ...], dict[int, Meeting]] = {}
    ambiguous = ambiguous_groups(pages)
    for page, clock, time in zip(pages, clocks, times, strict=True):
        groups = PageGroups(page)
        for record in page.records:
            of = groups.of(record) if _meets(record) else None
            if of is None or of[0] in ambiguous:
                continue
            begin_ns, end_ns = time(record.begin_ns), time(record.end_ns)
            seen = found.setdefault((of[0], record.plane, record.number), {})
            before = seen.get(clock)
            if before is not None:
                begin_ns, end_ns = max(begin_ns, before.begin_ns), min(end_ns, before.end_ns)
            seen[clock] = Meeting(begin_ns, end_ns)
    return list(found.values())
