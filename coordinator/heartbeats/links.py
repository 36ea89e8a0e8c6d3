"""One connection to a rank on another host: it tells whether that host's kernel still acknowledges what is sent."""

from __future__ import annotations

import enum
import errno
import fcntl
import math
import os
import socket
import struct
import termios
import weakref
from typing import Final, NamedTuple

__all__ = ["Link", "State", "beat_period_s"]

# A beat is due at this part of `lost_after_s`, and at most this many seconds, behind the last one.
_PERIOD_PART: Final = 0.25
_LONGEST_PERIOD_S: Final = 0.5
# A host is not lost before this: the kernel sends a beat that got lost again after 0.2 s at the earliest.
_LEAST_S: Final = 0.5
# Beats without one in return, before the kernel's keepalives alone are left: a rank that waits for nobody reads none,
# and the memory for what it has not read is limited.
UNANSWERED_BEATS: Final = 8192
# So many probes of the kernel must get no answer: while nobody waits, a network may be silent for some seconds.
_KEEPALIVES: Final = 10
_KEEPALIVE_PART: Final = 1 / 3
# include/uapi/linux/tcp.h: send a lost beat again at equal intervals, not at longer and longer ones, for six times.
_THIN_LINEAR_TIMEOUTS: Final = 16
_READ_BYTES: Final = 4096

# struct tcp_info of include/uapi/linux/tcp.h: tcpi_last_ack_recv in milliseconds.
_LAST_ACK: Final = 56
_TCP_INFO_BYTES: Final = 60
_NUMBER: Final = struct.Struct("=I")

# Errors that say that the network leads nowhere. Any other one says that the process at the other end has gone.
_UNREACHABLE: Final = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)


# A forked child closes its copies: as long as one is open, the other end sees the process of its parent live on.
# A link that is collected is taken out by a callback that runs no Python code, for the reason that
# `host/process_groups.py` gives.
_links: Final[set[weakref.ref[Link]]] = set()


class State(enum.Enum):
    """What a look at a link has found."""

    OPEN = enum.auto()
    ENDED = enum.auto()
    """The other end has closed it, or its process has ended."""
    VANISHED = enum.auto()


class _Question(enum.Enum):
    """What has become of a beat that was asked for."""

    NONE = enum.auto()
    """None was, or it has its answer."""
    DUE = enum.auto()
    SENT = enum.auto()


class _Seen(NamedTuple):
    """What the kernel says of a connection: bytes without an answer, and the seconds since the last acknowledgement."""

    unanswered: int
    silent_s: float


def beat_period_s(lost_after_s: float) -> float:
    """Return the time between two beats of a rank that waits, in seconds."""
    return min(max(lost_after_s, _LEAST_S) * _PERIOD_PART, _LONGEST_PERIOD_S)


