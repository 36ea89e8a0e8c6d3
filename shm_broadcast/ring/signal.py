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
from contextlib import suppress
from typing import Final, Protocol

from shm_broadcast import _core
from shm_broadcast.liveness import fork_count

# How often the thread asks whether the writer's process has ended.
_SLICE_NS: Final = 400_000_000
# How long it waits while the ring cannot be used.
_PAUSE_S: Final = 0.05
# The thread ends within some microseconds once it is told to, on an idle machine.
_END_S: Final = 5.0


class Reader(Protocol):
    """What the thread asks of the reader."""

    def notice_lost_writer(self) -> bool:
        """Return whether the writer's process has ended; the next read that finds no message then raises."""


class ReadSignal:
    """The descriptor and its thread. There is no lock that a signal handler could wait for."""

    def __init__(self, reader: Reader, memory: mmap.mmap, index: int) -> None:
        """Prepare for place `index` of the ring in `memory`."""
        self.descriptor: int = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.memory: mmap.mmap | None = memory
        self.index = index
        # The thread keeps no reader alive.
        self.reader: weakref.ref[Reader] = weakref.ref(reader)
        self.is_served: bool = False
        self.is_ended: bool = False
        self._forks = fork_count()
        self._has_begun = False
        self._thread: threading.Thread | None = None

    def begin(self, endpoint: _core.ReadEndpoint) -> None:
        """Start the thread, and let `endpoint` settle the descriptor. Goes on where a signal handler interrupted it."""
        if self._has_begun:
            return
        _signals.add(self)
        if not self.is_served:
            # One that was started by an interrupted call serves; another one then ends at once.
            self._thread = threading.Thread(
                target=_serve, args=(self,), name="group-coordinator-fileno", daemon=True
            )
            self._thread.start()
        endpoint.set_signal(self.descriptor)
        self._has_begun = True

    def end(self) -> None:
        """Wake whoever waits for the descriptor, and close it. Behind the closing of the endpoint.

        Does nothing in a forked child, which has no thread and must leave the ring alone.
        """
        if self._forks != fork_count():
            return
        self.is_ended = True
        memory, thread = self.memory, self._thread
        if memory is not None:
            with suppress(_core.MappingError):  # the ring was overwritten; the thread looks again soon
                _core.ring_stir(memory)
        if thread is not None and thread.ident is not None:
            thread.join(_END_S)
        self.memory = None


def _serve(signal: ReadSignal) -> None:
    memory = signal.memory
    if signal.is_served or memory is None:
        return
    # Nothing is called between these two statements, so that one thread alone comes this far.
    signal.is_served = True
    descriptor = signal.descriptor
    while not signal.is_ended:
        try:
            _core.ring_signal(memory, signal.index, descriptor, _SLICE_NS)
        except _core.MappingError:
            # The ring was overwritten: the next read says so.
            os.eventfd_write(descriptor, 1)
            time.sleep(_PAUSE_S)
        reader = signal.reader()
        if reader is None:
            break
        if not signal.is_ended and reader.notice_lost_writer():
            os.eventfd_write(descriptor, 1)
        del reader
    os.eventfd_write(descriptor, 1)
    os.close(descriptor)


# A daemon thread that runs native code must not live on while the interpreter is finalized.
_signals: weakref.WeakSet[ReadSignal] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for signal in list(_signals):
        signal.end()
