"""Make a trace of status pages, in the Trace Event Format that Perfetto and chrome://tracing read.

A process is a rank, and a track a plane of a group. A call is a slice, the time for which its rank waited for the last
one a slice inside of it, and an arrow leads from the rank that came last to each of the others. The arguments have the
names that torch's profiler gives those of its collectives, so that tools for its traces find them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from coordinator.diagnosis.clock_offsets import Alignment, align
from coordinator.diagnosis.model import Group, Lane, Page, Record
from coordinator.diagnosis.same_calls import TWO_LEVELS, GroupKey, PageGroups, ambiguous_groups, carrier_of
from device_comm._core import TYPE_NAMES

__all__ = ["Trace", "make_trace"]

Event = dict[str, Any]

CATEGORY: Final = "group_coordinator"
# As c10::toString names them, which torch's profiler writes.
_TORCH_NAMES: Final = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "bool": "Bool",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
# `ReduceOperation` in its order, which is that of the codes.
_OPERATIONS: Final = ("sum", "mean", "product", "min", "max")
_REDUCING: Final = frozenset({"all_reduce", "reduce", "reduce_scatter"})
# Shared memory counts elements in these calls, of which the result has as many as the input, and bytes in others.
_SAME_SIZE: Final = frozenset({"all_reduce", "reduce"})
# Calls of other carriers end when they are queued on a device, and say nothing of who waited for whom.
_WAITING: Final = frozenset({"shared memory", "process group", TWO_LEVELS})
_SENDING: Final = frozenset({"send", "send_object", "send_tensor_dict"})
_RECEIVING: Final = frozenset({"recv", "recv_object", "recv_tensor_dict"})


class Trace(msgspec.Struct, frozen=True):
    """A trace.

    Attributes:
        events: In the Trace Event Format, ordered by time behind those that name processes and tracks.
        calls: How many calls are in it.
        running: How many of these calls go on.
        arrows: How many arrows lead from a last arriver.
        notes: What a reader must know: how well the clocks agree, what is missing.
    """

    events: tuple[Event, ...]
    calls: int
    running: int
    arrows: int
    notes: tuple[str, ...]

    def to_json(self) -> bytes:
        """Return the file."""
        whole = {
            "traceEvents": self.events,
            "displayTimeUnit": "ns",
            "otherData": {"notes": list(self.notes)},
        }
        return msgspec.json.encode(whole)


class _Call(NamedTuple):
    """One slice: a call that has ended, or one that goes on, on the common clock."""

    page: int
    key: GroupKey
    group: Group
    record: Record
    begin_ns: int
    end_ns: int
    state: str  # "" if it has ended


class _Place(NamedTuple):
    """Where a call is in the trace."""

    call: _Call
    pid: int
    tid: int


def make_trace(pages: Sequence[Page], now_ns: Mapping[int, int] | None = None) -> Trace:
    """Return the trace of some processes, of one job or of all that one wants to see together.

    Args:
        pages: What the processes say.
        now_ns: For live pages, CLOCK_MONOTONIC at the time when they were read, by the index of the page.
            Calls that go on are shown to end then, or else with the last thing that any page shows.
    """
    alignment = align(pages)
    calls = list(_ended(pages, alignment))
    latest_ns = max([call.end_ns for call in calls], default=0)
    for place, at_ns in (now_ns or {}).items():
        latest_ns = max(latest_ns, alignment.times[place](at_ns))
    going_on = list(_going_on(pages, alignment, latest_ns))
    calls += going_on
    start_ns = min((call.begin_ns for call in calls), default=0)
    pids = _pids(pages)
    events: list[Event] = []
    for place, page in enumerate(pages):
        events += _named("process", pids[place], 0, _title(page), place)
    places = []
    for tid, ((place, title), track) in enumerate(
        sorted(_tracks(calls).items(), key=lambda item: item[0]), 1
    ):
        events += _named("thread", pids[place], tid, title, tid)
        places += [_Place(call, pids[place], tid) for call in track]
    timed: list[Event] = []
    for found in places:
        timed += _slices(found, start_ns)
    arrows = list(_arrows(places, pages, alignment, start_ns))
    timed += arrows
    # At one time an outer slice comes before an inner one, and the beginning of an arrow before its end.
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0), event["ph"] == "f"))
    notes = (*_clock_notes(alignment), *_missing(pages))
    return Trace((*events, *timed), len(calls), len(going_on), len(arrows) // 2, notes)


def _ended(pages: Sequence[Page], alignment: Alignment) -> Iterator[_Call]:
    for place, page in enumerate(pages):
        time, groups = alignment.times[place], PageGroups(page)
        for record in page.records:
            of = groups.of(record)
            if of is not None:
                begin_ns = time(record.begin_ns)
                yield _Call(place, *of, record, begin_ns, max(time(record.end_ns), begin_ns), "")


def _going_on(pages: Sequence[Page], alignment: Alignment, latest_ns: int) -> Iterator[_Call]:
    for place, page in enumerate(pages):
        for key, group in PageGroups(page).keys.items():
            for lane in group.lanes:
                if lane.state != "idle" and lane.call and lane.begin_ns:
                    record, begin_ns = _as_record(group, lane), alignment.times[place](lane.begin_ns)
                    yield _Call(place, key, group, record, begin_ns, max(latest_ns, begin_ns), lane.state)


def _as_record(group: Group, lane: Lane) -> Record:
    """Return the call that goes on in a lane as one that has ended is shown."""
    return Record(
        index=0,
        group=group.name,
        epoch=group.epoch,
        plane=lane.plane,
        algorithm=lane.algorithm,
        call=lane.call,
        number=lane.number,
        count=lane.count,
        dtype=lane.dtype,
        op=lane.op,
        root=lane.root,
        detail=lane.detail,
        begin_ns=lane.begin_ns,
        end_ns=0,
        last=None,
        waited_ns=0,
        late_ns=0,
        outcome="running",
    )


def _pids(pages: Sequence[Page]) -> list[int]:
    """Return the number of each process in the trace: its rank, or a free number for one that has none of its own."""
    found: list[int] = []
    free = max((page.rank or 0 for page in pages), default=0) + 1
    for page in pages:
        if page.rank is not None and page.rank not in found:
            found.append(page.rank)
        else:
            found.append(free)
            free += 1
    return found


def _title(page: Page) -> str:
    rank = "no rank" if page.rank is None else f"rank {page.rank}"
    return f"{rank} · {page.hostname} · pid {page.pid}"


def _named(kind: str, pid: int, tid: int, name: str, order: int) -> list[Event]:
    event = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {**event, "name": f"{kind}_name", "args": {"name": name}},
        {**event, "name": f"{kind}_sort_index", "args": {"sort_index": order}},
    ]


def _tracks(calls: Sequence[_Call]) -> dict[tuple[int, str], list[_Call]]:
    """Return the calls by process and title of the track.

    Slices of one track must not overlap. Calls between two ranks may, and have as many tracks as they need.
    """
    found: dict[tuple[int, str], list[_Call]] = {}
    for call in sorted(calls, key=lambda each: (each.begin_ns, each.end_ns)):
        epoch = f" epoch {call.group.epoch}" if call.group.epoch else ""
        title, number = f"{call.group.name}{epoch} · {call.record.plane}", 1
        while True:
            track = found.setdefault((call.page, title if number == 1 else f"{title} ({number})"), [])
            if not track or track[-1].end_ns <= call.begin_ns:
                track.append(call)
                break
            number += 1
    return found


def _us(ns: int, start_ns: int) -> float:
    return (ns - start_ns) / 1000


def _slices(place: _Place, start_ns: int) -> Iterator[Event]:
    call, record = place.call, place.call.record
    number = f" #{record.number}" if record.number else ""
    event = {"ph": "X", "cat": CATEGORY, "pid": place.pid, "tid": place.tid}
    begin_us = _us(call.begin_ns, start_ns)
    yield {
        **event,
        "name": f"{record.call}{number}" + ("" if record.outcome == "done" else f" ({record.outcome})"),
        "ts": begin_us,
        "dur": _us(call.end_ns, call.begin_ns),
        "args": _arguments(call),
    }
    waited_ns = min(record.waited_ns, call.end_ns - call.begin_ns)
    if waited_ns:
        last = "" if record.last is None else f" for {_rank_text(call.group, record.last)}"
        yield {**event, "name": f"wait{last}", "ts": begin_us, "dur": _us(waited_ns, 0), "args": {}}


def _rank_text(group: Group, place: int) -> str:
    return f"rank {group.ranks[place]}" if place < len(group.ranks) else f"place {place}"


def _arguments(call: _Call) -> Event:
    """Return what is known of a call by the names of torch's profiler, and below that by our own."""
    group, record = call.group, call.record
    found: Event = {
        "Collective name": record.call,
        "Group size": group.world_size,
        "Process Group Name": group.name,
        "Process Group Description": f"{group.name} {record.plane}",
        "Process Group Ranks": str(list(group.ranks)),
        "Rank": group.place,
    }
    if record.number:
        found["Seq"] = record.number
    found |= _sizes(record)
    if record.call in _REDUCING and record.op < len(_OPERATIONS) and "dtype" in found:
        found["reduction"] = _OPERATIONS[record.op]
    if record.root is not None:
        names = {**dict.fromkeys(_SENDING, "Dst Rank"), **dict.fromkeys(_RECEIVING, "Src Rank")}
        found[names.get(record.call, "root")] = record.root
    found |= {"count": record.count, "algorithm": record.algorithm, "epoch": record.epoch}
    if call.state:
        return {**found, "state": call.state}
    found |= {"waited_us": record.waited_ns / 1000, "outcome": record.outcome}
    if record.last is not None:
        found |= {
            "last to come": _rank_text(group, record.last),
            "late_us": record.late_ns / 1000,
        }
    return found


