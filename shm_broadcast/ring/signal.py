"""A descriptor that is readable while a reader of a ring has something to read, for selectors and event loops.

A thread of the reader's process sleeps for it in the native core, at the futex word of the ring. The writer therefore
knows nothing of descriptors, and pays for this reader what it pays for any that sleeps. `DESIGN.md` says why.
"""

from __future__ import annotations

import atexit
import mmap
import os
import threading
import time
import weakref
from typing import Final, Protocol

from shm_broadcast import _core
from shm_broadcast.descriptors import new_eventfd, refuse_if_full
from shm_broadcast.interruption import tolerating
from shm_broadcast.liveness import fork_count
from shm_broadcast.threads import DaemonThread, start_thread

# How often the thread asks whether the writer's process has ended.
_SLICE_NS: Final = 400_000_000
# Owns the descriptor if no thread does.
_ENDING: Final = object()
# How long it waits while the ring cannot be used.
_PAUSE_S: Final = 0.05
# The thread ends within a millisecond once it is told to, on an idle machine.
_END_S: Final = 5.0


class Reader(Protocol):
    """What the thread asks of the reader."""

    def notice_lost_writer(self) -> bool:
        """Return whether the writer's process has ended; the next read that finds no message then raises."""


class ReadSignal:
    """The descriptor and its thread. There is no lock that a signal handler could wait for.

    Who closes the descriptor is decided once: the thread, when it ends; or `end` if no thread serves.
    """

    def __init__(self, reader: Reader, memory: mmap.mmap, index: int) -> None:
        """Prepare for place `index` of the ring in `memory`."""
        self.descriptor: int = new_eventfd(1)
        self.memory: mmap.mmap | None = memory
        self.index = index
        # The thread keeps no reader alive.
        self.reader: weakref.ref[Reader] = weakref.ref(reader)
        # Set to 1 once the thread is to end.
        self.stop: bytearray = bytearray(1)
        self._owner: dict[int, object] = {}
        # Held by a thread that ends this.
        self._ending = threading.RLock()
        self._forks = fork_count()
        self._has_begun = False
        self._threads: list[DaemonThread] = []

    def begin(self, endpoint: _core.ReadEndpoint) -> None:
        """Start the thread, and let `endpoint` settle the descriptor. Goes on where a signal handler interrupted it."""
        if self._has_begun:
            return
        _signals.add(weakref.ref(self, _signals.discard))
        if not self._owner:
            # If a thread that an interrupted call has started serves already, this one ends at once.
            thread = DaemonThread(_serve, "group-coordinator-fileno", (self,))
            self._threads.append(thread)
            start_thread(thread, "to tell when a queue can be read")
        try:
            endpoint.set_signal(self.descriptor)
        except OSError as error:
            refuse_if_full("fcntl", "gives the reader a descriptor of its own", error)
            raise
        self._has_begun = True

    def owns(self, who: object) -> bool:
        """Return whether `who` was the first to ask, and so is to close the descriptor."""
        return self._owner.setdefault(0, who) is who

    def let_go(self) -> None:
        """Wake whoever waits for the descriptor, and close it. For its owner, who may do it again if interrupted."""
        if self.descriptor >= 0:
            os.eventfd_write(self.descriptor, 1)
            # No signal handler runs before the number is closed, so that it is closed once.
            descriptor, self.descriptor = self.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def ask_to_end(self) -> None:
        """Let the thread end, without waiting for that. Does nothing in a forked child, as `end`."""
        memory = self.memory
        if memory is None or self._forks != fork_count():
            return
        self.stop[0] = 1
        with tolerating(_core.MappingError):  # the ring was overwritten; the thread looks again soon
            _core.ring_stir(memory)

    def end(self) -> None:
        """Wake whoever waits for the descriptor, and close it. Behind the closing of the endpoint.

        Does nothing in a forked child, which has no thread and must leave the ring alone.
        """
        if self._forks != fork_count():
            return
        self.ask_to_end()
        with self._ending:
            if self.owns(_ENDING):
                self.let_go()
            for thread in self._threads:
                if thread.is_alive():
                    thread.join(_END_S)
        self.memory = None


def _serve(signal: ReadSignal) -> None:
    memory = signal.memory
    if memory is None or not signal.owns(object()):
        return
    try:
        while signal.stop[0] == 0:
            try:
                _core.ring_signal(memory, signal.index, signal.descriptor, _SLICE_NS, signal.stop)
            except _core.MappingError:
                # The ring was overwritten: the next read says so.
                os.eventfd_write(signal.descriptor, 1)
                time.sleep(_PAUSE_S)
            reader = signal.reader()
            if reader is None:
                break
            if signal.stop[0] == 0 and reader.notice_lost_writer():
                os.eventfd_write(signal.descriptor, 1)
            del reader
    finally:
        signal.let_go()


# A daemon thread that runs native code must not live on while the interpreter is finalized.
# One that is collected is taken out by a callback that runs no Python code: Python would drop what a signal handler
# raises in one that does.
_signals: set[weakref.ref[ReadSignal]] = set()


@atexit.register
def _end_all() -> None:
    signals = [signal for reference in list(_signals) if (signal := reference()) is not None]
    for signal in signals:
        signal.ask_to_end()
    for signal in signals:
        signal.end()
