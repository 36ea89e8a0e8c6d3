"""The streams that calls are queued on: find the current one, order one behind another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Streams(Protocol):
    """The streams of one device. A stream is identified by the driver's number for it."""

    @property
    def current(self) -> Callable[[], int]:
        """Return the function that returns the caller's current stream."""

    def on_device(self) -> AbstractContextManager[None]:
        """Make the device the current one within the context."""

    def wait(self, waiter: int, on: int) -> None:
        """Make later work on `waiter` wait for all work queued on `on` so far."""

    def is_idle(self, stream: int) -> bool:
        """Return whether all work queued on `stream` is complete. Not allowed while it is captured."""

    def create(self) -> int:
        """Return a stream for the group's asynchronous calls, which lives as long as this object."""

    def use(self, stream: int) -> AbstractContextManager[object]:
        """Make `stream` the current one within the context."""

    def record(self, stream: int) -> StreamEvent:
        """Return an event behind all work queued on `stream` so far."""

    def is_captured(self) -> bool:
        """Return whether the current stream is being captured."""

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        """Keep the tensor's memory from being reused before all work queued on `stream` by then is complete."""


class StreamEvent(Protocol):
    """A place in the order of a stream."""

    def wait(self, stream: int) -> None:
        """Make later work on `stream` wait for it."""

    def is_done(self) -> bool:
        """Return whether all work before it is complete."""


class Order(Protocol):
    """Keeps the calls of one group in order, whatever streams they come on.

    Attributes:
        hot: A call on this stream need not be admitted.
    """

    hot: int | None

    def admit(self, stream: int, operation: str) -> None:
        """Order a call on `stream` behind the earlier ones; raise `UsageError` where that cannot be."""


class Progress(Protocol):
    """Tracks whether queued work is complete."""

    def mark(self, stream: int) -> None:
        """Remember the work queued on `stream` so far. Called after each call; must not block or fail in a capture."""

    def is_done(self) -> bool:
        """Return whether all marked work is complete. Called by another thread."""


class TorchStreams:
    """The streams of a CUDA device, with torch's current stream.

    Attributes:
        current: Returns the caller's current stream.
    """

    def __init__(
        self, device: torch.device, relaxed: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Serve `device`, or the current device if it has no index.

        Args:
            device: The device.
            relaxed: Returns a context in which this thread may ask for the progress of a stream while any thread of the
                process captures. Without it the question makes such a capture invalid: torch captures in global mode.
        """
        self.relaxed = relaxed
        self.index: int = torch.cuda.current_device() if device.index is None else device.index
        # Takes 0.1 us. torch.cuda.current_stream() creates an object and takes ten times as long.
        self.current: Callable[[], int] = functools.partial(
            torch._C._cuda_getCurrentRawStream,  # type: ignore[attr-defined, unused-ignore] # noqa: SLF001
            self.index,
        )
        # Streams that torch made for us.
        self._kept: dict[int, torch.cuda.Stream] = {}

    def on_device(self) -> AbstractContextManager[None]:
        """Make the device the current one within the context."""
        return torch.cuda.device(self.index)  # type: ignore[no-any-return, unused-ignore]

    def wait(self, waiter: int, on: int) -> None:
        """Make later work on `waiter` wait for all work queued on `on` so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._of(on))
        event.wait(self._of(waiter))

    def is_idle(self, stream: int) -> bool:
        """Return whether all work queued on `stream` is complete."""
        with self.relaxed():
            return bool(self._of(stream).query())

    def create(self) -> int:
        """Return a stream of torch's pool, with the default priority."""
        made: torch.cuda.Stream = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        self._kept[made.cuda_stream] = made
        return int(made.cuda_stream)

    def use(self, stream: int) -> AbstractContextManager[object]:
        """Make `stream` the current one within the context."""
        return torch.cuda.stream(self._of(stream))

    def record(self, stream: int) -> StreamEvent:
        """Return an event behind all work queued on `stream` so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._of(stream))
        return _TorchEvent(event, self)

    def is_captured(self) -> bool:
        """Return whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        """Record the tensor for `stream`. Torch leaves memory that is not its allocator's to the owner."""
        if tensor.is_cuda:
            tensor.record_stream(self._of(stream))

    def _of(self, stream: int) -> torch.cuda.Stream:
        found = self._kept.get(stream)
        if found is None:
            # ExternalStream(0) is a new stream of torch's pool, not the default stream, whose number is 0.
            found = torch.cuda.get_stream_from_external(stream, self.index)
        return found


class _TorchEvent:
    """An event of torch."""

    def __init__(self, event: torch.cuda.Event, streams: TorchStreams) -> None:
        self._event = event
        self._streams = streams

    def wait(self, stream: int) -> None:
        self._event.wait(self._streams._of(stream))  # noqa: SLF001 - the class above

    def is_done(self) -> bool:
        with self._streams.relaxed():
            return bool(self._event.query())  # type: ignore[no-untyped-call]


__all__ = ["Order", "Progress", "StreamEvent", "Streams", "TorchStreams"]
