"""The host plane: barriers, objects and raw tensors between the CPU memory of a group's ranks, over Gloo.

An object travels as one frame of the codec. The first `FIRST_BYTES` of it are one message of at most that
size, into which the receiver has a buffer of fixed size ready; only what is longer needs a second
message, which follows at once. So no object ever needs a round trip.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from coordinator.process_groups import GlooBackend, abort_gloo
from coordinator.transfer_tags import BROADCAST_TAG, GATHER_TAG, OBJECT_TAG
from device_comm.channels import Channels
from device_comm.fabric import SharedMemory
from device_comm.handles import CompletedHandle, Handle, PointToPointHandle
from device_comm.health import GroupHealth, Operation
from device_comm.process_group import as_bytes, backend_timeout
from device_comm.works import CollectiveWork, PointToPointWorks, WaiterThreads
from shm_broadcast import codec
from shm_broadcast.errors import CapabilityError, ClosedError, DecodeError, UsageError

# Receivers post this much for the first message of a frame: a scheduler's step fits many times.
FIRST_BYTES: Final = 64 << 10

# Frames of at most `FIRST_BYTES` are not waited for. Gloo sends them when the receiver is ready for them; until
# then their memory is kept here. So many may be open before a thread waits for the newest of them.
EAGER_SENDS: Final = 32
# A sender that is so far ahead of its receiver, under one tag, waits for it.
EAGER_BYTES: Final = 64 << 20

# What of each rank's frame fits in the one round of an all-gather of objects.
_GATHER_INLINE_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("<q")
# Every rank takes memory for the longest frame of all, once for each rank.
_GATHER_LIMIT_BYTES: Final = 1 << 31


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


class CpuGroup:
    """The host plane of one group. Ranks here are ranks in the group."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank_in_group: int,
        backend: GlooBackend | None,
        health: GroupHealth,
        timeout_s: float,
        shared: SharedMemory | None = None,
    ) -> None:
        """Take over what the ranks are connected by.

        Args:
            ranks: Global ranks in group order.
            rank_in_group: This process's position.
            backend: Gloo among exactly these ranks, used by nobody else. Not needed where they share memory.
            health: The group's shared state.
            timeout_s: Deadline of collectives that state none.
            shared: What all ranks share, where they are on one host.
        """
        self._ranks = tuple(ranks)
        self._rank = rank_in_group
        self._open_backend: GlooBackend | None = backend
        self._health = health
        self._timeout_s = timeout_s
        self._threads = WaiterThreads(health.name)
        self._eager: dict[tuple[int, int], _EagerSends] = {}
        self._shared = shared
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

    def share(self, shared: SharedMemory | None) -> None:
        """Use memory that all ranks share from now on, and own it. All ranks call this at the same point."""
        self._shared = shared

    # ------------------------------------------------------------------ collectives

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once every rank has called this."""
        if self._shared is not None:
            fabric = self._shared.host
            fabric.finish("barrier", fabric.core.barrier(), timeout_s or self._timeout_s)
            return
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
        if self._shared is not None:
            rows = self._shared.host.all_gather_bytes(operation.name, data, deadline)
            return [rows[start : start + len(data)] for start in range(0, len(rows), len(data))]
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
        if len(frame) > _GATHER_LIMIT_BYTES:
            raise UsageError(
                f"all_gather_object: the object takes {len(frame)} bytes, at most {_GATHER_LIMIT_BYTES} can be gathered"
            )
        operation = self._health.begin("host", "all_gather_object")
        inline = frame[:_GATHER_INLINE_BYTES].ljust(_GATHER_INLINE_BYTES, b"\0")
        rows = self._all_gather(operation, _LENGTH.pack(len(frame)) + inline, timeout_s)
        lengths = [int(_LENGTH.unpack_from(row)[0]) for row in rows]
        for rank, length in zip(self._ranks, lengths, strict=True):
            # All ranks see this alike, before anybody waits for more.
            if not 0 <= length <= _GATHER_LIMIT_BYTES:
                raise DecodeError(f"{self._health.where(operation)}: rank {rank} announced {length} bytes")
        rows = [row[_LENGTH.size :] for row in rows]
        if max(lengths) > _GATHER_INLINE_BYTES:
            rows = self._all_gather(operation, frame.ljust(max(lengths), b"\0"), timeout_s)
        return [codec.decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return rank `src`'s object on every rank."""
        if self._shared is not None:
            return self._broadcast_shared(self._shared.channels, obj, src, timeout_s, type_)
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

    def _broadcast_shared(
        self, channels: Channels, obj: object, src: int, timeout_s: float | None, type_: Any
    ) -> Any:
        name = "broadcast_object"
        if self._rank == src:
            channels.send("host", name, obj, self._others, BROADCAST_TAG, timeout_s or self._timeout_s)
            return obj
        value = channels.recv("host", name, src, BROADCAST_TAG, timeout_s)
        return value if type_ is None else codec.convert(value, type_)

    def gather_object(self, obj: object, dst: int, timeout_s: float | None = None) -> list[Any] | None:
        """Return the ranks' objects on rank `dst`, in rank order; None elsewhere."""
        self._health.check_usable("gather_object")
        deadline = timeout_s or self._timeout_s
        if self._shared is not None:
            return self._gather_shared(self._shared.channels, obj, dst, deadline)
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

    def _gather_shared(self, channels: Channels, obj: object, dst: int, timeout_s: float) -> list[Any] | None:
        name = "gather_object"
        if self._rank != dst:
            channels.send("host", name, obj, (dst,), GATHER_TAG, timeout_s)
            return None
        objects = channels.recv_each("host", name, self._others, GATHER_TAG, timeout_s)
        return [*objects[:dst], obj, *objects[dst:]]

    # ------------------------------------------------------------------ point to point

    @property
    def carries_whole(self) -> bool:
        """Return whether objects go through shared memory, each byte copied once by each side."""
        return self._shared is not None

    @property
    def channels(self) -> Channels | None:
        """Return what carries objects between ranks that share memory; None where not all do."""
        return None if self._shared is None else self._shared.channels

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Send an object to rank `dst`; return when the transport owns it."""
        if self._shared is None:
            self.isend_object(obj, dst, name, timeout_s, tag).wait()
        else:
            self._shared.channels.send("host", name, obj, (dst,), tag, timeout_s or self._timeout_s)

    def isend_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> Handle:
        """Start to send an object to rank `dst`; its tensors must not change before that is."""
        deadline = timeout_s or self._timeout_s
        if self._shared is not None:
            copies = tag == OBJECT_TAG
            return self._shared.channels.isend("host", name, obj, dst, tag, deadline, copies)
        message = codec.encode(obj)
        operation = self._health.begin_point_to_point("host", f"{name} to {self._global([dst])}")
        return self._start_frame(operation, message, [dst], tag, deadline)

    def recv_object(
        self,
        src: int,
        timeout_s: float | None = None,
        type_: Any = None,
        name: str = "recv_object",
        tag: int = OBJECT_TAG,
    ) -> Any:
        """Receive an object from rank `src`; without a deadline this waits until there is one."""
        if self._shared is not None:
            value = self._shared.channels.recv("host", name, src, tag, timeout_s)
            return value if type_ is None else codec.convert(value, type_)
        operation = self._health.begin_point_to_point("host", f"{name} from {self._global([src])}")
        return self._receive_frame(operation, src, tag, timeout_s, type_)

    def isend_tensor(
        self, tensor: torch.Tensor, peers: Sequence[int], timeout_s: float | None, tag: int
    ) -> Handle:
        """Start to send the bytes of a contiguous CPU tensor to each of `peers`."""
        operation = self._health.begin_point_to_point("host", f"send to {self._global(peers)}")
        works: list[tuple[int, dist.Work]] = []
        with self._health.transport(operation):
            data = [as_bytes(tensor)]
            works.extend((self._ranks[peer], self._backend.send(data, peer, tag)) for peer in peers)
        return self._handle(operation, works, tensor, timeout_s or self._timeout_s)

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to receive into a contiguous CPU tensor."""
        operation = self._health.begin_point_to_point("host", f"recv from {self._global([src])}")
        with self._health.transport(operation):
            work = self._backend.recv([as_bytes(tensor)], src, tag)
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
    ) -> PointToPointHandle:
        transfer = PointToPointWorks(self._threads, works, keep)
        return PointToPointHandle(self._health, operation, transfer, timeout_s)

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
        if self._shared is not None:
            self._shared.close(timeout_s)
        # The connections close when the last reference goes; a user may keep the destroyed group.
        self._open_backend = None
