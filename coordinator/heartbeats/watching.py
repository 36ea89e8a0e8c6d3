"""The links of this process in one world, and the ranks that are lost with the hosts at their other ends."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Hashable, Iterable
from typing import Final, NamedTuple

from coordinator.heartbeats.links import Link, State
from shm_broadcast.errors import NativeError
from shm_broadcast.interruption import tolerating
from shm_broadcast.liveness import PeerWatch, fork_count
from shm_broadcast.reports.log_fields import log_fields

__all__ = ["Heartbeats"]

logger: logging.Logger = logging.getLogger(__name__)

# Several calls of one process may wait at once. The links are looked at no more often than this.
_LOOK_EVERY_S: Final = 0.05


class _Report(NamedTuple):
    """What was said of a rank: in which words and when, and whether its process has ended or is only suspected to."""

    how: str
    since: float
    has_ended: bool


class Heartbeats:
    """All links of this process in a world whose groups have one setting `lost_after_s`. Thread-safe."""

    def __init__(self, lost_after_s: float) -> None:
        """Begin without links; see `RemoteSettings` for the setting."""
        self.lost_after_s: float = lost_after_s
        self._links: dict[int, Link] = {}
        # By its user, such as a group: the partners to which it needs links.
        self._users: dict[Hashable, frozenset[int]] = {}
        # For each rank on another host that is known, the ranks of its host, in one set that they share.
        self._hosts: dict[int, set[int]] = {}
        self._store_at: set[int] = set()
        self._lost: dict[int, str] = {}
        # By rank, what no look has judged yet.
        self._reports: dict[int, _Report] = {}
        # What is still to be logged and reported.
        self._unlogged: deque[str] = deque()
        self._untold: deque[dict[int, str]] = deque()
        # An entry ends with its watch; the callback runs no Python code, for the reason that `host/process_groups.py`
        # gives.
        self._watches: dict[weakref.ref[PeerWatch], frozenset[int]] = {}
        self._next_look = 0.0
        self._is_looking = False
        self._fork_count = fork_count()
        # A signal handler may destroy or create a group while this thread holds it.
        self._lock = threading.RLock()

    def use(self, user: Hashable, partners: Iterable[int]) -> None:
        """Keep the links to `partners` until `release` is called for the same `user`."""
        with self._lock:
            self._users[user] = frozenset(partners)

    def release(self, user: Hashable) -> None:
        """Close the links that only `user` needed. Idempotent, and harmless if it has never called `use`."""
        with self._lock:
            self._users.pop(user, None)
            needed = {partner for partners in self._users.values() for partner in partners}
            for partner in [each for each in self._links if each not in needed]:
                self._links.pop(partner).close()

    def names(self, partners: Iterable[int]) -> dict[int, str]:
        """Return the names of the links that are open, by partner."""
        with self._lock:
            return {partner: self._links[partner].name for partner in partners if partner in self._links}

    def add(self, link: Link) -> None:
        """Own `link`, whose partner is in use; the former link to that partner is closed."""
        with self._lock:
            former = self._links.pop(link.partner, None)
            self._links[link.partner] = link
        if former is not None:
            former.close()

    def learn(self, ranks: Iterable[int]) -> None:
        """Know that `ranks` are on one host."""
        with self._lock:
            together = set(ranks)
            for rank in list(together):
                together |= self._hosts.get(rank, set())
            for rank in together:
                self._hosts[rank] = together

    def store_is_with(self, rank: int) -> None:
        """Know that the host of `rank` serves the world's store."""
        with self._lock:
            self._store_at.add(rank)

    def listen(self, watch: PeerWatch, ranks: Collection[int]) -> None:
        """Report to `watch` which of `ranks` are or will be lost, until it is collected.

        Each query of `watch` looks at the links first.
        """
        with self._lock:
            self._watches[weakref.ref(watch, self._watches.pop)] = frozenset(ranks)
            known = {rank: how for rank, how in self._lost.items() if rank in ranks}
        watch.report_all(known)
        watch.look_with(self.look, self._hold_back, self.is_in_doubt, self._suspect)

    def _hold_back(self, rank: int, how: str) -> bool:
        """Keep a report of `rank` until a look knows whether its host answers a beat; return False if there is no link.

        The store of a job with a secret reports a host that vanishes rank by rank.
        """
        return self._ask_host_of(rank, _Report(how, time.monotonic(), has_ended=True))

    def _suspect(self, rank: int, how: str) -> None:
        """Be in doubt until a look knows whether the host of `rank` answers a beat; report nothing if it does."""
        self._ask_host_of(rank, _Report(how, time.monotonic(), has_ended=False))

    def _ask_host_of(self, rank: int, report: _Report) -> bool:
        """Keep `report` until a look judges it, and ask the host of `rank`; return False if there is no link to it."""
        with self._lock:
            links = self._links_to(rank)
            if not links:
                return False
            known = self._reports.get(rank)
            if known is None or (report.has_ended and not known.has_ended):
                self._reports[rank] = report
            for link in links:
                link.ask()
            self._next_look = 0.0
        self.look()
        return True

    def _links_to(self, rank: int) -> list[Link]:
        """Return the links to the host of `rank`."""
        together = self._hosts.get(rank, {rank})
        return [link for partner, link in self._links.items() if partner in together]

    def _judge_reports(self, now: float) -> None:
        """Pass on what was reported: of the rank alone if its host answers and it has ended, else of the whole host."""
        for rank, (how, since, has_ended) in list(self._reports.items()):
            links = self._links_to(rank)
            if any(link.is_silent() for link in links):
                lost = self._hosts.get(rank, {rank})
                # Groups that are made later hear of them too.
                self._lost = dict.fromkeys(sorted(lost), how) | self._lost
            # A kernel answers for a process that reads no beats, but takes no more of them.
            elif not all(link.is_asked for link in links) or not links or now - since >= self.lost_after_s:
                lost = {rank} if has_ended else set()
            else:
                continue
            if lost:
                self._untold.append(dict.fromkeys(sorted(lost), how))
            self._reports.pop(rank, None)

    def is_in_doubt(self) -> bool:
        """Return whether a beat has no answer yet, or a report waits for one, with beats on all links.

        A link that has no beats left gets one: it would find its host vanished only by the kernel's keepalives.
        """
        with self._lock:
            for link in self._links.values():
                link.allow_beat()
        self.look()
        with self._lock:
            return bool(self._reports) or any(link.is_in_doubt for link in self._links.values())

    def check_store(self) -> None:
        """Raise `NativeError` if the host that serves the world's store has vanished. Never blocks."""
        self.look()
        if not self._store_at.isdisjoint(self._lost):
            raise NativeError("the host of the world's store has vanished", library="libc", function="recv")

    def look(self) -> None:
        """Look at all links, beat where it is due, and report the ranks of hosts that have vanished. Never blocks."""
        if not (self._links or self._reports or self._untold) or self._fork_count != fork_count():
            return
        # By `with`: a signal handler that raises cannot come between the lock and the block. It is held for a moment.
        with self._lock:
            now = time.monotonic()
            # A handler may look while this thread does.
            if not self._is_looking and now >= self._next_look:
                self._is_looking, self._next_look = True, now + _LOOK_EVERY_S
                try:
                    for link in list(self._links.values()):
                        self._look_at(link, now)
                    self._judge_reports(now)
                finally:
                    self._is_looking = False
        self._tell()

    def _look_at(self, link: Link, now: float) -> None:
        state = link.look(now)
        if state is State.OPEN:
            return
        if state is State.VANISHED:
            self._report(link)
        if self._links.get(link.partner) is link:
            del self._links[link.partner]
        link.close()

    def _report(self, link: Link) -> None:
        lost = dict.fromkeys(sorted(self._hosts.get(link.partner, {link.partner})), link.reason)
        self._lost = lost | self._lost
        self._unlogged.append(f"the host of ranks {_listed(lost)} has vanished: {link.reason}")
        self._untold.append(lost)

    def _tell(self) -> None:
        """Log and report what looks have found; without the lock, which others may wait for with locks of those."""
        while self._unlogged:
            with tolerating(IndexError):  # another thread has logged it
                logger.error("%s", self._unlogged.popleft(), extra=log_fields())
        while self._untold:
            with tolerating(IndexError, ValueError):  # another thread has told it, too
                lost = self._untold[0]
                with self._lock:
                    watches = self._watches.copy()
                for reference, ranks in watches.items():
                    if (watch := reference()) is not None:
                        watch.report_all({rank: how for rank, how in lost.items() if rank in ranks})
                # Last: what a handler raises before leaves it to the next look.
                self._untold.remove(lost)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
