"""Find ranks that are late all the time, by the difference of two looks at the counters.

The last rank to come to a call is *late* by the time since the last but one came. In one window a rank is
suspect in a plane of a group if

* it came last to at least half of its calls there, of which there are at least 200,
* by this it was late for at least a tenth of the window,
* and this is not so for the others too: by four standard deviations it came last more often than chance lets
  one of equal ranks (of two ranks whose work varies, each is last to about half of the calls), and it was
  late for at least a tenth of the window more than any other rank.

A rank that is suspect in two consecutive windows is a straggler. Only shared memory knows which rank came
last, so calls over process groups and NCCL accuse nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from coordinator.diagnosis.model import Page

__all__ = [
    "FEWEST_CALLS",
    "Held",
    "LaneCount",
    "LaneName",
    "Straggler",
    "StragglerWatch",
    "counts_of",
    "is_suspect",
    "suspects",
]

FEWEST_CALLS: Final = 200
"""Calls that must be seen before a rank is named for coming last."""

_LEAST_LAST: Final = 0.5
_LEAST_LATE: Final = 0.1
_DEVIATIONS: Final = 4.0


class Held(Protocol):
    """A page and who holds it: `Found` or `Seen`."""

    @property
    def page(self) -> Page:
        """Return what the page says."""

    @property
    def pid(self) -> int | None:
        """Return its process as this one sees it; None if that is not seen."""

    @property
    def holders(self) -> tuple[int, ...]:
        """Return the processes that have the page, as this one sees them."""


class LaneName(NamedTuple):
    """One plane of a group in one process; it never means another one later.

    Attributes:
        boot_id: Of the process's kernel.
        pid_namespace: In which the process has `pid`.
        pid: The process.
        start_ticks: When it started.
        created_ns: When the group was made.
        group: Name of the group.
        epoch: Of the group.
        ranks: Global ranks of the group.
        plane: Such as "shared".
    """

    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int
    created_ns: int
    group: str
    epoch: int
    ranks: tuple[int, ...]
    plane: str

    @property
    def shared(self) -> tuple[str, int, tuple[int, ...], str]:
        """Return what the lanes of all ranks of the group have in common; those of another job may have it, too."""
        return self.group, self.epoch, self.ranks, self.plane

    @property
    def process(self) -> ProcessName:
        """Return what tells the process from all others."""
        return self.boot_id, self.pid_namespace, self.pid, self.start_ticks


ProcessName = tuple[str, int, int, int]


class LaneCount(NamedTuple):
    """What one rank has counted in a lane.

    Attributes:
        rank: Global rank.
        calls: Calls that have ended.
        last: Those to which it came last.
        late_ns: By how much it was late in these.
        job: Tells groups with the same `LaneName.shared` apart: in one look, equal for lanes of one group.
    """

    rank: int
    calls: int
    last: int
    late_ns: int
    job: int = 0


Counts = Mapping[LaneName, LaneCount]


class Straggler(msgspec.Struct, frozen=True):
    """A rank that was late in a window.

    Attributes:
        rank: Global rank.
        pid: Its process, in its own namespace.
        group: The group in which it was late.
        plane: The plane.
        calls: Calls in the window.
        last: Calls to which it came last.
        late_ns: By how much it was late in all of these.
        window_ns: Length of the window.
        process: What tells the process from all others; see `LaneName.process`.
    """

    rank: int
    pid: int
    group: str
    plane: str
    calls: int
    last: int
    late_ns: int
    window_ns: int
    process: ProcessName

    def __str__(self) -> str:
        """Return a sentence."""
        return (
            f"rank {self.rank} (pid {self.pid}) is late in {self.group!r} ({self.plane}): last to {self.last} of "
            f"{self.calls} calls, by {self.late_ns / self.last / 1e6:.2f} ms each, "
            f"{self.late_ns / self.window_ns:.0%} of the last {self.window_ns / 1e9:g} s"
        )


def counts_of(held: Sequence[Held]) -> dict[LaneName, LaneCount]:
    """Return what the ranks have counted so far."""
    found: dict[LaneName, LaneCount] = {}
    members: dict[tuple[object, ...], dict[LaneName, tuple[Held, int]]] = {}
    for each in held:
        page = each.page
        for group in page.groups:
            for lane in group.lanes:
                name = LaneName(
                    page.boot_id,
                    page.pid_namespace,
                    page.pid,
                    page.start_ticks,
                    group.created_ns,
                    group.name,
                    group.epoch,
                    group.ranks,
                    lane.plane,
                )
                rank = group.ranks[group.place] if group.place < len(group.ranks) else group.place
                before = found.get(name, LaneCount(rank, 0, 0, 0))
                found[name] = LaneCount(
                    rank,
                    before.calls + sum(each.calls for each in lane.counters),
                    before.last + sum(each.last for each in lane.counters),
                    before.late_ns + sum(each.late_ns for each in lane.counters),
                )
                members.setdefault(name.shared, {})[name] = each, group.place
    for those in members.values():
        for number, job in enumerate(_jobs(those)):
            found.update({name: LaneCount(*found[name][:-1], job=number) for name in job})
    return found


def _jobs(members: Mapping[LaneName, tuple[Held, int]]) -> list[list[LaneName]]:
    """Return which lanes of equal `shared` are of one group; two jobs on a host may have groups of the same name.

    On each host the first rank of a group keeps the pages of the others, and each other one that of the first.
    """
    jobs: list[list[LaneName]] = []
    for name, member in members.items():
        linked = [job for job in jobs if any(_are_linked(member, members[other]) for other in job)]
        jobs = [job for job in jobs if job not in linked]
        jobs.append([name, *(other for job in linked for other in job)])
    return jobs


def _are_linked(one: tuple[Held, int], other: tuple[Held, int]) -> bool:
    is_kept = one[0].pid in other[0].holders or other[0].pid in one[0].holders
    return is_kept and one[1] != other[1]


def suspects(before: Counts, after: Counts, window_ns: int) -> dict[LaneName, Straggler]:
    """Return who was late between two looks that are `window_ns` apart."""
    grown = dict(_grown(before, after))
    late: dict[tuple[object, ...], list[tuple[int, LaneName]]] = {}
    for name, count in grown.items():
        late.setdefault((name.shared, count.job), []).append((count.late_ns, name))
    found: dict[LaneName, Straggler] = {}
    for name, count in grown.items():
        others = max((other for other, lane in late[name.shared, count.job] if lane != name), default=0)
        if is_suspect(count, others, len(name.ranks), window_ns):
            found[name] = Straggler(
                rank=count.rank,
                pid=name.pid,
                group=name.group,
                plane=name.plane,
                calls=count.calls,
                last=count.last,
                late_ns=count.late_ns,
                window_ns=window_ns,
                process=name.process,
            )
    return found


def is_suspect(count: LaneCount, others_late_ns: int, ranks: int, window_ns: int) -> bool:
    """Return whether one of `ranks` was late in a window, and no other for longer than `others_late_ns`."""
    return (
        count.calls >= FEWEST_CALLS
        and count.last >= max(_LEAST_LAST * count.calls, _by_chance(count.calls, ranks))
        and count.late_ns - others_late_ns >= _LEAST_LATE * window_ns
    )


def _by_chance(calls: int, ranks: int) -> float:
    """Return to how many calls one of `ranks` equal ranks may come last by chance (the binomial distribution)."""
    share = 1 / max(ranks, 1)
    return calls * share + _DEVIATIONS * math.sqrt(calls * share * (1 - share))


def _grown(before: Counts, after: Counts) -> Iterator[tuple[LaneName, LaneCount]]:
    for name, count in after.items():
        # A lane that is new has counted from 0.
        old = before.get(name, LaneCount(count.rank, 0, 0, 0))
        if count.calls > old.calls and count.last >= old.last and count.late_ns >= old.late_ns:
            calls, last = count.calls - old.calls, count.last - old.last
            yield name, LaneCount(count.rank, calls, last, count.late_ns - old.late_ns, count.job)


class StragglerWatch:
    """Remembers the last look, and who was suspect in the last window.

    Attributes:
        judged: How many planes of processes have made enough calls in the last window.
    """

    def __init__(self) -> None:
        """Start before the first look."""
        self.judged: int = 0
        self._counts: Counts = {}
        self._at_ns: int | None = None
        self._suspects: Mapping[LaneName, Straggler] = {}

    def look(self, held: Sequence[Held], at_ns: int) -> tuple[Straggler, ...]:
        """Return who is a straggler, by this look and the two before it.

        Args:
            held: What the ranks have counted.
            at_ns: When they were read, on any clock that only grows.
        """
        return self.count(counts_of(held), at_ns)

    def count(self, counts: Counts, at_ns: int) -> tuple[Straggler, ...]:
        """Do `look` for counters that `counts_of` has returned."""
        found: Mapping[LaneName, Straggler] = {}
        if self._at_ns is not None and at_ns > self._at_ns:
            found = suspects(self._counts, counts, at_ns - self._at_ns)
            self.judged = sum(count.calls >= FEWEST_CALLS for _, count in _grown(self._counts, counts))
        twice = tuple(straggler for name, straggler in found.items() if name in self._suspects)
        self._counts, self._at_ns, self._suspects = counts, at_ns, found
        return tuple(sorted(twice, key=lambda each: (each.rank, each.group, each.plane)))
