"""The planes of a fake group: one process, and results as if every rank held what this rank holds."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from coordinator.host.plane import SoloHostPlane, isend_with_tensors
from coordinator.host.tensor_dict_format import PackedDict, Slicing, TensorDictMessage, split
from device_comm.base import CommunicatorContext, DeviceCommunicator, Sizes, Timeout
from device_comm.handles import CompletedHandle, Handle
from device_comm.health import GroupHealth
from device_comm.outputs import fill
from device_comm.process_group import dense
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from shm_broadcast import codec
from shm_broadcast.codec import register_type
from shm_broadcast.errors import CommError, UsageError
from shm_broadcast.reports.arrivals import Arrival
from shm_broadcast.reports.failure_record import FailureRecord

# What is sent and not yet received is kept for each peer and tag, first in, first out.
Key: TypeAlias = tuple[int, int]


class SilentStatusStore:
    """The status store of a group without other ranks; it is always empty."""

    @property
    def is_reachable(self) -> bool:
        """Return True."""
        return True

    def arrive(self, plane: str, arrival: Arrival) -> None:
        """Do nothing."""

    def arrivals(self, plane: str) -> dict[int, Arrival]:
        """Return nothing."""
        return {}

    def failure_record(self) -> FailureRecord | None:
        """Return None."""
        return None

    def publish(self, failure_record: FailureRecord, within_s: float = 0.0) -> FailureRecord:
        """Return `failure_record` itself, as there is no earlier one."""
        return failure_record

    def leave(self) -> None:
        """Do nothing."""

    def left(self) -> tuple[int, ...]:
        """Return nothing."""
        return ()


class PostedReceive:
    """A receive in a loop-back mailbox. It is filled as soon as something is sent to the same peer."""

    def __init__(self, mailbox: TensorMailbox, key: Key, into: torch.Tensor, name: str) -> None:
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
        fill(self._into, sent)

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
    """Return the text of the error that is raised where a real receive would wait."""
    return (
        f"{where}: nothing is there, and a real group would wait for it; in a fake group a rank receives "
        "from a peer what it has itself sent to that peer"
    )


class TensorMailbox:
    """Tensors sent and not yet received."""

    def __init__(self, health: GroupHealth) -> None:
        """Start empty, as part of the group of `health`."""
        self.health = health
        self._sent: defaultdict[Key, deque[torch.Tensor]] = defaultdict(deque)
        self._posted: defaultdict[Key, deque[PostedReceive]] = defaultdict(deque)

    def send(self, key: Key, tensor: torch.Tensor) -> Handle:
        """Keep a copy of `tensor` for the next receive under `key`."""
        self._sent[key].append(dense(tensor).clone())
        self._match(key)
        return CompletedHandle()

    def post(self, key: Key, into: torch.Tensor, name: str) -> Handle:
        """Receive the next tensor under `key`, now or when it is sent."""
        self.health.check_usable(name)
        receive = PostedReceive(self, key, into, name)
        self._posted[key].append(receive)
        self._match(key)
        return receive

    def cancel(self, key: Key, receive: PostedReceive) -> None:
        """Forget a receive, so that it takes nothing that is sent later."""
        if receive in self._posted[key]:
            self._posted[key].remove(receive)

    def clear(self) -> None:
        """Forget everything."""
        self._sent.clear()
        self._posted.clear()

    def _match(self, key: Key) -> None:
        sent, posted = self._sent[key], self._posted[key]
        while sent and posted:
            posted.popleft().fill(sent.popleft())


class FakeCommunicator(DeviceCommunicator):
    """The device plane of a fake group of two ranks or more: a group of one is a `SoloCommunicator`.

    Reductions use the arithmetic and the rank order of the real ones. Where `sizes` gives other ranks more or
    fewer rows than this rank brings, they are taken to bring this rank's rows, over and over, as many as
    they need; zeros if this rank has none. In an all-to-all each rank brings what this one sends to itself. A
    broadcast or scatter from another rank leaves the tensor as it is.
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
        source = dense(input_.reshape(input_.shape or 1))
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
            fill(output, part)

    def _all_to_all(
        self, input_: torch.Tensor, dim: int, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> torch.Tensor:
        self.context.health.check_usable("all_to_all")
        source, rank = dense(input_.reshape(input_.shape or 1)), self.rank_in_group
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
    """Return `source` with its rows repeated or cut to `size` in dimension `dim`; zeros if it has none."""
    own = source.shape[dim]
    if own == 0:
        return source.new_zeros((*source.shape[:dim], size, *source.shape[dim + 1 :]))
    return torch.cat([source] * -(-max(size, 1) // own), dim).narrow(dim, 0, size)


@register_type(name="coordinator.testing.WholeMessage")
class WholeMessage(TensorDictMessage, frozen=True):
    """The message of a tensor dict in a fake group.

    Attributes:
        wholes: The tensors of which only a slice travels, in the order of their slots.
    """

    wholes: tuple[torch.Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class _PackedWhole(PackedDict):
    wholes: tuple[torch.Tensor, ...] = ()

    def message(self) -> object:
        message = super().message()
        if isinstance(message, TensorDictMessage):
            return WholeMessage(message.slots, message.tree, message.parts, self.wholes)
        return message


def _sliced_tensors(tree: Mapping[Any, Any], slicing: Slicing, prefix: str = "") -> Iterator[torch.Tensor]:
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if type(value) in (dict, OrderedDict):
            yield from _sliced_tensors(value, slicing, key)
        elif isinstance(value, torch.Tensor) and slicing.slices(key, value.numel()) > 1:
            yield dense(value).cpu()


class FakeHostPlane(SoloHostPlane):
    """The host plane of a fake group: as in a group of one nothing waits, but what is sent to a peer comes back.

    Objects go through the codec, as on the way to another rank.
    """

    def __init__(self, health: GroupHealth, rank_in_group: int) -> None:
        """Belong to the group of `health`."""
        super().__init__(health)
        self._rank = rank_in_group
        self._world_size = len(health.ranks)
        self._frames: defaultdict[Key, deque[bytes]] = defaultdict(deque)
        self._tensors = TensorMailbox(health)

    def all_gather_integers(self, value: int, timeout_s: float | None = None) -> list[int]:
        """Return this rank's integer for every rank."""
        self._health.check_usable("all_gather_integers")
        return [value] * self._world_size

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return a copy for every rank."""
        self._health.check_usable("all_gather_object")
        frame = codec.encode(obj).to_bytes()
        return [codec.decode(frame) for _ in range(self._world_size)]

    def exchange(self, data: bytes) -> list[bytes]:
        """Return this rank's bytes for every rank."""
        return self.all_gather_object(data)

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return the object on rank `src`, elsewhere a copy."""
        self._health.check_usable("broadcast_object")
        frame = codec.encode(obj).to_bytes()
        return obj if self._rank == src else codec.decode(frame, type_)

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Keep the object for a receive from rank `dst`."""
        self.isend_object(obj, dst, name, timeout_s, tag)

    def send_message(
        self, message: codec.Message, dst: int, name: str, timeout_s: float | None, tag: int
    ) -> None:
        """Keep the object for a receive from rank `dst`."""
        self._health.check_usable(name)
        self._frames[dst, tag].append(message.to_bytes())

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
        frames = self._frames[src, tag]
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

    def pack(self, tensor_dict: Mapping[Any, Any], slicing: Slicing) -> PackedDict:
        """Pack as in a group over several hosts, with the tensors that are sliced also as a whole."""
        packed = split(tensor_dict, slicing)
        wholes = tuple(_sliced_tensors(tensor_dict, slicing))
        return _PackedWhole(packed.metadata, packed.slots, packed.tensors, wholes=wholes)

    def isend_tensor_dict(self, packed: PackedDict, dst: int, timeout_s: float | None) -> list[Handle]:
        """Keep the message and the CPU tensors beside it for receives from rank `dst`."""
        return isend_with_tensors(self, packed, dst, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Forget what was sent and not received."""
        self._frames.clear()
        self._tensors.clear()
