"""Look at the processes of this host that hang: two looks tell a wait from a call that has just begun."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import msgspec

from coordinator.diagnosis.blame.evidence import Evidence, Process, ProcessState
from coordinator.diagnosis.blame.members import GroupKey, key_of, newest_groups
from coordinator.diagnosis.model import Lane, Page, Queue
from coordinator.diagnosis.queues import Ring
from coordinator.diagnosis.top.sampling import Sample, Sampler, Seen
from shm_broadcast.errors import UsageError
from shm_broadcast.status.layout import TABLES

__all__ = ["evidence_of", "jobs_of", "look_at_jobs"]

# Readers and writers of queues count as waiting only if they were in both looks.
_APART_S = 0.2

_LanePlace = tuple[str, int, int]


def look_at_jobs(pids: Iterable[int], waiting_s: float) -> tuple[Evidence, ...]:
    """Return what the processes of this host do, one for each job.

    Args:
        pids: Take the jobs of these processes alone; empty for all.
        waiting_s: A call counts as a wait if it goes on for this long, in seconds.

    Raises:
        UsageError: None of them has a group or a queue, and a page that can be read.
    """
    sampler = Sampler()
    try:
        before = sampler.sample(newest=0)
        time.sleep(_APART_S)
        # On a busy machine a rank may have made its page since the first search, and the group since then.
        now = sampler.sample(newest=TABLES["records"].number, searches=True)
    finally:
        sampler.close()
    wanted = set(pids)
    jobs = [
        job
        for job in jobs_of(now.seen)
        if not wanted or any({each.pid, each.page.pid} & wanted for each in job)
    ]
    if not jobs:
        which = f"process {', '.join(map(str, sorted(wanted)))}" if wanted else "process of this host"
        refused = f"; {len(now.refused)} could not be read" if now.refused else ""
        raise UsageError(f"no {which} has a group or a queue, and a status page{refused}")
    return tuple(evidence_of(before, now, job, waiting_s) for job in jobs)


def jobs_of(seen: Iterable[Seen]) -> list[list[Seen]]:
    """Return the processes with groups or queues, by their jobs.

    The ranks of a group keep each other's pages. Other processes that have pages open, such as readers of
    pages, have no group in common with the owners, and connect no jobs. A process without a group, such as
    the core of an engine, belongs to each job with which it has a queue.
    """
    seen = list(seen)
    jobs: list[list[Seen]] = []
    for each in seen:
        if each.page.groups:
            linked = [job for job in jobs if any(_are_linked(each, other) for other in job)]
            jobs = [job for job in jobs if job not in linked]
            jobs.append([each, *(other for job in linked for other in job)])
    without = [each for each in seen if not each.page.groups and each.page.queues]
    for job in jobs:
        _draw_in(job, without)
    while without := [each for each in without if not any(each in job for job in jobs)]:
        jobs.append([without[0]])
        _draw_in(jobs[-1], without[1:])
    for job in jobs:
        job.sort(key=lambda each: (each.page.rank is None, each.page.rank or 0, each.page.pid))
    return jobs


def _are_linked(one: Seen, other: Seen) -> bool:
    """Return whether one of two processes keeps the other's page, and they have a group together."""
    if one.pid not in other.holders and other.pid not in one.holders:
        return False
    groups = {key_of(group): group.place for group in one.page.groups}
    return any(groups.get(key_of(group), group.place) != group.place for group in other.page.groups)


def _draw_in(job: list[Seen], others: Sequence[Seen]) -> None:
    """Add to a job those of `others` that write to it or read from it, directly or by another one of them."""
    while True:
        places = {_place(end) for each in job for end in each.page.queues}
        found = [
            each
            for each in others
            if each not in job and any(_place(end) in places for end in each.page.queues)
        ]
        if not found:
            return
        job += found


def _place(end: Queue) -> tuple[int, int]:
    return end.inode, end.offset


