"""NCCL calls that wait to be queued, and handles of transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from device_comm.nccl.streams import Streams


class Post(NamedTuple):
    """One call of an NCCL function.

    Attributes:
        function: The function's name.
        arguments: All arguments except the last two, the communicator and the stream.
        keep: Keeps the memory allocated until the call is made; from then on the stream's order protects it.
    """

    function: str
    arguments: tuple[int, ...]
    keep: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


def brought_bytes(posts: Sequence[Post]) -> int:
    """Return how many bytes this rank brings to the call that consists of `posts`."""
    sent = sum(post.arguments[1] for post in posts if post.function == "ncclSend")
    if sent or posts[0].function == "ncclRecv":
        return sent
    kept = posts[0].keep
    return (kept[0] if isinstance(kept, tuple) else kept).nbytes


def root_of(name: str, posts: Sequence[Post]) -> int:
    """Return the place of the root, or of the other rank, of the call `name` that consists of `posts`.

    It is the last argument of a send, a receive, a broadcast and a reduce. All ranks of a scatter receive from the root
    last, and all ranks of a gather send to it first. Calls without a root get any number.
    """
    return posts[-1 if name == "scatter" else 0].arguments[-1]


class Receive(NamedTuple):
    """A receive that is deferred until its handle is used or a collective follows.

    NCCL runs the calls of a communicator one after the other. A receive queued at once would block a later send, and
    the peer may wait for that send before it answers.
    """

    post: Post
    finish: Callable[[], object] | None
    peer: int
    within_s: float | None
    handle: QueuedTransfer


@dataclasses.dataclass
class Collected:
    """The calls made within `NcclCommunicator.group`.

    Attributes:
        posts: Calls of the library, in order.
        finishers: Functions to call after the posts have been queued.
        within_s: The longest deadline of the calls, in seconds.
        peers: Global ranks of the peers if all calls are point to point, else None.
    """

    posts: list[Post] = dataclasses.field(default_factory=list)
    finishers: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    within_s: float = 0.0
    peers: tuple[int, ...] | None = ()

    def add(
        self,
        posts: Sequence[Post],
        finish: Callable[[], object] | None,
        within_s: float,
        peers: tuple[int, ...] | None,
    ) -> None:
        """Add one more call."""
        self.posts.extend(posts)
        if finish is not None:
            self.finishers.append(finish)
        self.within_s = max(self.within_s, within_s)
        both = None if peers is None or self.peers is None else {*self.peers, *peers}
        self.peers = None if both is None else tuple(sorted(both))


class QueuedTransfer:
    """A transfer that runs in the order of a stream and owns its memory; see `Handle`.

    `wait` makes the stream that is current then wait for the transfer; it does not block the host.
    """

    def __init__(self, streams: Streams, keep: object, flush: Callable[[], None] | None = None) -> None:
        """Create the handle of a transfer that is queued, or with `flush` of one that `flush` will queue."""
        self._streams = streams
        self._flush = flush
        self._stream = streams.current()
        self._keep = keep

    def queued(self) -> None:
        """Note that the transfer has been queued on the current stream."""
        self._flush = None
        self._stream = self._streams.current()

    def is_completed(self) -> bool:
        """Return whether all work of the transfer's stream is complete. Not allowed during a capture."""
        self._push()
        return self._streams.is_idle(self._stream)

    def wait(self) -> None:
        """Make the current stream wait for the transfer; may be called more than once."""
        self._push()
        current = self._streams.current()
        if current != self._stream:
            self._streams.wait(current, self._stream)

    def _push(self) -> None:
        flush, self._flush = self._flush, None
        if flush is not None:
            flush()


__all__ = ["Collected", "Post", "QueuedTransfer", "Receive"]
