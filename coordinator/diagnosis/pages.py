"""Find the status pages of this host's processes through `/proc`, and read them without their help.

A page is a memfd, or a file of the record directory, so every process that holds its descriptor shows it: its owner,
and ranks that keep the pages of others so that these survive `kill -9`. What the kernel does not let this process read
is counted and not shown.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.model import Page
from coordinator.diagnosis.page_memory import PageMemory
from shm_broadcast.errors import DecodeError
from shm_broadcast.liveness import this_process, time_namespace
from shm_broadcast.status.record_file import is_page_link

__all__ = [
    "Found",
    "Memory",
    "Search",
    "find_memory",
    "find_pages",
    "is_foreign",
    "owner_of",
    "processes",
    "shift_of",
]

# Pages, queues, and what groups share.
_LINKS: Final = "/memfd:group-coordinator"
# Inode of the PID namespace that sees the processes of all others: PROC_PID_INIT_INO of include/linux/proc_ns.h.
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC


class Found(msgspec.Struct, frozen=True):
    """A page, and where it was found.

    Attributes:
        page: What it says.
        pid: Its owner as this process sees it; None if the owner has ended, or may be hidden (`is_foreign`).
        holders: Processes in which it was found, as this process sees them.
    """

    page: Page
    pid: int | None
    holders: tuple[int, ...]


class Search(msgspec.Struct, frozen=True):
    """What a search has found.

    Attributes:
        found: The pages, in the order of their ranks.
        refused: Processes whose descriptors this process may not read.
        faults: What is wrong with pages that cannot be decoded, by holder.
    """

    found: tuple[Found, ...]
    refused: tuple[int, ...]
    faults: dict[int, str]


class Memory(msgspec.Struct, frozen=True):
    """A descriptor of shared memory of ours.

    Attributes:
        link: The entry of /proc/PID/fd.
        place: Device and inode, which tell what memory it is.
        is_page: Whether it is a status page.
    """

    link: str
    place: tuple[int, int]
    is_page: bool


def find_pages(pids: Iterable[int] | None = None, *, records: bool = True) -> Search:
    """Return the pages that the processes `pids` hold; by default those of all processes that this one may read.

    Args:
        pids: As this process sees them.
        records: Whether to decode the calls that have ended; see `decode_page`.
    """
    places: dict[tuple[int, int], list[tuple[int, str]]] = {}
    refused, faults = [], {}
    for pid in sorted(processes() if pids is None else pids):
        try:
            for memory in find_memory(pid):
                if memory.is_page:
                    places.setdefault(memory.place, []).append((pid, memory.link))
        except PermissionError:
            refused.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended meanwhile
    found = []
    for held in places.values():
        try:
            page = _read((link for _, link in held), records)
        except DecodeError as error:
            faults[held[0][0]] = str(error)
            continue
        if page is not None:
            holders = tuple(sorted({pid for pid, _ in held}))
            found.append(Found(page, owner_of(page, holders), holders))
    found.sort(key=lambda each: (each.page.rank is None, each.page.rank or 0, each.page.pid))
    return Search(tuple(found), tuple(refused), faults)


def processes() -> list[int]:
    """Return the ids of all processes that this one sees."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def find_memory(pid: int) -> list[Memory]:
    """Return the shared memory of ours that a process has descriptors of, without pages that it only reads.

    A program that reads pages, as `top` does, opens those of all jobs for reading only. The processes of a job pass
    each other descriptors that can also write.

    Raises:
        PermissionError: This process may not read that.
        FileNotFoundError, ProcessLookupError: The process has ended.
    """
    folder = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(folder):
        link = f"{folder}/{name}"
        try:
            target = os.readlink(link)
            may_be_page = is_page_link(target)
            if may_be_page and not os.lstat(link).st_mode & stat.S_IWUSR:
                continue
            if may_be_page or target.startswith(_LINKS):
                status = Path(link).stat()
                found.append(Memory(link, (status.st_dev, status.st_ino), may_be_page))
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


def _read(links: Iterable[str], records: bool) -> Page | None:
    """Return what the page says that all of `links` are; None if all of them have gone meanwhile.

    Raises:
        DecodeError: As `PageMemory`, or it holds no page.
    """
    for link in links:
        try:
            memory = PageMemory(link)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        with closing(memory):
            copy = memory.copy()
        # A page that is being made has no magic number yet.
        return decode_page(copy, records) if any(copy[:8]) else None
    return None


def shift_of(page: Page) -> int:
    """Return what turns a time of a page into CLOCK_MONOTONIC of this process, in ns; 0 in one time namespace."""
    if page.time_namespace == time_namespace():
        return 0
    return page.realtime_ns - (time.time_ns() - time.monotonic_ns())


def is_foreign(page: Page) -> bool:
    """Return whether a process that is not found for a page may live all the same, as in another container.

    Its number means nothing here then, or its start is counted by another clock.
    """
    sees = (page.pid_namespace, _FIRST_PID_NAMESPACE)
    return page.time_namespace != time_namespace() or this_process().pid_namespace not in sees


def owner_of(page: Page, holders: Iterable[int]) -> int | None:
    """Return the holder that is the page's process."""
    for pid in holders:
        try:
            status = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            inside = Path(f"/proc/{pid}/status").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The last number is the pid in the process's own namespace; see pid_namespaces(7).
        own = next((line.split()[-1] for line in inside.splitlines() if line.startswith("NSpid:")), str(pid))
        if int(own) == page.pid and int(status[19]) == page.start_ticks:
            return pid
    return None
