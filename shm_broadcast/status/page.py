"""Write this process's status page: which groups and queues it has, and what it does in them.

The page is shared memory that only this process writes. Another process of the same user reads it through
`/proc/PID/fd`, without this one's help, also while it is stopped or hangs; see `DESIGN.md`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from shm_broadcast import _core
from shm_broadcast.liveness import fork_count, this_process, time_namespace
from shm_broadcast.segment import Segment
from shm_broadcast.status import layout
from shm_broadcast.status.failure_dump import Broken, Dumps
from shm_broadcast.status.layout import GroupState
from shm_broadcast.status.record_file import RunFolder

__all__ = ["LEFT_GROUPS", "GroupStatus", "OwnPage", "own_page", "record_own_page"]

LEFT_GROUPS: Final = 16
"""How many groups that were left are still shown; those that were left last."""


class OwnPage:
    """The status page of this process, of which there is one.

    Its methods may be called from any thread, and by signal handlers inside of each other. A page that has no room left
    for a group, queue or lane counts that, and what they do is not shown.

    Attributes:
        segment: The memory.
        dumps: Where a failure is written, if the page is in a file.
    """

    def __init__(self, folder: RunFolder | None = None) -> None:
        """Make the page, in a file of `folder` or in memory that has no name.

        Raises:
            CapabilityError: The kernel refuses a memfd, or too little memory or space for a file is free.
            SettingsError: The file cannot be made.
        """
        self.segment: Final = (
            Segment.create(layout.PAGE_BYTES, name=layout.NAME) if folder is None else folder.page()
        )
        self.dumps: Final = None if folder is None else Dumps(folder, self.segment)
        identity = this_process()
        _core.status_format(
            self.segment.memory,
            identity.pid,
            identity.start_ticks,
            identity.pid_namespace,
            time_namespace(),
            identity.boot_id.encode(),
            identity.hostname.encode(),
        )
        self._core = _core.StatusPage(self.segment.memory)
        self._forks = fork_count()
        # `pop` and `append` are atomic under the GIL, so that no two callers get the same place.
        self._free_groups = list(reversed(range(layout.TABLES["groups"].number)))
        self._left_groups: deque[int] = deque()
        self._free_queues = list(reversed(range(layout.TABLES["queues"].number)))
        self._rank, self._world_size, self._stack_signal, self._refused = -1, 0, 0, 0

    @property
    def is_inherited(self) -> bool:
        """Return whether this is a copy in a forked child, which must not write it."""
        return self._forks != fork_count()

    def set_rank(self, rank: int, world_size: int) -> None:
        """State the process's place in the first world that it joins; those of stateless groups count from 0 again."""
        if not self._world_size:
            self.change_rank(rank, world_size)

    def change_rank(self, rank: int, world_size: int) -> None:
        """State the process's place among other members of its world."""
        self._rank, self._world_size = rank, world_size
        self._set_words()

    def take_words(self, before: OwnPage) -> None:
        """Take over the words of an earlier page of this process."""
        self._rank, self._world_size = before._rank, before._world_size
        self.set_stack_signal(before._stack_signal)

    def set_stack_signal(self, number: int) -> None:
        """State which signal makes this process write its stacks; 0: none."""
        self._stack_signal = number
        self._set_words()

    def group(self, name: str, place: int, ranks: Sequence[int], epoch: int = 0) -> GroupStatus:
        """Show a group that is being created.

        Args:
            name: Its unique name.
            place: This process's place in it.
            ranks: The global ranks of its members, in group order.
            epoch: How often its members have changed.
        """
        return GroupStatus(self, self._take_group(), name, place, ranks, epoch)

    def _take_group(self) -> int | None:
        if self._free_groups:
            return self._free_groups.pop()
        if self._left_groups:
            # The group that was left first is shown no more.
            taken = self._left_groups.popleft()
            self._core.release(taken)
            return taken
        self._count_refused()
        return None

    def give_back_group(self, place: int) -> None:
        """Let others take the place and the lanes of a group that was left, once enough others were left after it."""
        self._left_groups.append(place)
        if len(self._left_groups) > LEFT_GROUPS:
            # Their lanes and counters run out before the places of groups do.
            oldest = self._left_groups.popleft()
            self._core.release(oldest)
            self.write_group(oldest, layout.pack_record("groups"))
            self._free_groups.append(oldest)

    def write_group(self, place: int, body: bytes) -> None:
        """Write the record of a group; see `layout.pack_record`."""
        self._core.write(False, place, body)

    def lane(self, group: int | None, plane: str, algorithm: str) -> _core.StatusLane:
        """Return a new lane of the group in a place; one that is shown to nobody if there is no room."""
        if group is not None:
            lane = self._core.lane(group, plane.encode(), algorithm.encode())
            if lane is not None:
                return lane
            self._count_refused()
        return _core.status_nowhere()

    def add_queue(self, name: str, segment: Segment, offset: int, reader: int) -> int | None:
        """Show an end of a queue; return its place, or None if there is no room.

        Args:
            name: The name of the queue.
            segment: The memory that holds its ring.
            offset: Of the ring.
            reader: This end's place among the readers, or -1 for the writer.
        """
        if not self._free_queues:
            self._count_refused()
            return None
        place = self._free_queues.pop()
        body = layout.pack_record(
            "queues",
            state=1,
            inode=os.fstat(segment.descriptor).st_ino,
            offset=offset,
            reader=reader,
            descriptor=segment.descriptor,
            name=cut(name, 96),
        )
        self._core.write(True, place, body)
        return place

    def remove_queue(self, place: int | None) -> None:
        """Show an end of a queue no more; in a forked child and with None this does nothing."""
        if place is not None and not self.is_inherited:
            self._core.write(True, place, layout.pack_record("queues"))
            self._free_queues.append(place)

    def _count_refused(self) -> None:
        self._refused += 1
        self._set_words()

    def _set_words(self) -> None:
        self._core.set_words(self._rank, self._world_size, self._stack_signal, self._refused)


