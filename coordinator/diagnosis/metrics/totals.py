"""Add up what status pages count so that no sum ever falls, whatever becomes of the groups and their processes.

A page counts for each group while the group has a place in it, and ends with its process. Prometheus takes a counter
that falls for one that began again at 0, and would count everything twice. So each sum here has a share for each group
of each process that was ever seen: a share never falls, and stays when what it counts has gone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from coordinator.diagnosis.metrics.lags import Lag, QueueReader, lags_of
from coordinator.diagnosis.model import Counters, Group, Page
from coordinator.diagnosis.pages import Found, Search, shift_of
from coordinator.diagnosis.same_calls import PageGroups
from shm_broadcast.status.layout import BUCKETS

__all__ = ["Counts", "Key", "Member", "Reading", "Totals"]

# Shares of groups that have gone are kept one by one up to this number, in case a page is found again that could not
# be read for a while. The oldest beyond it are added up.
_MOST_GONE: Final = 256
# At most this many sums are kept to which nothing shown now adds, so that memory does not grow for ever.
_MOST_ENDED: Final = 4096


class Member(NamedTuple):
    """A rank of a group.

    Attributes:
        rank: In the world that the process joined first; in a group that was made after a change of members, the rank
            since that change. In the group, if neither is known, or else empty.
        group: Unique name of the group, without the epoch: the sums go on when the members change.
    """

    rank: str
    group: str


class Key(NamedTuple):
    """What is counted apart: the calls of one name that a rank makes in a plane of a group."""

    rank: str
    group: str
    plane: str
    op: str


class Counts(msgspec.Struct, frozen=True):
    """Sums over calls that have ended; see `coordinator.diagnosis.model.Counters`.

    Attributes:
        calls: How many.
        nbytes: Bytes that the rank brought.
        waited_ns: Waited for the last rank to come.
        last: Calls to which the rank came last.
        late_ns: By how much it was later than the last but one rank in these calls.
        disagreed: Calls that ended because the ranks' calls differ.
        failed: Calls that ended with another error.
        waits: Histogram of the waits, by bucket.
    """

    calls: int = 0
    nbytes: int = 0
    waited_ns: int = 0
    last: int = 0
    late_ns: int = 0
    disagreed: int = 0
    failed: int = 0
    waits: tuple[int, ...] = (0,) * BUCKETS

    def plus(self, other: Counts) -> Counts:
        """Return the sums of both."""
        return self._with(other, lambda one, two: one + two)

    def most(self, other: Counts) -> Counts:
        """Return the greater of each two numbers."""
        return self._with(other, max)

    def _with(self, other: Counts, of: Callable[[int, int], int]) -> Counts:
        return Counts(
            calls=of(self.calls, other.calls),
            nbytes=of(self.nbytes, other.nbytes),
            waited_ns=of(self.waited_ns, other.waited_ns),
            last=of(self.last, other.last),
            late_ns=of(self.late_ns, other.late_ns),
            disagreed=of(self.disagreed, other.disagreed),
            failed=of(self.failed, other.failed),
            waits=tuple(map(of, self.waits, other.waits)),
        )


class Reading(NamedTuple):
    """What is exported.

    Attributes:
        counts: Never fall from one reading to the next.
        inflight_s: How long the oldest call that goes on has taken; 0.0 if there is none. Of live ranks only.
        usable: Whether the group is usable for the rank; of live ranks that have not left it.
        epoch: How often the group's members have changed; of the same.
        lags: How far readers of queues are behind.
        processes: Live processes with a page.
        undecodable: Pages that could not be decoded.
    """

    counts: dict[Key, Counts]
    inflight_s: dict[Key, float]
    usable: dict[Member, bool]
    epoch: dict[Member, int]
    lags: dict[QueueReader, Lag]
    processes: int
    undecodable: int


class _Instance(NamedTuple):
    """One group of one process, while it is in the page."""

    pid_namespace: int
    pid: int
    start_ticks: int
    group: str
    created_ns: int


class Totals:
    """The sums, for as long as this object lives. Its owner calls it from one thread at a time."""

    def __init__(self, read_records: Callable[[Found], Page | None]) -> None:
        """Begin at what the pages say.

        Args:
            read_records: Returns a page with the calls that have ended, or None if it has gone. It is called only where
                an error was counted since the last time, because decoding them takes long.
        """
        self._read_records = read_records
        # In the order in which they were last seen.
        self._shares: dict[_Instance, dict[Key, Counts]] = {}
        # As each group was first seen: the rank of its process changes with the members, and what the group has counted
        # must not count again under another one.
        self._ranks: dict[_Instance, str] = {}
        self._errors: dict[_Instance, int] = {}
        self._classified: dict[_Instance, int] = {}
        # What the oldest shares that have gone came to.
        self._ended: dict[Key, Counts] = {}

    def update(self, search: Search) -> Reading:
        """Add what the pages say now, and return all sums."""
        for found in search.found:
            self._count(found)
        shown = {_instance(found.page, group) for found in search.found for group in found.page.groups}
        self._add_up_gone(shown)
        counts = dict(self._ended)
        for share in self._shares.values():
            for key, count in share.items():
                counts[key] = counts[key].plus(count) if key in counts else count
        live = [found.page for found in search.found if found.pid is not None]
        usable, epoch = self._states(live)
        return Reading(
            counts=counts,
            inflight_s=self._inflight(live),
            usable=usable,
            epoch=epoch,
            lags=lags_of(search.found),
            processes=len(live),
            undecodable=len(search.faults),
        )

    def _count(self, found: Found) -> None:
        fresh: dict[_Instance, dict[Key, Counts]] = {}
        errors: dict[_Instance, dict[Key, int]] = {}
        for group in found.page.groups:
            # The name of a torn record may be a mixture of two. What is known of the group stays.
            if group.is_torn:
                continue
            instance = _instance(found.page, group)
            self._ranks.setdefault(instance, _rank(found.page, group))
            share, failed = fresh.setdefault(instance, {}), errors.setdefault(instance, defaultdict(int))
            for key, counters in self._counted(found.page, group):
                before = share.get(key, Counts())
                share[key] = before.plus(
                    Counts(
                        calls=counters.calls,
                        nbytes=counters.nbytes,
                        waited_ns=counters.waited_ns,
                        last=counters.last,
                        late_ns=counters.late_ns,
                        waits=counters.waits,
                    )
                )
                failed[key] += counters.errors
        disagreed = self._disagreed(found, {each: sum(errors[each].values()) for each in errors})
        for instance, share in fresh.items():
            known = self._shares.pop(instance, {})
            for key, count in share.items():
                before = known.get(key, Counts())
                apart = before.disagreed + disagreed.get((instance, key), 0)
                others = max(errors[instance][key] - apart, 0)
                known[key] = before.most(msgspec.structs.replace(count, disagreed=apart, failed=others))
            self._shares[instance] = known

    def _disagreed(self, found: Found, errors: dict[_Instance, int]) -> dict[tuple[_Instance, Key], int]:
        """Return how many calls of each kind have ended since the last look because the ranks disagreed.

        The counters do not say why a call failed. The records of calls do, but only the last 4,096 are there: what is
        lost from them counts as failed.
        """
        if all(number <= self._errors.get(each, 0) for each, number in errors.items()):
            return {}
        page = self._read_records(found)
        if page is None:
            return {}
        self._errors.update(errors)
        found_by: dict[tuple[_Instance, Key], int] = defaultdict(int)
        groups = PageGroups(page)
        newest: dict[_Instance, int] = {}
        for record in page.records:
            of = groups.of(record)
            instance = None if of is None else _instance(page, of[1])
            if of is None or instance not in errors:
                continue  # it is younger than the counters
            newest[instance] = record.index
            if record.outcome == "disagreed" and record.index > self._classified.get(instance, 0):
                found_by[instance, self._key(page, of[1], record.plane, record.call)] += 1
        self._classified.update(newest)
        return found_by

    def _add_up_gone(self, shown: Collection[_Instance]) -> None:
        """Add up the oldest shares of what is shown no more, and forget the oldest sums."""
        gone = [each for each in self._shares if each not in shown]
        for instance in gone[: max(len(gone) - _MOST_GONE, 0)]:
            for key, count in self._shares.pop(instance).items():
                # Popped, so that the order is that of the latest change.
                self._ended[key] = self._ended.pop(key, Counts()).plus(count)
            self._ranks.pop(instance, None)
            self._errors.pop(instance, None)
            self._classified.pop(instance, None)
        used = {key for share in self._shares.values() for key in share}
        unused = [key for key in self._ended if key not in used]
        for key in unused[: max(len(unused) - _MOST_ENDED, 0)]:
            del self._ended[key]

    def _key(self, page: Page, group: Group, plane: str, call: str) -> Key:
        return Key(self._ranks[_instance(page, group)], _lasting_name(group), plane, call)

    def _counted(self, page: Page, group: Group) -> Iterator[tuple[Key, Counters]]:
        for lane in group.lanes:
            for counters in lane.counters:
                yield self._key(page, group, lane.plane, counters.call), counters

    def _states(self, live: Iterable[Page]) -> tuple[dict[Member, bool], dict[Member, int]]:
        """Return whether each group is usable, and its epoch; one of several processes is usable for all or none."""
        usable: dict[Member, bool] = {}
        epoch: dict[Member, int] = {}
        for page in live:
            for group in page.groups:
                if group.state != "left" and not group.is_torn:
                    member = Member(self._ranks[_instance(page, group)], _lasting_name(group))
                    usable[member] = usable.get(member, True) and group.state == "usable"
                    epoch[member] = max(epoch.get(member, 0), group.epoch)
        return usable, epoch

    def _inflight(self, live: Iterable[Page]) -> dict[Key, float]:
        found: dict[Key, float] = {}
        for page in live:
            now_ns = time.monotonic_ns() - shift_of(page)
            for group in page.groups:
                if group.state == "left" or group.is_torn:
                    continue
                for key, _ in self._counted(page, group):
                    found.setdefault(key, 0.0)
                for lane in group.lanes:
                    if lane.state != "idle" and lane.call:
                        key = self._key(page, group, lane.plane, lane.call)
                        found[key] = max(found.get(key, 0.0), (now_ns - lane.begin_ns) / 1e9, 0.0)
        return found


def _instance(page: Page, group: Group) -> _Instance:
    return _Instance(page.pid_namespace, page.pid, page.start_ticks, group.name, group.created_ns)


def _rank(page: Page, group: Group) -> str:
    in_group = str(group.ranks[group.place]) if group.place < len(group.ranks) else ""
    # A group of a later epoch may be seen before or after its process has the rank of that epoch.
    is_later = bool(group.epoch and in_group)
    return in_group if page.rank is None or is_later else str(page.rank)


def _lasting_name(group: Group) -> str:
    """Return the name without the epoch that ends it from the first change of members on."""
    return group.name.removesuffix(f"@{group.epoch}")
