"""The contract of the host plane, what its implementations share, and the host plane of a group of one.

Which implementation serves a group is decided once, when the group is made: `SharedHostPlane` where all ranks share
memory, else `GlooHostPlane`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol

import torch

from coordinator.host.tags import TENSOR_DICT_TAG, TENSOR_TAG
from coordinator.host.tensor_dict_format import PackedDict, Slicing, pack_beside
from device_comm.handles import Handle
from device_comm.health import GroupHealth
from shm_broadcast import codec
from shm_broadcast.errors import CapabilityError, DecodeError, UsageError

# What of each rank's frame fits in the one round of an all-gather of objects.
_GATHER_INLINE_BYTES: Final = 4096
# Every rank takes memory for the longest frame of all, once for each rank.
_GATHER_LIMIT_BYTES: Final = 1 << 31
_INTEGER: Final = struct.Struct("<q")


class HostPlane(Protocol):
    """Barriers, objects and CPU memory between the ranks of a group. Ranks are ranks in the group.

    `timeout_s` is in seconds. None means the group's deadline, except for receives, which then wait
    without limit but wake when a peer dies or the group is closed.
    """

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once every rank has called this. Collective."""

    def all_gather_integers(self, value: int, timeout_s: float | None = None) -> list[int]:
        """Return every rank's integer, in rank order. Collective."""

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's object, in rank order. Collective."""

    def gather_object(self, obj: object, dst: int, timeout_s: float | None = None) -> list[Any] | None:
        """Return the ranks' objects on rank `dst`, None elsewhere. Collective."""

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return rank `src`'s object on every rank. Collective."""

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], src: int, timeout_s: float | None) -> None:
        """Fill contiguous CPU tensors on every rank with those of rank `src`, one after the other. Collective."""

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Send an object to rank `dst`; return when the transport owns it."""

    def isend_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> Handle:
        """Start to send an object to rank `dst`; what it holds may change as soon as this returns."""

    def recv_object(
        self, src: int, timeout_s: float | None = None, type_: Any = None, name: str = "", tag: int = 0
    ) -> Any:
        """Receive an object from rank `src`."""

    def isend_tensor(self, tensor: torch.Tensor, dst: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to send a contiguous CPU tensor to rank `dst`; it must not change until the handle was waited for."""

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to receive into a tensor of any layout and device."""

    def recv_any(
        self, shape: Sequence[int], dtype: torch.dtype, tag: int, timeout_s: float | None
    ) -> tuple[torch.Tensor, int]:
        """Receive the next tensor of `tag` from any other rank; (the tensor, in new memory, that rank).

        Raises:
            CapabilityError: The ranks share no memory; the group is intact.
            DisagreementError: What came has another shape or dtype; it is gone, the group is intact.
        """

    def pack(self, tensor_dict: Mapping[Any, Any], slicing: Slicing) -> PackedDict:
        """Return a tensor dict as this plane sends it: one message, and the tensors that travel beside it.

        Raises:
            UsageError: The dict cannot be sent.
        """

    def isend_tensor_dict(self, packed: PackedDict, dst: int, timeout_s: float | None) -> list[Handle]:
        """Start to send what `pack` returned, without the tensors of other devices, to rank `dst`.

        Returns:
            Handles. The first is that of the message; those behind it cover every CPU tensor that is still needed.
        """

    def flush(self, timeout_s: float) -> None:
        """Wait until closing the connections would lose nothing that was sent."""

    def close(self, timeout_s: float) -> None:
        """Release everything; wake what waits. Idempotent."""


def pack_integer(value: int) -> bytes:
    """Return an integer of up to 64 bits as bytes of fixed length."""
    return _INTEGER.pack(value)


def unpack_integer(row: memoryview) -> int:
    """Return the integer that `pack_integer` packed."""
    return int(_INTEGER.unpack(row)[0])


def frame_of(obj: object) -> bytes:
    """Return an object as a frame for `gather_frames`.

    Raises:
        UsageError: It cannot be sent, or its frame is too long.
    """
    frame = codec.encode(obj).to_bytes()
    if len(frame) > _GATHER_LIMIT_BYTES:
        raise UsageError(
            f"all_gather_object: the object takes {len(frame)} bytes, at most {_GATHER_LIMIT_BYTES} can be gathered"
        )
    return frame


def gather_frames(
    frame: bytes, gather: Callable[[bytes], list[memoryview]], health: GroupHealth
) -> list[memoryview]:
    """Return the ranks' frames of any length, in rank order. Collective; one round when all are small.

    Args:
        frame: This rank's.
        gather: Returns the ranks' bytes, in rank order, where all bring the same number.
        health: The group's shared state.

    Raises:
        DecodeError: A rank announced a length that cannot be; on every rank, and the group is intact.
    """
    inline = frame[:_GATHER_INLINE_BYTES].ljust(_GATHER_INLINE_BYTES, b"\0")
    rows = gather(_INTEGER.pack(len(frame)) + inline)
    lengths = [int(_INTEGER.unpack_from(row)[0]) for row in rows]
    for rank, length in zip(health.ranks, lengths, strict=True):
        # All ranks see the same lengths, and none waits for more.
        if not 0 <= length <= _GATHER_LIMIT_BYTES:
            raise DecodeError(f"{health.where('all_gather_object')}: rank {rank} announced {length} bytes")
    rows = [row[_INTEGER.size :] for row in rows]
    if max(lengths) > _GATHER_INLINE_BYTES:
        rows = gather(frame.ljust(max(lengths), b"\0"))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def isend_with_tensors(
    plane: HostPlane, packed: PackedDict, dst: int, timeout_s: float | None
) -> list[Handle]:
    """Start to send the message of a dict, and then each CPU tensor beside it."""
    message = plane.isend_object(packed.message(), dst, "send_tensor_dict", timeout_s, TENSOR_DICT_TAG)
    return [
        message,
        *(plane.isend_tensor(tensor, dst, timeout_s, TENSOR_TAG) for tensor in packed.beside("host")),
    ]


def refuse_any(health: GroupHealth) -> CapabilityError:
    """Return the error of a receive from any rank where that cannot be."""
    return CapabilityError(
        f"{health.where('recv_any')}: a tensor from any rank takes CPU tensors and memory that all ranks share",
        requirement="shared memory",
    )


class SoloHostPlane:
    """The host plane of a group of one: what is gathered is one's own, and there is no peer."""

    def __init__(self, health: GroupHealth) -> None:
        """Belong to the group of `health`."""
        self._health = health

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return at once."""
        del timeout_s
        self._health.check_usable("barrier")

    def all_gather_integers(self, value: int, timeout_s: float | None = None) -> list[int]:
        """Return this rank's integer."""
        del timeout_s
        self._health.check_usable("all_gather_integers")
        return [value]

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return this rank's object."""
        del timeout_s
        self._health.check_usable("all_gather_object")
        return [obj]

    def gather_object(self, obj: object, dst: int, timeout_s: float | None = None) -> list[Any] | None:
        """Return this rank's object."""
        del dst, timeout_s
        self._health.check_usable("gather_object")
        return [obj]

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return `obj`."""
        del src, timeout_s, type_
        self._health.check_usable("broadcast_object")
        return obj

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], src: int, timeout_s: float | None) -> None:
        """Leave the tensors as they are."""

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Refuse: there is no peer."""
        del obj, dst, timeout_s, tag
        self._refuse(name)

    def isend_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> Handle:
        """Refuse: there is no peer."""
        del obj, dst, timeout_s, tag
        self._refuse(name)

    def recv_object(
        self,
        src: int,
        timeout_s: float | None = None,
        type_: Any = None,
        name: str = "recv_object",
        tag: int = 0,
    ) -> Any:
        """Refuse: there is no peer."""
        del src, timeout_s, type_, tag
        self._refuse(name)

    def isend_tensor(self, tensor: torch.Tensor, dst: int, timeout_s: float | None, tag: int) -> Handle:
        """Refuse: there is no peer."""
        del tensor, dst, timeout_s, tag
        self._refuse("send")

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> Handle:
        """Refuse: there is no peer."""
        del tensor, src, timeout_s, tag
        self._refuse("recv")

    def recv_any(
        self, shape: Sequence[int], dtype: torch.dtype, tag: int, timeout_s: float | None
    ) -> tuple[torch.Tensor, int]:
        """Refuse: there is no peer."""
        del shape, dtype, tag, timeout_s
        self._refuse("recv_any")

    def pack(self, tensor_dict: Mapping[Any, Any], slicing: Slicing) -> PackedDict:
        """Check the dict as other planes do."""
        return pack_beside(tensor_dict, slicing)

    def isend_tensor_dict(self, packed: PackedDict, dst: int, timeout_s: float | None) -> list[Handle]:
        """Refuse: there is no peer."""
        del packed, dst, timeout_s
        self._refuse("send_tensor_dict")

    def flush(self, timeout_s: float) -> None:
        """Nothing was sent."""
        del timeout_s

    def close(self, timeout_s: float) -> None:
        """Nothing to release."""
        del timeout_s

    def _refuse(self, name: str) -> NoReturn:
        self._health.check_usable(name)
        raise UsageError(f"{self._health.where(name)}: a group of one has no other rank")
