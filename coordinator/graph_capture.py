"""The context in which a CUDA graph is captured; on the CPU there is nothing to capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@dataclasses.dataclass
class GraphCaptureContext:
    """What the groups of one capture share.

    Attributes:
        stream: The stream that is captured; None on devices without streams.
    """

    stream: torch.Stream | None = None


@contextmanager
def capture_on(device: torch.device, context: GraphCaptureContext | None) -> Iterator[GraphCaptureContext]:
    """Yield `context`, or a new one; on devices with streams run the body on the context's stream.

    On the CPU this is a no-op that yields a context, so that code written for graphs runs.
    """
    if device.type == "cpu":
        yield context or GraphCaptureContext()
        return
    if context is None:
        context = GraphCaptureContext(torch.Stream(device=device))
    if context.stream is None:
        yield context
        return
    current = torch.accelerator.current_stream(device.index)
    if current != context.stream:
        # What was queued before must be done before the capture begins on another stream.
        context.stream.wait_stream(current)
    with context.stream:
        yield context
