"""Who is alive, told by the kernel.

A process is named by its host's boot id, its PID namespace, its pid and its start time, so that a
reused pid is never mistaken for the process it replaced. Peers in the same PID namespace are watched
through a pidfd, which becomes readable when the process ends; forked children of a peer that inherit
its sockets do not keep it "alive". Peers elsewhere cannot be watched from here: their state is unknown.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from shm_broadcast import _core

PeerState = Literal["alive", "stopped", "dead", "unknown"]

# Position of the fields in /proc/PID/stat behind the command name, proc_pid_stat(5): state is field 3
# and starttime field 22, and the fields behind the name start at 3.
_STATE: Final = 0
_START_TIME: Final = 22 - 3


def fork_count() -> int:
    """Return how many forks lie between the process that imported this module and this one.

    An object that stores the value at its creation can tell later that it lives in a forked child,
    at the price of one integer comparison.
    """
    return _core.fork_count()


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Names one process for ever.

    Attributes:
        boot_id: The kernel's boot id: the same for all containers of one host.
        pid_namespace: Inode of the PID namespace, in which `pid` has its meaning.
        network_namespace: Inode of the network namespace, within which loopback reaches.
        pid: Process id.
        start_ticks: Start time in clock ticks since boot; differs when a pid is used again.
        hostname: For people.
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
    """Return boot id and start time of this process, which asks often while groups are made; 0.2 ms each time."""
    del forks
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, _stat_fields("self")[1]


def this_process() -> ProcessIdentity:
    """Return the identity of the calling process."""
    boot_id, start_ticks = _constants(fork_count())
    return ProcessIdentity(
        boot_id=boot_id,
        pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
        network_namespace=Path("/proc/self/ns/net").stat().st_ino,
        pid=os.getpid(),
        start_ticks=start_ticks,
        hostname=socket.gethostname(),
    )


def _stat_fields(pid: int | str) -> tuple[str, int]:
    """Return (state letter, start time in ticks) of a process.

    Raises:
        FileNotFoundError: There is no such process.
    """
    # The command name stands in brackets and may hold blanks and brackets itself: cut at the last one.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[_STATE], int(fields[_START_TIME])


def process_state(identity: ProcessIdentity) -> PeerState:
    """Return the state of a process that this one can see; "dead" also when its pid was used again."""
    try:
        state, start_ticks = _stat_fields(identity.pid)
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    if start_ticks != identity.start_ticks or state in "ZXx":
        return "dead"
    return "stopped" if state in "Tt" else "alive"


class PeerWatch:
    """Watches the processes of a group's other ranks.

    One descriptor is held for each peer in this PID namespace, until `close`. Safe to use from several
    threads.
    """

    def __init__(self, own: ProcessIdentity, peers: Mapping[int, ProcessIdentity]) -> None:
        """Open a pidfd on every peer that can be seen from here.

        Args:
            own: The identity of this process.
            peers: Identities by global rank, this rank left out.
        """
        self._own = own
        self._peers = dict(peers)
        self._descriptors: dict[int, int] = {}
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        for rank, peer in self._peers.items():
            if own.sees(peer):
                self._open(rank, peer)

    def _open(self, rank: int, peer: ProcessIdentity) -> None:
        try:
            descriptor = os.pidfd_open(peer.pid)
        except ProcessLookupError:
            self._lost.add(rank)
            return
        # The pid may have been used again before the pidfd was opened; its start time tells.
        if process_state(peer) == "dead":
            os.close(descriptor)
            self._lost.add(rank)
            return
        self._descriptors[rank] = descriptor

    def adopt(self, rank: int, peer: ProcessIdentity, descriptor: int) -> None:
        """Watch `rank` by a pidfd that it opened on itself and sent here; works across PID namespaces.

        The descriptor is owned by this object from now on.
        """
        with self._lock:
            self._peers[rank] = peer
            self._descriptors[rank] = descriptor

    def lost(self) -> tuple[int, ...]:
        """Return the global ranks whose process has ended, ascending. Does not block."""
        with self._lock:
            if self._descriptors:
                poller = select.poll()
                ranks = {descriptor: rank for rank, descriptor in self._descriptors.items()}
                for descriptor in ranks:
                    poller.register(descriptor, select.POLLIN)
                for descriptor, _ in poller.poll(0):
                    rank = ranks[descriptor]
                    self._lost.add(rank)
                    os.close(self._descriptors.pop(rank))
            return tuple(sorted(self._lost))

    def watches(self, rank: int) -> bool:
        """Return whether the end of `rank` would be seen here."""
        return rank in self._lost or rank in self._descriptors

    def state(self, rank: int) -> PeerState:
        """Return what is known of `rank`'s process now."""
        peer = self._peers.get(rank)
        if peer is None:
            return "unknown"
        if rank in self.lost():
            return "dead"
        if not self._own.sees(peer):
            return "alive" if rank in self._descriptors else "unknown"
        return process_state(peer)

    def describe(self, rank: int) -> str:
        """Return `pid 4242, alive` or what else is known of `rank`, for an error's text."""
        peer = self._peers.get(rank)
        if peer is None:
            return "no process known"
        state = self.state(rank)
        if state == "unknown":
            return f"pid {peer.pid} on host {peer.hostname}, state not visible from here"
        return f"pid {peer.pid}, {state}"

    def close(self) -> None:
        """Give the descriptors back. Idempotent."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()
