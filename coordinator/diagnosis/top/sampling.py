"""Look at the processes of this host again and again, for `top`: cheaply, and also when they stop, hang or end.

A page that was found stays open, so that a look copies 0.4 MB and asks `/proc` for one process. Who else has a page
is searched for rarely, as that takes a look at each descriptor of each process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from coordinator.diagnosis import pages
from coordinator.diagnosis.decoding import decode_lateness, decode_page
from coordinator.diagnosis.model import Page
from coordinator.diagnosis.page_memory import PageMemory
from coordinator.diagnosis.processes import Process, look_at
from coordinator.diagnosis.queues import Ring, read_rings
from shm_broadcast.errors import DecodeError

__all__ = ["Sample", "Sampler", "Seen", "jobs_of", "of_processes"]

# A process is searched for its page this often while it is new, then seldom; a search may take this share of a core.
SEARCH_S: Final = 1.5
SEARCH_SHARE: Final = 0.005
# A page of a process that has ended is shown for this long if nobody else keeps it.
KEPT_S: Final = 60.0
# How many of the newest calls tell how late a rank is.
NEWEST: Final = 128

Place = tuple[int, int]
Lateness = Mapping[tuple[str, int, str], Sequence[tuple[int, int]]]


class Seen(msgspec.Struct, frozen=True):
    """A page, and its process.

    Attributes:
        page: What it says, with as many of the newest calls as `Sampler` was asked for.
        pid: Its process as this one sees it; None if that has ended or is not seen here.
        process: What the kernel says of that; None if it has ended or is not seen here.
        holders: Processes with a page of their own that have this one.
        job: Number of the job, from 0; pages of one job share memory.
        shift_ns: What turns a time of the page into one of this process, if they live in two time namespaces.
        lateness: Who came last to its newest calls; see `decode_lateness`.
        is_foreign: Whether it may live though this process does not see it; see `pages.is_foreign`.
    """

    page: Page
    pid: int | None
    process: Process | None
    holders: tuple[int, ...]
    job: int
    shift_ns: int
    lateness: Lateness = {}
    is_foreign: bool = False

    @property
    def is_hidden(self) -> bool:
        """Return whether nobody here can tell if its process lives."""
        return self.pid is None and self.is_foreign

    @property
    def has_ended(self) -> bool:
        """Return whether its process has ended; not if that is not known."""
        return not self.is_hidden and (self.process is None or self.process.has_ended)


class Sample(msgspec.Struct, frozen=True):
    """All pages at one moment.

    Attributes:
        at_ns: When, on CLOCK_MONOTONIC.
        seen: The pages, by job and rank.
        rings: Queues and channels.
        refused: Processes whose descriptors this process may not read.
        faults: What is wrong with pages that cannot be decoded, by holder.
    """

    at_ns: int
    seen: tuple[Seen, ...]
    rings: tuple[Ring, ...]
    refused: tuple[int, ...]
    faults: dict[int, str]


def of_processes(sample: Sample, pids: Collection[int]) -> Sample:
    """Return a sample with the queues and channels of these alone; it keeps all pages, which tell who waits."""
    own = {
        (end.inode, end.offset)
        for seen in sample.seen
        if seen.pid in pids or seen.page.pid in pids
        for end in seen.page.queues
    }
    rings = tuple(ring for ring in sample.rings if (ring.inode, ring.offset) in own)
    return msgspec.structs.replace(sample, rings=rings)


class _Kept:
    """A page that stays open."""

    def __init__(self, memory: PageMemory) -> None:
        self.memory = memory
        self.holders: dict[int, None] = {}
        self.keepers: tuple[int, ...] = ()
        self.pid: int | None = None
        self.start_ticks = -1
        self.ended_s: float | None = None
        # What tells that two pages belong to one job: who has held them, and the memory that those had.
        self.marks: set[object] = set()


class Sampler:
    """Finds pages and looks at them. One thread uses it; `close` lets the pages go."""

    def __init__(self, newest: int = 0) -> None:
        """Look at nothing yet; of each page decode the `newest` calls that have ended."""
        self._newest = newest
        self._kept: dict[Place, _Kept] = {}
        # What memory of ours each process had at the last search.
        self._memory: dict[int, list[pages.Memory]] = {}
        self._refused: set[int] = set()
        self._faults: dict[int, str] = {}
        self._next_search_s = 0.0

    def close(self) -> None:
        """Let the pages go. Idempotent."""
        for kept in self._kept.values():
            kept.memory.close()
        self._kept.clear()

    def sample(self, newest: int = NEWEST, *, searches: bool = False) -> Sample:
        """Look at every page, and search for new ones if it is time.

        Args:
            newest: How many of the calls that have ended to decode, in each page.
            searches: Search in any case.
        """
        if searches or time.monotonic() >= self._next_search_s:
            began_s = time.thread_time()
            self._search()
            took_s = time.thread_time() - began_s
            self._next_search_s = time.monotonic() + max(SEARCH_S, took_s / SEARCH_SHARE)
        found: list[tuple[Place, Page, Lateness]] = []
        faults = dict(self._faults)
        for place, kept in list(self._kept.items()):
            try:
                copy = kept.memory.copy()
                page = decode_page(copy, newest=newest) if any(copy[:8]) else None  # it is being made
            except DecodeError as error:
                page = None
                if kept.holders:
                    faults[next(iter(kept.holders))] = str(error)
            if page is None:
                if not kept.holders:
                    kept.memory.close()
                    del self._kept[place]
                continue
            if kept.start_ticks != page.start_ticks:
                # It is asked once: a process that holds its page keeps its number while it lives.
                kept.pid, kept.start_ticks = pages.owner_of(page, kept.holders), page.start_ticks
            found.append((place, page, decode_lateness(copy, page, NEWEST)))
        return self._sampled(found, faults)

    def _sampled(self, found: list[tuple[Place, Page, Lateness]], faults: dict[int, str]) -> Sample:
        owners = {kept.pid for kept in self._kept.values()}
        for place, _, _ in found:
            kept = self._kept[place]
            # Whoever merely reads pages, as this command does, has them open too, and belongs to no job.
            kept.keepers = tuple(pid for pid in kept.holders if pid in owners)
            own = self._memory.get(kept.pid, []) if kept.pid is not None else []
            marks = {*kept.keepers, *(memory.place for memory in own if not memory.is_page)}
            # A process that has ended has nothing any more, and still belongs to its job.
            kept.marks = marks or kept.marks
        jobs = jobs_of([(place, self._kept[place].marks) for place, _, _ in found])
        now_ns = time.monotonic_ns()
        seen = []
        for place, page, lateness in found:
            kept = self._kept[place]
            process = look_at(kept.pid) if kept.pid is not None else None
            if process is not None and process.start_ticks != page.start_ticks:
                process = None  # another one has the number now
            shift_ns, is_foreign = pages.shift_of(page), pages.is_foreign(page)
            seen.append(
                Seen(page, kept.pid, process, kept.keepers, jobs[place], shift_ns, lateness, is_foreign)
            )
            self._forget(place, kept, seen[-1].has_ended or seen[-1].is_hidden)
        seen.sort(key=lambda each: (each.job, each.page.rank is None, each.page.rank or 0, each.page.pid))
        rings = read_rings((each.page, None if each.has_ended else each.pid) for each in seen)
        return Sample(now_ns, tuple(seen), rings, tuple(sorted(self._refused)), faults)

    def _forget(self, place: Place, kept: _Kept, may_have_ended: bool) -> None:
        """Let a page go that this process alone has kept for long enough."""
        if not may_have_ended:
            kept.ended_s = None
            return
        if kept.ended_s is None:
            kept.ended_s = time.monotonic()
        if not kept.keepers and time.monotonic() - kept.ended_s >= KEPT_S:
            kept.memory.close()
            del self._kept[place]

    def _search(self) -> None:
        """Look at the descriptors of all processes."""
        self._memory, self._faults, self._refused = {}, {}, set()
        for kept in self._kept.values():
            kept.holders = {}
        for pid in sorted(set(pages.processes()) - {os.getpid()}):
            try:
                self._memory[pid] = pages.find_memory(pid)
            except PermissionError:
                self._refused.add(pid)
                continue
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            for memory in self._memory[pid]:
                if memory.is_page:
                    self._keep(pid, memory)

    def _keep(self, pid: int, memory: pages.Memory) -> None:
        kept = self._kept.get(memory.place)
        if kept is None:
            # What has gone meanwhile is no page to be shown.
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                try:
                    kept = self._kept[memory.place] = _Kept(PageMemory(memory.link))
                except DecodeError as error:
                    self._faults[pid] = str(error)
        if kept is not None:
            if kept.pid is None:
                kept.start_ticks = -1  # ask again whose it is
            kept.holders[pid] = None


def jobs_of(marked: Iterable[tuple[Place, set[object]]]) -> dict[Place, int]:
    """Return the job number of each page: pages that share a mark, even through others, have one job."""
    jobs: list[tuple[set[object], list[Place]]] = []
    for place, marks in marked:
        joined: tuple[set[object], list[Place]] = (set(marks), [place])
        rest = []
        for job in jobs:
            if job[0].isdisjoint(joined[0]):
                rest.append(job)
            else:
                joined = (job[0] | joined[0], job[1] + joined[1])
        jobs = [*rest, joined]
    return {place: number for number, (_, places) in enumerate(jobs) for place in places}
