"""The thread that alone uses the sockets of one end of the store, and releases them when it ends."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from typing import Any, Final

from shm_broadcast._core import undisturbed
from shm_broadcast.liveness import fork_count
from shm_broadcast.reports.log_fields import LogFields
from shm_broadcast.threads import DaemonThread

__all__ = ["StoreThread", "is_at"]

logger: logging.Logger = logging.getLogger(__name__)

# `close` waits this long for the thread. A signal handler that calls it may have interrupted code that holds a lock,
# for which the thread waits to tell of a loss or to write to the log; it then ends a little later, and needs nobody for
# that.
_END_S: Final = 5.0

# The ends of stores that this process has open; a forked child closes its copies of their connections.
# One that nobody has closed is taken out by a callback that runs no Python code, for the reason that
# `host/process_groups.py` gives.
_open: Final[set[weakref.ref[StoreThread]]] = set()


class StoreThread(ABC):
    """The client or the server of the store. Any thread, and any signal handler at any place, may call `close`."""

    def __init__(self, name: str, fields: LogFields) -> None:
        """Open nothing; `_start` starts the thread `name` once all is open."""
        self._fields = fields
        self._forks = fork_count()
        self._is_stopping = False
        # A signal handler that interrupts a call may make another one.
        self._lock = threading.RLock()
        # Taken by who releases everything: the thread, or `_start` if it cannot start that.
        self._release_once = threading.Lock()
        # An eventfd that wakes the thread; the subclass opens it, and the thread closes it last.
        self._wake = -1
        self._thread = DaemonThread(self._serve, name)

    def _start(self) -> None:
        _open.add(weakref.ref(self, _open.discard))
        try:
            self._thread.start()
        except BaseException:
            self._stop()
            if self._release_once.acquire(blocking=False):
                self._release()
            raise

    def close(self) -> None:
        """End the thread. Idempotent; does nothing in a forked child.

        Blocks until the thread has released everything, which it does also if this is interrupted, at most `_END_S`.
        """
        if self._forks == fork_count():
            undisturbed(self._close)

    def _close(self) -> None:
        self._stop()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            logger.warning(
                "%r has not ended within %.1f s, and will later", self, _END_S, extra=self._fields.copy()
            )

    def _stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # --- the thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        if not self._release_once.acquire(blocking=False):
            return  # it could be started, and was then interrupted
        try:
            self._run()
        finally:
            self._release()

    def _release(self) -> None:
        _open.discard(weakref.ref(self))
        self._close_sockets()
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    # --- a forked child ---------------------------------------------------------------------------------------

    @abstractmethod
    def _owns(self, connection: socket.socket) -> bool:
        """Return whether a TCP socket of this process is one of those of this end. Raises OSError if it has no peer."""

    # --- what the thread does ---------------------------------------------------------------------------------

    @abstractmethod
    def _run(self) -> None:
        """Work until `_is_stopping` is set."""

    @abstractmethod
    def _close_sockets(self) -> None:
        """Say goodbye if that is still possible, and close the sockets and their context."""


def is_at(name: Any, address: str, port: int) -> bool:
    """Return whether `name`, which the kernel has given for one side of a TCP socket, is a numeric address and port."""
    # An address of IPv6 may have a zone, and can be written in several ways.
    host, wanted = (ipaddress.ip_address(text.partition("%")[0]) for text in (name[0], address))
    return bool(name[1] == port and host == wanted)


def _close_inherited() -> None:
    """Close a forked child's copies of the connections, which would hide the end of its parent from the others.

    zmq keeps the descriptors to itself, so where there is a store all sockets are looked at.
    """
    ends = [end for reference in list(_open) if (end := reference()) is not None]
    _open.clear()
    for name in os.listdir("/proc/self/fd") if ends else ():
        try:
            connection = socket.socket(fileno=int(name))
        except OSError:
            continue  # another kind of descriptor, or the one by which the list was read
        if any(_is_of(end, connection) for end in ends):
            connection.close()
        else:
            connection.detach()


def _is_of(end: StoreThread, connection: socket.socket) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    try:
        return end._owns(connection)  # noqa: SLF001 - ours
    except OSError:  # it has no peer
        return False


os.register_at_fork(after_in_child=_close_inherited)