class GroupStatus:
    """What the page shows of one group. In a forked child nothing is written."""

    def __init__(
        self, page: OwnPage, at: int | None, name: str, place: int, ranks: Sequence[int], epoch: int
    ) -> None:
        """Use `OwnPage.group`. `at` is the place in the page."""
        self._page = page
        self._at = at
        self._lanes: list[_core.StatusLane] = []
        self._state = GroupState.FREE
        self._name = name
        self._values: dict[str, object] = {
            "epoch": epoch,
            "rank": place,
            "world_size": len(ranks),
            "created_ns": time.monotonic_ns(),
            "name": cut(name, 160),
            # A rank that the page cannot name is shown as nobody.
            "ranks": [min(rank, layout.NOBODY) for rank in ranks],
        }
        self.set_state(GroupState.FORMING)

    def lane(self, plane: str, algorithm: str) -> _core.StatusLane:
        """Return a new lane, in which one thread at a time makes the calls of a plane."""
        lane = self._page.lane(self._at, plane, algorithm)
        self._lanes.append(lane)
        return lane

    def set_state(self, state: GroupState, cause: str = "") -> None:
        """Show a state, and for a broken group why it is broken."""
        if self._at is None or self._state is GroupState.LEFT or self._page.is_inherited:
            return
        self._state = state
        if cause:
            self._values["cause"] = cut(cause, 320)
        self._page.write_group(self._at, layout.pack_record("groups", state=int(state), **self._values))

    @property
    def is_dumped(self) -> bool:
        """Return whether a dump is written when the group breaks: the page is in a file."""
        return self._page.dumps is not None and not self._page.is_inherited

    def dump(self, cause: BaseException, failure: Broken | None, others: Mapping[int, str]) -> None:
        """Write a dump if the page is in a file; the arguments are those of `Dumps.write`."""
        if self._page.dumps is not None and not self._page.is_inherited:
            self._page.dumps.write(self._name, cause, failure, others)

    def leave(self) -> None:
        """Show that the group was left, and write no more. Idempotent."""
        if self._at is None or self._state is GroupState.LEFT or self._page.is_inherited:
            return
        self.set_state(GroupState.LEFT)
        if self._page.dumps is not None:
            self._page.dumps.left(self._name)
        for lane in self._lanes:
            lane.close()
        self._page.give_back_group(self._at)


def cut(text: str, nbytes: int) -> bytes:
    """Return UTF-8 that fits with the 0 behind it, cut between two characters."""
    return text.encode(errors="replace")[: nbytes - 1].decode(errors="ignore").encode()


class _Own:
    """Holds the page of this process. A lock orders threads that begin a record; a signal handler may interrupt one."""

    lock = threading.RLock()
    page: OwnPage | None = None


def own_page() -> OwnPage:
    """Return this process's page, which the first call makes; a forked child makes its own.

    Raises:
        CapabilityError: As `OwnPage`.
    """
    page = _Own.page
    if page is None or page.is_inherited:
        page = _Own.page = OwnPage()
    return page


def record_own_page(directory: Path, run: str, rank: int) -> None:
    """Let this process write a page in a file from now on, unless it does.

    Groups and queues that are there already stay in the page that they have.

    Args:
        directory: The record directory.
        run: Name of the run, equal on all ranks.
        rank: Of this process, for the name of the file.

    Raises:
        SettingsError: As `RunFolder`.
        CapabilityError: As `OwnPage`.
    """
    with _Own.lock:
        if _is_recording():
            return
        own = this_process()
        folder = RunFolder(directory, run, f"rank-{rank}-{own.boot_id[:8]}-{own.pid}-{own.start_ticks}")
        try:
            folder.remove_page()  # what an interrupted call has left
            page = OwnPage(folder)
        except BaseException:
            if not _is_recording():
                folder.remove_page()
            raise
        if _is_recording():
            # A signal handler has begun the record meanwhile, and the file is that of its page.
            page.segment.close()
            return
        if _Own.page is not None:
            page.take_words(_Own.page)
        _Own.page = page


def _is_recording() -> bool:
    page = _Own.page
    return page is not None and page.dumps is not None and not page.is_inherited


def _close_inherited() -> None:
    # The mapping stays: lanes of groups that the child cannot use refer to it, and write elsewhere now.
    _Own.lock = threading.RLock()
    if _Own.page is not None:
        _Own.page.segment.close_descriptor()
        _Own.page = None


os.register_at_fork(after_in_child=_close_inherited)
