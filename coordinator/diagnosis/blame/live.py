"""Look at the processes of this host that hang: two looks tell a wait from a call that has just begun."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec

from coordinator.diagnosis.blame.evidence import Evidence, Process, ProcessState
from coordinator.diagnosis.blame.members import is_shared, key_of
from coordinator.diagnosis.model import Lane, Page
from coordinator.diagnosis.top.sampling import Sample, Sampler, Seen
from shm_broadcast.errors import UsageError
from shm_broadcast.status.layout import TABLES

__all__ = ["look_at_jobs"]

# Readers and writers of queues count as waiting only if they were in both looks.
_APART_S = 0.2


def look_at_jobs(pids: Iterable[int], waiting_s: float) -> tuple[Evidence, ...]:
    """Return what the processes of this host do, one for each job.

    Args:
        pids: Take the jobs of these processes alone; empty for all.
        waiting_s: A call counts as a wait if it goes on for this long, in seconds.

    Raises:
        UsageError: None of them has a group and a page that can be read.
    """
    sampler = Sampler(TABLES["records"].number)
    try:
        before = sampler.sample()
        time.sleep(_APART_S)
        now = sampler.sample()
    finally:
        sampler.close()
    wanted = set(pids)
    jobs = {
        each.job
        for each in now.seen
        if each.page.groups and (not wanted or {each.pid, each.page.pid} & wanted)
    }
    if not jobs:
        which = f"process {', '.join(map(str, sorted(wanted)))}" if wanted else "process of this host"
        refused = f"; {len(now.refused)} could not be read" if now.refused else ""
        raise UsageError(f"no {which} has a group and a status page{refused}")
    return tuple(_evidence(before, now, job, waiting_s) for job in sorted(jobs))


def _evidence(before: Sample, now: Sample, job: int, waiting_s: float) -> Evidence:
    seen = [each for each in now.seen if each.job == job and (each.page.groups or each.page.queues)]
    begun = {
        (each.page.pid, each.page.start_ticks, group.name, index): lane.begin_ns
        for each in before.seen
        for group in each.page.groups
        for index, lane in enumerate(group.lanes)
    }
    processes = tuple(_process(each, begun, now.at_ns, waiting_s) for each in seen)
    pids = {each.page.pid for each in seen}
    waited = {(ring.inode, ring.offset): ring for ring in before.rings}
    rings = tuple(
        msgspec.structs.replace(
            ring,
            writer_waits=ring.writer_waits and waited[ring.inode, ring.offset].writer_waits,
        )
        for ring in now.rings
        if (ring.inode, ring.offset) in waited
        and (ring.pid in pids or any(reader.pid in pids for reader in ring.readers))
    )
    unseen = [f"page of process {pid}: {fault}" for pid, fault in sorted(now.faults.items())]
    if now.refused:
        unseen.append(f"processes whose descriptors this one may not read: {len(now.refused)}")
    return Evidence(processes, rings, _ended(processes) if not now.refused else {}, tuple(unseen))


def _process(
    seen: Seen, begun: Mapping[tuple[int, int, str, int], int], at_ns: int, waiting_s: float
) -> Process:
    now_ns = at_ns - seen.shift_ns
    settling = frozenset(
        (group.name, index)
        for group in seen.page.groups
        for index, lane in enumerate(group.lanes)
        if not _is_wait(
            lane, begun.get((seen.page.pid, seen.page.start_ticks, group.name, index)), now_ns, waiting_s
        )
    )
    return Process(seen.page, "live", _state(seen), now_ns, settling=settling)


def _is_wait(lane: Lane, begun_ns: int | None, now_ns: int, waiting_s: float) -> bool:
    """Return whether a call goes on since the look before, and for long enough."""
    return lane.begin_ns == begun_ns and now_ns - lane.begin_ns >= waiting_s * 1e9


def _state(seen: Seen) -> ProcessState:
    if seen.process is None or seen.has_ended:
        return "dead"
    return "stopped" if seen.process.is_stopped else "alive"


def _ended(processes: tuple[Process, ...]) -> dict[int, str]:
    """Return the ranks of which nothing is left though their groups share the memory of this host."""
    found: dict[int, str] = {}
    there = {process.page.rank for process in processes}
    for process in processes:
        for group in process.page.groups:
            if group.state == "left" or not any(is_shared(lane.algorithm) for lane in group.lanes):
                continue
            if not _is_whole(process.page, group.world_size):
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


def _is_whole(page: Page, world_size: int) -> bool:
    """Return whether all members of a group are on this host: its shared memory is that of the whole group."""
    return any(
        group.world_size == world_size and any(lane.plane.startswith("shared") for lane in group.lanes)
        for group in page.groups
    )
