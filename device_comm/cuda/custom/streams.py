"""Let a communicator's kernels run one after the other, whatever streams their calls come on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from device_comm.cuda.driver import Driver
from shm_broadcast.errors import CudaError, UsageError

__all__ = ["StreamOrder"]


class StreamOrder:
    """Orders the calls of one communicator: two kernels at once would share epochs and memory.

    A call on another stream than the last one runs behind it. So does a call in another branch of the same capture, by
    events that become part of the graph. Two graphs, or a graph and other calls, are ordered by who replays them.

    The stream of the last call must outlive the next call. The driver cannot wait for a stream that was destroyed. An
    event behind every call could be waited for instead, but each call would have to record it.

    Attributes:
        hot: A call on this stream need not be ordered, unless we have begun a capture. None before the first
            call, and from a captured call until the first eager call after all captures that hold calls: any
            stream may have joined these.
        stream: The stream of the last call that was not captured; None before the first one.
    """

    def __init__(self, driver: Driver, where: Callable[[str], str]) -> None:
        """Order nothing yet; `where(operation)` returns the beginning of an error's text."""
        self.hot: int | None = None
        self.stream: int | None = None
        self._driver = driver
        self._where = where
        # The stream of the last call in each capture, by its id. Those that have ended are dropped when one is added.
        self._branches: dict[int, int] = {}
        # Event that the next stream has to wait for.
        self._behind: int | None = None

    def admit(self, stream: int, operation: str) -> None:
        """Order a call on `stream` behind the earlier ones.

        Raises:
            UsageError: The earlier ones are on a stream that is being captured, and this one is not. Nothing was
                queued, the group is intact.
            CudaError: The driver cannot order the two, as when the stream of the last call was destroyed.
        """
        if stream == self.hot:
            return
        capture = self._driver.capture_id(stream)
        if capture:
            self._admit_captured(stream, capture, operation)
        elif not self._driver.stream_is_capturing(stream):
            self.use(stream, operation)
        # Else its capture has become invalid, and nothing of it will run: the launch raises the driver's error.

    def _admit_captured(self, stream: int, capture: int, operation: str) -> None:
        if self.hot is not None:
            # Calls on the hot stream are not looked at: it may belong to this capture by now, or to another one.
            joined = self._capture_of(self.hot)
            if joined:
                self._branches[joined] = self.hot
        before = self._branches.get(capture)
        if before is None:
            self._forget_ended()
        elif before != stream:
            self._order(before, stream, operation)
        self._branches[capture], self.hot = stream, None

    def _forget_ended(self) -> None:
        self._branches = {
            capture: stream
            for capture, stream in self._branches.items()
            if self._capture_of(stream) == capture
        }

    def _capture_of(self, stream: int) -> int:
        """Return the capture that the stream of an earlier call takes part in, or 0."""
        try:
            return self._driver.capture_id(stream)
        except CudaError:
            # It was destroyed, so it is in no capture. Any other error comes back with the next step of the call.
            return 0

    def use(self, stream: int, operation: str = "use_stream") -> None:
        """Order the calls from now on, which come on `stream`, behind all work queued so far.

        Raises:
            UsageError: One of the two streams is being captured, so the ordering would become part of the graph.
            CudaError: As `admit`.
        """
        old, driver = self.stream, self._driver
        if old is None:
            self._wait_behind(stream)
        elif old != stream:
            with self._last(old, operation):
                captured = old if driver.stream_is_capturing(old) else None
            if captured is None and driver.stream_is_capturing(stream):
                captured = stream
            if captured is not None:
                raise UsageError(
                    f"{self._where(operation)}: stream {stream:#x} cannot be ordered behind stream {old:#x}, on which "
                    f"earlier calls were queued, while stream {captured:#x} is being captured"
                )
            self._order(old, stream, operation)
        self._continue_on(stream)

    def _continue_on(self, stream: int | None) -> None:
        """Make `stream` that of the last call, and the hot one unless a capture with calls goes on."""
        if self._branches:
            self._forget_ended()
        self.stream, self.hot = stream, None if self._branches else stream

    def restore(self, stream: int | None) -> None:
        """Undo `use`: go back to `stream`, or to none. Later calls run after all work queued so far.

        Raises:
            CudaError: As `admit`.
        """
        old, operation = self.stream, "restore_stream"
        if stream == old or old is None:
            return
        with self._last(old, operation):
            is_captured = self._driver.stream_is_capturing(old)
        if is_captured:
            # An exception left the capture. Its calls never run, so there is nothing to wait for.
            self._continue_on(stream)
        elif stream is not None:
            self.use(stream, operation)
        else:
            self._behind = self._driver.event_create()
            with self._last(old, operation):
                self._driver.event_record(self._behind, old)
            self._continue_on(None)

    def close(self) -> None:
        """Destroy the pending event, if any. Idempotent."""
        event, self._behind = self._behind, None
        if event is not None:
            self._driver.event_destroy(event)

    @contextmanager
    def _last(self, stream: int, operation: str) -> Iterator[None]:
        """Explain an error of the driver about `stream`, that of the last call."""
        try:
            yield
        except CudaError as error:
            raise CudaError(
                f"{self._where(operation)}: nothing can be ordered behind stream {stream:#x}, on which the last call "
                f"was queued and which must outlive the next call: {error}",
                library=error.library,
                function=error.function,
                code=error.code,
            ) from error

    def _order(self, before: int, stream: int, operation: str) -> None:
        """Let later work on `stream` wait for all work queued on `before` so far."""
        driver = self._driver
        event = driver.event_create()
        try:
            with self._last(before, operation):
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
