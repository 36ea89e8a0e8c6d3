"""The stream on which a group makes its asynchronous calls, beside the caller's; see `DESIGN.md`, CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from device_comm.async_calls import tensors_of
from device_comm.nccl.streams import Streams
from shm_broadcast.errors import UsageError

__all__ = ["SideStream"]


class SideStream:
    """One stream of a group, made when it is first needed; see `Aside`."""

    def __init__(
        self,
        streams: Streams,
        is_ordered: Callable[[], bool],
        ordering: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Make no stream yet.

        Args:
            streams: The device's streams.
            is_ordered: Returns whether the group's calls keep their order on any stream. If not, they stay on the
                current one.
            ordering: Returns a context that breaks the group if a call that was made on this stream cannot be ordered.
        """
        self._streams = streams
        self._is_ordered = is_ordered
        self._ordering = ordering
        self._own: int | None = None

    @contextmanager
    def entered(self, call: object) -> Iterator[None]:
        """Make the side stream current, behind the caller's; keep the memory of the call's tensors for it.

        If that fails, the other ranks may queue a call that this one does not: the group is broken then.
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
            streams.wait(side, caller)
            for tensor in tensors_of(call):
                streams.keep(tensor, side)
        return streams.use(side)

    def mark(self, result: object) -> SideMark:
        """Return a mark behind the work on the current stream, and keep `result` for the streams that wait for it.

        If that fails, the group is broken: this rank has queued a call that looks as if it had not.
        """
        with self._ordering(self._streams.current()):
            return SideMark(self._streams, tensors_of(result))


class SideMark:
    """A mark behind a call; see `Mark`."""

    def __init__(self, streams: Streams, results: Iterable[torch.Tensor]) -> None:
        """Record an event on the current stream."""
        self._streams = streams
        self._results = list(results)
        self._stream = streams.current()
        self._is_captured = streams.is_captured()
        self._event = streams.record(self._stream)

    def wait(self) -> None:
        """Make the current stream wait for the event.

        Raises:
            UsageError: The current stream is being captured and the call was not, or the other way round. Nothing was
                queued, and no capture is spoilt.
        """
        self._check("wait for")
        current = self._streams.current()
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
        if self._is_captured or self._streams.is_captured():
            raise UsageError(
                "is_completed: a captured call runs in each replay, and a capture allows no such question"
            )
        return self._event.is_done()

    @contextmanager
    def behind(self) -> Iterator[Any]:
        """Make the stream of the call current; the caller's stream does not wait."""
        with self._streams.use(self._stream):
            yield

    def _check(self, what: str) -> None:
        is_captured = self._streams.is_captured()
        if is_captured and not self._is_captured:
            raise UsageError(
                f"a captured stream cannot {what} a call that was made before the capture; wait for its handle before"
            )
        if self._is_captured and not is_captured:
            raise UsageError(
                f"a stream outside of the capture cannot {what} a call that was captured; wait for its handle within "
                "the capture, and replay the graph"
            )
