"""The context in which a CUDA graph is captured; on the CPU there is nothing to capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from device_comm.base import DeviceCommunicator


@dataclasses.dataclass
class GraphCaptureContext:
    """What the groups of one capture share.

    Attributes:
        stream: The stream that is captured; None on devices without streams.
    """

    stream: torch.Stream | None = None


def context_for(device: torch.device, context: GraphCaptureContext | None) -> GraphCaptureContext:
    """Return `context`, or a new one, with a stream of its own where the device has streams."""
    if context is not None:
        return context
    if device.type == "cpu":
        return GraphCaptureContext(None)
    if device.type == "cuda":
        # A plain torch.Stream does not tell its number, which our communicators and torch.cuda.graph need.
        return GraphCaptureContext(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return GraphCaptureContext(torch.Stream(device=device))


@contextmanager
def capture_on(
    device: torch.device,
    communicators: Iterable[DeviceCommunicator],
    graph_capture_context: GraphCaptureContext | None,
) -> Iterator[GraphCaptureContext]:
    """Yield `graph_capture_context`, or a new one; on devices with streams run the body on the context's stream.

    The communicators enter in the given order, which is the same on all ranks, and leave in its reverse: leaving is
    where they tell their ranks of what was captured. On the CPU all of this is a no-op, so that code written for
    graphs runs.
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
            # What was queued before must be done before the capture begins on another stream.
            context.stream.wait_stream(current)
        with context.stream:
            yield context
