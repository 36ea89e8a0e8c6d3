"""Bind a communicator's kernels to one stream, and order them when the stream changes."""

from __future__ import annotations

from collections.abc import Callable

from device_comm.cuda.driver import Driver
from shm_broadcast.errors import UsageError

__all__ = ["StreamBinding"]


class StreamBinding:
    """The stream that calls are bound to: calls on two streams at once would share epochs and memory.

    Attributes:
        stream: The stream; None before the first call.
    """

    def __init__(self, driver: Driver, where: Callable[[str], str]) -> None:
        """Bind nothing yet; `where(operation)` returns the beginning of an error's text."""
        self.stream: int | None = None
        self._driver = driver
        self._where = where
        # Event that the next bound stream has to wait for.
        self._behind: int | None = None

    def admit(self, stream: int, operation: str) -> None:
        """Bind to the first stream and refuse a second one. Streams under capture are always admitted.

        Raises:
            UsageError: Calls are bound to another stream. Nothing was queued, the group is intact.
        """
        if stream == self.stream or self._driver.stream_is_capturing(stream):
            return
        if self.stream is not None:
            raise UsageError(
                f"{self._where(operation)}: on stream {stream:#x}, but this communicator is in use on stream "
                f"{self.stream:#x}; calls on two streams would overwrite each other's data: order the streams and call "
                "use_stream first"
            )
        self._wait_behind(stream)
        self.stream = stream

    def use(self, stream: int) -> None:
        """Bind to `stream`; later calls run after all work queued so far.

        Raises:
            UsageError: One of the two streams is being captured, so the ordering would become part of the graph.
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
        """Undo `use`: bind to `stream` again, or to none. Later calls run after all work queued so far."""
        old = self.stream
        if stream == old or old is None:
            return
        if self._driver.stream_is_capturing(old):
            # An exception left the capture. Its calls never run, so there is nothing to wait for.
            self.stream = stream
        elif stream is not None:
            self.use(stream)
        else:
            self._behind = self._driver.event_create()
            self._driver.event_record(self._behind, old)
            self.stream = None

    def close(self) -> None:
        """Destroy the pending event, if any. Idempotent."""
        event, self._behind = self._behind, None
        if event is not None:
            self._driver.event_destroy(event)

    def _wait_behind(self, stream: int) -> None:
        if self._behind is not None:
            try:
                self._driver.stream_wait_event(stream, self._behind)
            finally:
                self.close()
