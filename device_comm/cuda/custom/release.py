"""Free device memory when nothing on the device can still use it, without waiting for other groups' kernels.

See *The end* in DESIGN.md, under "Policy and custom all-reduce: host side".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from device_comm.cuda.custom.peer_messages import PeerExchange
from device_comm.cuda.driver import Driver
from shm_broadcast.errors import CommError, CommTimeoutError, CudaError
from shm_broadcast.reports.log_fields import LogFields

__all__ = ["CAPTURE_ERRORS", "await_idle", "release_together", "release_when_idle"]

logger: logging.Logger = logging.getLogger(__name__)

CAPTURE_ERRORS: Final = range(900, 909)
"""CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: what captures forbid or spoil."""

# How long the caller waits for other work on the device. What a healthy process has queued ends in milliseconds.
IDLE_S: Final = 1.0


def release_when_idle(driver: Driver, where: str, fields: LogFields, release: Callable[[bool], None]) -> None:
    """Call `release` once everything is done that this process has queued on the device so far.

    *Blocks* for `IDLE_S` at most, apart from `release` itself. If the device takes longer, a thread calls `release`
    later. While a stream is being captured it cannot be known what is done: then `release` is never called, which is
    logged, and the memory stays allocated until the process ends. Raises nothing.

    Args:
        driver: The device. It stays open until `release` closes it.
        where: The beginning of a log record.
        fields: The fields of a log record.
        release: Frees the memory and raises nothing. Gets whether the caller still waits for it.
    """
    waiting = _Waiting(driver, where, fields, release)
    waiting.start()
    waiting.leave(waiting.is_idle_in_time())


def release_together(
    driver: Driver, where: str, fields: LogFields, peers: PeerExchange, release: Callable[[bool], None]
) -> None:
    """Do as `release_when_idle`, where `release` unmaps memory of peers who unmap that of this rank meanwhile.

    *Collective*. *Blocks* as long as the exchange does, and as `release_when_idle`. `release` gets whether all ranks
    call it now, so that it may wait for them. That is so if every device is idle in time. Otherwise each rank calls it
    as soon as its own device is idle, and it must wait for no other rank.

    Raises:
        Others: As the exchange. `release` is called nevertheless, and must wait for no other rank then.
    """
    waiting = _Waiting(driver, where, fields, release)
    waiting.start()
    is_together = False
    try:
        is_idle = waiting.is_idle_in_time()
        is_together = not peers.failures("" if is_idle else "other work on the device takes longer")
    finally:
        waiting.leave(is_together)


def await_idle(driver: Driver, where: str, timeout_s: float) -> None:
    """Return once everything has ended that this process has queued on the device so far.

    The driver's wait has no deadline, so a thread waits. If that takes longer than `timeout_s`, it goes on waiting.

    Raises:
        CudaError: The device has failed, or a stream is being captured, so that it cannot be known what has ended.
        CommTimeoutError: Something on the device does not end in time.
    """
    ended = threading.Event()
    failures: list[CommError] = []

    def wait() -> None:
        try:
            driver.context_synchronize()
        except CommError as error:
            failures.append(error)
        ended.set()

    threading.Thread(target=wait, name="group-coordinator-idle", daemon=True).start()
    if not ended.wait(timeout_s):
        raise CommTimeoutError(f"{where}: the device has not come to rest within {timeout_s:.1f} s")
    if failures:
        raise failures[0]


class _Waiting:
    """The wait for an idle device, by a thread, and the decision who releases."""

    def __init__(
        self, driver: Driver, where: str, fields: LogFields, release: Callable[[bool], None]
    ) -> None:
        self._driver = driver
        self._where = where
        self._fields = fields
        self._release = release
        self._ended = threading.Event()
        self._is_idle = False
        # Whether the caller has left the release to the thread.
        self._is_left = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Wait in a thread from now on."""
        thread = threading.Thread(target=self.run, name="group-coordinator-release", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # There is no thread to be had, as the interpreter is ending: wait here.
            self.run()

    def run(self) -> None:
        """Wait until the device is idle, and release if the caller does not wait any more."""
        is_idle = self._wait()
        with self._lock:
            self._is_idle = is_idle
            self._ended.set()
            is_left = self._is_left
        if is_left and is_idle:
            try:
                self._driver.relax_capture()
            except CommError as error:
                logger.warning("%s: %s", self._where, error, extra=self._fields)
            self._release(False)

    def _wait(self) -> bool:
        try:
            self._driver.context_synchronize()
        except CudaError as error:
            logger.warning("%s: %s", self._where, error, extra=self._fields)
            if error.code in CAPTURE_ERRORS:
                logger.warning(
                    "%s: a capture hides what is done; memory stays until the process ends",
                    self._where,
                    extra=self._fields,
                )
                return False
            # The device has failed, and no kernel runs any more.
        return True

    def is_idle_in_time(self) -> bool:
        """Wait for `IDLE_S` at most; return whether the device has become idle."""
        self._ended.wait(IDLE_S)
        return self._is_idle

    def leave(self, is_together: bool) -> None:
        """Release if the device is idle by now, with `is_together`; else leave that to the thread."""
        with self._lock:
            self._is_left = not self._ended.is_set()
        if self._is_left:
            logger.warning(
                "%s: other work on the device takes longer than %.0f s; memory is freed behind it, but for what peers "
                "may have open by CUDA IPC",
                self._where,
                IDLE_S,
                extra=self._fields,
            )
        elif self._is_idle:
            self._release(is_together)
