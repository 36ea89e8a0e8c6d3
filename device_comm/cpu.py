"""Collectives on CPU tensors through memory that all ranks of a host share.

A call is a sequence of steps: each rank copies a piece of its tensor into its slot, says so, waits until all
have, and takes what it needs from the others' slots (`csrc/call.cpp`). An ordinary small call is one native call.
Groups over several hosts are served by `device_comm.hierarchical`, and by the general communicator where no two
ranks share a host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from device_comm import _core, fabric
from device_comm.base import SUM, CommunicatorContext, movable_dtype
from device_comm.fabric import SharedMemory
from device_comm.handles import Handle
from device_comm.health import Operation
from device_comm.hierarchical import HierarchicalCommunicator
from device_comm.ordinary_tensors import teach_core
from device_comm.paths import CallPath
from device_comm.process_group import TENSOR_TAG, as_bytes, dense, is_plain
from device_comm.reduction import ReduceOperation
from shm_broadcast._core import BlockPool
from shm_broadcast.errors import DisagreementError

# Up to this size every rank reduces everything itself: one meeting of the ranks instead of two. With two ranks both
# ways move the same number of bytes between the cores, and one-shot has less to do.
ONE_SHOT_BYTES: Final = 64 << 10
_ONE_SHOT_RANKS: Final = 2

_OPS: Final = {
    operation: code
    for code, operation in enumerate(
        (
            ReduceOperation.SUM,
            ReduceOperation.MEAN,
            ReduceOperation.PRODUCT,
            ReduceOperation.MIN,
            ReduceOperation.MAX,
        )
    )
}
_TYPES: Final[dict[torch.dtype, int]] = {
    getattr(torch, name): code for code, name in _core.TYPE_NAMES.items() if hasattr(torch, name)
}
teach_core({dtype: code for dtype, code in _TYPES.items() if dtype is not torch.bool})

# From this size on results take the place of earlier ones. Below it malloc does the same.
POOLED_BYTES: Final = 256 << 10
# What is merely moved is told by its size and, for the check, by a code of its own where it has no kernel.
_OTHER_TYPE: Final = 0xFF


def all_reduce_kind(nbytes: int, world_size: int) -> int:
    """Return the algorithm of an all-reduce: a pure choice from facts that all ranks share."""
    if world_size <= _ONE_SHOT_RANKS or nbytes <= ONE_SHOT_BYTES:
        return _core.ALL_REDUCE_ONE_SHOT
    return _core.ALL_REDUCE_TWO_SHOT


def call_path(operation: str, nbytes: int, world_size: int) -> CallPath:
    """Return how the ranks of one host carry a call on CPU tensors: a pure choice from facts that all ranks share."""
    if operation not in ("all_reduce", "all_reduce_"):
        return CallPath("shared memory", "every rank takes what it needs from the others' slots")
    if world_size <= _ONE_SHOT_RANKS:
        return CallPath("one-shot", "two ranks: both ways move as much, and this one meets once")
    if all_reduce_kind(nbytes, world_size) == _core.ALL_REDUCE_ONE_SHOT:
        return CallPath("one-shot", f"{nbytes} bytes are at most {ONE_SHOT_BYTES}: one meeting of the ranks")
    return CallPath(
        "two-shot", f"{nbytes} bytes are more than {ONE_SHOT_BYTES}: each rank combines its share"
    )


class CpuCommunicator(HierarchicalCommunicator):
    """Collectives over shared memory where all ranks are on one host, else in two levels or over the process group."""

    algorithm = "shared memory"
    needs_process_group = False

    def __init__(self, context: CommunicatorContext) -> None:
        """Use the context's shared memory; if there is none, make it, which is collective."""
        super().__init__(context)
        self._own = None if context.shared is not None else self._connect()
        shared = context.shared or self._own
        self._fabric = None if shared is None else shared.device
        self._core = None if self._fabric is None else self._fabric.core
        self._channels = None if shared is None else shared.channels
        self._is_pair = self.world_size <= _ONE_SHOT_RANKS
        # What is answered by one native call, which knows one-shot alone.
        self._short_bytes = POOLED_BYTES - 1 if self._is_pair else ONE_SHOT_BYTES
        self._pool = BlockPool()
        if shared is None:
            self._connect_hosts()

    def path(self, operation: str, nbytes: int, dtype: torch.dtype) -> CallPath:
        """Return how a call is carried."""
        if self._core is not None:
            return call_path(operation, nbytes, self.world_size)
        return super().path(operation, nbytes, dtype)

    def _connect(self) -> SharedMemory | None:
        operation = self._health.begin("device", "create shared memory")
        timeout_s = self.context.timeout_s

        def exchange(own: bytes) -> list[bytes]:
            tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            gathered = super(CpuCommunicator, self)._gather_bytes(operation, tensor, timeout_s)
            return [bytes(row.numpy()) for row in gathered.view(self.world_size, -1)]

        return fabric.connect(self._health, self.rank_in_group, timeout_s, exchange)

    def destroy(self) -> None:
        """Let the shared memory go, then the rest."""
        self._pool.close()
        if self._fabric is not None:
            self._fabric.close()
        if self._own is not None:
            self._own.close()
        super().destroy()

    def _settle(self, name: str, status: int, timeout_s: float | None) -> None:
        if status != _core.DONE and self._fabric is not None:
            self._fabric.finish(name, status, timeout_s or self.context.timeout_s)

    def _fresh(self, shape: Sequence[int], dtype: torch.dtype, nbytes: int) -> torch.Tensor:
        """Return a new tensor of any content; a large one in memory that was used before, if there is any."""
        if nbytes < POOLED_BYTES:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.frombuffer(self._pool.take(nbytes), dtype=dtype).view(shape)

    # ------------------------------------------------------------------ reductions

    def all_reduce(
        self, input_: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Combine the ranks' tensors; every rank gets the result, of the input's shape and dtype.

        The ordinary small call is one native call. The result is a tensor as any other, but for its storage,
        which cannot be resized.
        """
        if op is SUM and timeout_s is None and self._core is not None:
            answer = self._core.all_reduce(input_, self._short_bytes)
            if type(answer) is torch.Tensor:
                return answer
            if answer is not None:
                result, status = answer
                self._settle("all_reduce", status, None)
                return result
        return super().all_reduce(input_, op, timeout_s=timeout_s)

    def _kind(self, nbytes: int) -> int:
        return _core.ALL_REDUCE_ONE_SHOT if self._is_pair else all_reduce_kind(nbytes, self.world_size)

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        code = _TYPES.get(input_.dtype)
        if self._core is None or code is None:
            return super()._all_reduce(input_, op, timeout_s)
        source = input_ if is_plain(input_) else dense(input_)
        result = self._fresh(source.shape, source.dtype, source.nbytes)
        self._reduce_into("all_reduce", source, result, code, op, timeout_s)
        return result

    def all_reduce_(
        self,
        tensor: torch.Tensor,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Combine the ranks' tensors in place; return `tensor`, which must not overlap itself."""
        if op is SUM and timeout_s is None and self._core is not None:
            status = self._core.all_reduce_in_place(tensor, self._short_bytes)
            if status is not None:
                self._settle("all_reduce_", status, None)
                return tensor
        code = _TYPES.get(tensor.dtype) if isinstance(tensor, torch.Tensor) else None
        if self._core is None or code is None or not is_plain(tensor):
            return super().all_reduce_(tensor, op, timeout_s=timeout_s)
        op = self._check_reduction("all_reduce_", tensor, op, timeout_s)
        self._reduce_into("all_reduce_", tensor, tensor, code, op, timeout_s)
        return tensor

    def _reduce_into(
        self,
        name: str,
        source: torch.Tensor,
        result: torch.Tensor,
        code: int,
        op: ReduceOperation,
        timeout_s: float | None,
    ) -> None:
        kind = self._kind(source.nbytes)
        status = self._core.reduce(  # type: ignore[union-attr]
            kind, source.data_ptr(), result.data_ptr(), source.numel(), code, _OPS[op], 0
        )
        self._settle(name, status, timeout_s)

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor | None:
        code = _TYPES.get(input_.dtype)
        if self._core is None or code is None:
            return super()._reduce(input_, dst, op, timeout_s)
        source = input_ if is_plain(input_) else dense(input_)
        result = None
        if self.rank_in_group == dst:
            result = self._fresh(source.shape, source.dtype, source.nbytes)
        status = self._core.reduce(
            *(_core.REDUCE, source.data_ptr(), 0 if result is None else result.data_ptr()),
            *(source.numel(), code, _OPS[op], dst),
        )
        self._settle("reduce", status, timeout_s)
        return result

    def _reduce_scatter(
        self,
        input_: torch.Tensor,
        dim: int,
        sizes: tuple[int, ...],
        op: ReduceOperation,
        timeout_s: float | None,
    ) -> torch.Tensor:
        code = _TYPES.get(input_.dtype)
        if self._core is None or code is None:
            return super()._reduce_scatter(input_, dim, sizes, op, timeout_s)
        source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
        shape = (*source.shape[:dim], sizes[self.rank_in_group], *source.shape[dim + 1 :])
        result = self._fresh(shape, source.dtype, math.prod(shape) * source.itemsize)
        rows, widths = _columns(source, dim, sizes)
        status = self._core.move(
            *(_core.REDUCE_SCATTER, source.data_ptr(), result.data_ptr(), rows, widths, code, _OPS[op], 0)
        )
        self._settle("reduce_scatter", status, timeout_s)
        return result

    # ------------------------------------------------------------------ what has no kernel is moved as bytes

    def _gather_bytes(self, operation: Operation, own: torch.Tensor, timeout_s: float | None) -> torch.Tensor:
        if self._core is None:
            return super()._gather_bytes(operation, own, timeout_s)
        result = own.new_empty(own.numel() * self.world_size)
        widths = (own.numel(),) * self.world_size
        status = self._core.move(
            *(_core.ALL_GATHER, own.data_ptr(), result.data_ptr(), 1, widths, _OTHER_TYPE, 0, 0)
        )
        self._settle(operation.name, status, timeout_s)
        return result

    def _exchange(
        self, operation: Operation, flat: torch.Tensor, counts: Sequence[int], timeout_s: float | None
    ) -> list[torch.Tensor]:
        if self._core is None:
            return super()._exchange(operation, flat, counts, timeout_s)
        own = counts[self.rank_in_group]
        received = flat.new_empty(own * self.world_size)
        sent = tuple(count * flat.itemsize for count in counts)
        status = self._core.exchange(
            flat.data_ptr(),
            received.data_ptr(),
            1,
            sent,
            (own * flat.itemsize,) * self.world_size,
            _OTHER_TYPE,
        )
        self._settle(operation.name, status, timeout_s)
        return list(received.view(self.world_size, own))

    # ------------------------------------------------------------------ moving data

    def _all_gather(
        self, input_: torch.Tensor, dim: int, sizes: tuple[int, ...], timeout_s: float | None
    ) -> torch.Tensor:
        if self._core is None:
            return super()._all_gather(input_, dim, sizes, timeout_s)
        source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
        shape = (*source.shape[:dim], sum(sizes), *source.shape[dim + 1 :])
        result = self._fresh(shape, source.dtype, math.prod(shape) * source.itemsize)
        self._gather_into("all_gather", _core.ALL_GATHER, source, result, dim, sizes, 0, timeout_s)
        return result

    def _gather(
        self, input_: torch.Tensor, dst: int, dim: int, timeout_s: float | None
    ) -> torch.Tensor | None:
        if self._core is None:
            return super()._gather(input_, dst, dim, timeout_s)
        source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
        sizes = (source.shape[dim],) * self.world_size
        result = None
        if self.rank_in_group == dst:
            shape = (*source.shape[:dim], sum(sizes), *source.shape[dim + 1 :])
            result = self._fresh(shape, source.dtype, math.prod(shape) * source.itemsize)
        self._gather_into("gather", _core.GATHER, source, result, dim, sizes, dst, timeout_s)
        return result

    def _gather_into(
        self,
        name: str,
        kind: int,
        source: torch.Tensor,
        result: torch.Tensor | None,
        dim: int,
        sizes: tuple[int, ...],
        root: int,
        timeout_s: float | None,
    ) -> None:
        rows, widths = _columns(source, dim, sizes)
        address = 0 if result is None else result.data_ptr()
        code = _TYPES.get(source.dtype, _OTHER_TYPE)
        status = self._core.move(  # type: ignore[union-attr]
            kind, source.data_ptr(), address, rows, widths, code, 0, root
        )
        self._settle(name, status, timeout_s)

    def _scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None,
        src: int,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        if self._core is None:
            super()._scatter(output, input_, src, dim, sizes, timeout_s)
            return
        into = output.detach()
        landing = into if is_plain(into) else into.new_empty(into.shape)
        source = None if input_ is None else dense(input_)
        rows, widths = _columns(landing, dim, sizes)
        code = _TYPES.get(output.dtype, _OTHER_TYPE)
        address = 0 if source is None else source.data_ptr()
        status = self._core.move(*(_core.SCATTER, address, landing.data_ptr(), rows, widths, code, 0, src))
        self._settle("scatter", status, timeout_s)
        if landing is not into:
            into.copy_(landing)

    def _all_to_all(
        self,
        input_: torch.Tensor,
        dim: int,
        send_sizes: tuple[int, ...],
        recv_sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> torch.Tensor:
        if self._core is None:
            return super()._all_to_all(input_, dim, send_sizes, recv_sizes, timeout_s)
        source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
        shape = (*source.shape[:dim], sum(recv_sizes), *source.shape[dim + 1 :])
        result = self._fresh(shape, source.dtype, math.prod(shape) * source.itemsize)
        (rows, sent), (_, received) = (_columns(source, dim, sizes) for sizes in (send_sizes, recv_sizes))
        code = _TYPES.get(source.dtype, _OTHER_TYPE)
        status = self._core.exchange(source.data_ptr(), result.data_ptr(), rows, sent, received, code)
        self._settle("all_to_all", status, timeout_s)
        return result

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
        if self._core is None:
            return super()._broadcast(tensor, src, timeout_s)
        into = tensor.detach()
        landing = into if is_plain(into) else dense(into)
        code = _TYPES.get(tensor.dtype, _OTHER_TYPE)
        status = self._core.broadcast(landing.data_ptr(), as_bytes(landing).numel(), code, src)
        self._settle("broadcast", status, timeout_s)
        if landing is not into and self.rank_in_group != src:
            into.copy_(landing)
        return tensor

    # ------------------------------------------------------------------ point to point

    def _send(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> None:
        if self._channels is None:
            super()._send(tensor, dst, timeout_s)
        else:
            deadline = timeout_s or self.context.timeout_s
            self._channels.send("device", "send", dense(tensor), (dst,), TENSOR_TAG, deadline)

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        if self._channels is None:
            return super()._isend(tensor, dst, timeout_s)
        deadline = timeout_s or self.context.timeout_s
        return self._channels.isend("device", "send", dense(tensor), dst, TENSOR_TAG, deadline)

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        if self._channels is None:
            return super()._irecv(tensor, src, timeout_s)
        into = tensor.detach()

        def land(received: object) -> None:
            into.copy_(self._checked(received, into.dtype, into.shape, src))

        return self._channels.irecv("device", "recv", src, TENSOR_TAG, timeout_s, land)

    def _recv(
        self, shape: tuple[int, ...], dtype: torch.dtype, src: int, timeout_s: float | None
    ) -> torch.Tensor:
        if self._channels is None:
            return super()._recv(shape, dtype, src, timeout_s)
        moved = movable_dtype(dtype)
        received = self._channels.recv("device", "recv", src, TENSOR_TAG, timeout_s)
        result = self._checked(received, moved, shape, src)
        return result if moved is dtype else result.view(dtype)

    def _checked(
        self, received: object, dtype: torch.dtype, shape: tuple[int, ...], src: int
    ) -> torch.Tensor:
        """Return what was received in the shape that is expected here."""
        expected = f"a tensor of shape {list(shape)} and dtype {dtype}"
        if not isinstance(received, torch.Tensor):
            sent = f"an object of type {type(received).__name__}"
        elif received.dtype == dtype and received.numel() == math.prod(shape):
            return received.view(shape)
        else:
            sent = f"a tensor of shape {list(received.shape)} and dtype {received.dtype}"
        raise DisagreementError(
            f"{self._health.where('recv')}: rank {self.context.ranks[src]} sent {sent}, this rank expects {expected}; "
            "the message is gone, the next one can be received"
        )


def _columns(tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return how many rows a tensor has that is concatenated along `dim`, and each rank's bytes of a row."""
    rows = math.prod(tensor.shape[:dim])
    inner = math.prod(tensor.shape[dim + 1 :]) * tensor.itemsize
    return rows, tuple(size * inner for size in sizes)


__all__ = ["ONE_SHOT_BYTES", "CpuCommunicator", "all_reduce_kind", "call_path"]
