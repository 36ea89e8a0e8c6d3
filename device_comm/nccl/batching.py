"""Queue NCCL calls: singly, grouped or deferred; and implement the point-to-point calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.cuda_settings import cuda_settings
from device_comm.handles import CompletedHandle, Handle
from device_comm.nccl.connection import Call, NcclConnection
from device_comm.nccl.dtypes import UINT8
from device_comm.nccl.library import NcclLibrary
from device_comm.nccl.streams import Order, Progress, Streams
from device_comm.nccl.transfers import Collected, Post, QueuedTransfer, Receive, brought_bytes, root_of
from device_comm.nccl.window import Copy, Wish, obstacle_of
from device_comm.outputs import fill
from device_comm.process_group import dense, is_plain
from shm_broadcast.errors import UsageError


class NcclQueue(DeviceCommunicator):
    """Queue calls of one connection on the current stream. The subclass defines the collectives."""

    def __init__(
        self,
        context: CommunicatorContext,
        library: NcclLibrary,
        streams: Streams,
        progress: Progress | None,
    ) -> None:
        """Prepare; send nothing. The arguments are those of `NcclCommunicator`."""
        super().__init__(context)
        self.library: NcclLibrary = library
        self._streams = streams
        self._current = streams.current
        self._progress = progress
        self._health = context.health
        self._connection = NcclConnection(context, library, streams, progress, self._wish)
        self._collected: Collected | None = None
        self._receives: list[Receive] = []
        # Set by a subclass that can ask the driver about captures.
        self._order: Order | None = None

    def _wish(self) -> Wish | None:
        """Return the window that this rank wants, None if the settings ask for none; see `window`."""
        nbytes = cuda_settings(self.context.cuda).nccl_window_bytes
        if not nbytes:
            return None
        copy, obstacle = self._copier()
        return Wish(nbytes, obstacle or obstacle_of(self.library), copy)

    def _copier(self) -> tuple[Copy | None, str]:
        """Return what queues copies for a window, or why this rank cannot; the subclass knows the device's driver."""
        return None, "this communicator has no driver that could copy, and order its calls"

    def _admit(self, stream: int, name: str) -> None:
        """Order a call on `stream` behind the earlier ones of the group. Without an order NCCL alone keeps one."""
        order = self._order
        if order is not None and stream != order.hot:
            order.admit(stream, name)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Collect the calls in this context and queue them as one NCCL group, in which no call waits for another.

        Leaving the context queues the group; results are ordered on the stream behind it. Put sends and receives in
        both directions between two ranks into one group. Wait for the handles of transfers behind the context.
        """
        if self._collected is not None:
            yield
            return
        # Deferred receives stay deferred, as in `_isend`: the peer may send only after it has got this group.
        self._begin("group", connects=True, flushes=False)
        self._connection.hot = None
        collected = self._collected = Collected()
        try:
            yield
        finally:
            self._collected = None
            try:
                if collected.posts:
                    # Other ranks may collect more than this one, so nothing of it is staged.
                    self._queue(
                        "group", collected.posts, collected.within_s, collected.peers, may_stage=False
                    )
            finally:
                self._rearm()
        for finish in collected.finishers:
            finish()

    @property
    def is_collecting(self) -> bool:
        """Return whether calls are collected now, and queued when the context of `group` is left."""
        return self._collected is not None

    def _begin(self, name: str, *, connects: bool, flushes: bool = True) -> None:
        """Check that calls are possible, connect if necessary, and with `flushes` queue the deferred receives."""
        self._health.check_usable(name)
        if not self._connection.is_connected and not connects and self.world_size > 2:
            raise UsageError(
                f"{self._health.where(name)}: the ranks are not connected yet, and only some of them take part in this "
                "call; let all call `connect` or a collective first, or create the communicator with eager=True"
            )
        self._connection.connect()
        if flushes:
            self._flush_receives()

    def _rearm(self) -> None:
        if self._collected is None and not self._receives:
            self._connection.rearm()

    def _call(
        self,
        name: str,
        posts: Sequence[Post],
        timeout_s: float | None,
        *,
        finish: Callable[[], object] | None = None,
        peers: tuple[int, ...] | None = None,
    ) -> None:
        """Queue `posts` as one, then call `finish`; within `group`, collect both for its end."""
        within_s = timeout_s or self.context.timeout_s
        if self._collected is not None:
            self._collected.add(posts, finish, within_s, peers)
            return
        if posts:
            self._queue(name, posts, within_s, peers)
        if finish is not None:
            finish()

    def _queue(
        self,
        name: str,
        posts: Sequence[Post],
        within_s: float | None,
        peers: tuple[int, ...] | None,
        *,
        may_stage: bool = True,
    ) -> None:
        connection, library = self._connection, self.library
        stream = self._current()
        self._admit(stream, name)
        with connection.calling(Call(name, peers, within_s), brought_bytes(posts), root_of(name, posts)):
            handle = connection.handle()
            window = connection.window if may_stage else None
            if len(posts) == 1:
                function, arguments, _ = posts[0]
                if window is None or not window.carry(function, arguments, handle, stream, connection.settle):
                    status = library.functions[function](*arguments, handle, stream)
                    if status:
                        connection.settle(function, status)
            else:
                self._queue_group(posts, handle, stream)
            if self._progress is not None:
                self._progress.mark(stream)

    def _queue_group(self, posts: Sequence[Post], handle: ctypes.c_void_p, stream: int) -> None:
        connection, library = self._connection, self.library
        failed = ""
        status = library.functions["ncclGroupStart"]()
        if status:
            raise connection.failed("ncclGroupStart", status)
        for function, arguments, _ in posts:
            status = library.functions[function](*arguments, handle, stream)
            if status not in (0, 7):
                failed = function
                break
        # Always end the group: an open one would collect all later calls of this thread.
        ended = library.functions["ncclGroupEnd"]()
        if failed:
            raise connection.failed(failed, status)
        connection.settle("ncclGroupEnd", ended)

    def _moved(
        self,
        name: str,
        posts: Sequence[Post],
        rows: torch.Tensor,
        dim: int,
        timeout_s: float | None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queue the calls that fill `rows`; return them contiguous with the first dimension moved to `dim`.

        If there is an `output`, the result goes there; `rows` are its memory if it can take them as they are.
        """
        if dim == 0 and (output is None or rows.data_ptr() == output.data_ptr()):
            self._call(name, posts, timeout_s)
            return rows
        moved = rows.movedim(0, dim)
        result = rows.new_empty(moved.shape) if output is None else output
        self._call(name, posts, timeout_s, finish=lambda: fill(result, moved))
        return result

    # ------------------------------------------------------------------ point to point

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        # Deferred receives stay deferred: the peer may send only after it has received this.
        self._begin("send", connects=False, flushes=False)
        source = dense(tensor)
        if not source.numel():
            return CompletedHandle()
        peer = self.context.ranks[dst]
        posts = [Post("ncclSend", (source.data_ptr(), source.nbytes, UINT8, dst), source)]
        self._call(f"send to {peer}", posts, timeout_s, peers=(peer,))
        return QueuedTransfer(self._streams, source)

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        into = tensor.detach()
        if not into.numel():
            self._health.check_usable("recv")
            return CompletedHandle()
        landing = into if is_plain(into) else into.new_empty(into.shape)
        peer = self.context.ranks[src]
        post = Post("ncclRecv", (landing.data_ptr(), landing.nbytes, UINT8, src), landing)
        finish = None if landing is into else lambda: fill(into, landing)
        handle = QueuedTransfer(self._streams, (landing, into), self._flush_receives)
        if self._collected is not None:
            self._call("recv", [post], timeout_s, finish=finish, peers=(peer,))
            handle.queued()
            return handle
        self._health.check_usable("recv")
        if not self._connection.is_connected and self.world_size > 2:
            self._begin("recv", connects=False)
        self._receives.append(Receive(post, finish, peer, timeout_s, handle))
        self._connection.hot = None
        return handle

    def _flush_receives(self) -> None:
        """Queue the deferred receives as one group."""
        receives, self._receives = self._receives, []
        if not receives:
            return
        self._begin("recv", connects=False)
        limits = [receive.within_s for receive in receives]
        within_s = None if None in limits else max(limit for limit in limits if limit is not None)
        peers = tuple(sorted({receive.peer for receive in receives}))
        name = f"recv from {', '.join(map(str, peers))}"
        self._queue(name, [receive.post for receive in receives], within_s, peers)
        for receive in receives:
            receive.handle.queued()
            if receive.finish is not None:
                receive.finish()
        self._rearm()


__all__ = ["NcclQueue"]
