"""The planes of a fake group: one process, and results as if every rank held what this rank holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from coordinator.host.plane import isend_with_tensors, refuse_any
from coordinator.host.tensor_dict_format import PackedDict, Slicing, split
from device_comm.base import CommunicatorContext, DeviceCommunicator, Sizes, Timeout
from device_comm.handles import CompletedHandle, Handle
from device_comm.health import Arrival, FailureRecord, GroupHealth
from device_comm.process_group import dense
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from shm_broadcast import codec
from shm_broadcast.errors import CommError, UsageError


class SilentStatusStore:
    """The status store of a group without other ranks: nobody else ever writes on it."""

    @property
    def is_reachable(self) -> bool:
        """Return True."""
        return True

    def arrive(self, plane: str, arrival: Arrival) -> None:
        """Tell nobody."""
        del plane, arrival

    def arrivals(self, plane: str) -> dict[int, Arrival]:
        """Return nothing."""
        del plane
        return {}

    def failure_record(self) -> FailureRecord | None:
        """Return None."""
        return None

    def publish(self, failure_record: FailureRecord, within_s: float = 0.0) -> FailureRecord:
        """Return the failure record itself: it is the first."""
        del within_s
        return failure_record

    def leave(self) -> None:
        """Tell nobody."""

    def left(self) -> tuple[int, ...]:
        """Return nothing."""
        return ()


class PostedReceive:
    """A receive in a loop-back mailbox: filled as soon as something was sent to the same peer."""

    def __init__(self, mailbox: TensorMailbox, key: tuple[int, int], into: torch.Tensor, name: str) -> None:
        """Wait in `mailbox` for the next tensor under `key`; `name` is that of the call."""
        self._mailbox = mailbox
        self._key = key
        self._into = into.detach()
        self._name = name
        self._where = mailbox.health.where(name)
        self._done = False
        self._error: CommError | None = None

    def fill(self, sent: torch.Tensor) -> None:
        """Take what was sent, or remember that it does not fit."""
        self._done = True
        if sent.shape != self._into.shape or sent.dtype != self._into.dtype:
            self._error = UsageError(
                f"{self._where}: the receiver expects shape {tuple(self._into.shape)} and {self._into.dtype}, "
                f"shape {tuple(sent.shape)} and {sent.dtype} was sent"
            )
            return
        self._into.copy_(sent)

    def is_completed(self) -> bool:
        """Return whether the tensor is there. Raises `UsageError` if what was sent does not fit."""
        if self._error is not None:
            raise self._error
        return self._done

    def wait(self) -> None:
        """Return if the tensor is there; a real rank would wait, a fake has nobody to wait for.

        Raises:
            UsageError: Nothing was sent to this peer that is still to be received, or it does not fit.
            ClosedError: The group was destroyed.
        """
        if not self._done:
            self._mailbox.health.check_usable(self._name)
            self._mailbox.cancel(self._key, self)
            raise UsageError(nothing_there(self._where))
        self.is_completed()


def nothing_there(where: str) -> str:
    """Return the text of the error that stands for a receive without end."""
    return (
        f"{where}: nothing is there, and a real group would wait for it; in a fake group a rank receives "
        "from a peer what it has itself sent to that peer"
    )


class TensorMailbox:
    """Tensors sent and not yet received, first in, first out for each key (peer, tag)."""

    def __init__(self, health: GroupHealth) -> None:
        """Start empty, as part of the group of `health`."""
        self.health = health
        self._sent: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self._posted: dict[tuple[int, int], deque[PostedReceive]] = {}

    def send(self, key: tuple[int, int], tensor: torch.Tensor) -> Handle:
        """Keep a copy of `tensor` for the next receive under `key`."""
        self._sent.setdefault(key, deque()).append(dense(tensor).clone())
        self._match(key)
        return CompletedHandle()

    def post(self, key: tuple[int, int], into: torch.Tensor, name: str) -> Handle:
        """Receive the next tensor under `key`, now or when it is sent."""
        self.health.check_usable(name)
        receive = PostedReceive(self, key, into, name)
        self._posted.setdefault(key, deque()).append(receive)
        self._match(key)
        return receive

    def cancel(self, key: tuple[int, int], receive: PostedReceive) -> None:
        """Forget a receive, so that it takes nothing that is sent later."""
        if receive in self._posted.get(key, ()):
            self._posted[key].remove(receive)

    def clear(self) -> None:
        """Forget everything."""
        self._sent.clear()
        self._posted.clear()

    def _match(self, key: tuple[int, int]) -> None:
        sent, posted = self._sent.get(key), self._posted.get(key)
        while sent and posted:
            posted.popleft().fill(sent.popleft())


class FakeCommunicator(DeviceCommunicator):
    """The device plane of a fake group of two ranks or more: a group of one is a `SoloCommunicator`.

    Reductions use the arithmetic and the rank order of the real ones. Where `sizes` gives other ranks more or
    fewer rows than this rank brings, they are taken to bring this rank's rows, over and over, as many as
    they need; zeros if this rank has none. In an all-to-all each rank brings what this one sends to itself. What
    another rank broadcasts or scatters is what is there already.
    """

    algorithm = "fake"

    def __init__(self, context: CommunicatorContext) -> None:
        """Need nothing of the context but its names, device and health."""
        super().__init__(context)
        self._mailbox = TensorMailbox(context.health)

    def destroy(self) -> None:
        """Forget what was sent and not received."""
        self._mailbox.clear()

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        self.context.health.check_usable("all_reduce")
        return reduce_in_rank_order([dense(input_)] * self.world_size, op)

    def _all_gather(
        self, input_: torch.Tensor, dim: int, sizes: tuple[int, ...], timeout_s: float | None
    ) -> torch.Tensor:
        self.context.health.check_usable("all_gather")
        source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
        return torch.cat([_with_rows(source, dim, size) for size in sizes], dim)

    def _scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None,
        src: int,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        self.context.health.check_usable("scatter")
        if input_ is not None:
            whole = input_.detach().reshape(input_.shape or 1)
            part = whole.narrow(dim, sum(sizes[: self.rank_in_group]), sizes[self.rank_in_group])
            output.detach().copy_(part.reshape(output.shape))

    def _all_to_all(
        self, input_: torch.Tensor, dim: int, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> torch.Tensor:
        self.context.health.check_usable("all_to_all")
        source, rank = dense(input_.reshape(1) if input_.dim() == 0 else input_), self.rank_in_group
        part = source.narrow(dim, sum(send_sizes[:rank]), send_sizes[rank])
        return torch.cat([_with_rows(part, dim, size) for size in recv_sizes], dim)

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
        self.context.health.check_usable("broadcast")
        return tensor

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        self.context.health.check_usable("send")
        return self._mailbox.send((dst, 0), tensor)

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        return self._mailbox.post((src, 0), tensor, f"recv from rank {self.context.ranks[src]}")


def _with_rows(source: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    own = source.shape[dim]
    if own == size:
        return source
    if own == 0:
        return source.new_zeros((*source.shape[:dim], size, *source.shape[dim + 1 :]))
    return (
        torch.cat([source] * -(-size // own), dim).narrow(dim, 0, size) if size else source.narrow(dim, 0, 0)
    )


class FakeHostPlane:
    """The host plane of a fake group. Objects go through the codec, as on the way to another rank."""

    def __init__(self, health: GroupHealth, rank_in_group: int) -> None:
        """Belong to the group of `health`."""
        self._health = health
        self._rank = rank_in_group
        self._world_size = len(health.ranks)
        self._frames: dict[tuple[int, int], deque[bytes]] = {}
        self._tensors = TensorMailbox(health)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return at once."""
        self._health.check_usable("barrier")

    def all_gather_integers(self, value: int, timeout_s: float | None = None) -> list[int]:
        """Return this rank's integer for every rank."""
        self._health.check_usable("all_gather_integers")
        return [value] * self._world_size

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return a copy for every rank."""
        self._health.check_usable("all_gather_object")
        frame = codec.encode(obj).to_bytes()
        return [codec.decode(frame) for _ in range(self._world_size)]

    def gather_object(self, obj: object, dst: int, timeout_s: float | None = None) -> list[Any] | None:
        """Return on rank `dst` the object itself in its own place and a copy for every other rank."""
        self._health.check_usable("gather_object")
        frame = codec.encode(obj).to_bytes()
        if self._rank != dst:
            return None
        return [obj if rank == dst else codec.decode(frame) for rank in range(self._world_size)]

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return the object on rank `src`, elsewhere a copy."""
        self._health.check_usable("broadcast_object")
        frame = codec.encode(obj).to_bytes()
        return obj if self._rank == src else codec.decode(frame, type_)

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], src: int, timeout_s: float | None) -> None:
        """Leave the tensors as they are."""
        self._health.check_usable("broadcast_tensor_dict")

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Keep the object for a receive from rank `dst`."""
        self.isend_object(obj, dst, name, timeout_s, tag)

    def send_message(
        self, message: codec.Message, dst: int, name: str, timeout_s: float | None, tag: int
    ) -> None:
        """Keep the object for a receive from rank `dst`."""
        self._health.check_usable(name)
        self._frames.setdefault((dst, tag), deque()).append(message.to_bytes())

    def isend_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> Handle:
        """Keep the object for a receive from rank `dst`."""
        self.send_message(codec.encode(obj), dst, name, timeout_s, tag)
        return CompletedHandle()

    def recv_object(self, src: int, timeout_s: float | None, type_: Any, name: str, tag: int) -> Any:
        """Return the next object that was sent to rank `src`.

        Raises:
            UsageError: There is none.
        """
        self._health.check_usable(name)
        frames = self._frames.get((src, tag))
        if not frames:
            where = self._health.where(f"{name} from rank {self._health.ranks[src]}")
            raise UsageError(nothing_there(where))
        return codec.decode(frames.popleft(), type_)

    def isend_tensor(self, tensor: torch.Tensor, dst: int, timeout_s: float | None, tag: int) -> Handle:
        """Keep a copy of the tensor for a receive from rank `dst`."""
        self._health.check_usable("send")
        return self._tensors.send((dst, tag), tensor)

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> Handle:
        """Receive the next tensor that was sent to rank `src`, now or when it is sent."""
        return self._tensors.post((src, tag), tensor, f"recv from rank {self._health.ranks[src]}")

    def recv_any(
        self, shape: Sequence[int], dtype: torch.dtype, tag: int, timeout_s: float | None
    ) -> tuple[torch.Tensor, int]:
        """Refuse; `FakeGroupCoordinator` looks at one rank after the other itself."""
        raise refuse_any(self._health)

    def pack(self, tensor_dict: Mapping[Any, Any], slicing: Slicing) -> PackedDict:
        """Pack as on a group over several hosts."""
        return split(tensor_dict, slicing)

    def isend_tensor_dict(self, packed: PackedDict, dst: int, timeout_s: float | None) -> list[Handle]:
        """Keep the message and the CPU tensors beside it for receives from rank `dst`."""
        return isend_with_tensors(self, packed, dst, timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Nothing is on its way."""

    def close(self, timeout_s: float) -> None:
        """Forget what was sent and not received."""
        self._frames.clear()
        self._tensors.clear()
