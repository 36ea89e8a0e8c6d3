"""Tell from the kernel whether a peer process is alive.

Boot id, PID namespace, pid and start time identify a process, so a reused pid is never mistaken for the
process it replaced. A peer in the same PID namespace is watched through a pidfd, which becomes readable when
the process ends, even if a forked child still holds its sockets. Other peers cannot be watched from here:
their state is "unknown".
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import select
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from shm_broadcast import _core
from shm_broadcast.descriptors import read_text, refusal
from shm_broadcast.errors import CapabilityError, UsageError
from shm_broadcast.interruption import raised_by_handler

PeerState = Literal["alive", "stopped", "dead", "unknown"]
_Key = TypeVar("_Key")

# Indices into the fields of /proc/PID/stat that follow the command name, see proc_pid_stat(5). They start with field 3,
# the state; the start time is field 22.
_STATE: Final = 0
# How kernels refuse a pidfd of a thread other than the main one: newer ones with ENOENT, older ones with EINVAL.
_NO_PROCESS: Final = (errno.ENOENT, errno.EINVAL)
_START_TIME: Final = 22 - 3


def fork_count() -> int:
    """Return how many forks separate this process from the one that imported this module.

    An object stores the count when it is created and compares it later: a difference means that it now lives in
    a forked child.
    """
    return _core.fork_count()


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identifies one process uniquely, also after its pid is reused.

    Attributes:
        boot_id: The kernel's boot id, the same for all containers of one host; see `name_host` for clones.
        pid_namespace: Inode of the PID namespace that `pid` belongs to.
        network_namespace: Inode of the network namespace; loopback connections do not leave it.
        pid: Process id.
        start_ticks: Start time in clock ticks since boot; it distinguishes processes with the same pid.
        hostname: Shown in errors and logs only.
    """

    boot_id: str
    pid_namespace: int
    network_namespace: int
    pid: int
    start_ticks: int
    hostname: str

    def on_same_host(self, other: ProcessIdentity) -> bool:
        """Return whether both processes run on one kernel."""
        return self.boot_id == other.boot_id

    def shares_loopback(self, other: ProcessIdentity) -> bool:
        """Return whether 127.0.0.1 means the same for both processes."""
        return self.boot_id == other.boot_id and self.network_namespace == other.network_namespace

    def sees(self, other: ProcessIdentity) -> bool:
        """Return whether this process can watch `other`: same kernel and same PID namespace."""
        return self.on_same_host(other) and self.pid_namespace == other.pid_namespace


@functools.lru_cache(maxsize=1)
def _constants(forks: int) -> tuple[str, int]:
    """Return boot id and start time of this process. Cached: reading them takes 0.2 ms."""
    del forks
    boot_id = read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
    return boot_id, _stat_fields("self")[1]


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process.

    Raises:
        CapabilityError: No descriptor is free with which to read it.
    """
    boot_id, start_ticks = _constants(fork_count())
    return ProcessIdentity(
        boot_id=_boot_id_of(boot_id),
        pid_namespace=_namespace("pid"),
        network_namespace=_namespace("net"),
        pid=os.getpid(),
        start_ticks=start_ticks,
        hostname=socket.gethostname(),
    )


def _namespace(kind: str) -> int:
    return Path(f"/proc/self/ns/{kind}").stat().st_ino


# The name of this process's host, if it was given one.
_host_id: Final = list[str]()


def name_host(host_id: str | None) -> None:
    """Make this process's identity differ from those on other hosts, even if the boot ids are equal.

    Clones of a running machine have its boot id, and the same numbers of namespaces. Whoever creates a group
    calls this before the process's identity is sent to others; None changes nothing.

    Raises:
        UsageError: The process has another name already: others know it by that.
    """
    if host_id is None or host_id in _host_id:
        return
    if _host_id:
        raise UsageError(
            f"setting host_id is {host_id!r}, but this process has said already that it is on host {_host_id[0]!r}"
        )
    _host_id.append(host_id)


def _boot_id_of(boot_id: str) -> str:
    """Return a boot id of the same form that also depends on the host's name, if it was given one."""
    if not _host_id:
        return boot_id
    digest = hashlib.sha256(f"{boot_id} {_host_id[0]}".encode()).digest()
    return str(uuid.UUID(bytes=digest[:16]))


def time_namespace() -> int:
    """Return the inode of this process's time namespace, which shifts CLOCK_MONOTONIC; 0 on kernels that have none."""
    try:
        return Path("/proc/self/ns/time").stat().st_ino
    except OSError:
        return 0


def _stat_fields(pid: int | str) -> tuple[str, int]:
    """Return (state letter, start time in ticks) of a process.

    Raises:
        FileNotFoundError: There is no such process.
        CapabilityError: No descriptor is free.
    """
    # The command name is in parentheses and may itself contain blanks and parentheses: cut at the last one.
    fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[_STATE], int(fields[_START_TIME])


