"""The stream on which a group makes its asynchronous calls, beside the caller's; see `DESIGN.md`, CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from device_comm.async_calls import check_capture, refuse_question, tensors_of
from device_comm.nccl.streams import Streams
from shm_broadcast.errors import UsageError

__all__ = ["SideStream"]


class SideStream:
    """One stream of a group, made when it is first needed; see `Aside`."""

    def __init__(
        self,
        streams: Streams,
        is_ordered: Callable[[], bool],
        capture_of: Callable[[int], int],
        ordering: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Make no stream yet.

        Args:
            streams: The device's streams.
            is_ordered: Returns whether the group's calls keep their order on any stream. If not, they stay on the
                current one.
            capture_of: Returns the id of the capture that a stream takes part in, or 0.
            ordering: Returns a context that breaks the group if a call that was made on this stream cannot be ordered.
        """
        self._streams = streams
        self._is_ordered = is_ordered
        self._capture_of = capture_of
        self._ordering = ordering
        self._own: int | None = None

    @contextmanager
    def entered(self, call: object) -> Iterator[None]:
        """Make the side stream current, behind the caller's; keep the memory of the call's tensors for it.

        If that fails, the other ranks may queue a call that this one does not: the group is broken then.

        Raises:
            UsageError: The side stream takes part in a capture, and the caller's stream in none or in another one.
                Nothing was queued, the group is intact.
        """
        with ExitStack() as current:
            with self._ordering(self._streams.current()):
                if self._is_ordered():
                    current.enter_context(self._side(call))
            yield

    def _side(self, call: object) -> AbstractContextManager[object]:
        streams = self._streams
        if self._own is None:
            self._own = streams.create()
        side, caller = self._own, streams.current()
        if side != caller:
            capture = self._capture_of(side)
            if capture and capture != self._capture_of(caller):
                raise UsageError(
                    f"stream {side:#x}, on which the group makes its asynchronous calls, takes part in a capture; such "
                    f"calls on stream {caller:#x}, which does not, can be made when that capture has ended"
                )
            streams.wait(side, caller)
            for tensor in tensors_of(call):
                streams.keep(tensor, side)
        return streams.use(side)

    def mark(self, result: object) -> SideMark:
        """Return a mark behind the work on the current stream, and keep `result` for the streams that wait for it.

        If that fails, the group is broken: this rank has queued the call, but its handle reports a failure.
        """
        with self._ordering(self._streams.current()):
            return SideMark(self._streams, self._capture_of, tensors_of(result))


class SideMark:
    """A mark behind a call; see `Mark`."""

    def __init__(
        self, streams: Streams, capture_of: Callable[[int], int], results: Iterable[torch.Tensor]
    ) -> None:
        """Record an event on the current stream. The arguments are those of `SideStream`, and what to keep."""
        self._streams = streams
        self._capture_of = capture_of
        self._results = list(results)
        self._stream = streams.current()
        self._is_captured = streams.is_captured()
        self._capture = capture_of(self._stream)
        self._event = streams.record(self._stream)

    def wait(self) -> None:
        """Make the current stream wait for the event.

        Raises:
            UsageError: The current stream is being captured and the call was not, or the other way round, or both were
                and in different captures. Nothing was queued, and no capture is spoilt.
        """
        current = self._streams.current()
        self._check(current)
        if current == self._stream:
            return
        self._event.wait(current)
        for tensor in self._results:
            self._streams.keep(tensor, current)

    def is_reached(self) -> bool:
        """Query the event.

        Raises:
            UsageError: The call was captured: it runs in each replay. Or the current stream is being captured.
        """
        refuse_question(self._is_captured or self._streams.is_captured())
        return self._event.is_done()

    @contextmanager
    def behind(self) -> Iterator[Any]:
        """Make the stream of the call current; the caller's stream does not wait."""
        with self._streams.use(self._stream):
            yield

    def _check(self, stream: int) -> None:
        check_capture(is_captured=self._streams.is_captured(), was_captured=self._is_captured)
        # The id of a capture that has become invalid is 0: then the driver says that.
        if self._capture_of(stream) not in (0, self._capture):
            raise UsageError(
                "a captured stream cannot wait for a call of another capture; wait for its handle within that, and "
                "order the replays of the two graphs"
            )
