"""How far a device has come with what was queued on it, told by one event."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from device_comm.driver import Driver
from shm_broadcast.errors import CapabilityError, CudaError

__all__ = ["EventProgress"]

logger: logging.Logger = logging.getLogger(__name__)


class EventProgress:
    """See `Progress`: one event, recorded anew behind each call.

    A stream's calls end in their order, so the latest event speaks for all before it, as long as one stream is used
    at a time. A call that is captured is no work yet and leaves no mark. Without a driver nothing is marked: then only
    what the host waits for has deadlines.
    """

    def __init__(self, open_driver: Callable[[], Driver]) -> None:
        """Open the device at the first mark; it stays the caller's."""
        self._open_driver = open_driver
        self._driver: Driver | None = None
        self._is_blind = False
        self._event = 0
        self._has_mark = False
        self._lock = threading.Lock()

    def mark(self, stream: int) -> None:
        """Remember what is queued on `stream` by now; nothing while it is captured."""
        if self._is_blind:
            return
        try:
            driver = self._driver = self._driver or self._open_driver()
        except CapabilityError as error:
            logger.warning("queued calls have no deadlines: %s", error)
            self._is_blind = True
            return
        if driver.stream_is_capturing(stream):
            return
        with self._lock:
            if not self._event:
                self._event = driver.event_create()
            driver.event_record(self._event, stream)
            self._has_mark = True

    def is_done(self) -> bool:
        """Return whether all that was remembered is complete; a device that failed will do no more."""
        with self._lock:
            if not self._has_mark or self._driver is None:
                return True
            try:
                return self._driver.event_query(self._event)
            except CudaError:
                # Whoever waits for the stream gets the error from there.
                return True

    def close(self) -> None:
        """Give the event back. Idempotent."""
        with self._lock:
            driver, self._driver = self._driver, None
            event, self._event = self._event, 0
            self._is_blind, self._has_mark = True, False
        if driver is not None and event:
            driver.event_destroy(event)
