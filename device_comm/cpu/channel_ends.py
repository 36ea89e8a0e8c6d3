"""What both ends of a channel between two ranks of one host share: how they wait, and what they raise."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn, Protocol

from shm_broadcast import _core as rings
from shm_broadcast import codec
from shm_broadcast.errors import CommError, DecodeError, NativeError, UsageError

# A call polls and yields for this long before it sleeps, because the other rank often comes soon.
SPIN_NS: Final = 100_000
# A waiting call first looks for messages from other ranks after this time. Each later pause is twice as long.
FIRST_LOOK_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.1
# The pause while such a message is arriving, or while a call writes to several receivers.
BUSY_LOOK_S: Final = 0.0002

# Takes the place of the memory of a closed channel; every native function refuses it.
NO_RING: Final = mmap.mmap(-1, mmap.PAGESIZE)


class Crossing(Protocol):
    """What the ends ask of the channels that they belong to."""

    is_closed: bool

    def drain(self, busy: object) -> bool:
        """Take in what others send, except through the receiver `busy`; tell whether something came or is under way."""

    def fail_corrupt(self, peer: int, error: Exception) -> NoReturn:
        """Raise for a channel with rank `peer` that holds no ring: it was closed, or else the group breaks."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on a thread of ours. CapabilityError: There is none, and none can be started."""


class LeftError(RuntimeError):
    """The other end of a channel has left, or this one was closed; `GroupHealth.explain` finds out why."""


class NestedError(UsageError):
    """This thread is inside of a call on the channel already; the text lacks the name of the call that is refused."""


UNSENT: Final = (LeftError, NestedError)
"""Why a channel takes no message."""


def look_around_of(crossing: Crossing, peer: int) -> Callable[[int, Any], object]:
    """Return what the endpoint of a channel with rank `peer` calls when it cannot go on."""

    def look_around(reason: int, detail: Any) -> object:
        if reason == rings.LOOK_CORRUPT:
            crossing.fail_corrupt(peer, detail)
        if reason == rings.LOOK_UNDECODABLE:
            fault = codec.decode_error(detail)
            # It takes the place of the message, and is raised where the message is asked for.
            return None if fault is None else Undecodable(peer, fault)
        if reason == rings.LOOK_UNENCODABLE:
            codec.raise_usage_error(detail)
        if reason == rings.LOOK_REENTRANT:
            raise NestedError(
                f"this thread is inside of a call on the channel with rank {peer} already, "
                "as in a signal handler or a finalizer"
            )
        raise_left()

    return look_around


def refuse_closed(_reason: int, _detail: object) -> NoReturn:
    """Stand in for `look_around` once the end is closed."""
    raise_left()


class Undecodable:
    """Takes the place of a message that cannot be decoded, until somebody asks for it."""

    def __init__(self, peer: int, error: DecodeError | MemoryError) -> None:
        """Keep the error that whoever asks for the message from rank `peer` gets."""
        self.error: CommError = error if isinstance(error, DecodeError) else unplaced(peer, error)


def unplaced(peer: int, error: Exception) -> NativeError:
    """Return what to raise for a message that has come but cannot be stored.

    This is a `CommError`, because a waiting call takes any other error for a failure of the transport. The group is
    intact.
    """
    fault = NativeError(
        f"a message from rank {peer} came, but could not be put in its place: {error}",
        library="torch",
        function="copy_",
    )
    fault.__cause__ = error
    return fault


class Look:
    """Decides when a call that waits for one rank takes in what other ranks have sent meanwhile."""

    def __init__(self, crossing: Crossing, slice_s: float, pause_s: float = FIRST_LOOK_S) -> None:
        """Wait for up to `slice_s` seconds in all, and for `pause_s` until the first look."""
        self._crossing = crossing
        self._until = time.monotonic() + slice_s
        self.pause_s: float = pause_s

    def park_ns(self) -> int:
        """Return how many nanoseconds to sleep until the next look or the end of the slice."""
        return max(int(min(self.pause_s, self._until - time.monotonic()) * 1e9), 0)

    def is_over(self, busy: object) -> bool:
        """Take in what others send, except through the receiver `busy`; return whether the slice is over."""
        if self._crossing.drain(busy):
            self.pause_s = BUSY_LOOK_S
        else:
            self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)
        return time.monotonic() >= self._until


def raise_left() -> NoReturn:
    """Raise for a channel whose other end has left."""
    raise LeftError("a rank has left the group")
