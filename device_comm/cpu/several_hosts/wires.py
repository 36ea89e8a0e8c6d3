"""TCP connections between the leaders of hosts: what is to be sent and received on each, in order and without threads.

A message has no length and no number: both ends queue the same messages in the same order, since a collective is the
same sequence on all ranks. Any failure ends the group, so that nobody reads past a message that was cut.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from shm_broadcast.errors import UsageError
from shm_broadcast.interruption import raised_by_handler, tolerating
from shm_broadcast.liveness import fork_count

# One system call sends what is queued, a header and its data.
_MOST_BUFFERS: Final = 4

Check = Callable[[bytes], bool]

# A forked child closes its copies: as long as one is open, the other end does not learn that the parent has died.
# A wire that is collected is taken out by a callback that runs no Python code: Python would drop what a signal handler
# raises in one that does.
_wires: Final[set[weakref.ref[Wire]]] = set()


class WireError(RuntimeError):
    """A connection between two leaders has failed; see `GroupHealth.explain` for the reason."""


class _Arrival:
    """A message to come: its memory, how much of it is filled, and who checks it before more is read."""

    def __init__(self, memory: memoryview, owner: object, check: Check | None) -> None:
        self.memory = memory
        self.owner = owner
        self.filled = 0
        self.check = check


class Wire:
    """A connection to one leader. Not thread-safe; the calls of a group come one after the other.

    Attributes:
        peer: Global rank at the other end.
        queued: How many messages were queued so far: to be sent, to be received.
        done: How many of them have been sent and received as a whole.
        is_refused: Whether a check has failed; nothing more is read then.
    """

    def __init__(self, peer: int, connection: socket.socket, forks: int | None = None) -> None:
        """Own `connection`, which both ends have accepted.

        Args:
            peer: Global rank at the other end.
            connection: The connection.
            forks: The fork count of the process to which it belongs; None for this one.
        """
        _wires.add(weakref.ref(self, _wires.discard))
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.queued: list[int] = [0, 0]
        self.done: list[int] = [0, 0]
        self.is_refused: bool = False
        self._connection = connection
        self._forks = fork_count() if forks is None else forks
        self._leaving: deque[memoryview] = deque()
        self._owners: deque[object] = deque()
        self._coming: deque[_Arrival] = deque()

    def send(self, data: memoryview, owner: object = None) -> None:
        """Queue bytes, which must not be empty nor change until they are sent. `owner` is kept until then."""
        self._leaving.append(data)
        self._owners.append(owner)
        self.queued[0] += 1

    def receive(self, memory: memoryview, owner: object = None, check: Check | None = None) -> None:
        """Queue memory to be filled, which must not be empty. `owner` is kept until it is.

        If there is a `check`, it gets the bytes of this message, and says whether messages behind it may be read.
        """
        self._coming.append(_Arrival(memory, owner, check))
        self.queued[1] += 1

    @property
    def interest(self) -> tuple[socket.socket, int]:
        """Return the connection, and for what to poll it."""
        reads = select.POLLIN if self._coming and not self.is_refused else 0
        return self._connection, reads | (select.POLLOUT if self._leaving else 0)

    def move(self) -> None:
        """Send and receive what the kernel takes and has, without waiting.

        Raises:
            WireError: The connection has failed, or the other end has closed it.
            UsageError: It is that of the process that forked this one.
        """
        if self._forks != fork_count():
            raise UsageError(
                f"the connection with rank {self.peer} belongs to the process that forked this one"
            )
        try:
            self._send()
            self._receive()
        except OSError as error:
            if raised_by_handler(error):
                raise
            raise WireError(f"connection with rank {self.peer}: {error.strerror or error}") from error

    def _send(self) -> None:
        while self._leaving:
            try:
                sent = self._connection.sendmsg(
                    list(islice(self._leaving, _MOST_BUFFERS)), [], socket.MSG_NOSIGNAL
                )
            except BlockingIOError:
                return
            while sent:
                first = self._leaving[0]
                if sent < len(first):
                    self._leaving[0] = first[sent:]
                    break
                sent -= len(first)
                self._leaving.popleft()
                self._owners.popleft()
                self.done[0] += 1

    def _receive(self) -> None:
        while self._coming and not self.is_refused:
            first = self._coming[0]
            try:
                received = self._connection.recv_into(first.memory[first.filled :])
            except BlockingIOError:
                return
            if not received:
                raise WireError(f"rank {self.peer} has closed its connection")
            first.filled += received
            if first.filled == len(first.memory):
                self._coming.popleft()
                self.done[1] += 1
                self.is_refused = first.check is not None and not first.check(bytes(first.memory))

    def shut(self) -> None:
        """End the connection for both ends, without blocking. A call that waits for it fails. Idempotent.

        In a forked child it does nothing: the connection is that of its parent.
        """
        if self._forks == fork_count():
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:  # it has ended before
                if raised_by_handler(error):
                    raise

    def close(self) -> None:
        """End the connection, and release its descriptor; in a forked child only its copy. Idempotent."""
        self.shut()
        self._connection.close()


def _close_inherited() -> None:
    wires = [wire for reference in list(_wires) if (wire := reference()) is not None]
    _wires.clear()
    for wire in wires:
        wire.close()


os.register_at_fork(after_in_child=_close_inherited)


class Swap:
    """The messages queued so far on some wires; see `Pollable`."""

    def __init__(self, wires: Iterable[Wire], *, is_reported: bool = True) -> None:
        """Note what is queued on `wires`. `is_reported`: whether ranks that wait report that to the status store."""
        self._is_reported = is_reported
        self._wires: Sequence[Wire] = tuple(wires)
        self._marks: list[tuple[int, ...]] = [tuple(wire.queued) for wire in self._wires]
        self._failed: tuple[int, ...] | None = None

    def begin(self) -> None:
        """Move what can be moved at once.

        Raises:
            WireError: A connection has failed.
        """
        self._move()

    @property
    def is_refused(self) -> bool:
        """Return whether a check has failed."""
        return any(wire.is_refused for wire in self._wires)

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds; return whether all has been moved, or a check has failed."""
        end = time.monotonic() + slice_s
        while True:
            self._move()
            if self.is_refused or all(map(_is_done, self._wires, self._marks)):
                return True
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            self._await(left_s)

    def pending(self) -> tuple[int, ...] | None:
        """Return the leader whose connection failed, or None: an awaited leader may itself be waiting.

        If only the wires can tell who is late, return the leaders at the other ends of those that are not done.
        """
        if self._failed is not None or self._is_reported:
            return self._failed
        ends = zip(self._wires, self._marks, strict=True)
        return tuple(wire.peer for wire, marks in ends if not _is_done(wire, marks))

    def _move(self) -> None:
        for wire in self._wires:
            try:
                wire.move()
            except WireError:
                self._failed = (wire.peer,)
                raise

    def _await(self, left_s: float) -> None:
        poller = select.poll()
        for wire in self._wires:
            connection, events = wire.interest
            if events and connection.fileno() >= 0:
                # In a child that a handler forks just here it is closed now; the next move says whose it is.
                with tolerating(ValueError):
                    poller.register(connection, events)
        # Rounded up: a timeout of zero would make a busy loop of the last millisecond.
        poller.poll(int(left_s * 1000) + 1)


def _is_done(wire: Wire, marks: tuple[int, ...]) -> bool:
    return wire.done[0] >= marks[0] and wire.done[1] >= marks[1]


__all__ = ["Swap", "Wire", "WireError"]
