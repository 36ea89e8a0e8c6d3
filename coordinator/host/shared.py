"""The host plane of a group whose ranks share memory. Sender and receiver each copy every byte once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from coordinator.host.plane import GatheringHostPlane
from coordinator.host.tags import BROADCAST_TAG, BROADCAST_TENSOR_TAG, TENSOR_DICT_TAG
from coordinator.host.tensor_dict_format import PackedDict, Slicing, pack_whole
from device_comm.cpu.received_tensors import expect_tensor, irecv_into, recv_into
from device_comm.cpu.shared_memory import SharedMemory
from device_comm.handles import CompletedHandle, Handle
from device_comm.health import GroupHealth
from device_comm.movable import movable, movable_dtype
from device_comm.outputs import fill
from shm_broadcast import codec


class SharedHostPlane(GatheringHostPlane):
    """The host plane of one group over shared memory. Ranks here are ranks in the group."""

    carries_whole: bool = True

    def __init__(
        self, shared: SharedMemory, health: GroupHealth, rank_in_group: int, timeout_s: float
    ) -> None:
        """Use `shared`, which the plane owns from now on; the other arguments are those of `GlooHostPlane`."""
        self._shared = shared
        self._region = shared.host
        self._channels = shared.channels
        self._health = health
        self._rank = rank_in_group
        self._timeout_s = timeout_s
        self._others = [rank for rank in range(len(health.ranks)) if rank != rank_in_group]

    # ------------------------------------------------------------------ collectives

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once every rank has called this."""
        self._region.make("barrier", self._region.core.barrier, timeout_s or self._timeout_s)

    def _all_gather(self, name: str, timeout_s: float | None, data: bytes) -> list[memoryview]:
        self._health.check_usable(name)
        rows = self._region.all_gather_bytes(name, data, timeout_s or self._timeout_s)
        return [rows[start : start + len(data)] for start in range(0, len(rows), len(data))]

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return rank `src`'s object on every rank."""
        name = "broadcast_object"
        if self._rank != src:
            return self.recv_object(src, timeout_s, type_, name, BROADCAST_TAG)
        self._channels.send("host", name, obj, self._others, BROADCAST_TAG, timeout_s or self._timeout_s)
        return obj

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], src: int, timeout_s: float | None) -> None:
        """Fill CPU tensors on every rank with those of rank `src`, one after the other."""
        limit_s = timeout_s or self._timeout_s
        for tensor in tensors:
            if self._rank == src:
                self._channels.send("host", "send", tensor, self._others, BROADCAST_TENSOR_TAG, limit_s)
            else:
                self.irecv_tensor(tensor, src, timeout_s, BROADCAST_TENSOR_TAG).wait()

    # ------------------------------------------------------------------ point to point

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Send an object to rank `dst`; return once it has been copied into the channel."""
        self._channels.send("host", name, obj, (dst,), tag, timeout_s or self._timeout_s)

    def send_message(
        self, message: codec.Message, dst: int, name: str, timeout_s: float | None, tag: int
    ) -> None:
        """Send an already encoded object to rank `dst`; return once it has been copied into the channel."""
        self._channels.send_message("host", name, message, (dst,), tag, timeout_s or self._timeout_s)

    def isend_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> Handle:
        """Start to send an object to rank `dst`; this copies the object."""
        limit_s = timeout_s or self._timeout_s
        return self._channels.isend("host", name, obj, dst, tag, limit_s, copies=True)

    def recv_object(self, src: int, timeout_s: float | None, type_: Any, name: str, tag: int) -> Any:
        """Receive an object from rank `src`; without `timeout_s` this waits until one arrives."""
        land = None if type_ is None else partial(codec.convert, wanted=type_)
        return self._channels.recv("host", name, src, tag, timeout_s, land)

    def recv_each(self, sources: Sequence[int], timeout_s: float | None, name: str, tag: int) -> list[Any]:
        """Receive an object from each of `sources`."""
        return self._channels.recv_each("host", name, sources, tag, timeout_s or self._timeout_s)

    def isend_tensor(self, tensor: torch.Tensor, dst: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to send a contiguous CPU tensor to rank `dst`."""
        return self._channels.isend("device", "send", tensor, dst, tag, timeout_s or self._timeout_s)

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to receive into a tensor of any layout and device."""
        return irecv_into(tensor.detach(), self._channels, src, tag, timeout_s, self._health)

    def recv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> None:
        """Receive into a tensor of any layout and device; what a signal handler raises leaves the message."""
        recv_into(tensor.detach(), self._channels, src, tag, timeout_s, self._health)

    def recv_any(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        tag: int,
        timeout_s: float | None,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Receive the next tensor of `tag` from any other rank, also into `into`; return it, and that rank."""
        moved = movable_dtype(dtype)

        def land(received: object, src: int) -> torch.Tensor:
            tensor = expect_tensor(received, moved, shape, src, self._health)
            if into is not None:
                fill(movable(into), tensor)
            return tensor.view(dtype)

        return self._channels.recv_any("device", "recv_any", tag, timeout_s, land)

    def pack(self, tensor_dict: Mapping[Any, Any], slicing: Slicing) -> PackedDict:
        """Pack every CPU tensor into the message: this is as fast as sending the tensors separately."""
        return pack_whole(tensor_dict, slicing)

    def isend_tensor_dict(self, packed: PackedDict, dst: int, timeout_s: float | None) -> list[Handle]:
        """Start to send the message, which holds every CPU tensor."""
        limit_s = timeout_s or self._timeout_s
        handle = self._channels.isend(
            "host", "send_tensor_dict", packed.message(), dst, TENSOR_DICT_TAG, limit_s
        )
        # Engines regard the first handle as the metadata's, and wait only for the handles after it.
        # So the only handle is returned twice.
        return [handle] if isinstance(handle, CompletedHandle) else [handle, handle]

    # ------------------------------------------------------------------ lifecycle

    def flush(self, timeout_s: float) -> None:
        """Return at once: what was written can be read after this rank has left."""

    def close(self, timeout_s: float) -> None:
        """Release the memory; calls that wait in other threads raise an error. Idempotent."""
        self._shared.close(timeout_s)


__all__ = ["SharedHostPlane"]
