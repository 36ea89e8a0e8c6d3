"""The words in host memory by which kernels report a failure and by which the host ends their waiting."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Final

from device_comm.cuda.driver import Driver
from device_comm.cuda.kernel_layout import ABORT_OFFSET, ERROR_RECORD_BYTES, KernelFailure, read_failure
from device_comm.health import FAILURE_EVERY_S, GroupHealth
from shm_broadcast.interruption import tolerating
from shm_broadcast.threads import DaemonThread

__all__ = ["DeathWatch", "ErrorRecord"]

# Interval at which the peers' processes are checked, and so about how long a kernel waits for a peer that died.
WATCH_EVERY_S: Final = 0.05

_ABORT_WORD: Final = ABORT_OFFSET // 4


class ErrorRecord:
    """64 bytes of host memory that kernels write to; `kernel_layout` defines them. Never cleared: a failure is final.

    Attributes:
        words: The record as 32-bit words. Word 0 is set by a kernel that failed, word 8 by the host that ends their
            waiting. Word 8 is also set once the record was freed, so that a late call does not launch.
        device_address: The record's address for kernels.
    """

    def __init__(self, driver: Driver) -> None:
        """Allocate the record."""
        self._driver = driver
        self.device_address: int
        self._host, self.device_address = driver.host_alloc_mapped(ERROR_RECORD_BYTES)
        self.words: memoryview[int] = (
            memoryview((ctypes.c_uint32 * (ERROR_RECORD_BYTES // 4)).from_address(self._host))
            .cast("B")
            .cast("I")
        )
        self._lock = threading.Lock()
        self._is_freed = False

    @property
    def is_clear(self) -> bool:
        """Return whether no kernel has failed and the host did not end their waiting."""
        return not (self.words[0] or self.words[_ABORT_WORD])

    def failure(self) -> KernelFailure | None:
        """Return the failure that a kernel reported, or None."""
        return None if self._is_freed else read_failure(bytes(self.words.cast("B")))

    def abort(self) -> None:
        """Make every kernel of this communicator on this rank end: those that wait now, and those launched later."""
        with self._lock:
            if not self._is_freed:
                self.words[_ABORT_WORD] = 1

    def free(self) -> None:
        """Free the record. No kernel may be running. Idempotent."""
        with self._lock:
            if self._is_freed:
                return
            self._is_freed = True
            last = bytearray(self.words.cast("B"))
            self.words = memoryview(last).cast("I")
            self.words[_ABORT_WORD] = 1
        self._driver.host_free(self._host)


class DeathWatch:
    """A thread that ends the waiting of kernels when a peer's process ends or a peer breaks the group.

    A host thread that synchronizes with its device cannot watch the peers meanwhile. Without the watch, the kernel it
    waits for would spin until its deadline, which may be minutes.
    """

    def __init__(self, record: ErrorRecord, health: GroupHealth, failed: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            record: The record that kernels report to.
            health: Knows which peers are alive.
            failed: Called once, by the thread, if a kernel reports a failure, a peer has published one, or the
                process of a peer has ended that had not left: an application that only replays graphs makes no
                call that would see it.
        """
        self._failed = failed
        self._record = record
        self._health = health
        self._stop = threading.Event()
        self._thread = DaemonThread(self._watch, f"{health.name} kernels")
        self._thread.start()

    def _watch(self) -> None:
        next_look = time.monotonic() + FAILURE_EVERY_S
        while not self._stop.wait(WATCH_EVERY_S):
            with tolerating(OSError):  # a teardown closes the watch first, then calls `stop`
                if self._health.lost():
                    self._record.abort()
                    # A rank that has left in order before it ended breaks nothing; the others are still watched.
                    if self._health.gone():
                        self._failed()
                        return
                if self._record.words[0]:
                    self._failed()
                    return
                if time.monotonic() >= next_look:
                    if not self._health.is_broken and self._health.others_failed():
                        self._failed()
                        return
                    next_look = time.monotonic() + FAILURE_EVERY_S

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.join()
