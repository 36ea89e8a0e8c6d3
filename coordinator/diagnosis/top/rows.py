"""Make the rows of `top` of two samples: what each rank does in each plane of its groups. Nothing here looks."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from typing import Final

import msgspec

from coordinator.diagnosis.model import Group, Lane
from coordinator.diagnosis.same_calls import carrier_of
from coordinator.diagnosis.stragglers import Straggler
from coordinator.diagnosis.top.activity import Activity, activity_of
from coordinator.diagnosis.top.sampling import Lateness, Sample, Seen
from shm_broadcast.status.shown_calls import WAITS

__all__ = ["Row", "rows_of"]

_BUSY: Final = ("computing", "posted", "asleep")


class Row(msgspec.Struct, frozen=True):
    """What one rank does in one plane of a group.

    Attributes:
        job: Number of the job, from 0.
        group: The group's unique name; empty for a process without groups.
        plane: Such as "device"; empty if the rank has made no call in the group.
        rank: Global rank; None if it is not known.
        pid: Of its process, as this one sees it, or else as it sees itself.
        state: "dead", "unknown", "stopped", "broken", "torn", "forming", "waiting", "computing", "elsewhere" (in a
            call of another group or plane), or what the process does outside of calls; see `Activity`.
        call: The call in which it is, such as "all_reduce #118"; empty if it is in none.
        since_s: Seconds for which it has been in the call, in that of another group or plane, or in no call; None if
            that is not known.
        waits_for: Global ranks that have not come to the call, in group order; None if it is in none, or may wait for
            any rank.
        unseen: Global ranks of which it is not known whether they have come, as no page of theirs is seen.
        note: What else the state means, for people.
        cause: Why the group is broken, or was when the process ended; empty if it is not.
        calls_per_s: Calls that have ended, between the samples; None without a sample before.
        bytes_per_s: Bytes that the rank brought to them.
        last_share: The share of its newest calls to which it came last; None if no call tells.
        late_ns: Median of how late it then was.
        wait_share: Share of a core that it took to poll.
        is_late: Whether it is one of the ranks that are late all the time.
    """

    job: int
    group: str
    plane: str
    rank: int | None
    pid: int
    state: str
    call: str
    since_s: float | None
    waits_for: tuple[int, ...] | None
    unseen: tuple[int, ...]
    note: str
    cause: str
    calls_per_s: float | None
    bytes_per_s: float | None
    last_share: float | None
    late_ns: float | None
    wait_share: float | None
    is_late: bool = False


class _Plane(msgspec.Struct, frozen=True):
    """The lanes of one plane of a group: one for collectives, or one for each thread that waits for a message.

    Attributes:
        name: Of the plane.
        lane: The one whose call goes on, and has for the longest time; else the one that was used last.
        lanes: All.
    """

    name: str
    lane: Lane
    lanes: tuple[Lane, ...]

    @property
    def is_busy(self) -> bool:
        return self.lane.state in _BUSY

    @property
    def is_used(self) -> bool:
        if self.is_busy or self.lane.is_torn:
            return True
        # Where nobody waits for a message, the row of such waits would say nothing of its own.
        return not self.name.endswith(WAITS) and any(lane.counters for lane in self.lanes)

    @property
    def ended_ns(self) -> int:
        return max(lane.end_ns for lane in self.lanes)

    def total(self, word: str) -> int:
        return sum(getattr(each, word) for lane in self.lanes for each in lane.counters)


# A group in a job, and a plane in it with what carries it. All tensor-parallel groups of a job have one name.
_GroupKey = tuple[int, str, int, tuple[int, ...]]
_PlaneKey = tuple[str, str]


def rows_of(
    before: Sample | None, now: Sample, pids: Collection[int] = (), late: Collection[Straggler] = ()
) -> tuple[Row, ...]:
    """Return a row for each rank and plane of each group that is not left, by job, group, plane and rank.

    A usable group of one member that has made no call has a row only if its process would have none: an engine has many
    such groups, and nobody waits in them.

    Args:
        before: An earlier sample, from which rates are computed.
        now: The sample that is shown.
        pids: Show these processes alone; empty for all.
        late: The ranks that are late all the time.
    """
    planes = {id(seen): {id(group): _planes(group) for group in _shown(seen)} for seen in now.seen}
    members: dict[_GroupKey, dict[int, dict[_PlaneKey, _Plane]]] = {}
    # If a rank was replaced, the process that lives comes last, and so counts.
    for seen in sorted(now.seen, key=lambda each: not each.has_ended):
        for group in _shown(seen):
            members.setdefault(_key(seen, group), {})[group.place] = planes[id(seen)][id(group)]
    earlier = {} if before is None else {_identity(seen): seen for seen in before.seen}
    rows: list[Row] = []
    for seen in now.seen:
        if pids and seen.pid not in pids and seen.page.pid not in pids:
            continue
        maker = _Maker(before, now, earlier.get(_identity(seen)), seen, planes[id(seen)])
        maker.late = {(each.group, each.plane) for each in late if each.process == _identity(seen)}
        shown = _shown(seen)
        if not shown and not seen.has_ended:
            rows.append(maker.row(None, None, None))
        own: list[Row] = []
        for group in shown:
            used = [(key, plane) for key, plane in planes[id(seen)][id(group)].items() if plane.is_used]
            own += [maker.row(group, plane, members[_key(seen, group)], key) for key, plane in used]
            if not used and (group.world_size > 1 or group.state != "usable"):
                own.append(maker.row(group, None, None))
        rows += own or [maker.row(group, None, None) for group in shown[:1]]
    rows.sort(key=lambda row: (row.job, row.group, row.plane, row.rank is None, row.rank or 0, row.pid))
    return tuple(rows)


def _shown(seen: Seen) -> list[Group]:
    return [group for group in seen.page.groups if group.state != "left"]


def _identity(seen: Seen) -> tuple[str, int, int, int]:
    return seen.page.boot_id, seen.page.pid_namespace, seen.page.pid, seen.page.start_ticks


def _key(seen: Seen, group: Group) -> _GroupKey:
    return seen.job, group.name, group.epoch, group.ranks


def _planes(group: Group) -> dict[_PlaneKey, _Plane]:
    """Return the planes of a group in one process, by name and by what carries them."""
    found: dict[_PlaneKey, list[Lane]] = {}
    for lane in group.lanes:
        found.setdefault((lane.plane, carrier_of(lane)), []).append(lane)
    planes = {}
    for key, lanes in found.items():
        busy = [lane for lane in lanes if lane.state in _BUSY]
        chosen = (
            min(busy, key=lambda lane: lane.begin_ns) if busy else max(lanes, key=lambda lane: lane.end_ns)
        )
        planes[key] = _Plane(key[0], chosen, tuple(lanes))
    return planes


class _Maker:
    """Makes the rows of one process."""

    def __init__(
        self,
        before: Sample | None,
        now: Sample,
        earlier: Seen | None,
        seen: Seen,
        planes: dict[int, dict[_PlaneKey, _Plane]],
    ) -> None:
        # Groups and planes in which it is late all the time.
        self.late: set[tuple[str, str]] = set()
        self._now = now
        self._seen = seen
        self._earlier = earlier
        self._passed_s = (now.at_ns - before.at_ns) / 1e9 if before is not None and earlier else 0.0
        self._activity: Activity = activity_of(
            None if earlier is None else earlier.process, seen, self._passed_s, now.rings
        )
        busy = [
            (group, plane)
            for group in _shown(seen)
            for plane in planes[id(group)].values()
            if plane.is_busy and not plane.lane.is_torn
        ]
        self._busy = min(busy, key=lambda each: each[1].lane.begin_ns) if busy else None
        ends = [plane.ended_ns for group in _shown(seen) for plane in planes[id(group)].values()]
        self._free_ns = max([*ends, *(group.created_ns for group in _shown(seen)), seen.page.created_ns])

    def row(
        self,
        group: Group | None,
        plane: _Plane | None,
        members: dict[int, dict[_PlaneKey, _Plane]] | None,
        key: _PlaneKey | None = None,
    ) -> Row:
        """Return the row of a plane of a group, or of a process that has none."""
        page = self._seen.page
        state, note = self._state(group, plane)
        is_busy = plane is not None and plane.is_busy and not plane.lane.is_torn
        waits_for, unseen = self._waits_for(group, plane, members, key) if is_busy else (None, ())
        last_share, late_ns = _lateness(self._seen.lateness, group, plane)
        if plane is not None and is_busy:
            began_ns = plane.lane.begin_ns
        else:
            began_ns = self._busy[1].lane.begin_ns if self._busy and state == "elsewhere" else self._free_ns
        rank = page.rank
        if group is not None and group.place < len(group.ranks):
            rank = group.ranks[group.place]
        return Row(
            job=self._seen.job,
            group="" if group is None else group.name,
            plane="" if plane is None else plane.name,
            rank=rank,
            pid=page.pid if self._seen.pid is None else self._seen.pid,
            state=state,
            call=_call(plane.lane) if plane is not None and is_busy else "",
            since_s=max((self._now.at_ns - began_ns - self._seen.shift_ns) / 1e9, 0.0) if began_ns else None,
            waits_for=waits_for,
            unseen=unseen,
            note=note,
            cause=group.cause if group is not None and group.state == "broken" else "",
            calls_per_s=self._rate(group, plane, key, "calls"),
            bytes_per_s=self._rate(group, plane, key, "nbytes"),
            last_share=last_share,
            late_ns=late_ns,
            wait_share=_divided(self._rate(group, plane, key, "polled_ns"), 1e9),
            is_late=group is not None and plane is not None and (group.name, plane.name) in self.late,
        )

    def _state(self, group: Group | None, plane: _Plane | None) -> tuple[str, str]:
        """Return the state of a row, and what it means."""
        is_torn = (group is not None and group.is_torn) or (plane is not None and plane.lane.is_torn)
        torn = "a record was left half written" if is_torn else ""
        if self._seen.has_ended:
            return "dead", torn or _kept_by(self._seen)
        if self._seen.is_hidden:
            return "unknown", torn or "its process is not seen from here"
        if self._seen.process is not None and self._seen.process.is_stopped:
            return "stopped", self._activity.note
        if group is not None and group.state == "broken":
            return "broken", group.cause
        if is_torn:
            return "torn", torn
        if group is not None and group.state == "forming":
            return "forming", ""
        if plane is not None and plane.is_busy:
            return ("computing" if plane.lane.state == "computing" else "waiting"), ""
        if self._busy is not None:
            other, its = self._busy
            return "elsewhere", f"in {other.name} {its.name}"
        return self._activity.state, self._activity.note

    def _waits_for(
        self,
        group: Group | None,
        plane: _Plane | None,
        members: dict[int, dict[_PlaneKey, _Plane]] | None,
        key: _PlaneKey | None,
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """Return the global ranks that have not come to the call, and those of which that is not known."""
        if group is None or plane is None or members is None or key is None:
            return None, ()
        lane = plane.lane
        if not lane.number:
            # A call between two ranks.
            is_named = lane.root is not None and lane.root < len(group.ranks)
            return ((group.ranks[lane.root or 0],) if is_named else None), ()
        missing, unseen = [], []
        for place, rank in enumerate(group.ranks):
            if place == group.place:
                continue
            if place not in members:
                unseen.append(rank)
                continue
            its = members[place].get(key)
            if its is None or its.lane.number < lane.number:
                missing.append(rank)
        return tuple(missing), tuple(unseen)

    def _rate(
        self, group: Group | None, plane: _Plane | None, key: _PlaneKey | None, word: str
    ) -> float | None:
        """Return by how much the sum of a counter grew per second."""
        if group is None or plane is None or key is None or self._earlier is None or self._passed_s <= 0:
            return None
        before = 0
        for other in self._earlier.page.groups:
            if (other.name, other.epoch, other.created_ns) == (group.name, group.epoch, group.created_ns):
                its = _planes(other).get(key)
                before = 0 if its is None else its.total(word)
        return max(plane.total(word) - before, 0) / self._passed_s


def _divided(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def _call(lane: Lane) -> str:
    return f"{lane.call} #{lane.number}" if lane.number else lane.call


def _kept_by(seen: Seen) -> str:
    if seen.process is not None:
        return "its parent has not waited for it"
    others = [pid for pid in seen.holders if pid != seen.pid]
    return f"kept by pid {others[0]}" if others else "kept by this top"


def _lateness(
    lateness: Lateness, group: Group | None, plane: _Plane | None
) -> tuple[float | None, float | None]:
    """Return to which share of the newest calls this rank came last, and the median of how late it was."""
    if group is None or plane is None:
        return None, None
    told = lateness.get((group.name, group.epoch, plane.name), ())
    late = [late_ns for last, late_ns in told if last == group.place]
    return (len(late) / len(told) if told else None), (float(statistics.median(late)) if late else None)
