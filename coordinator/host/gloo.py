"""The host plane over Gloo, for groups whose ranks do not all share memory.

An object travels as one frame of the codec. The first `FIRST_BYTES` of it are one message of at most that
size, into which the receiver has a buffer of fixed size ready; only what is longer needs a second
message, which follows at once. So no object ever needs a round trip.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from coordinator.host.plane import (
    frame_of,
    gather_frames,
    isend_with_tensors,
    pack_integer,
    refuse_any,
    unpack_integer,
)
from coordinator.host.process_groups import GlooBackend, abort_gloo
from coordinator.host.tags import BROADCAST_TAG, BROADCAST_TENSOR_TAG, GATHER_TAG, OBJECT_TAG
from coordinator.host.tensor_dict_format import PackedDict, Slicing, pack_beside
from device_comm.handles import CompletedHandle, Handle, PointToPointHandle
from device_comm.health import GroupHealth, Operation
from device_comm.process_group import as_bytes, backend_timeout, is_plain
from device_comm.works import CollectiveWork, PointToPointWorks, WaiterThreads
from shm_broadcast import codec
from shm_broadcast.errors import CapabilityError, ClosedError

# Receivers post this much for the first message of a frame: a scheduler's step fits many times.
FIRST_BYTES: Final = 64 << 10

# Frames of at most `FIRST_BYTES` are not waited for. Gloo sends them when the receiver is ready for them; until
# then their memory is kept here. So many may be open before a thread waits for the newest of them.
EAGER_SENDS: Final = 32
# A sender that is so far ahead of its receiver, under one tag, waits for it.
EAGER_BYTES: Final = 64 << 20


class _EagerSends:
    """Frames that nobody waits for, to one peer and under one tag: those complete in the order they were sent."""

    def __init__(self) -> None:
        self.open: list[tuple[dist.Work, torch.Tensor]] = []
        self.settling: PointToPointWorks | None = None
        self.nbytes = 0

    def add(self, work: dist.Work, data: torch.Tensor) -> None:
        self.open.append((work, data))
        self.nbytes += data.numel()

    def settle(self, threads: WaiterThreads, peer: int) -> PointToPointWorks:
        """Return what completes with the frames being settled, or if there are none with all open ones."""
        if self.settling is None:
            newest, _ = self.open[-1]
            self.settling = PointToPointWorks(threads, [(peer, newest)], self.open)
            self.open = []
        return self.settling

    def settled(self) -> None:
        self.settling = None
        self.nbytes = sum(data.numel() for _, data in self.open)


class GlooHostPlane:
    """The host plane of one group over Gloo. Ranks here are ranks in the group."""

    def __init__(
        self, backend: GlooBackend, health: GroupHealth, rank_in_group: int, timeout_s: float
    ) -> None:
        """Take over what connects the ranks.

        Args:
            backend: Gloo among exactly these ranks, used by nobody else.
            health: The group's shared state.
            rank_in_group: This process's position.
            timeout_s: Deadline of collectives that state none.
        """
        self._ranks = health.ranks
        self._rank = rank_in_group
        self._open_backend: GlooBackend | None = backend
        self._health = health
        self._timeout_s = timeout_s
        self._threads = WaiterThreads(health.name)
        self._eager: dict[tuple[int, int], _EagerSends] = {}
        self._others = [rank for rank in range(len(self._ranks)) if rank != rank_in_group]
        health.on_abort(self.abort)

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
        operation = self._health.begin("host", "barrier")
        deadline = timeout_s or self._timeout_s
        options = dist.BarrierOptions()
        options.timeout = backend_timeout(deadline)
        with self._health.transport(operation):
            work = self._backend.barrier(options)
        self._health.wait(operation, CollectiveWork(work), deadline)

    def _all_gather(self, operation: Operation, timeout_s: float | None, data: bytes) -> list[memoryview]:
        """Return every rank's bytes, in rank order; all ranks bring the same number of bytes."""
        deadline = timeout_s or self._timeout_s
        options = AllgatherOptions()
        options.timeout = backend_timeout(deadline)
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        result = bytearray(len(data) * len(self._ranks))
        with self._health.transport(operation):
            work = self._backend._allgather_base(torch.frombuffer(result, dtype=torch.uint8), own, options)
        self._health.wait(operation, CollectiveWork(work), deadline)
        rows = memoryview(result)
        return [rows[start : start + len(data)] for start in range(0, len(result), len(data))]

    def all_gather_integers(self, value: int, timeout_s: float | None = None) -> list[int]:
        """Return every rank's integer of up to 64 bits, in rank order."""
        operation = self._health.begin("host", "all_gather_integers")
        return [unpack_integer(row) for row in self._all_gather(operation, timeout_s, pack_integer(value))]

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return the ranks' objects on every rank, in rank order. One round when all are small."""
        name = "all_gather_object"
        self._health.check_usable(name)
        frame = frame_of(obj)
        gather = partial(self._all_gather, self._health.begin("host", name), timeout_s)
        return [codec.decode(row) for row in gather_frames(frame, gather, self._health)]

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return rank `src`'s object on every rank."""
        # Not counted: it does not stand in line behind calls under way, so ranks would number those differently, and
        # blame by that. What is awaited here names the ranks itself.
        if self._rank == src:
            self._health.check_usable("broadcast_object")
            message = codec.encode(obj)
            name = f"broadcast_object to {self._global(self._others)}"
            operation = self._health.begin_point_to_point("host", name)
            deadline = timeout_s or self._timeout_s
            self._start_frame(operation, message, self._others, BROADCAST_TAG, deadline).wait()
            return obj
        operation = self._health.begin_point_to_point("host", f"broadcast_object from {self._global([src])}")
        return self._receive_frame(operation, src, BROADCAST_TAG, timeout_s, type_)

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], src: int, timeout_s: float | None) -> None:
        """Fill contiguous CPU tensors on every rank with those of rank `src`, one after the other."""
        for tensor in tensors:
            if self._rank == src:
                self._send_to(tensor, self._others, timeout_s, BROADCAST_TENSOR_TAG).wait()
            else:
                self.irecv_tensor(tensor, src, timeout_s, BROADCAST_TENSOR_TAG).wait()

    def gather_object(self, obj: object, dst: int, timeout_s: float | None = None) -> list[Any] | None:
        """Return the ranks' objects on rank `dst`, in rank order; None elsewhere."""
        self._health.check_usable("gather_object")
        deadline = timeout_s or self._timeout_s
        if self._rank != dst:
            message = codec.encode(obj)
            operation = self._health.begin("host", "gather_object")
            self._start_frame(operation, message, [dst], GATHER_TAG, deadline).wait()
            return None
        operation = self._health.begin("host", "gather_object")
        firsts = self._receive_first(operation, self._others, GATHER_TAG, deadline)
        # All frames before any is decoded: one that cannot be must leave nothing of the others behind.
        frames = {
            rank: self._complete_frame(operation, rank, GATHER_TAG, first, deadline)
            for rank, first in firsts.items()
        }
        objects = {rank: codec.decode(frame) for rank, frame in frames.items()}
        objects[dst] = obj
        return [objects[rank] for rank in range(len(self._ranks))]

    # ------------------------------------------------------------------ point to point

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Send an object to rank `dst`; return when the transport owns it."""
        self.isend_object(obj, dst, name, timeout_s, tag).wait()

    def isend_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> Handle:
        """Start to send an object to rank `dst`, of which this takes a copy."""
        message = codec.encode(obj)
        operation = self._health.begin_point_to_point("host", f"{name} to {self._global([dst])}")
        return self._start_frame(operation, message, [dst], tag, timeout_s or self._timeout_s)

    def recv_object(
        self,
        src: int,
        timeout_s: float | None = None,
        type_: Any = None,
        name: str = "recv_object",
        tag: int = OBJECT_TAG,
    ) -> Any:
        """Receive an object from rank `src`; without a deadline this waits until there is one."""
        operation = self._health.begin_point_to_point("host", f"{name} from {self._global([src])}")
        return self._receive_frame(operation, src, tag, timeout_s, type_)

    def isend_tensor(self, tensor: torch.Tensor, dst: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to send a contiguous CPU tensor to rank `dst`."""
        return self._send_to(tensor, [dst], timeout_s, tag)

    def _send_to(
        self, tensor: torch.Tensor, peers: Sequence[int], timeout_s: float | None, tag: int
    ) -> Handle:
        operation = self._health.begin_point_to_point("host", f"send to {self._global(peers)}")
        data = [as_bytes(tensor)]
        with self._health.transport(operation):
            works = [(self._ranks[peer], self._backend.send(data, peer, tag)) for peer in peers]
        return self._handle(operation, works, tensor, timeout_s or self._timeout_s)

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to receive into a tensor of any layout and device."""
        operation = self._health.begin_point_to_point("host", f"recv from {self._global([src])}")
        into = tensor.detach()
        is_direct = is_plain(into) and into.device.type == "cpu"
        landing = into if is_direct else torch.empty(into.shape, dtype=into.dtype)
        with self._health.transport(operation):
            works = [(self._ranks[src], self._backend.recv([as_bytes(landing)], src, tag))]
        return self._handle(operation, works, landing, timeout_s, None if is_direct else (into, landing))

    def recv_any(
        self, shape: Sequence[int], dtype: torch.dtype, tag: int, timeout_s: float | None
    ) -> tuple[torch.Tensor, int]:
        """Refuse: Gloo receives from one rank at a time."""
        del shape, dtype, tag, timeout_s
        raise refuse_any(self._health)

    def pack(self, tensor_dict: Mapping[Any, Any], slicing: Slicing) -> PackedDict:
        """Leave small CPU tensors in the message: one of its own costs each of them a round."""
        return pack_beside(tensor_dict, slicing)

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
        with self._health.transport(operation):
            for peer in peers:
                sent = self._backend.send([first], peer, tag)
                if rest.numel():
                    # Both: Gloo forgets a send whose work is dropped before the receiver is ready.
                    works.append((self._ranks[peer], sent))
                    works.append((self._ranks[peer], self._backend.send([rest], peer, tag)))
                else:
                    self._eager.setdefault((peer, tag), _EagerSends()).add(sent, data)
            for peer in peers:
                self._settle(operation, peer, tag, timeout_s)
        return self._handle(operation, works, data, timeout_s) if works else CompletedHandle()

    def _settle(self, operation: Operation, peer: int, tag: int, timeout_s: float) -> None:
        """Account for eager sends; wait only if the receiver is too far behind."""
        sends = self._eager.get((peer, tag))
        if sends is None:
            return
        if sends.settling is not None and sends.settling.is_complete():
            sends.settled()
        if len(sends.open) > EAGER_SENDS:
            sends.settle(self._threads, self._ranks[peer])
        while sends.nbytes > EAGER_BYTES:
            self._health.wait(operation, sends.settle(self._threads, self._ranks[peer]), timeout_s)
            sends.settled()

    def _receive_frame(
        self, operation: Operation, src: int, tag: int, timeout_s: float | None, type_: Any = None
    ) -> Any:
        first = self._receive_first(operation, [src], tag, timeout_s)[src]
        return codec.decode(self._complete_frame(operation, src, tag, first, timeout_s), type_)

    def _receive_first(
        self, operation: Operation, peers: Sequence[int], tag: int, timeout_s: float | None
    ) -> dict[int, bytearray]:
        """Receive the first message of a frame from each of `peers`."""
        firsts = {peer: bytearray(FIRST_BYTES) for peer in peers}
        works: list[tuple[int, dist.Work]] = []
        with self._health.transport(operation):
            for peer, first in firsts.items():
                into = torch.frombuffer(first, dtype=torch.uint8)
                works.append((self._ranks[peer], self._backend.recv([into], peer, tag)))
        self._handle(operation, works, firsts, timeout_s).wait()
        return firsts

    def _complete_frame(
        self, operation: Operation, src: int, tag: int, first: bytearray, timeout_s: float | None
    ) -> bytearray | memoryview:
        """Receive what follows the first message of a frame; return the whole."""
        total = codec.frame_length(first)
        if total <= FIRST_BYTES:
            return memoryview(first)[:total]
        try:
            frame = bytearray(total)
        except (MemoryError, OverflowError) as error:
            # What follows cannot be taken, and would be taken for the next message.
            refusal = CapabilityError(
                f"{self._health.where(operation)}: no memory for a message of {total} bytes; "
                "the group is now unusable, destroy it",
                requirement=f"{total} bytes of memory",
            )
            self._health.fail(refusal)
            raise refusal from error
        frame[:FIRST_BYTES] = first
        rest = torch.frombuffer(frame, dtype=torch.uint8)[FIRST_BYTES:]
        with self._health.transport(operation):
            work = self._backend.recv([rest], src, tag)
        # The sender is in the middle of it: from here on silence is a failure.
        self._handle(operation, [(self._ranks[src], work)], rest, timeout_s or self._timeout_s).wait()
        return frame

    def _handle(
        self,
        operation: Operation,
        works: Sequence[tuple[int, dist.Work]],
        keep: object,
        timeout_s: float | None,
        landing: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> PointToPointHandle:
        transfer = PointToPointWorks(self._threads, works, keep)
        return PointToPointHandle(self._health, operation, transfer, timeout_s, landing)

    def _global(self, peers: Sequence[int]) -> str:
        return ", ".join(f"rank {self._ranks[peer]}" for peer in peers)

    # ------------------------------------------------------------------ life

    def abort(self) -> None:
        """End everything in flight, here and on the peers."""
        backend = self._open_backend
        if backend is not None:
            abort_gloo(backend)

    def flush(self, timeout_s: float) -> None:
        """Wait until the kernel has all that was sent, so that closing the connections loses nothing."""
        deadline = time.monotonic() + timeout_s
        for (peer, _), sends in list(self._eager.items()):
            try:
                while sends.settling is not None or sends.open:
                    works = sends.settle(self._threads, self._ranks[peer])
                    if not works.poll(max(deadline - time.monotonic(), 0.0)):
                        # A peer that takes nothing any more cannot keep this rank from leaving.
                        return
                    sends.settled()
            except RuntimeError as gone:
                # This peer's connection is closed; another one may still want what was sent to it.
                del gone

    def close(self, timeout_s: float) -> None:
        """End the threads; what still waits in them is aborted first."""
        if self._threads.is_busy:
            self.abort()
        self._threads.close(timeout_s)
        self._eager.clear()
        # The connections close when the last reference goes; a user may keep the destroyed group.
        self._open_backend = None