def evidence_of(before: Sample, now: Sample, seen: Sequence[Seen], waiting_s: float) -> Evidence:
    """Return what two looks say of the processes `seen` of one job; see `look_at_jobs`."""
    begun = {
        (each.page.pid, each.page.start_ticks, place): lane.begin_ns
        for each in before.seen
        for place, lane in _lanes(each.page)
    }
    stopped = {(each.page.pid, each.page.start_ticks) for each in before.seen if _state(each) == "stopped"}
    processes = tuple(_process(each, begun, stopped, now.at_ns, waiting_s) for each in seen)
    pids = {each.page.pid for each in seen}
    waited = {(ring.inode, ring.offset): ring for ring in before.rings}
    rings = tuple(
        _waited(waited[ring.inode, ring.offset], ring, now.at_ns - waiting_s * 1e9)
        for ring in now.rings
        if (ring.inode, ring.offset) in waited
        and (ring.pid in pids or any(reader.pid in pids for reader in ring.readers))
    )
    unseen = [f"page of process {pid}: {fault}" for pid, fault in sorted(now.faults.items())]
    if now.refused:
        unseen.append(f"processes whose descriptors this one may not read: {len(now.refused)}")
    # If a page belongs to another container, a member without a page may live in another container too.
    is_all_seen = not now.refused and not now.faults and not any(each.is_foreign for each in seen)
    known = {key_of(group) for each in before.seen for group in each.page.groups}
    return Evidence(processes, rings, _ended(processes, known) if is_all_seen else {}, tuple(unseen))


def _waited(before: Ring, now: Ring, until_ns: float) -> Ring:
    """Return the queue as it is now, with only those waits that it had at the look before too.

    A reader waits for work only if nothing was published since `until_ns`.
    """
    still = {reader.place for reader in before.readers if reader.waits and now.published_ns <= until_ns}
    readers = tuple(
        msgspec.structs.replace(reader, waits=reader.waits and reader.place in still)
        for reader in now.readers
    )
    return msgspec.structs.replace(
        now, writer_waits=now.writer_waits and before.writer_waits, readers=readers
    )


def _process(
    seen: Seen,
    begun: Mapping[tuple[int, int, _LanePlace], int],
    stopped: Container[tuple[int, int]],
    at_ns: int,
    waiting_s: float,
) -> Process:
    now_ns = at_ns - seen.shift_ns
    settling = frozenset(
        place
        for place, lane in _lanes(seen.page)
        if not _is_wait(lane, begun.get((seen.page.pid, seen.page.start_ticks, place)), now_ns, waiting_s)
    )
    state = _state(seen)
    # Stopped in one of two looks does not count: a debugger or a profiler stops a process for a moment.
    if state == "stopped" and (seen.page.pid, seen.page.start_ticks) not in stopped:
        state = "alive"
    return Process(seen.page, "live", state, now_ns, settling=settling)


def _lanes(page: Page) -> Iterator[tuple[_LanePlace, Lane]]:
    """Return the lanes of a process, each with its group's name and creation, and its place in the group."""
    for group in newest_groups(page):
        for index, lane in enumerate(group.lanes):
            yield (group.name, group.created_ns, index), lane


def _is_wait(lane: Lane, begun_ns: int | None, now_ns: int, waiting_s: float) -> bool:
    """Return whether a call goes on since the look before, and for long enough."""
    return lane.begin_ns == begun_ns and now_ns - lane.begin_ns >= waiting_s * 1e9


def _state(seen: Seen) -> ProcessState:
    if seen.is_hidden:
        return "unknown"
    if seen.process is None or seen.has_ended:
        return "dead"
    return "stopped" if seen.process.is_stopped else "alive"


def _ended(processes: tuple[Process, ...], known: Container[GroupKey]) -> dict[int, str]:
    """Return the ranks of which nothing is left though their groups share the memory of this host.

    Only groups count that were `known` before the search for pages: each rank makes its page before it joins a group.
    """
    found: dict[int, str] = {}
    there = {process.page.rank for process in processes}
    for process in processes:
        for group in process.page.groups:
            # A plane with such a name is in memory of the whole group, not of its ranks on one host only.
            is_shared = any(lane.plane.startswith("shared") for lane in group.lanes)
            if group.state == "left" or not is_shared or key_of(group) not in known:
                continue
            places = {
                each.place
                for other in processes
                for each in other.page.groups
                if key_of(each) == key_of(group)
            }
            for place, rank in enumerate(group.ranks):
                if place not in places and rank not in there:
                    found[rank] = (
                        f"it is a member of {group.name!r} on this host, and no process has its page"
                    )
    return found