def process_state(identity: ProcessIdentity) -> PeerState:
    """Return the state of a process that this one can see; "dead" also if its pid was reused."""
    try:
        state, start_ticks = _stat_fields(identity.pid)
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    if start_ticks != identity.start_ticks or state in "ZXx":
        return "dead"
    return "stopped" if state in "Tt" else "alive"


def open_pidfd(pid: int) -> int:
    """Return a pidfd of a process, which the caller owns.

    Raises:
        ProcessLookupError: No process has this number.
        CapabilityError: The kernel refuses, as some containers' system call filters make it do.
    """
    kept: dict[str, int] = {}
    keep_pidfd(pid, kept, "pidfd")
    return kept["pidfd"]


def keep_pidfd(pid: int, kept: dict[_Key, int], key: _Key) -> None:
    """Open a pidfd of a process, and keep it as `kept[key]`, where the caller finds and closes it.

    Both happen inside of one native call: no signal handler runs between them, as it might behind `os.pidfd_open`. What
    it raised there would leave a descriptor open that nobody knows.

    Raises:
        ProcessLookupError: No process has this number.
        CapabilityError: The kernel refuses, as some containers' system call filters make it do.
    """
    try:
        kept.update(zip((key,), map(os.pidfd_open, (pid,)), strict=True))
    except ProcessLookupError:
        raise
    except OverflowError as error:
        raise ProcessLookupError(errno.ESRCH, f"no process has the number {pid}") from error
    except OSError as error:
        if raised_by_handler(error):
            raise
        if error.errno in _NO_PROCESS:
            raise ProcessLookupError(error.errno, "a thread of another process has this number") from error
        raise refusal(
            "pidfd_open", "tells when a process ends", error, "Linux 5.3, a free file descriptor"
        ) from error


