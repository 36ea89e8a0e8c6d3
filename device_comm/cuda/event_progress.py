"""Track with one event whether the device has completed the queued calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from device_comm.cuda.driver import Driver
from shm_broadcast.errors import CapabilityError, CudaError
from shm_broadcast.reports.log_fields import LogFields

__all__ = ["EventProgress"]

logger: logging.Logger = logging.getLogger(__name__)


class EventProgress:
    """Implement `Progress` with one event, recorded again after each call.

    Calls on a stream complete in order, so the latest record covers all calls before it, as long as one stream is used
    at a time. A captured call runs later and is not marked. Without a driver nothing is marked, and then only calls
    that the host itself waits for have deadlines.
    """

    def __init__(self, open_driver: Callable[[], Driver], fields: LogFields) -> None:
        """Open nothing yet; the first mark opens the device, which the caller still owns.

        `fields` are those of a log record on the group.
        """
        self._open_driver = open_driver
        self._fields = fields
        self._driver: Driver | None = None
        self._is_blind = False
        self._event = 0
        self._has_mark = False
        self._lock = threading.Lock()

    def mark(self, stream: int) -> None:
        """Record the event behind the work queued on `stream`; do nothing while the stream is captured."""
        driver = self._driver or self._open()
        if driver is None or driver.stream_is_capturing(stream):
            return
        with self._lock:
            if not self._event:
                self._event = driver.event_create()
            driver.event_record(self._event, stream)
            self._has_mark = True

    def _open(self) -> Driver | None:
        if self._is_blind:
            return None
        try:
            self._driver = self._open_driver()
        except CapabilityError as error:
            logger.warning("queued calls have no deadlines: %s", error, extra=self._fields)
            self._is_blind = True
        return self._driver

    def is_done(self) -> bool:
        """Return whether all marked work is complete, or the device has failed and will do no more."""
        with self._lock:
            if not self._has_mark or self._driver is None:
                return True
            try:
                return self._driver.event_query(self._event)
            except CudaError:
                # The caller that synchronizes with the stream gets the error there.
                return True

    def close(self) -> None:
        """Destroy the event. Idempotent."""
        with self._lock:
            driver, self._driver = self._driver, None
            event, self._event = self._event, 0
            self._is_blind, self._has_mark = True, False
        if driver is not None and event:
            driver.event_destroy(event)