def _sizes(record: Record) -> Event:
    """Return the dtype and numbers of elements, as far as shared memory shows them."""
    name = TYPE_NAMES.get(record.dtype)
    # Objects are bytes, for which the code is that of the first dtype.
    is_object = record.plane == "shared host" and record.call not in _REDUCING
    if carrier_of(record) != "shared memory" or name is None or record.call == "barrier" or is_object:
        return {}
    found: Event = {"dtype": _TORCH_NAMES.get(name, name.capitalize())}
    bits = re.search("[0-9]+", name)
    elements = record.count // (int(bits[0]) // 8 if bits else 1)
    if record.call in _SAME_SIZE:
        found |= {"In msg nelems": record.count, "Out msg nelems": record.count}
    elif record.call == "broadcast":
        found |= {"In msg nelems": elements, "Out msg nelems": elements}
    elif record.call == "all_gather":
        found["Out msg nelems"] = elements
    return found


def _arrows(
    places: Sequence[_Place], pages: Sequence[Page], alignment: Alignment, start_ns: int
) -> Iterator[Event]:
    """Yield two events for each arrow from the rank that came last to one that waited for it."""
    ambiguous = ambiguous_groups(pages)
    together: dict[tuple[object, ...], list[_Place]] = {}
    for place in places:
        record, carrier = place.call.record, carrier_of(place.call.record)
        if record.number and carrier in _WAITING and place.call.key not in ambiguous:
            # Of a group on several hosts the ranks of each host have shared memory of their own, in the plane "device".
            host = alignment.clocks[place.call.page] if carrier == "shared memory" else None
            key = place.call.key, record.plane, carrier, host, record.number, record.call
            together.setdefault(key, []).append(place)
    number = 0
    for found in together.values():
        if len({place.pid for place in found}) < len(found):
            continue  # no process makes one call twice: the numbers are wrong
        last = _last(found)
        if last is None:
            continue
        for other in found:
            # A rank that was through before did not wait for it: the root of a broadcast, or a queued call.
            if other is last or other.call.end_ns < last.call.begin_ns:
                continue
            number += 1
            event = {"cat": CATEGORY, "name": "last to come", "id": number}
            begin_us = _us(last.call.begin_ns, start_ns)
            # A rank comes a little after its call has begun, so that the last one may have begun first.
            end_us = _us(max(last.call.begin_ns, other.call.begin_ns), start_ns)
            yield {**event, "ts": begin_us, "ph": "s", "pid": last.pid, "tid": last.tid}
            yield {**event, "ts": end_us, "ph": "f", "bp": "e", "pid": other.pid, "tid": other.tid}


