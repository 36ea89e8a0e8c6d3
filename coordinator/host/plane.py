"""The contract of the host plane, the code that its implementations share, and the host plane of a group of one.

A group's implementation is chosen once, at its creation: `SharedHostPlane` if all ranks share memory, else
`GlooHostPlane`.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, Protocol, TypeVar

import torch

from coordinator.host.tags import DICT_TENSOR_TAG, TENSOR_DICT_TAG
from coordinator.host.tensor_dict_format import PackedDict, Slicing, split
from device_comm.handles import Handle
from device_comm.health import GroupHealth, Operation
from device_comm.stages import in_parts
from shm_broadcast import codec
from shm_broadcast.errors import CapabilityError, DecodeError, DisagreementError, UsageError

Result = TypeVar("Result")

# This much of each rank's frame travels in the first round of an all-gather of objects.
_GATHER_INLINE_BYTES: Final = 4096
# Longest frame in an all-gather of objects: every rank allocates the longest frame of all, once for each rank.
_GATHER_LIMIT_BYTES: Final = 1 << 31
_INTEGER: Final = struct.Struct("<q")
# What precedes a frame in an all-gather of objects: its length, and which of `_GATHERS` its rank has called.
_GATHER_HEADER: Final = struct.Struct("<qq")
_GATHERS: Final = ("all_gather_object", "exchange")


class HostPlane(Protocol):
    """Barriers, objects and CPU memory between the ranks of a group. Ranks are ranks in the group.

    `timeout_s` is in seconds. None means the group's deadline; receives with None wait without limit, but wake when a
    peer dies or the group is closed.

    Attributes:
        carries_whole: Whether the message of a tensor dict holds all its CPU tensors.
    """

    carries_whole: bool

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once every rank has called this. Collective."""

    def all_gather_integers(self, value: int, timeout_s: float | None = None) -> list[int]:
        """Return every rank's integer, in rank order. Collective."""

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's object, in rank order. Collective."""

    def exchange(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order: how the parts of a group agree. Collective.

        An `all_gather_object` of another rank never answers it, and is not answered by it.
        """

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return rank `src`'s object on every rank. Collective."""

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], src: int, timeout_s: float | None) -> None:
        """Fill contiguous CPU tensors on every rank with those of rank `src`, one after the other. Collective."""

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Send an object to rank `dst`; return when the transport owns it."""

    def send_message(
        self, message: codec.Message, dst: int, name: str, timeout_s: float | None, tag: int
    ) -> None:
        """Send an already encoded object to rank `dst`; return when the transport owns it."""

    def isend_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> Handle:
        """Start to send an object to rank `dst`; the object may change as soon as this returns."""

    def recv_object(self, src: int, timeout_s: float | None, type_: Any, name: str, tag: int) -> Any:
        """Receive an object from rank `src`, as `type_` unless that is None; `name` is the call's name, for errors."""

    def recv_each(self, sources: Sequence[int], timeout_s: float | None, name: str, tag: int) -> list[Any]:
        """Receive an object from each of `sources`; with `timeout_s` None the group's deadline counts.

        Raises:
            DecodeError: One cannot be decoded. All have been received.
        """

    def isend_tensor(self, tensor: torch.Tensor, dst: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to send a contiguous CPU tensor to rank `dst`; it must not change until the handle's `wait` returns."""

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to receive into a tensor of any layout and device."""

    def recv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> None:
        """Receive into a tensor of any layout and device."""

    def recv_any(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        tag: int,
        timeout_s: float | None,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Receive the next tensor of `tag` from any other rank; return it, in new memory, and that rank.

        If `into` is given, it is filled before the message is taken. It has as many elements, none of which overlap.

        Raises:
            CapabilityError: The ranks share no memory; the group is intact.
            DisagreementError: A tensor of another shape or dtype arrived; it is lost, and the group is intact.
        """

    def pack(self, tensor_dict: Mapping[Any, Any], slicing: Slicing) -> PackedDict:
        """Return a tensor dict as this plane sends it: one message, and the tensors that travel beside it.

        Raises:
            UsageError: The dict cannot be sent.
        """

    def isend_tensor_dict(self, packed: PackedDict, dst: int, timeout_s: float | None) -> list[Handle]:
        """Start to send the message and the CPU tensors of a packed dict to rank `dst`.

        Returns:
            Handles. The first is the message's; the others cover every CPU tensor whose memory is still needed.
        """

    def flush(self, timeout_s: float) -> None:
        """Wait until everything that was sent arrives even if the connections are closed."""

    def close(self, timeout_s: float) -> None:
        """Release everything, and wake the calls that wait. Idempotent."""


class GatheringHostPlane(ABC):
    """The all-gathers of a host plane, made of rounds in which all ranks bring the same number of bytes."""

    _health: GroupHealth

    @abstractmethod
    def _all_gather(self, name: str, timeout_s: float | None, data: bytes) -> list[memoryview]:
        """Return every rank's bytes, in rank order; all ranks bring the same number of bytes."""

    def _in_turn(self, name: str, call: Callable[[float | None], Result], timeout_s: float | None) -> Result:
        """Return `call(timeout_s)`, a collective of one or more rounds, behind those of other threads."""
        del name
        return call(timeout_s)

    def all_gather_integers(self, value: int, timeout_s: float | None = None) -> list[int]:
        """Return every rank's integer of up to 64 bits, in rank order."""
        name = "all_gather_integers"

        def call(limit_s: float | None) -> list[int]:
            rows = self._all_gather(name, limit_s, _INTEGER.pack(value))
            return [int(_INTEGER.unpack(row)[0]) for row in rows]

        return self._in_turn(name, call, timeout_s)

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return the ranks' objects on every rank, in rank order. This takes one round if all are small.

        Raises:
            UsageError: The object cannot be sent, or its frame is too long.
            DecodeError: A rank announced an impossible length; every rank raises this, and the group is intact.
            DisagreementError: A rank has called `exchange`; every rank raises this, and the group is intact. Or a rank
                has refused the call; over Gloo the group is broken then.
        """
        return self._gather_objects("all_gather_object", obj, timeout_s)

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the ranks' bytes on every rank, in rank order, within the group's deadline.

        Raises:
            DisagreementError: A rank has called `all_gather_object`; every rank raises this, and the group is intact.
            DecodeError: A rank sent something else than bytes, or as `all_gather_object`.
        """
        name = "exchange"
        answers = self._gather_objects(name, data, None)
        for rank, answer in zip(self._health.ranks, answers, strict=True):
            if not isinstance(answer, bytes):
                what = type(answer).__name__
                raise DecodeError(
                    f"{self._health.where(name)}: rank {rank} sent an object of type {what}, no bytes"
                )
        return answers

    def _gather_objects(self, name: str, obj: object, timeout_s: float | None) -> list[Any]:
        frame = codec.encode(obj).to_bytes()
        if len(frame) > _GATHER_LIMIT_BYTES:
            raise UsageError(
                f"{name}: the object takes {len(frame)} bytes, at most {_GATHER_LIMIT_BYTES} can be gathered"
            )
        inline = frame[:_GATHER_INLINE_BYTES].ljust(_GATHER_INLINE_BYTES, b"\0")
        header = _GATHER_HEADER.pack(len(frame), _GATHERS.index(name))

        def call(limit_s: float | None) -> list[Any]:
            # The region knows of one round. Between two of them the other ranks would wait for the second.
            stages = partial(self._gather_frames, name, frame, header + inline, limit_s)
            return in_parts(self._health, Operation("host", name, 0), stages)

        return self._in_turn(name, call, timeout_s)

    def _gather_frames(self, name: str, frame: bytes, first: bytes, timeout_s: float | None) -> list[Any]:
        """Bring `first` in the first round, and `frame` in a second one if a frame does not fit into the first."""
        rows = self._all_gather(name, timeout_s, first)
        headers = [_GATHER_HEADER.unpack_from(row) for row in rows]
        for rank, (length, call) in zip(self._health.ranks, headers, strict=True):
            # All ranks see the same headers, so no rank waits for a second round.
            if not 0 <= length <= _GATHER_LIMIT_BYTES:
                raise DecodeError(f"{self._health.where(name)}: rank {rank} announced {length} bytes")
            if not 0 <= call < len(_GATHERS):
                raise DecodeError(f"{self._health.where(name)}: rank {rank} announced call {call}")
        calls = {rank: _GATHERS[call] for rank, (_, call) in zip(self._health.ranks, headers, strict=True)}
        if len(set(calls.values())) > 1:
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in calls.items())
            text = f"{self._health.where(name)}: the ranks made different calls: {listed}"
            raise DisagreementError(text, views=calls)
        lengths = [int(length) for length, _ in headers]
        rows = [row[_GATHER_HEADER.size :] for row in rows]
        if max(lengths) > _GATHER_INLINE_BYTES:
            rows = self._all_gather(name, timeout_s, frame.ljust(max(lengths), b"\0"))
        return [codec.decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def isend_with_tensors(
    plane: HostPlane, packed: PackedDict, dst: int, timeout_s: float | None
) -> list[Handle]:
    """Start to send the message of a dict, and then each CPU tensor beside it."""
    message = plane.isend_object(packed.message(), dst, "send_tensor_dict", timeout_s, TENSOR_DICT_TAG)
    return [
        message,
        *(plane.isend_tensor(tensor, dst, timeout_s, DICT_TENSOR_TAG) for tensor in packed.beside("host")),
    ]


def refuse_any(health: GroupHealth) -> CapabilityError:
    """Return the error of a receive from any rank in a group that cannot do this."""
    return CapabilityError(
        f"{health.where('recv_any')}: a tensor from any rank takes CPU tensors and memory that all ranks share",
        requirement="shared memory",
    )


class SoloHostPlane:
    """The host plane of a group of one: collectives return what this rank brings, and there is no peer."""

    carries_whole: bool = False

    def __init__(self, health: GroupHealth) -> None:
        """Create the plane of the group with this `health`."""
        self._health = health

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    def all_gather_integers(self, value: int, timeout_s: float | None = None) -> list[int]:
        """Return this rank's integer."""
        return [value]

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return this rank's object."""
        return [obj]

    def exchange(self, data: bytes) -> list[bytes]:
        """Return this rank's bytes."""
        return [data]

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return `obj`."""
        return obj

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], src: int, timeout_s: float | None) -> None:
        """Leave the tensors as they are."""

    def _refuse(self, *args: object, **options: object) -> NoReturn:
        """Refuse a transfer: there is no other rank. The group's methods check the peer before they come here."""
        raise UsageError(f"{self._health.where('point to point')}: a group of one has no other rank")

    send_object: Callable[..., Any] = _refuse
    send_message: Callable[..., Any] = _refuse
    isend_object: Callable[..., Any] = _refuse
    recv_object: Callable[..., Any] = _refuse
    recv_each: Callable[..., Any] = _refuse
    isend_tensor: Callable[..., Any] = _refuse
    irecv_tensor: Callable[..., Any] = _refuse

    def recv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> None:
        """Receive what `irecv_tensor` starts to receive."""
        self.irecv_tensor(tensor, src, timeout_s, tag).wait()

    recv_any: Callable[..., Any] = _refuse
    isend_tensor_dict: Callable[..., Any] = _refuse

    def pack(self, tensor_dict: Mapping[Any, Any], slicing: Slicing) -> PackedDict:
        """Check the dict as other planes do."""
        return split(tensor_dict, slicing)

    def flush(self, timeout_s: float) -> None:
        """Return at once: nothing was sent."""

    def close(self, timeout_s: float) -> None:
        """Return at once: there is nothing to release."""
