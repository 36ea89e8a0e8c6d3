"""The streams that calls are queued on: which one is current, and how one waits for another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """The streams of one device; a stream is the number that the driver knows it by."""

    @property
    def current(self) -> Callable[[], int]:
        """Return the function that returns the caller's current stream."""

    def use(self, stream: Any) -> AbstractContextManager[None]:
        """Make `stream` the current one within the context."""

    def on_device(self) -> AbstractContextManager[None]:
        """Make the device the current one within the context."""

    def wait(self, waiter: int, on: int) -> None:
        """Let what is queued on `waiter` from now on wait for what is queued on `on` by now."""

    def is_idle(self, stream: int) -> bool:
        """Return whether all that was queued on `stream` is complete. Not while it is captured."""


class Progress(Protocol):
    """Tells whether what was queued has been carried out."""

    def mark(self, stream: int) -> None:
        """Remember what is queued on `stream` by now. Called after each call; must not wait, nor fail in a capture."""

    def is_done(self) -> bool:
        """Return whether all that was remembered is complete. Called by another thread."""


class TorchStreams:
    """The streams of a CUDA device, by torch's idea of which is current."""

    def __init__(self, device: torch.device) -> None:
        """Serve `device`, the current one where it has no index."""
        self.index: int = torch.cuda.current_device() if device.index is None else device.index
        # 0.1 us; torch.cuda.current_stream() makes an object of it and takes ten times as long.
        self._current: Callable[[], int] = functools.partial(
            torch._C._cuda_getCurrentRawStream,  # type: ignore[attr-defined, unused-ignore] # noqa: SLF001
            self.index,
        )

    @property
    def current(self) -> Callable[[], int]:
        """Return the function that returns the caller's current stream."""
        return self._current

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        """Make `stream`, torch's object or its number, the current one within the context."""
        with torch.cuda.stream(self._of(stream) if isinstance(stream, int) else stream):
            yield

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the device the current one within the context."""
        with torch.cuda.device(self.index):
            yield

    def wait(self, waiter: int, on: int) -> None:
        """Let `waiter` wait for what is queued on `on` by now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._of(on))
        event.wait(self._of(waiter))

    def is_idle(self, stream: int) -> bool:
        """Return whether all that was queued on `stream` is complete."""
        return bool(self._of(stream).query())

    def _of(self, stream: int) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(stream, device=self.index)  # type: ignore[no-untyped-call]


__all__ = ["Progress", "Streams", "TorchStreams"]
