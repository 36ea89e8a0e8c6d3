"""Let a communicator's kernels run one after the other, whatever streams their calls come on."""

from __future__ import annotations

from collections.abc import Callable

from device_comm.cuda.driver import Driver
from shm_broadcast.errors import UsageError

__all__ = ["StreamOrder"]


class StreamOrder:
    """Orders the calls of one communicator: two kernels at once would share epochs and memory.

    A call on another stream than the last one runs behind it. So does a call in another branch of the same capture, by
    events that become part of the graph. Two graphs, or a graph and other calls, are ordered by who replays them.

    Attributes:
        hot: A call on this stream needs no look, unless a capture was begun by us. None if every call does.
        stream: The stream of the last call that was not captured; None before the first one.
    """

    def __init__(self, driver: Driver, where: Callable[[str], str]) -> None:
        """Order nothing yet; `where(operation)` returns the beginning of an error's text."""
        self.hot: int | None = None
        self.stream: int | None = None
        self._driver = driver
        self._where = where
        # The capture and the stream of the last call that was captured; 0 before the first one.
        self._capture, self._branch = 0, 0
        # Event that the next stream has to wait for.
        self._behind: int | None = None

    def admit(self, stream: int, operation: str) -> None:
        """Order a call on `stream` behind the earlier ones.

        Raises:
            UsageError: The earlier ones are on a stream that is being captured, and this one is not. Nothing was
                queued, the group is intact.
        """
        if stream == self.hot:
            return
        capture = self._driver.capture_id(stream)
        if capture:
            self._admit_captured(stream, capture)
        else:
            self.use(stream, operation)

    def _admit_captured(self, stream: int, capture: int) -> None:
        before = self._branch
        if capture != self._capture:
            # Calls on the hot stream are not looked at: it may belong to this capture by now.
            hot = self.hot
            before = hot if hot is not None and self._driver.capture_id(hot) == capture else stream
        if before != stream:
            self._order(before, stream)
        self._capture, self._branch, self.hot = capture, stream, None

    def use(self, stream: int, operation: str = "use_stream") -> None:
        """Order the calls from now on, which come on `stream`, behind all work queued so far.

        Raises:
            UsageError: One of the two streams is being captured, so the ordering would become part of the graph.
        """
        old, driver = self.stream, self._driver
        if old is None:
            self._wait_behind(stream)
        elif old != stream:
            captured = [each for each in (old, stream) if driver.capture_id(each)]
            if captured:
                raise UsageError(
                    f"{self._where(operation)}: stream {stream:#x} cannot be ordered behind stream {old:#x}, on which "
                    f"earlier calls were queued, while stream {captured[0]:#x} is being captured"
                )
            self._order(old, stream)
        self.stream = self.hot = stream

    def restore(self, stream: int | None) -> None:
        """Undo `use`: go back to `stream`, or to none. Later calls run after all work queued so far."""
        old = self.stream
        if stream == old or old is None:
            return
        if self._driver.capture_id(old):
            # An exception left the capture. Its calls never run, so there is nothing to wait for.
            self.stream = self.hot = stream
        elif stream is not None:
            self.use(stream)
        else:
            self._behind = self._driver.event_create()
            self._driver.event_record(self._behind, old)
            self.stream = self.hot = None

    def close(self) -> None:
        """Destroy the pending event, if any. Idempotent."""
        event, self._behind = self._behind, None
        if event is not None:
            self._driver.event_destroy(event)

    def _order(self, before: int, stream: int) -> None:
        """Let later work on `stream` wait for all work queued on `before` so far."""
        driver = self._driver
        event = driver.event_create()
        try:
            driver.event_record(event, before)
            driver.stream_wait_event(stream, event)
        finally:
            driver.event_destroy(event)

    def _wait_behind(self, stream: int) -> None:
        if self._behind is not None:
            try:
                self._driver.stream_wait_event(stream, self._behind)
            finally:
                self.close()
