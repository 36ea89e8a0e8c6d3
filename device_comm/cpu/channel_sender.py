"""The writing end of a channel between two ranks of one host, and the messages that are on their way into it."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from device_comm.cpu.channel_ends import (
    BUSY_LOOK_S,
    NO_RING,
    SPIN_NS,
    Crossing,
    Look,
    look_around_of,
    raise_left,
    refuse_closed,
)
from shm_broadcast import _core as rings
from shm_broadcast import codec
from shm_broadcast.errors import CapabilityError, ClosedError, UsageError
from shm_broadcast.interruption import tolerating

# How often a thread that writes checks whether the channels were closed.
_BACKGROUND_SLICE_NS: Final = 20_000_000

_LEFT: Final = 2  # ring::kLeft


class Sending:
    """A message on its way into one channel; see `Pollable`."""

    def __init__(self, sender: ChannelSender, message: codec.Message, tag: int) -> None:
        """Write nothing yet."""
        self.sender: ChannelSender = sender
        self._message: codec.Message | None = message
        self._tag = tag
        self._done = 0
        self._error: BaseException | None = None
        # The thread that makes the call.
        self.thread: int = threading.get_ident()
        # Whether a part may be in the channel already. Only the rest of the message may follow it there.
        self.has_begun: bool = False
        # Set, and the memory let go, when the channel owns the whole message. Until then `_owning` is locked,
        # and waiters sleep on it. Waiters on an event would hold its inner lock: a handler that raised there
        # could leave that lock held, and a handler that waited for this message too would never get it.
        self.is_owned: bool = False
        self._owning = threading.Lock()
        self._owning.acquire()

    def advance(self, spin_ns: int, park_ns: int) -> bool:
        """Write what there is room for, waiting once where there is none; return whether anything was written.

        RuntimeError: The receiver has left.
        """
        message, sender, before = self._message, self.sender, self._done
        if message is None:
            return False
        if before == 0:
            sender.raise_if_deserted()
        self.has_begun = True
        self._done = sender.endpoint.write_some(
            message.header, message.buffers, before, spin_ns, park_ns, self._tag
        )
        if self._done == message.nbytes:
            self._finish(None)
        elif self._done == before:
            sender.raise_if_deserted()
        return self._done > before

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._message = None
        self.sender.done(self)
        # No function is called between the read and the write, so that the lock is released exactly once.
        was_owned, self.is_owned = self.is_owned, True
        if not was_owned:
            self._owning.release()
        self.sender.go_on()

    def run(self) -> None:
        """Write the whole message on a thread of our own; never raises."""
        try:
            spin_ns = SPIN_NS
            while not self.is_owned:
                if self.sender.crossing.is_closed:
                    raise_left()
                spin_ns = SPIN_NS if self.advance(spin_ns, _BACKGROUND_SLICE_NS) else 0
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._finish(error)

    def is_complete(self) -> bool:
        """Return whether the channel owns all of it. Raises why it cannot."""
        if self._error is not None:
            raise self._error
        if self.is_owned:
            return True
        # The thread that writes may not have noticed yet, or could not be started before.
        self.sender.raise_if_deserted()
        self.sender.call_thread()
        return False

    def poll(self, slice_s: float) -> bool:
        """Wait for the thread that writes."""
        look = Look(self.sender.crossing, slice_s)
        while not self.is_owned:
            if self._owning.acquire(timeout=look.park_ns() / 1e9):
                self._owning.release()
            elif look.is_over(None):
                # The call that was about to start the thread may have been interrupted, even by this call.
                self.sender.call_thread(again=True)
                break
        return self.is_complete()

    def pending(self) -> tuple[int, ...]:
        """Return the receiver while there is no room."""
        return () if self.is_owned else (self.sender.peer,)


class Writing:
    """Messages that the calling thread writes itself, one to each of several ranks; see `Pollable`."""

    def __init__(self, crossing: Crossing, sendings: Sequence[Sending]) -> None:
        """Each must be the first in its channel."""
        self._crossing = crossing
        self._open = list(sendings)

    def poll(self, slice_s: float) -> bool:
        """Write on for up to `slice_s` seconds."""
        look = Look(self._crossing, slice_s)
        while self._open:
            # With several receivers this waits only briefly for the first, then looks at the others again.
            is_alone = len(self._open) == 1
            moved = [sending.advance(0, 0) for sending in self._open] if not is_alone else []
            if not any(moved):
                park_ns = look.park_ns() if is_alone else int(BUSY_LOOK_S * 1e9)
                if not self._open[0].advance(SPIN_NS, park_ns) and look.is_over(None):
                    break
            self._open = [sending for sending in self._open if not sending.is_owned]
        return not self._open

    def pending(self) -> tuple[int, ...]:
        """Return the receivers that make no room."""
        return tuple(sorted(peer for sending in self._open for peer in sending.pending()))


class ChannelSender:
    """The writing end of the channel to one rank.

    As in `ChannelReceiver`, several threads may use it and a signal handler may interrupt any call. The
    waiting messages are kept without a lock, in statements that call no function before the last one. With a
    lock, a handler that needed a thread of ours while its own thread held the lock would wait for ever.
    """

    def __init__(
        self, crossing: Crossing, memory: mmap.mmap, peer: int, bell: memoryview | None = None
    ) -> None:
        """Write into a ring, which global rank `peer` reads, and sound its `bell`."""
        self.peer = peer
        self.crossing = crossing
        self.memory: mmap.mmap = memory
        self.endpoint: rings.WriteEndpoint = rings.WriteEndpoint(
            memory, codec.describe, "adaptive", look_around_of(crossing, peer), bell
        )
        # The messages that are not wholly in the channel yet, in order; the first is under way.
        self._waiting: deque[Sending] = deque()
        # The first of them, if the call that sends it writes it itself; else None.
        self._own: Sending | None = None
        # Whether a thread of ours is writing what waits, and whether one was called and has not begun yet.
        self._has_thread = False
        self._is_called = False

    def send_now(self, obj: Any, tag: int) -> codec.Message | None:
        """Send an object that fits and has nothing before it; return it encoded if it was not sent."""
        if self._waiting:
            return codec.encode(obj)
        encoded = self.endpoint.send_now(obj, tag)
        return None if encoded is None else codec.Message(*encoded)

    def write_now(self, message: codec.Message, tag: int) -> bool:
        """Send a message that fits and has nothing before it; return whether it was sent."""
        return not self._waiting and self.endpoint.write_now(message.header, message.buffers, tag)

    def refuse_nested(self, where: str) -> None:
        """Raise `UsageError` if this thread is inside of a call that writes to this rank.

        That call goes on only behind this one, which would wait for it.
        """
        own = self._own
        if own is not None and own.thread == threading.get_ident():
            raise UsageError(
                f"{where}: this thread is inside of a call that sends to rank {self.peer} already, "
                "as in a signal handler or a finalizer"
            )

    def enqueue(self, sending: Sending, *, aside: bool = False) -> bool:
        """Add a message to those that wait; return whether the caller has to write it now.

        The caller has called `refuse_nested` before. If this raises, or the caller is interrupted before it
        waits, the caller must withdraw the message.

        Args:
            sending: The message.
            aside: Whether a thread of ours shall write it in any case.

        Raises:
            CapabilityError: No thread can be started.
        """
        # Nothing is called from here to the end of `append`.
        own = self._own
        is_own = not (aside or self._waiting or self._has_thread)
        if is_own:
            self._own = sending
        self._waiting.append(sending)
        # If another call writes its own message, what waits behind that goes on when that call is done.
        if own is None and not is_own:
            self.call_thread()
        return is_own

    def go_on(self) -> None:
        """Let a thread of ours write what waits behind a call that is done."""
        # Whoever waits for such a message, or asks about it, calls the thread again, and raises why there is none.
        with tolerating(CapabilityError, ClosedError):
            self.call_thread()

    def call_thread(self, *, again: bool = False) -> None:
        """Call a thread to write what waits, unless somebody does or, without `again`, one was called."""
        if self._has_thread or self._own is not None or not self._waiting or (self._is_called and not again):
            return
        try:
            self._is_called = True
            self.crossing.submit(self._write_waiting)
        except BaseException:
            # If the thread comes nevertheless, it finds nothing to do, or does the work of the next one.
            self._is_called = False
            raise

    def _write_waiting(self) -> None:
        """Write, on a thread of ours, until nothing waits."""
        # Nothing is called between these statements: they are one step for all threads and signal handlers.
        self._is_called = False
        if self._has_thread or self._own is not None:
            return
        self._has_thread = True
        while True:
            # Nor between these: a message is added either before the check, and written here, or after
            # `_has_thread` has become False, and then its sender sees to it.
            if not self._waiting:
                self._has_thread = False
                return
            first = self._waiting[0]
            first.has_begun = True
            first.run()

    def withdraw(self, sending: Sending) -> bool:
        """Take back a message of which nothing was written; return whether none of it still waits."""
        # Nothing is called from here to the end of `remove`.
        if sending not in self._waiting:
            return True
        if sending.has_begun:
            return False
        if self._own is sending:
            self._own = None
        self._waiting.remove(sending)
        self.go_on()
        return True

    def raise_if_deserted(self) -> None:
        """Raise if the receiver has left."""
        try:
            if rings.ring_state(self.memory)[4][0][4] == _LEFT:
                raise_left()
        except rings.MappingError as error:
            self.crossing.fail_corrupt(self.peer, error)

    def done(self, sending: Sending) -> None:
        """Forget a message that is owned by the channel, or cannot be sent."""
        # Nothing is called from here to the end of `remove`.
        if self._own is sending:
            self._own = None
        if sending in self._waiting:
            self._waiting.remove(sending)

    def close(self) -> None:
        """Tell the receiver that nothing follows; what was written can still be read. Idempotent."""
        # Copied, because a signal handler that closes this too in the meantime replaces the attribute.
        memory = self.memory
        if memory is NO_RING:
            return
        # Close the endpoint first: ending the ring wakes a waiting thread, which must find it closed.
        self.endpoint.close(refuse_closed)
        rings.ring_end(memory, -1)
        self.memory = NO_RING