class PeerWatch:
    """Watches the processes of a group's other ranks.

    It holds one pidfd for each visible peer until `close`. Thread-safe.
    """

    def __init__(
        self,
        own: ProcessIdentity,
        peers: Mapping[int, ProcessIdentity],
        hostnames: Mapping[int, str] | None = None,
    ) -> None:
        """Open a pidfd for every peer in this PID namespace.

        Args:
            own: The identity of this process.
            peers: Identities of the other ranks, by global rank.
            hostnames: Of ranks whose process is not known, the names of their hosts.

        Raises:
            CapabilityError: The kernel refuses to open one.
        """
        self._own = own
        self._peers = dict(peers)
        self._hostnames = dict(hostnames or {})
        self._descriptors: dict[int, int] = {}
        self._lost: set[int] = set()
        self._reports: dict[int, str] = {}
        self._looks: list[Callable[[], None]] = []
        self._holds_back: Callable[[int, str], bool] = lambda _rank, _how: False
        self._doubts: list[Callable[[], bool]] = []
        self._suspect: Callable[[int, str], None] = lambda _rank, _how: None
        # Keeps reports and closings of several threads apart; a signal handler may run while this thread holds it, and
        # close too. `adopt` and `lost` take no lock: a handler that has interrupted `lost` may close a queue, and so
        # wait for a thread that calls either.
        self._lock = threading.RLock()
        try:
            for rank, peer in self._peers.items():
                if own.sees(peer):
                    self._open(rank, peer)
        except BaseException:
            self.close()
            raise

    def _open(self, rank: int, peer: ProcessIdentity) -> None:
        try:
            keep_pidfd(peer.pid, self._descriptors, rank)
        except ProcessLookupError:
            self._lost.add(rank)
            return
        # The pid may have been reused before the pidfd was opened: compare the start time.
        if process_state(peer) == "dead":
            self._lost.add(rank)
            descriptor = self._descriptors[rank]
            # No signal handler runs before `os.close`: it finds the descriptor stored and open, or neither.
            del self._descriptors[rank]
            os.close(descriptor)

    def adopt(self, rank: int, peer: ProcessIdentity, descriptor: int) -> None:
        """Watch `rank` through a pidfd that it opened on itself and sent here; works across PID namespaces.

        This object takes ownership of the descriptor.
        """
        self._peers[rank] = peer
        self._descriptors[rank] = descriptor

    def report(self, rank: int, how: str) -> None:
        """Count `rank` as ended because a process that sees it says so; `how` tells which one, for errors."""
        self.report_each({rank: how})

    def report_each(self, how: Mapping[int, str]) -> None:
        """Count each of these ranks as ended, unless `holds_back` of `look_with` holds its report back."""
        self.report_all({rank: text for rank, text in how.items() if not self._holds_back(rank, text)})

    def report_all(self, how: Mapping[int, str]) -> None:
        """Count all ranks in `how` as ended at once, so that nobody sees only some of them as lost."""
        with self._lock:
            self._reports = {**how, **self._reports}
            self._lost |= how.keys()

    def look_with(
        self,
        look: Callable[[], None],
        holds_back: Callable[[int, str], bool] = lambda _rank, _how: False,
        is_in_doubt: Callable[[], bool] = lambda: False,
        suspect: Callable[[int, str], None] = lambda _rank, _how: None,
    ) -> None:
        """Call `look` whenever somebody asks who is lost; it must not block, and may call `report_all`.

        `holds_back` is called with each report that comes from elsewhere. If it returns True, that report is
        dropped, and a later `look` reports the rank together with those that are lost with it. `is_in_doubt`
        must not block either; it says whether `look` may soon find ranks lost. `suspect` is that of this object.
        """
        with self._lock:
            self._looks.append(look)
            self._holds_back = holds_back
            self._suspect = suspect
            self._doubts.append(is_in_doubt)

    def suspect(self, rank: int, how: str) -> None:
        """Be in doubt until it is known whether the host of `rank` has vanished, which reports all of its ranks.

        Nothing is reported if that host answers: a connection to `rank` has failed, whose process may live. `how` tells
        what has failed, for errors.
        """
        self._suspect(rank, how)

    def is_in_doubt(self) -> bool:
        """Return whether ranks may soon be found lost, because something that they should answer has no answer yet."""
        return any(each() for each in self._doubts)

    def reported(self, rank: int) -> str | None:
        """Return how the end of `rank` was reported, or None if it was not."""
        return self._reports.get(rank)

    def lost(self) -> tuple[int, ...]:
        """Return the global ranks whose process has ended, ascending. Does not block."""
        for look in self._looks:
            look()
        if self._descriptors:
            poller = select.poll()
            ranks = {descriptor: rank for rank, descriptor in list(self._descriptors.items())}
            for descriptor in ranks:
                poller.register(descriptor, select.POLLIN)
            for descriptor, _ in poller.poll(0):
                # A signal handler or another thread may have closed this descriptor since it was listed. Its number
                # may be that of something else now, but it is forgotten before it is closed.
                if self._descriptors.get(ranks[descriptor]) == descriptor:
                    self._lost.add(ranks[descriptor])
        return tuple(sorted(self._lost))

    def descriptors(self) -> tuple[int, ...]:
        """Return the pidfds that are open. Each becomes readable when its process ends, and stays so until `close`."""
        return tuple(self._descriptors.values())

    def watches(self, rank: int) -> bool:
        """Return whether this process notices when `rank` ends."""
        return rank in self._lost or rank in self._descriptors

    def state(self, rank: int) -> PeerState:
        """Return the current state of `rank`'s process."""
        peer = self._peers.get(rank)
        if rank in self.lost():
            return "dead"
        if peer is None:
            return "unknown"
        if not self._own.sees(peer):
            return "alive" if rank in self._descriptors else "unknown"
        try:
            return process_state(peer)
        except CapabilityError:  # no descriptor is free; the caller describes another failure
            return "unknown"

    def twin_hosts(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the names of hosts on which `ranks` are, other than this one, that have this host's boot id.

        They are containers of this host, or clones of one machine. Ranks whose end was reported are left out,
        because a report does not come from comparing processes.
        """
        own = self._own
        peers = [self._peers[rank] for rank in ranks if rank in self._peers and rank not in self._reports]
        names = {peer.hostname for peer in peers if own.on_same_host(peer)}
        return tuple(sorted(names - {own.hostname}))

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the global ranks of which the process is known."""
        return tuple(self._peers)

    def process(self, rank: int) -> ProcessIdentity | None:
        """Return the process of `rank`, as far as it is known."""
        return self._peers.get(rank)

    def describe(self, rank: int) -> str:
        """Return a text about the process of `rank` for errors, for example `pid 4242, alive`."""
        report = self._reports.get(rank)
        if report is None:
            return self._seen(rank)
        peer, hostname = self._peers.get(rank), self._hostnames.get(rank)
        if peer is not None:
            return f"pid {peer.pid} on host {peer.hostname}, {report}"
        return report if hostname is None else f"on host {hostname}, {report}"

    def _seen(self, rank: int) -> str:
        """Return what this process sees of `rank`."""
        peer = self._peers.get(rank)
        if peer is None:
            hostname = self._hostnames.get(rank)
            if hostname is None:
                return "no process known"
            return f"on host {hostname}, state not visible from here"
        state = self.state(rank)
        if state == "unknown":
            return f"pid {peer.pid} on host {peer.hostname}, state not visible from here"
        return f"pid {peer.pid}, {state}"

    def __del__(self) -> None:
        """Close the pidfds of a watch that an exception has left without an owner."""
        if "_lock" in vars(self):  # it is missing if a signal handler has raised at the beginning
            self.close()

    def close(self) -> None:
        """Close the pidfds. Idempotent."""
        with self._lock:
            self._looks, self._doubts = [], []
            for rank in list(self._descriptors):
                # No handler runs before `os.close`: it finds the descriptor stored and open, or neither.
                if rank in self._descriptors:
                    descriptor = self._descriptors[rank]
                    del self._descriptors[rank]
                    os.close(descriptor)


def refusal_to_watch(own: ProcessIdentity) -> CapabilityError | None:
    """Return why this process, whose identity is `own`, cannot watch others, or None if it can."""
    try:
        with closing(PeerWatch(own, {0: own})):
            return None
    except CapabilityError as error:
        return error.with_traceback(None)
