"""The one stream that a communicator's kernels are on, and how it changes hands."""

from __future__ import annotations

from collections.abc import Callable

from device_comm.driver import Driver
from shm_broadcast.errors import UsageError

__all__ = ["StreamBinding"]


class StreamBinding:
    """Which stream calls are bound to: two at once would share epochs and memory.

    Attributes:
        stream: The stream; None before the first call.
    """

    def __init__(self, driver: Driver, where: Callable[[str], str]) -> None:
        """Bind nothing yet; `where` begins an error's text."""
        self.stream: int | None = None
        self._driver = driver
        self._where = where
        # What the next stream that is bound has to wait for.
        self._behind: int | None = None

    def admit(self, stream: int, operation: str) -> None:
        """Bind to the first stream; refuse a second one. Streams that are captured are allowed besides."""
        if stream == self.stream or self._driver.stream_is_capturing(stream):
            return
        if self.stream is not None:
            raise UsageError(
                f"{self._where(operation)}: on stream {stream:#x}, but this communicator is in use on stream "
                f"{self.stream:#x}; two streams at once would mix up their data: order them and call use_stream first"
            )
        self._wait_behind(stream)
        self.stream = stream

    def use(self, stream: int) -> None:
        """Bind to `stream`, behind all that was queued so far.

        Raises:
            UsageError: One of the two streams is being captured: the order would be part of the graph.
        """
        old, driver = self.stream, self._driver
        if old is None:
            self._wait_behind(stream)
        elif old != stream:
            if driver.stream_is_capturing(old) or driver.stream_is_capturing(stream):
                raise UsageError(
                    f"{self._where('use_stream')}: stream {old:#x} or stream {stream:#x} is being captured"
                )
            event = driver.event_create()
            try:
                driver.event_record(event, old)
                driver.stream_wait_event(stream, event)
            finally:
                driver.event_destroy(event)
        self.stream = stream

    def restore(self, stream: int | None) -> None:
        """Undo `use`: bind to `stream` again, or to none; later calls are behind all that was queued so far."""
        old = self.stream
        if stream == old or old is None:
            return
        if self._driver.stream_is_capturing(old):
            # A capture that was left by an exception: what it holds is void, there is nothing to be behind.
            self.stream = stream
        elif stream is not None:
            self.use(stream)
        else:
            self._behind = self._driver.event_create()
            self._driver.event_record(self._behind, old)
            self.stream = None

    def close(self) -> None:
        """Give back what is kept. Idempotent."""
        event, self._behind = self._behind, None
        if event is not None:
            self._driver.event_destroy(event)

    def _wait_behind(self, stream: int) -> None:
        if self._behind is not None:
            try:
                self._driver.stream_wait_event(stream, self._behind)
            finally:
                self.close()