def _last(found: Sequence[_Place]) -> _Place | None:
    """Return where the rank is that came last to a call; None if it is not in the trace."""
    # The memory of one of several hosts counts its own ranks only, and a process group does not know who came last.
    known = {place.call.record.last for place in found if place.call.record.plane != "device"} - {None}
    if known:
        return next((place for place in found if place.call.group.place in known), None)
    # The times of one host tell it, and those of several do within their error.
    return max(found, key=lambda place: (place.call.begin_ns, place.pid))


def _clock_notes(alignment: Alignment) -> Iterator[str]:
    for number, offset in enumerate(alignment.offsets[1:], 1):
        host = f"clock {number} ({alignment.hosts[number]})"
        if offset.error_ns is None:
            yield (
                f"{host}: no call ties it to clock 0 ({alignment.hosts[0]}); its offset of "
                f"{offset.offset_ns / 1e6:.3f} ms is the difference of the realtime clocks, and its error is not known"
            )
            continue
        text = (
            f"{host}: offset {offset.offset_ns / 1e6:.3f} ms to clock 0 ({alignment.hosts[0]}), "
            f"error at most {offset.error_ns / 1e3:.1f} us, from {offset.calls} calls"
        )
        if offset.contradiction_ns:
            text += (
                f"; the calls contradict each other by {offset.contradiction_ns / 1e3:.1f} us: "
                "the clocks drift apart, so take fewer minutes"
            )
        yield text


def _missing(pages: Sequence[Page]) -> Iterator[str]:
    for page in pages:
        if page.calls > len(page.records):
            yield f"{_title(page)}: the first {page.calls - len(page.records)} of {page.calls} calls are not kept"
        if page.refused:
            yield f"{_title(page)}: {page.refused} groups, queues or lanes found no room in the page and are not shown"
    for key, pids in ambiguous_groups(pages).items():
        yield f"'{key.name}': pids {pids[0]} and {pids[1]} claim one place, so it has no arrows: choose one job's pids"
