"""Wait for a message that any of several ranks may send first."""

from __future__ import annotations

import time
from collections.abc import Sequence

from device_comm.cpu.channel_ends import SPIN_NS, Crossing, Undecodable, raise_left
from device_comm.cpu.channel_receiver import ChannelReceiver, Receiving
from shm_broadcast import _core as rings


class ReceivingAny:
    """A message of one tag that is awaited from several ranks, whichever sends it first; see `Pollable`.

    It sleeps on the bell of this rank, which the writers of all channels to this rank sound while a thread listens.
    """

    def __init__(
        self, receivers: Sequence[ChannelReceiver], tag: int, crossing: Crossing, bell: memoryview
    ) -> None:
        """Await the message. Receives of the same tag that name one rank are served before this one."""
        self._receivers = receivers
        self._tag = tag
        self._crossing = crossing
        self._bell = bell
        self._is_new = True
        # The message that was taken.
        self.found: Receiving | None = None

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds. Raises what is wrong with the message."""
        until = time.monotonic() + slice_s
        # Look once without listening: while a thread listens, every message costs its sender a system call.
        is_found = (self._is_new or slice_s <= 0.0) and self._look() is None
        while not is_found:
            left_s = until - time.monotonic()
            if left_s <= 0.0:
                return False
            spin_ns = SPIN_NS if self._is_new else 0
            self._is_new = False
            is_found = rings.bell_listen(self._bell, self._look, spin_ns, int(left_s * 1e9))
        if self.found is not None and isinstance(self.found.message, Undecodable):
            error, self.found = self.found.message.error, None
            raise error
        return True

    def _look(self) -> tuple[rings.ReadEndpoint, ...] | None:
        """Take the message if it is there; else return the endpoints through which it may come."""
        if self._crossing.is_closed:
            raise_left()
        awaited = []
        for receiver in self._receivers:
            if receiver.has_news(self._tag):
                # No signal handler runs between the end of this call and the assignment.
                self.found = receiver.take_arrived(self._tag)
                if self.found is not None:
                    return None
                if receiver.has_ended():
                    continue
            awaited.append(receiver.endpoint)
        if not awaited:
            raise_left()
        return tuple(awaited)

    def abandon(self) -> None:
        """Put the message back: it is the next one of its tag again."""
        if self.found is not None:
            self.found.receiver.abandon(self.found)

    def pending(self) -> tuple[int, ...]:
        """Return all senders: any of them might have been the one."""
        return tuple(sorted(receiver.peer for receiver in self._receivers)) if self.found is None else ()
