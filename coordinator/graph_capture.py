"""The context in which a CUDA graph is captured. On the CPU it does nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from device_comm.base import DeviceCommunicator
from shm_broadcast.errors import UsageError


@dataclasses.dataclass
class GraphCaptureContext:
    """State that all groups of one capture share.

    Attributes:
        stream: The captured stream; None on devices without streams.
    """

    stream: torch.Stream | None = None


def context_for(
    device: torch.device, context: GraphCaptureContext | None, stream: torch.Stream | None = None
) -> GraphCaptureContext:
    """Return `context`, or a new one for `stream`, or a new one; that has its own stream if the device has streams.

    Raises:
        UsageError: Both are given, and the context has another stream.
    """
    if context is not None:
        if stream is not None and stream != context.stream:
            raise UsageError("graph_capture: graph_capture_context has another stream; pass one of the two")
        return context
    if stream is not None:
        return GraphCaptureContext(stream)
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
    stream: torch.Stream | None = None,
) -> Iterator[GraphCaptureContext]:
    """Yield `graph_capture_context`, or a new one, for `stream` if given; run the body on its stream if there is one.

    The communicators enter in the given order, which must be the same on all ranks, and leave in reverse. On leaving
    they exchange what was captured with their peers. On the CPU this is a no-op, so code written for graphs runs.
    """
    context = context_for(device, graph_capture_context, stream)
    if context.stream is None or device.type == "cpu":
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
