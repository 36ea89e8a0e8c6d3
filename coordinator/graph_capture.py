"""The context in which a CUDA graph is captured, and whether what was captured may be replayed. On the CPU no-ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Generic, Protocol, TypeVar

import torch

from device_comm.base import DeviceCommunicator
from device_comm.health import GroupHealth
from shm_broadcast.errors import StaleGraphError, UsageError


class Replayable(Protocol):
    """A captured graph, such as `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Replay it."""


class CaptureGuard:
    """Whether graphs that were captured with a group may be replayed.

    Attributes:
        followed_by: The epoch of the group, and that of the groups that have taken its place; None while it serves.
    """

    def __init__(self, health: GroupHealth) -> None:
        """Guard the group that `health` belongs to."""
        self._health = health
        self.followed_by: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise unless graphs may be replayed; see `GraphCaptureContext.check_replay`."""
        if self.followed_by is not None:
            raise StaleGraphError(*self.followed_by, group=self._health.name)
        self._health.check_usable("a replay")


Graph = TypeVar("Graph", bound=Replayable)


class CapturedGraph(Generic[Graph]):
    """A graph that is replayed only while the groups serve with which it was captured.

    Attributes:
        graph: The graph.
    """

    def __init__(self, graph: Graph, context: GraphCaptureContext) -> None:
        """Use `GraphCaptureContext.captured`."""
        self.graph: Graph = graph
        self._context = context

    def check(self) -> None:
        """Raise unless the graph may be replayed; see `GraphCaptureContext.check_replay`."""
        self._context.check_replay()

    def replay(self) -> None:
        """Check, then replay the graph. Raises as `GraphCaptureContext.check_replay`."""
        self._context.check_replay()
        self.graph.replay()


@dataclasses.dataclass
class GraphCaptureContext:
    """State that all groups of one capture share.

    Attributes:
        stream: The captured stream; None on devices without streams.
    """

    stream: torch.Stream | None = None
    _guards: list[CaptureGuard] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def check_replay(self) -> None:
        """Raise unless the graphs that were captured in this context may be replayed. Not collective.

        Takes a quarter of a microsecond for each group of the capture.

        Call it before each replay that does not go through `CapturedGraph.replay`. A graph holds the addresses of its
        groups' workspaces and NCCL's communicators: a replay would use memory that has been freed.

        Raises:
            StaleGraphError: Other groups have taken the place of those of the capture: capture again, with them.
            ClosedError: A group of the capture was destroyed.
            GroupBrokenError: A failure has broken one.
        """
        for guard in self._guards:
            guard.check()

    def captured(self, graph: Graph) -> CapturedGraph[Graph]:
        """Return `graph`, which was captured in this context, with a `replay` that checks before."""
        return CapturedGraph(graph, self)


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
    guards: Sequence[CaptureGuard],
    graph_capture_context: GraphCaptureContext | None,
    stream: torch.Stream | None = None,
) -> Iterator[GraphCaptureContext]:
    """Yield `graph_capture_context`, or a new one, for `stream` if given; run the body on its stream if there is one.

    The communicators enter in the given order, which must be the same on all ranks, and leave in reverse. On leaving
    they exchange what was captured with their peers. On the CPU this is a no-op, so code written for graphs runs.
    Graphs of the context may be replayed as long as the groups of `guards` serve.
    """
    context = context_for(device, graph_capture_context, stream)
    context._guards.extend(guard for guard in guards if guard not in context._guards)  # noqa: SLF001 - ours
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
