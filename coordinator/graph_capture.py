"""The context in which a CUDA graph is captured. On the CPU it does nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from device_comm.base import DeviceCommunicator


@dataclasses.dataclass
class GraphCaptureContext:
    """State that all groups of one capture share.

    Attributes:
        stream: The captured stream; None on devices without streams.
    """

    stream: torch.Stream | None = None


def context_for(device: torch.device, context: GraphCaptureContext | None) -> GraphCaptureContext:
    """Return `context`, or a new one; a new one has its own stream if the device has streams."""
    if context is not None:
        return context
    if device.type == "cpu":
        return GraphCaptureContext(None)
    if device.type == "cuda":
        # Our communicators and torch.cuda.graph need the stream's handle, which a plain torch.Stream does not expose.
        return GraphCaptureContext(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return GraphCaptureContext(torch.Stream(device=device))


@contextmanager
def capture_on(
    device: torch.device,
    communicators: Iterable[DeviceCommunicator],
    graph_capture_context: GraphCaptureContext | None,
) -> Iterator[GraphCaptureContext]:
    """Yield `graph_capture_context`, or a new one; run the body on its stream if the device has streams.

    The communicators enter in the given order, which must be the same on all ranks, and leave in reverse. On leaving
    they exchange what was captured with their peers. On the CPU this is a no-op, so code written for graphs runs.
    """
    context = context_for(device, graph_capture_context)
    if context.stream is None:
        yield context
        return
    with ExitStack() as entered:
        for communicator in communicators:
            entered.enter_context(communicator.capture(context.stream))
        current = torch.accelerator.current_stream(device.index)
        if current != context.stream:
            # Order the capture after the work that is already queued on the current stream.
            context.stream.wait_stream(current)
        with context.stream:
            yield context