class Link:
    """A connection that carries beats; not thread-safe.

    Attributes:
        partner: The rank at the other end.
        name: Random text that both ends know the connection by.
        reason: Behind a look that found the host vanished, how that shows, for errors.
    """

    def __init__(self, partner: int, connection: socket.socket, name: str, lost_after_s: float) -> None:
        """Own `connection`, which both ends have accepted."""
        self.partner = partner
        self.name = name
        self.reason: str = ""
        self._connection = connection
        self._lost_after_s = max(lost_after_s, _LEAST_S)
        self._period_s = beat_period_s(lost_after_s)
        self._beats_left = UNANSWERED_BEATS
        self._next_beat = 0.0
        self._question = _Question.NONE
        self._looked_at: float | None = None
        # How long beats have been without an answer, as far as looks have followed it.
        self._waited_s = 0.0
        _links.add(weakref.ref(self, _links.discard))
        connection.setblocking(False)
        _keep_alive(connection, lost_after_s)

    def look(self, now: float) -> State:
        """Read what has come, send a beat if one is due, and say what is known at the monotonic time `now`.

        Never blocks.
        """
        try:
            if not self._drain():
                return State.ENDED
            seen = self._seen()
            self._count(seen, now)
            if self._waited_s >= self._lost_after_s and seen.silent_s >= self._lost_after_s:
                self.reason = f"no answer from the host for {seen.silent_s:.1f} s"
                return State.VANISHED
            if not seen.unanswered and self._question is _Question.SENT:
                self._question = _Question.NONE
            if not seen.unanswered and now >= self._next_beat and self._beats_left:
                self._beats_left -= self._connection.send(b".")
                self._next_beat = now + self._period_s
            if (
                self._question is _Question.DUE
            ):  # the beat just sent, or an earlier one that has no answer yet
                self._question = _Question.SENT
        except BlockingIOError:  # the window of the other end is full: its kernel answers
            return State.OPEN
        except ValueError:  # a signal handler has closed it meanwhile
            return State.ENDED
        except OSError as error:
            if error.errno not in _UNREACHABLE:
                return State.ENDED
            self.reason = f"no answer from the host: {os.strerror(error.errno)}"
            return State.VANISHED
        return State.OPEN

    def allow_beat(self) -> None:
        """Let the next look send a beat even if `UNANSWERED_BEATS` have been sent."""
        self._beats_left = max(self._beats_left, 1)

    def ask(self) -> None:
        """Let the next look send a beat unless one has no answer yet; `is_asked` holds until one has been answered."""
        self.allow_beat()
        # One that was sent for an earlier report may have been answered before the host vanished.
        self._question, self._next_beat = _Question.DUE, 0.0

    @property
    def is_asked(self) -> bool:
        """Return whether the beat of `ask` has no answer yet, as far as the last look has shown."""
        return self._question is not _Question.NONE

    @property
    def is_in_doubt(self) -> bool:
        """Return whether a beat has been without an answer for longer than one takes, but not for twice `lost_after_s`.

        By then a host has vanished, or its kernel answers for a process that reads no beats: nobody waits for that.
        """
        return self._period_s <= self._waited_s < 2 * self._lost_after_s

    def is_silent(self) -> bool:
        """Return whether a beat has been without an answer for half of the time after which the host counts as lost.

        Asks the kernel, for the last look may have been long ago. Never blocks.
        """
        if self._waited_s < self._lost_after_s / 2:
            return False
        try:
            seen = self._seen()
        except ValueError:  # closed
            return False
        except OSError as error:
            return error.errno in _UNREACHABLE
        return seen.unanswered > 0 and seen.silent_s >= self._lost_after_s / 2

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def _drain(self) -> bool:
        """Read all that has come; return whether the other end is open."""
        try:
            while received := self._connection.recv(_READ_BYTES):
                self._beats_left = UNANSWERED_BEATS
                if len(received) < _READ_BYTES:
                    return True
        except BlockingIOError:
            return True
        return False

    def _seen(self) -> _Seen:
        # Also what it could not send, for this host may have lost its own interface.
        queued = fcntl.ioctl(self._connection, termios.TIOCOUTQ, bytes(_NUMBER.size))
        told = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        (unanswered,), (silent_ms,) = _NUMBER.unpack(queued), _NUMBER.unpack_from(told, _LAST_ACK)
        return _Seen(unanswered, silent_ms / 1000)

    def _count(self, seen: _Seen, now: float) -> None:
        """Count how long a beat has had no answer. Behind a long pause, acknowledgements may be still to be read."""
        # What has no answer at the first look may have been sent just before it.
        since = now if self._looked_at is None else self._looked_at
        step_s = min(now - since, self._lost_after_s / 2)
        self._waited_s = self._waited_s + step_s if seen.unanswered else 0.0
        self._looked_at = now


def _close_inherited() -> None:
    links = [link for reference in list(_links) if (link := reference()) is not None]
    _links.clear()
    for link in links:
        link.close()


os.register_at_fork(after_in_child=_close_inherited)


def _keep_alive(connection: socket.socket, lost_after_s: float) -> None:
    """Let the kernel look for the other host where no beat is in flight, and send lost beats again soon."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _seconds(lost_after_s)),
        (socket.TCP_KEEPINTVL, _seconds(lost_after_s * _KEEPALIVE_PART)),
        (socket.TCP_KEEPCNT, _KEEPALIVES),
        (_THIN_LINEAR_TIMEOUTS, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _seconds(seconds: float) -> int:
    """Round up to what the kernel takes for an interval."""
    return min(max(math.ceil(seconds), 1), 32767)
