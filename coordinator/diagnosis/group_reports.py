"""Report what the groups of processes did since they were made: calls, bytes, algorithms and waits, for `info`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from coordinator.diagnosis.model import Counters, Group
from coordinator.diagnosis.pages import Found
from coordinator.diagnosis.top.quantities import in_bytes, in_number, in_seconds
from shm_broadcast.status.layout import FIRST_BUCKET_NS

__all__ = ["CallReport", "GroupReport", "ProcessReport", "in_lines", "report_of"]


class CallReport(msgspec.Struct, frozen=True):
    """Calls of one name, carried by one algorithm in one plane.

    Attributes:
        plane: Such as "shared" or "device".
        call: Such as "all_reduce".
        algorithm: Such as "one-shot".
        calls: How many have ended.
        errors: How many of these with an error.
        nbytes: Bytes that the rank brought.
        waited_s: Waited for the last rank to come, in all.
        median_wait_below_s: Half of the waits were shorter; None if that is longer than the page's histogram tells.
        p99_wait_below_s: 99 in 100 were shorter; None likewise.
        last: Calls to which the rank came last.
        late_s: By how much it was later than the last but one rank in these calls, in all.
    """

    plane: str
    call: str
    algorithm: str
    calls: int
    errors: int
    nbytes: int
    waited_s: float
    median_wait_below_s: float | None
    p99_wait_below_s: float | None
    last: int
    late_s: float


class GroupReport(msgspec.Struct, frozen=True):
    """A group, as one process saw it.

    Attributes:
        name: Its unique name.
        state: "forming", "usable", "broken" or "left".
        epoch: How often its members have changed.
        place: The process's place.
        world_size: Members.
        cause: Why it is broken, or empty.
        calls: By plane and name.
    """

    name: str
    state: str
    epoch: int
    place: int
    world_size: int
    cause: str
    calls: tuple[CallReport, ...]


class ProcessReport(msgspec.Struct, frozen=True):
    """A process.

    Attributes:
        pid: As this process sees it; None if it has ended, and others keep its page.
        rank: In the world, or None.
        world_size: Of the world, or 0.
        refused: Groups, queues and lanes for which its page had no room, and which are not shown.
        groups: Those made last, also some that were left.
    """

    pid: int | None
    rank: int | None
    world_size: int
    refused: int
    groups: tuple[GroupReport, ...]


def report_of(found: Iterable[Found]) -> tuple[ProcessReport, ...]:
    """Return what the groups of each page did."""
    return tuple(
        ProcessReport(
            pid=each.pid,
            rank=each.page.rank,
            world_size=each.page.world_size,
            refused=each.page.refused,
            groups=tuple(_group(group) for group in each.page.groups),
        )
        for each in found
    )


def in_lines(reports: Iterable[ProcessReport]) -> dict[str, Any]:
    """Return reports as text for people: by process and group a line for each call."""
    lines: dict[str, Any] = {}
    for report in reports:
        rank = "no rank" if report.rank is None else f"rank {report.rank} of {report.world_size}"
        who = f"{rank}, {'ended' if report.pid is None else f'pid {report.pid}'}"
        groups: dict[str, Any] = {}
        for group in report.groups:
            title = f"{group.name} (place {group.place} of {group.world_size}, {group.state})"
            calls = [_line(call) for call in group.calls]
            groups[title] = [f"because: {group.cause}", *calls] if group.cause else calls or "no calls"
        if report.refused:
            groups["not shown for want of room"] = report.refused
        lines[who] = groups
    return lines


def _group(group: Group) -> GroupReport:
    rows: dict[tuple[str, str, str], list[Counters]] = {}
    for lane in group.lanes:
        for counters in lane.counters:
            rows.setdefault((lane.plane, counters.call, counters.algorithm), []).append(counters)
    return GroupReport(
        name=group.name,
        state=group.state,
        epoch=group.epoch,
        place=group.place,
        world_size=group.world_size,
        cause=group.cause,
        calls=tuple(_call(*key, counted) for key, counted in sorted(rows.items())),
    )


def _call(plane: str, call: str, algorithm: str, rows: list[Counters]) -> CallReport:
    waits = [sum(bucket) for bucket in zip(*(row.waits for row in rows), strict=True)]
    return CallReport(
        plane=plane,
        call=call,
        algorithm=algorithm,
        calls=sum(row.calls for row in rows),
        errors=sum(row.errors for row in rows),
        nbytes=sum(row.nbytes for row in rows),
        waited_s=sum(row.waited_ns for row in rows) / 1e9,
        median_wait_below_s=_below(waits, 0.5),
        p99_wait_below_s=_below(waits, 0.99),
        last=sum(row.last for row in rows),
        late_s=sum(row.late_ns for row in rows) / 1e9,
    )


_SHORTEST_S: Final = FIRST_BUCKET_NS / 1e9


def _below(waits: list[int], share: float) -> float | None:
    """Return the limit of the first bucket up to which `share` of the waits are; None for the last, which has none."""
    below = 0
    for place, number in enumerate(waits[:-1]):
        below += number
        if below and below >= share * sum(waits):
            return _SHORTEST_S * (1 << place)
    return None


def _line(call: CallReport) -> str:
    parts = [f"{in_number(call.calls)} call{'s' if call.calls != 1 else ''}", in_bytes(call.nbytes)]
    if call.errors:
        parts.append(f"{in_number(call.errors)} with an error")
    parts.append(f"waited {in_seconds(call.waited_s)}")
    limits = [
        f"{name} below {in_seconds(max(limit, 1e-6))}"
        for name, limit in (("half", call.median_wait_below_s), ("99 %", call.p99_wait_below_s))
        if limit is not None
    ]
    if call.waited_s and limits:
        parts[-1] += f" ({', '.join(limits)} each)"
    if call.last:
        parts.append(
            f"last in {100 * call.last / max(call.calls, 1):.0f} %, by {in_seconds(call.late_s / call.last)} on average"
        )
    return f"{call.plane}: {call.call} by {call.algorithm}: {', '.join(parts)}"
