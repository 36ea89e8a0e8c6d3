"""Read status pages for metrics: those of a whole host, or this process's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing

import msgspec

from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.metrics.totals import Reading, Totals
from coordinator.diagnosis.model import Page
from coordinator.diagnosis.page_memory import PageMemory
from coordinator.diagnosis.pages import Found, Search, find_memory, find_pages
from shm_broadcast.errors import DecodeError
from shm_broadcast.liveness import fork_count

__all__ = ["MetricsReader", "read_host", "read_own"]


def read_host() -> Search:
    """Return the pages of all processes that this one may read."""
    return find_pages(records=False)


def read_own() -> Search:
    """Return the page of this process, if it has made a group or queue."""
    search = find_pages([os.getpid()], records=False)
    # A rank may hold the pages of others too; these export themselves.
    return msgspec.structs.replace(
        search, found=tuple(each for each in search.found if each.pid == os.getpid())
    )


class MetricsReader:
    """Reads pages, and keeps the sums. Any thread may call it: one at a time reads."""

    def __init__(self, search: Callable[[], Search]) -> None:
        """Read what `search` finds."""
        self._search = search
        self._lock = threading.Lock()
        self._totals = Totals(_with_records)
        self._forks = fork_count()

    def read(self) -> Reading:
        """Return the sums. In a forked child they begin again: what its parent has counted, that one exports."""
        if self._forks != fork_count():
            # A thread of the parent may have held the lock.
            self._lock = threading.Lock()
            self._totals = Totals(_with_records)
            self._forks = fork_count()
        with self._lock:
            return self._totals.update(self._search())


def _with_records(found: Found) -> Page | None:
    """Return the page again, with the calls that have ended; None if it has gone, or they make no sense.

    A rank may hold the pages of all others. Only this one is decoded with its calls, which takes long.
    """
    for pid in found.holders:
        try:
            links = [memory.link for memory in find_memory(pid) if memory.is_page]
        except OSError:
            continue  # the process has ended meanwhile, or has become another user's
        for link in links:
            page = _decoded(link, found.page)
            if page is not None:
                return page
    return None


def _decoded(link: str, wanted: Page) -> Page | None:
    """Return the page `link` with its calls if it is that of the process of `wanted`."""
    try:
        with closing(PageMemory(link)) as memory:
            copy = memory.copy()
        if _process(decode_page(copy, records=False)) != _process(wanted):
            return None
        return decode_page(copy)
    except (OSError, DecodeError):
        return None  # it has gone meanwhile, or makes no sense, and must not hide the pages of others


def _process(page: Page) -> tuple[int, int, int]:
    return page.pid_namespace, page.pid, page.start_ticks
