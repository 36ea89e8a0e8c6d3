"""The host plane over Gloo, for groups whose ranks do not all share memory.

An object travels as one frame of the codec. The first message holds up to `FIRST_BYTES` of it, and the receiver posts a
buffer of that size before it knows the length. The rest of a longer frame follows at once in a second message.
Therefore no object needs a round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from coordinator.host.frame_turns import FrameTurns, Turn
from coordinator.host.plane import GatheringHostPlane, isend_with_tensors, refuse_any
from coordinator.host.process_groups import GlooBackend, abort_gloo
from coordinator.host.tags import ALL_GATHER_TAG, BROADCAST_TAG, BROADCAST_TENSOR_TAG, GATHER_OBJECTS_TAG
from coordinator.host.tensor_dict_format import PackedDict, Slicing, split
from device_comm.gloo.exchange import exchange
from device_comm.handles import CompletedHandle, Handle, PointToPointHandle
from device_comm.health import GroupHealth, Operation
from device_comm.process_group import as_bytes, backend_timeout, is_plain
from device_comm.stages import Turns, collective, in_stages, until
from device_comm.works import CollectiveWork, PointToPointWorks, WaiterThreads
from shm_broadcast import codec
from shm_broadcast.errors import CapabilityError, ClosedError
from shm_broadcast.interruption import tolerating

Result = TypeVar("Result")

# Size of the first message of a frame, for which receivers post a buffer; a scheduler's step is far smaller.
FIRST_BYTES: Final = 64 << 10

# A sender does not wait for frames of at most `FIRST_BYTES`. Gloo sends them when the receiver is ready, and their
# memory is kept here until then. When more than this many are open, a thread waits for the newest of them.
EAGER_SENDS: Final = 32
# A sender whose receiver has not taken this much, under one tag, waits for the receiver.
EAGER_BYTES: Final = 64 << 20


class _EagerSends:
    """Frames that no call waits for, to one peer and under one tag. They complete in the order of sending."""

    def __init__(self) -> None:
        self.open: list[tuple[dist.Work, torch.Tensor]] = []
        self.settling: PointToPointWorks | None = None
        self.nbytes = 0

    def add(self, work: dist.Work, data: torch.Tensor) -> None:
        self.open.append((work, data))
        self.nbytes += data.numel()

    def settle(self, threads: WaiterThreads, peer: int) -> PointToPointWorks:
        """Return the wait for the frames that are being settled; if there are none, start one for all open frames."""
        if self.settling is None:
            # Taken out first: another thread, or a signal handler, may add a frame while a thread is started.
            kept, self.open = self.open, []
            try:
                self.settling = PointToPointWorks(threads, [(peer, kept[-1][0])], kept)
            except BaseException:
                self.open = [*kept, *self.open]
                raise
        return self.settling

    def settled(self, works: PointToPointWorks) -> None:
        """Account for frames that have been taken; another thread may have done so, and have begun with the next."""
        if self.settling is works:
            self.settling = None
            self.nbytes = sum(data.numel() for _, data in self.open)


class GlooHostPlane(GatheringHostPlane):
    """The host plane of one group over Gloo. Ranks here are ranks in the group."""

    carries_whole: bool = False

    def __init__(
        self, backend: GlooBackend, health: GroupHealth, rank_in_group: int, timeout_s: float
    ) -> None:
        """Use a backend, which the plane owns from now on.

        Args:
            backend: A Gloo backend among exactly these ranks, which nothing else uses.
            health: The group's shared state.
            rank_in_group: This process's rank in the group.
            timeout_s: Deadline of collectives without their own, in seconds.
        """
        self._ranks = health.ranks
        self._rank = rank_in_group
        self._open_backend: GlooBackend | None = backend
        self._health = health
        self._timeout_s = timeout_s
        self._threads = WaiterThreads(health.name)
        self._eager: dict[tuple[int, int], _EagerSends] = {}
        self._sending, self._receiving = FrameTurns(health), FrameTurns(health)
        self._others = [rank for rank in range(len(self._ranks)) if rank != rank_in_group]
        health.on_abort(self.abort)
        self._turns = Turns(health, "host")

    @property
    def _backend(self) -> GlooBackend:
        backend = self._open_backend
        if backend is None:
            raise ClosedError(
                f"{self._health.where('a call')}: the group was destroyed while the call was being posted"
            )
        return backend

    # ------------------------------------------------------------------ collectives

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once every rank has called this."""
        limit_s = timeout_s or self._timeout_s

        def stages(operation: Operation, end: float) -> None:
            left_s = self._health.refusals.settle(self._health, operation, until(end))
            options = dist.BarrierOptions()
            options.timeout = backend_timeout(left_s)
            with self._health.transport(operation) as post:
                work = post(self._backend.barrier, options)
            self._health.wait(operation, CollectiveWork(work), left_s)

        self._turns.make("barrier", stages, limit_s)

    def _in_turn(self, name: str, call: Callable[[float | None], Result], timeout_s: float | None) -> Result:
        """Return `call(left_s)` when no other collective of this rank is in progress."""
        return self._turns.take(name, lambda end: call(until(end)), timeout_s or self._timeout_s)

    def _all_gather(self, name: str, timeout_s: float | None, data: bytes) -> list[memoryview]:
        limit_s = timeout_s or self._timeout_s
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        result = bytearray(len(data) * len(self._ranks))
        into = torch.frombuffer(result, dtype=torch.uint8).view(-1, len(data))
        into[self._rank] = own
        parts = dict.fromkeys(self._others, own), {rank: into[rank] for rank in self._others}

        # If ranks make different calls by mistake, an integer must not meet the frame of an object.
        tag = ALL_GATHER_TAG if name == "all_gather_integers" else GATHER_OBJECTS_TAG

        def stages(operation: Operation) -> None:
            left_s = self._health.refusals.settle(self._health, operation, limit_s)
            exchange(self._backend, self._threads, self._health, operation, parts, tag, left_s)

        collective(self._health, "host", name, stages, len(data))
        rows = memoryview(result)
        return [rows[start : start + len(data)] for start in range(0, len(result), len(data))]

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return rank `src`'s object on every rank."""
        # This call is not numbered: it does not wait for calls in progress, so ranks would number those differently and
        # blame the wrong rank. The wait here names its ranks itself.
        name = "broadcast_object"
        if self._rank != src:
            return self.recv_object(src, timeout_s, type_, name, BROADCAST_TAG)
        self._isend_message(codec.encode(obj), self._others, name, timeout_s, BROADCAST_TAG).wait()
        return obj

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], src: int, timeout_s: float | None) -> None:
        """Fill contiguous CPU tensors on every rank with those of rank `src`, one after the other."""
        for tensor in tensors:
            if self._rank == src:
                self._send_to(tensor, self._others, timeout_s, BROADCAST_TENSOR_TAG).wait()
            else:
                self.recv_tensor(tensor, src, timeout_s, BROADCAST_TENSOR_TAG)

    # ------------------------------------------------------------------ point to point

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Send an object to rank `dst`; return when the transport owns it."""
        self.isend_object(obj, dst, name, timeout_s, tag).wait()

    def isend_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> Handle:
        """Start to send an object to rank `dst`; this copies the object."""
        return self._isend_message(codec.encode(obj), [dst], name, timeout_s, tag)

    def send_message(
        self, message: codec.Message, dst: int, name: str, timeout_s: float | None, tag: int
    ) -> None:
        """Send an already encoded object to rank `dst`; return when the transport owns it."""
        self._isend_message(message, [dst], name, timeout_s, tag).wait()

    def _isend_message(
        self, message: codec.Message, peers: Sequence[int], name: str, timeout_s: float | None, tag: int
    ) -> Handle:
        operation = self._health.begin_point_to_point("host", f"{name} to {self._global(peers)}")
        return self._start_frame(operation, message, peers, tag, timeout_s or self._timeout_s)

    def recv_object(self, src: int, timeout_s: float | None, type_: Any, name: str, tag: int) -> Any:
        """Receive an object from rank `src`; without `timeout_s` this waits until one arrives."""
        operation = self._health.begin_point_to_point("host", f"{name} from {self._global([src])}")
        return self._receive_frame(operation, src, tag, timeout_s, type_)

    def recv_each(self, sources: Sequence[int], timeout_s: float | None, name: str, tag: int) -> list[Any]:
        """Receive an object from each of `sources`."""
        limit_s = timeout_s or self._timeout_s
        operation = self._health.begin_point_to_point("host", f"{name} from {self._global(sources)}")

        def stages() -> list[Any]:
            # Receive all frames before decoding any: if one cannot be decoded, nothing of the others may be left
            # behind.
            frames = self._receive_frames(operation, sources, tag, limit_s)
            return [codec.decode(frame) for frame in frames]

        return in_stages(self._health, operation, stages)

    def isend_tensor(self, tensor: torch.Tensor, dst: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to send a contiguous CPU tensor to rank `dst`."""
        return self._send_to(tensor, [dst], timeout_s, tag)

    def _send_to(
        self, tensor: torch.Tensor, peers: Sequence[int], timeout_s: float | None, tag: int
    ) -> Handle:
        operation = self._health.begin_point_to_point("host", f"send to {self._global(peers)}")
        data = [as_bytes(tensor)]

        def stages() -> Handle:
            with self._health.transport(operation) as post:
                works = [(self._ranks[peer], post(self._backend.send, data, peer, tag)) for peer in peers]
            return self._send_handle(operation, works, tensor, timeout_s or self._timeout_s)

        return in_stages(self._health, operation, stages)

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to receive into a tensor of any layout and device."""
        operation = self._health.begin_point_to_point("host", f"recv from {self._global([src])}")
        return self._post_receive(operation, tensor, src, timeout_s, tag)

    def _post_receive(
        self, operation: Operation, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int
    ) -> Handle:
        into = tensor.detach()
        is_direct = is_plain(into) and into.device.type == "cpu"
        landing = into if is_direct else torch.empty(into.shape, dtype=into.dtype, device="cpu")

        def stages() -> Handle:
            with self._health.transport(operation) as post:
                works = [(self._ranks[src], post(self._backend.recv, [as_bytes(landing)], src, tag))]
            return self._handle(operation, works, landing, timeout_s, None if is_direct else (into, landing))

        return in_stages(self._health, operation, stages)

    def recv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> None:
        """Receive into a tensor of any layout and device."""
        operation = self._health.begin_point_to_point("host", f"recv from {self._global([src])}")

        def stages() -> None:
            self._post_receive(operation, tensor, src, timeout_s, tag).wait()

        in_stages(self._health, operation, stages)

    def recv_any(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        tag: int,
        timeout_s: float | None,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Refuse: Gloo receives from one rank at a time."""
        raise refuse_any(self._health)

    def pack(self, tensor_dict: Mapping[Any, Any], slicing: Slicing) -> PackedDict:
        """Leave small CPU tensors in the message: a message of its own would cost each of them a round."""
        return split(tensor_dict, slicing)

    def isend_tensor_dict(self, packed: PackedDict, dst: int, timeout_s: float | None) -> list[Handle]:
        """Start to send the message and the CPU tensors beside it."""
        return isend_with_tensors(self, packed, dst, timeout_s)

    # ------------------------------------------------------------------ frames

    def _start_frame(
        self, operation: Operation, message: codec.Message, peers: Sequence[int], tag: int, timeout_s: float
    ) -> Handle:
        frame = bytearray(message.nbytes)
        message.write_into(frame)
        data = torch.frombuffer(frame, dtype=torch.uint8)
        first, rest = data[:FIRST_BYTES], data[FIRST_BYTES:]
        works: list[tuple[int, dist.Work]] = []
        end = time.monotonic() + timeout_s

        def stages() -> Handle:
            turns = self._sending.take(operation, peers, tag, end)
            try:
                with self._health.transport(operation) as post:
                    for peer in peers:
                        sent = post(self._backend.send, [first], peer, tag)
                        if rest.numel():
                            # Keep both works: Gloo drops a send whose work is released before the receiver is ready.
                            works.append((self._ranks[peer], sent))
                            works.append((self._ranks[peer], post(self._backend.send, [rest], peer, tag)))
                        else:
                            self._eager.setdefault((peer, tag), _EagerSends()).add(sent, data)
                            self._begin_to_settle(peer, tag)
            finally:
                for turn in turns:
                    turn.release()
            with self._health.transport(operation):
                for peer in peers:
                    self._await_room(operation, peer, tag, end)
            return self._send_handle(operation, works, data, until(end)) if works else CompletedHandle()

        return in_stages(self._health, operation, stages)

    def _begin_to_settle(self, peer: int, tag: int) -> None:
        """Let a thread wait for eager sends if there are many of them. The caller has the turn of this peer and tag."""
        sends = self._eager[peer, tag]
        if sends.settling is not None and sends.settling.is_complete():
            sends.settled(sends.settling)
        if len(sends.open) > EAGER_SENDS or sends.nbytes > EAGER_BYTES:
            sends.settle(self._threads, self._ranks[peer])

    def _await_room(self, operation: Operation, peer: int, tag: int, end: float) -> None:
        """Wait while the receiver is too far behind with the eager sends."""
        sends = self._eager.get((peer, tag))
        while sends is not None and sends.nbytes > EAGER_BYTES and (works := sends.settling) is not None:
            self._health.wait(operation, works, until(end))
            sends.settled(works)

    def _receive_frame(
        self, operation: Operation, src: int, tag: int, timeout_s: float | None, type_: Any = None
    ) -> Any:
        def stages() -> Any:
            [frame] = self._receive_frames(operation, [src], tag, timeout_s)
            return codec.decode(frame, type_)

        return in_stages(self._health, operation, stages)

    def _receive_frames(
        self, operation: Operation, sources: Sequence[int], tag: int, timeout_s: float | None
    ) -> list[bytearray | memoryview]:
        """Receive a frame from each of `sources`, one after the other with those that other threads receive."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        turns = self._receiving.take(operation, sources, tag, end)
        try:
            firsts = self._receive_first(operation, sources, tag, end, turns)
            return [self._complete_frame(operation, src, tag, firsts[src], end, turns) for src in sources]
        finally:
            for turn in turns:
                turn.release()

    def _receive_first(
        self,
        operation: Operation,
        peers: Sequence[int],
        tag: int,
        end: float | None,
        turns: Sequence[Turn],
    ) -> dict[int, bytearray]:
        """Receive the first message of a frame from each of `peers`."""
        firsts = {peer: bytearray(FIRST_BYTES) for peer in peers}
        works: list[tuple[int, dist.Work]] = []
        with self._health.transport(operation) as post:
            for peer, first in firsts.items():
                into = torch.frombuffer(first, dtype=torch.uint8)
                works.append((self._ranks[peer], post(self._backend.recv, [into], peer, tag)))
        self._handle(operation, works, firsts, None if end is None else until(end), turns=turns).wait()
        return firsts

    def _complete_frame(
        self,
        operation: Operation,
        src: int,
        tag: int,
        first: bytearray,
        end: float | None,
        turns: Sequence[Turn],
    ) -> bytearray | memoryview:
        """Receive the rest of a frame after its first message; return the whole frame."""
        total = codec.frame_length(first)
        if total <= FIRST_BYTES:
            return memoryview(first)[:total]
        try:
            frame = bytearray(total)
        except (MemoryError, OverflowError) as error:
            # The rest of the frame cannot be received, and would be mistaken for the next message.
            refusal = CapabilityError(
                f"{self._health.where(operation)}: no memory for a message of {total} bytes; "
                "the group is now unusable, destroy it",
                requirement=f"{total} bytes of memory",
            )
            self._health.fail(refusal)
            raise refusal from error
        frame[:FIRST_BYTES] = first
        rest = torch.frombuffer(frame, dtype=torch.uint8)[FIRST_BYTES:]
        with self._health.transport(operation) as post:
            work = post(self._backend.recv, [rest], src, tag)
        # The sender is in the middle of its frame: from here on silence is a failure.
        limit_s = self._timeout_s if end is None else until(end)
        self._handle(operation, [(self._ranks[src], work)], rest, limit_s, turns=turns).wait()
        return frame

    def _handle(
        self,
        operation: Operation,
        works: Sequence[tuple[int, dist.Work]],
        keep: object,
        timeout_s: float | None,
        landing: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        turns: Sequence[Turn] = (),
    ) -> PointToPointHandle:
        """Return the handle of a transfer, for which a thread waits that has `turns`."""
        with self._health.transport(operation):  # the system may have no thread to give
            transfer = PointToPointWorks(self._threads, works, keep)
        for turn in turns:
            turn.awaited = transfer
        return PointToPointHandle(self._health, operation, transfer, timeout_s, landing)

    def _send_handle(
        self, operation: Operation, works: Sequence[tuple[int, dist.Work]], keep: object, timeout_s: float
    ) -> PointToPointHandle:
        unfinished = self._health.unfinished_sends
        with self._health.transport(operation):
            transfer = PointToPointWorks(self._threads, works, keep, unfinished)
        return PointToPointHandle(self._health, operation, transfer, timeout_s)

    def _global(self, peers: Sequence[int]) -> str:
        return ", ".join(f"rank {self._ranks[peer]}" for peer in peers)

    # ------------------------------------------------------------------ lifecycle

    def abort(self) -> None:
        """End every operation in flight, here and on the peers."""
        backend = self._open_backend
        if backend is not None:
            abort_gloo(backend)

    def flush(self, timeout_s: float) -> None:
        """Wait until the kernel has everything that was sent, so that closing the connections loses nothing."""
        deadline = time.monotonic() + timeout_s
        for (peer, _), sends in list(self._eager.items()):
            # If this peer's connection is closed, another peer may still want what was sent to it.
            with tolerating(RuntimeError):
                while sends.settling is not None or sends.open:
                    works = sends.settle(self._threads, self._ranks[peer])
                    if not works.poll(max(deadline - time.monotonic(), 0.0)):
                        # A peer that takes nothing any more cannot keep this rank from leaving.
                        return
                    sends.settled(works)

    def close(self, timeout_s: float) -> None:
        """End the threads, after aborting the operations that still wait in them."""
        if self._threads.is_busy:
            self.abort()
        self._threads.close(timeout_s)
        self._eager.clear()
        # The connections close with the last reference to the backend; a user may keep the destroyed group.
        self._open_backend = None
