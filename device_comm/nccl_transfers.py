"""What is waiting to be queued with NCCL, and the handles of what was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from device_comm.streams import Streams


class Post(NamedTuple):
    """One call of the library.

    Attributes:
        function: Its name.
        arguments: All but the communicator and the stream, which are the last two of each.
        keep: Owns the memory until the call is made; from then on the order of the stream does.
    """

    function: str
    arguments: tuple[int, ...]
    keep: object


class Receive(NamedTuple):
    """A receive that was put off until somebody waits for it.

    NCCL carries a communicator's calls out one after the other: a receive that was queued at once would keep a send
    behind it from starting, for which the peer may wait in turn.
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
        finishers: What is to be done behind them.
        within_s: The longest of their deadlines.
        peers: Global ranks, where all calls are point to point.
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
        """Take one more call."""
        self.posts.extend(posts)
        if finish is not None:
            self.finishers.append(finish)
        self.within_s = max(self.within_s, within_s)
        both = None if peers is None or self.peers is None else {*self.peers, *peers}
        self.peers = None if both is None else tuple(sorted(both))


class QueuedTransfer:
    """A transfer that is carried out in the order of a stream; owns its memory; see `Handle`.

    Waiting keeps the stream that is current then behind the transfer, not the host.
    """

    def __init__(self, streams: Streams, keep: object, flush: Callable[[], None] | None = None) -> None:
        """Be the handle of a transfer that is queued, or with `flush` of one that `flush` will queue."""
        self._streams = streams
        self._flush = flush
        self._stream = streams.current()
        self._keep = keep

    def queued(self) -> None:
        """Note that the transfer has been queued on the current stream."""
        self._flush = None
        self._stream = self._streams.current()

    def is_completed(self) -> bool:
        """Return whether all that the stream held is complete, the transfer with it. Not within a capture."""
        self._push()
        return self._streams.is_idle(self._stream)

    def wait(self) -> None:
        """Let the current stream wait for the transfer; may be called more than once."""
        self._push()
        current = self._streams.current()
        if current != self._stream:
            self._streams.wait(current, self._stream)

    def _push(self) -> None:
        flush, self._flush = self._flush, None
        if flush is not None:
            flush()


__all__ = ["Collected", "Post", "QueuedTransfer", "Receive"]
