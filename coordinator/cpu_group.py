"""The host plane: barriers, objects and raw tensors between the CPU memory of a group's ranks, over Gloo.

An object travels as one frame of the codec. The first `FIRST_BYTES` of it are one message of at most that
size, into which the receiver has a buffer of fixed size ready; only what is longer needs a second
message, which follows at once. So no object ever needs a round trip.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from coordinator.process_groups import GlooBackend, abort_gloo
from coordinator.transfer_tags import BROADCAST_TAG, GATHER_TAG, OBJECT_TAG, TENSOR_TAG
from device_comm.base import Handle
from device_comm.handles import CompletedHandle, PointToPointHandle
from device_comm.health import GroupHealth, Operation
from device_comm.process_group import as_bytes, backend_timeout
from device_comm.works import CollectiveWork, PointToPointWorks, WaiterThreads
from shm_broadcast import codec
from shm_broadcast.errors import CommError

# Receivers post this much for the first message of a frame: a scheduler's step fits many times.
FIRST_BYTES: Final = 64 << 10

# Sends of at most this size are not waited for: Gloo hands them to the kernel at once, in a memory of
# ours. The kernel's buffers are finite, so this many may be unaccounted for before one wait settles all.
EAGER_SENDS: Final = 32

# What of each rank's frame fits in the one round of an all-gather of objects.
_GATHER_INLINE_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("<q")


class CpuGroup:
    """The host plane of one group. Ranks here are ranks in the group."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank_in_group: int,
        backend: GlooBackend,
        health: GroupHealth,
        timeout_s: float,
    ) -> None:
        """Take over a Gloo backend.

        Args:
            ranks: Global ranks in group order.
            rank_in_group: This process's position.
            backend: Gloo among exactly these ranks, used by nobody else.
            health: The group's shared state.
            timeout_s: Deadline of collectives that state none.
        """
        self._ranks = tuple(ranks)
        self._rank = rank_in_group
        self._backend = backend
        self._health = health
        self._timeout_s = timeout_s
        self._threads = WaiterThreads(health.name)
        self._eager: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {}
        self._others = [rank for rank in range(len(self._ranks)) if rank != rank_in_group]
        health.on_abort(self.abort)

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

    def all_gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[memoryview]:
        """Return every rank's bytes, in rank order; all ranks bring the same number of bytes."""
        return self._all_gather(self._health.begin("host", "all_gather"), data, timeout_s)

    def _all_gather(self, operation: Operation, data: bytes, timeout_s: float | None) -> list[memoryview]:
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
        rows = self._all_gather(operation, _LENGTH.pack(value), timeout_s)
        return [int(_LENGTH.unpack(row)[0]) for row in rows]

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return the ranks' objects on every rank, in rank order. One round when all are small."""
        self._health.check_usable("all_gather_object")
        frame = codec.encode(obj).to_bytes()
        operation = self._health.begin("host", "all_gather_object")
        inline = frame[:_GATHER_INLINE_BYTES].ljust(_GATHER_INLINE_BYTES, b"\0")
        rows = self._all_gather(operation, _LENGTH.pack(len(frame)) + inline, timeout_s)
        lengths = [int(_LENGTH.unpack_from(row)[0]) for row in rows]
        rows = [row[_LENGTH.size :] for row in rows]
        if max(lengths) > _GATHER_INLINE_BYTES:
            rows = self._all_gather(operation, frame.ljust(max(lengths), b"\0"), timeout_s)
        return [codec.decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return rank `src`'s object on every rank."""
        if self._rank == src:
            self._health.check_usable("broadcast_object")
            message = codec.encode(obj)
            operation = self._health.begin("host", "broadcast_object")
            deadline = timeout_s or self._timeout_s
            self._start_frame(operation, message, self._others, BROADCAST_TAG, deadline).wait()
            return obj
        operation = self._health.begin("host", "broadcast_object")
        return self._receive_frame(operation, src, BROADCAST_TAG, timeout_s, type_)

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
        frames = self._receive_first(operation, self._others, GATHER_TAG, deadline)
        objects = {
            rank: self._complete_frame(operation, rank, GATHER_TAG, first, deadline, None)
            for rank, first in frames.items()
        }
        objects[dst] = obj
        return [objects[rank] for rank in range(len(self._ranks))]

    # ------------------------------------------------------------------ point to point

    def isend_message(
        self, message: codec.Message, peers: Sequence[int], name: str, timeout_s: float | None, tag: int
    ) -> Handle:
        """Start to send an encoded object to each of `peers`."""
        operation = self._health.begin_point_to_point("host", f"{name} to {self._global(peers)}")
        return self._start_frame(operation, message, peers, tag, timeout_s or self._timeout_s)

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

    def isend_tensor(
        self, tensor: torch.Tensor, peers: Sequence[int], timeout_s: float | None = None
    ) -> Handle:
        """Start to send the bytes of a contiguous CPU tensor to each of `peers`."""
        operation = self._health.begin_point_to_point("host", f"send to {self._global(peers)}")
        works: list[tuple[int, dist.Work]] = []
        with self._health.transport(operation):
            data = [as_bytes(tensor)]
            works.extend((self._ranks[peer], self._backend.send(data, peer, TENSOR_TAG)) for peer in peers)
        return self._handle(operation, works, tensor, timeout_s or self._timeout_s)

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None = None) -> Handle:
        """Start to receive into a contiguous CPU tensor."""
        operation = self._health.begin_point_to_point("host", f"recv from {self._global([src])}")
        with self._health.transport(operation):
            work = self._backend.recv([as_bytes(tensor)], src, TENSOR_TAG)
        return self._handle(operation, [(self._ranks[src], work)], tensor, timeout_s)

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
                    works.append((self._ranks[peer], self._backend.send([rest], peer, tag)))
                else:
                    self._eager.setdefault(peer, deque()).append((sent, data))
        for peer in peers:
            self._settle(operation, peer, EAGER_SENDS, timeout_s)
        return self._handle(operation, works, data, timeout_s) if works else CompletedHandle()

    def _settle(self, operation: Operation, peer: int, allowed: int, timeout_s: float) -> None:
        """Account for eager sends to `peer` if more than `allowed` are open."""
        sends = self._eager.get(peer)
        if sends is None or len(sends) <= allowed:
            return
        # Sends to one peer complete in order: the newest stands for all.
        newest, _ = sends[-1]
        works = PointToPointWorks(self._threads, [(self._ranks[peer], newest)], list(sends))
        self._health.wait(operation, works, timeout_s)
        sends.clear()

    def _receive_frame(
        self, operation: Operation, src: int, tag: int, timeout_s: float | None, type_: Any = None
    ) -> Any:
        first = self._receive_first(operation, [src], tag, timeout_s)[src]
        return self._complete_frame(operation, src, tag, first, timeout_s, type_)

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
        self, operation: Operation, src: int, tag: int, first: bytearray, timeout_s: float | None, type_: Any
    ) -> Any:
        """Receive what follows the first message of a frame, and decode it."""
        total = codec.frame_length(first)
        if total <= FIRST_BYTES:
            return codec.decode(memoryview(first)[:total], type_)
        frame = bytearray(total)
        frame[:FIRST_BYTES] = first
        rest = torch.frombuffer(frame, dtype=torch.uint8)[FIRST_BYTES:]
        with self._health.transport(operation):
            work = self._backend.recv([rest], src, tag)
        # The sender is in the middle of it: from here on silence is a failure.
        self._handle(operation, [(self._ranks[src], work)], rest, timeout_s or self._timeout_s).wait()
        return codec.decode(frame, type_)

    def _handle(
        self,
        operation: Operation,
        works: Sequence[tuple[int, dist.Work]],
        keep: object,
        timeout_s: float | None,
    ) -> PointToPointHandle:
        transfer = PointToPointWorks(self._threads, works, keep)
        return PointToPointHandle(self._health, operation, transfer, timeout_s)

    def _global(self, peers: Sequence[int]) -> str:
        return ", ".join(f"rank {self._ranks[peer]}" for peer in peers)

    # ------------------------------------------------------------------ life

    def abort(self) -> None:
        """End everything in flight, here and on the peers."""
        abort_gloo(self._backend)

    def flush(self, timeout_s: float) -> None:
        """Wait until the kernel has all that was sent, so that closing the connections loses nothing."""
        operation = Operation("host", "destroy", 0)
        for peer in list(self._eager):
            try:
                self._settle(operation, peer, 0, timeout_s)
            except CommError as error:
                # A peer that takes nothing any more cannot keep this rank from leaving.
                del error
                break

    def close(self, timeout_s: float) -> None:
        """End the threads; what still waits in them is aborted first."""
        if self._threads.is_busy:
            self.abort()
        self._threads.close(timeout_s)
        self._eager.clear()
        # The connections close when the last reference goes; a user may keep the destroyed group.
        del self._backend
