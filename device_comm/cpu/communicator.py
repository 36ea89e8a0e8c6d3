"""Collectives on CPU tensors through memory that all ranks of a group share.

A call is a sequence of steps: each rank copies a piece of its tensor into its slot, posts that, waits until all ranks
have, and takes what it needs from the others' slots (`csrc/cpu/call.cpp`). An ordinary small call is one native call.
Groups over several hosts are served by other classes; `connect_cpu` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from device_comm import _core
from device_comm.base import SUM, CallPath, CommunicatorContext, DeviceCommunicator, Sizes, Timeout
from device_comm.cpu.native_codes import OPERATION_CODES, TYPE_CODES, columns, copy_code
from device_comm.cpu.received_tensors import expect_tensor, irecv_into
from device_comm.cpu.shared_memory import SharedMemory
from device_comm.handles import Handle
from device_comm.movable import movable_dtype
from device_comm.outputs import fill
from device_comm.process_group import TENSOR_TAG, as_bytes, dense, is_plain
from device_comm.reduction import ReduceOperation
from shm_broadcast._core import BlockPool

# Up to this size of all ranks' tensors together every rank reduces everything itself: the ranks meet once instead of
# twice. The bytes that a rank reads grow with their number, the cost of meeting hardly does. On two cores both took
# the same time at 56 KiB with 3 ranks, 28 KiB with 4, 7 KiB with 8, 6 KiB with 16, 4 KiB with 32, 3 KiB with 64.
ONE_SHOT_TOTAL_BYTES: Final = 128 << 10

# With two ranks both algorithms move the same number of bytes between the cores, and one-shot has less to do.
_ONE_SHOT_RANKS: Final = 2

# Results of this size or more reuse the memory of earlier ones. Below it malloc does the same.
POOLED_BYTES: Final = 256 << 10


def one_shot_bytes(world_size: int) -> int:
    """Return up to which size a rank's tensor is reduced in one shot, if there are more than two ranks."""
    return ONE_SHOT_TOTAL_BYTES // world_size


def all_reduce_kind(nbytes: int, world_size: int) -> int:
    """Return the algorithm of an all-reduce: a pure choice from facts that all ranks share."""
    if world_size <= _ONE_SHOT_RANKS or nbytes <= one_shot_bytes(world_size):
        return _core.ALL_REDUCE_ONE_SHOT
    return _core.ALL_REDUCE_TWO_SHOT


def instruction_set() -> str:
    """Return the instruction set that reductions of CPU tensors use on this machine."""
    return _core.level()


def call_path(operation: str, nbytes: int, world_size: int) -> CallPath:
    """Return how the ranks of one host carry a call on CPU tensors: a pure choice from facts that all ranks share."""
    if operation not in ("all_reduce", "all_reduce_"):
        return CallPath("shared memory", "every rank takes what it needs from the others' slots")
    if world_size <= _ONE_SHOT_RANKS:
        return CallPath(
            "one-shot", "two ranks: both algorithms move the same bytes, and this one has a single round"
        )
    limit = one_shot_bytes(world_size)
    if all_reduce_kind(nbytes, world_size) == _core.ALL_REDUCE_ONE_SHOT:
        return CallPath("one-shot", f"{nbytes} bytes are at most {limit}: a single round")
    return CallPath("two-shot", f"{nbytes} bytes are more than {limit}: each rank combines its share")


class SharedMemoryCommunicator(DeviceCommunicator):
    """Collectives and point to point through memory that all ranks of the group share."""

    algorithm = "shared memory"

    def __init__(self, context: CommunicatorContext, shared: SharedMemory) -> None:
        """Use `shared`, which stays the caller's. Not collective."""
        super().__init__(context)
        self._region = shared.device
        self._core = shared.device.core
        self._channels = shared.channels
        self._health = context.health
        # The native call for short messages takes the algorithm that `all_reduce_kind` names.
        is_always = self.world_size <= _ONE_SHOT_RANKS
        self._limits = (POOLED_BYTES - 1, POOLED_BYTES if is_always else one_shot_bytes(self.world_size))
        self._pool = BlockPool()

    def path(self, operation: str, nbytes: int, dtype: torch.dtype) -> CallPath:
        """Return how a call is carried."""
        del dtype
        return call_path(operation, nbytes, self.world_size)

    def destroy(self) -> None:
        """Leave the shared region; calls that wait in other threads end."""
        self._pool.close()
        self._region.close()

    def _make(self, name: str, begin: Callable[[], int], timeout_s: float | None) -> None:
        self._region.make(name, begin, timeout_s or self.context.timeout_s)

    def _finish(self, name: str, status: int) -> None:
        """Wait for a short call that has begun; its caller unwinds what is raised."""
        if status != _core.DONE:
            self._region.finish(name, status, self.context.timeout_s)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of any content; a large one in memory that was used before, if there is any."""
        return self._fresh(shape, dtype, math.prod(shape) * dtype.itemsize, is_of_call=False)

    def _fresh(
        self, shape: Sequence[int], dtype: torch.dtype, nbytes: int, *, is_of_call: bool = True
    ) -> torch.Tensor:
        """Return what `allocate` does. If there is no memory for a tensor of a call, this rank refuses the call."""
        try:
            if nbytes < POOLED_BYTES:
                return torch.empty(shape, dtype=dtype, device=self.device)
            return torch.frombuffer(self._pool.take(nbytes), dtype=dtype).view(shape)
        except Exception as error:
            if is_of_call:
                self._region.refuse_unmade("a call", error)
            raise

    def _dense(self, tensor: torch.Tensor, *, in_rows: bool = False) -> torch.Tensor:
        """Return the tensor's values in contiguous memory. If there is none for a copy, this rank refuses the call.

        `in_rows`: a 0-dim tensor counts as one of shape [1].
        """
        try:
            return dense(tensor.reshape(1) if in_rows and tensor.dim() == 0 else tensor)
        except Exception as error:
            self._region.refuse_unmade("a call", error)
            raise

    def _fresh_like(self, source: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Return a new tensor as `source` with `size` in dimension `dim`; see `_fresh`."""
        shape = (*source.shape[:dim], size, *source.shape[dim + 1 :])
        return self._fresh(shape, source.dtype, math.prod(shape) * source.itemsize)

    # ------------------------------------------------------------------ reductions

    def all_reduce(
        self, input_: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Combine the ranks' tensors; every rank gets the result, of the input's shape and dtype.

        The ordinary small call is one native call. The result is an ordinary tensor, except that its storage cannot be
        resized.
        """
        if op is SUM and timeout_s is None:
            try:
                answer = self._core.all_reduce(input_, *self._limits)
                if type(answer) is torch.Tensor:
                    return answer
                if answer is not None:
                    result, status = answer
                    if status != _core.BUSY:
                        self._finish("all_reduce", status)
                        return result
            except BaseException as error:
                self._region.unwind("all_reduce", error, self._core.leave())
                raise
        return super().all_reduce(input_, op, timeout_s=timeout_s)

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        source = input_ if is_plain(input_) else self._dense(input_)
        result = self._fresh(source.shape, source.dtype, source.nbytes)
        self._reduce_into("all_reduce", source, result, op, timeout_s)
        return result

    def _all_reduce_into(
        self, output: torch.Tensor, input_: torch.Tensor, op: ReduceOperation, timeout_s: Timeout
    ) -> None:
        if not is_plain(output):
            super()._all_reduce_into(output, input_, op, timeout_s)
            return
        self._reduce_into(
            "all_reduce", input_ if is_plain(input_) else self._dense(input_), output, op, timeout_s
        )

    def all_reduce_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """As `all_reduce`, into `output`, which is returned; it may be the memory of the input.

        The ordinary small call is one native call.
        """
        if op is SUM and timeout_s is None:
            try:
                status = self._core.all_reduce_into(input_, output, *self._limits)
                if status is not None and status != _core.BUSY:
                    self._finish("all_reduce", status)
                    return output
            except BaseException as error:
                self._region.unwind("all_reduce", error, self._core.leave())
                raise
        return super().all_reduce_into_output(input_, output, op, timeout_s=timeout_s)

    def all_reduce_(
        self, tensor: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Combine the ranks' tensors in place; return `tensor`, which must not overlap itself."""
        if op is SUM and timeout_s is None:
            try:
                status = self._core.all_reduce_into(tensor, tensor, *self._limits)
                if status is not None and status != _core.BUSY:
                    self._finish("all_reduce_", status)
                    return tensor
            except BaseException as error:
                self._region.unwind("all_reduce_", error, self._core.leave())
                raise
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            return super().all_reduce_(tensor, op, timeout_s=timeout_s)
        op = self._check_reduction("all_reduce_", tensor, op, timeout_s)
        self._reduce_into("all_reduce_", tensor, tensor, op, timeout_s)
        return tensor

    def _reduce_into(
        self,
        name: str,
        source: torch.Tensor,
        result: torch.Tensor | None,
        op: ReduceOperation,
        timeout_s: Timeout,
        root: int | None = None,
    ) -> None:
        """Combine the ranks' contiguous tensors, on rank `root` alone if there is one."""
        kind = all_reduce_kind(source.nbytes, self.world_size) if root is None else _core.REDUCE
        codes = (TYPE_CODES[source.dtype], OPERATION_CODES[op])
        addresses = (source.data_ptr(), _address(result))
        begin = partial(self._core.reduce, kind, *addresses, source.numel(), *codes, root or 0)
        self._make(name, begin, timeout_s)

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor | None:
        source = input_ if is_plain(input_) else self._dense(input_)
        result = None
        if self.rank_in_group == dst:
            result = self._fresh(source.shape, source.dtype, source.nbytes)
        self._reduce_into("reduce", source, result, op, timeout_s, dst)
        return result

    def _reduce_scatter(
        self, input_: torch.Tensor, dim: int, sizes: Sizes, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor:
        source = self._dense(input_, in_rows=True)
        result = self._fresh_like(source, dim, sizes[self.rank_in_group])
        self._scatter_reduced(source, result, dim, sizes, op, timeout_s)
        return result

    def _reduce_scatter_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        sizes: Sizes,
        op: ReduceOperation,
        timeout_s: Timeout,
    ) -> None:
        if not is_plain(output):
            super()._reduce_scatter_into(output, input_, dim, sizes, op, timeout_s)
            return
        self._scatter_reduced(self._dense(input_, in_rows=True), output, dim, sizes, op, timeout_s)

    def _scatter_reduced(
        self,
        source: torch.Tensor,
        result: torch.Tensor,
        dim: int,
        sizes: Sizes,
        op: ReduceOperation,
        timeout_s: Timeout,
    ) -> None:
        kind, code = _core.REDUCE_SCATTER, OPERATION_CODES[op]
        self._move("reduce_scatter", kind, source, result, dim, sizes, timeout_s, code)

    # ------------------------------------------------------------------ moving data

    def all_gather(
        self, input_: torch.Tensor, dim: int = -1, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in rank order; every rank gets the result.

        The ordinary small call is one native call. The result is an ordinary tensor, except that its storage cannot be
        resized.
        """
        if timeout_s is None:
            try:
                answer = self._core.all_gather(input_, dim, self._limits[0])
                if type(answer) is torch.Tensor:
                    return answer
                if answer is not None:
                    result, status = answer
                    if result is not None and status != _core.BUSY:
                        self._finish("all_gather", status)
                        return result
            except BaseException as error:
                self._region.unwind("all_gather", error, self._core.leave())
                raise
        return super().all_gather(input_, dim, timeout_s=timeout_s)

    def _all_gather(self, input_: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout) -> torch.Tensor:
        source = self._dense(input_, in_rows=True)
        result = self._fresh_like(source, dim, sum(sizes))
        self._move("all_gather", _core.ALL_GATHER, source, result, dim, sizes, timeout_s)
        return result

    def _all_gather_into(
        self, output: torch.Tensor, input_: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout
    ) -> None:
        if not is_plain(output):
            super()._all_gather_into(output, input_, dim, sizes, timeout_s)
            return
        self._move(
            "all_gather", _core.ALL_GATHER, self._dense(input_, in_rows=True), output, dim, sizes, timeout_s
        )

    def _gather(self, input_: torch.Tensor, dst: int, dim: int, timeout_s: Timeout) -> torch.Tensor | None:
        source = self._dense(input_, in_rows=True)
        sizes = (source.shape[dim],) * self.world_size
        result = self._fresh_like(source, dim, sum(sizes)) if self.rank_in_group == dst else None
        self._move("gather", _core.GATHER, source, result, dim, sizes, timeout_s, root=dst)
        return result

    def _scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None,
        src: int,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        into = output.detach()
        landing = into if is_plain(into) else self._fresh(into.shape, into.dtype, into.nbytes)
        source = None if input_ is None else self._dense(input_)
        self._move("scatter", _core.SCATTER, source, landing, dim, sizes, timeout_s, root=src)
        if landing is not into:
            fill(into, landing)

    def _move(
        self,
        name: str,
        kind: int,
        source: torch.Tensor | None,
        result: torch.Tensor | None,
        dim: int,
        sizes: Sizes,
        timeout_s: Timeout,
        op_code: int = 0,
        root: int = 0,
    ) -> None:
        """Make a native call in which one of the tensors holds `sizes[rank]` of each rank along `dim`.

        In an all-to-all both do: the first half of `sizes` is for the source, the second half for the result.
        """
        either = next(tensor for tensor in (source, result) if tensor is not None)
        rows, widths = columns(either, dim, sizes)
        codes = (copy_code(either.dtype), op_code)
        begin = partial(self._core.move, kind, _address(source), _address(result), rows, widths, *codes, root)
        self._make(name, begin, timeout_s)

    def _all_to_all(
        self, input_: torch.Tensor, dim: int, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> torch.Tensor:
        source = self._dense(input_, in_rows=True)
        result = self._fresh_like(source, dim, sum(recv_sizes))
        sizes = (*send_sizes, *recv_sizes)
        self._move("all_to_all", _core.ALL_TO_ALL, source, result, dim, sizes, timeout_s)
        return result

    def _all_to_all_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        send_sizes: Sizes,
        recv_sizes: Sizes,
        timeout_s: Timeout,
    ) -> None:
        if not is_plain(output):
            super()._all_to_all_into(output, input_, dim, send_sizes, recv_sizes, timeout_s)
            return
        sizes = (*send_sizes, *recv_sizes)
        self._move(
            "all_to_all", _core.ALL_TO_ALL, self._dense(input_, in_rows=True), output, dim, sizes, timeout_s
        )

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
        into = tensor.detach()
        landing = into if is_plain(into) else self._dense(into)
        code = copy_code(tensor.dtype)
        begin = partial(self._core.broadcast, landing.data_ptr(), as_bytes(landing).numel(), code, src)
        self._make("broadcast", begin, timeout_s)
        if landing is not into and self.rank_in_group != src:
            fill(into, landing)
        return tensor

    # ------------------------------------------------------------------ point to point

    def _send(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> None:
        deadline = timeout_s or self.context.timeout_s
        self._channels.send("device", "send", dense(tensor), (dst,), TENSOR_TAG, deadline)

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        deadline = timeout_s or self.context.timeout_s
        return self._channels.isend("device", "send", dense(tensor), dst, TENSOR_TAG, deadline)

    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, src: int, timeout_s: Timeout) -> torch.Tensor:
        moved, health = movable_dtype(dtype), self._health

        def land(received: object) -> torch.Tensor:
            result = expect_tensor(received, moved, shape, src, health)
            return result if moved is dtype else result.view(dtype)

        # Nothing is called behind this, so that no signal handler drops the message.
        result: torch.Tensor = self._channels.recv("device", "recv", src, TENSOR_TAG, timeout_s, land)
        return result

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        return irecv_into(tensor.detach(), self._channels, src, TENSOR_TAG, timeout_s, self._health)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


__all__ = [
    "ONE_SHOT_TOTAL_BYTES",
    "SharedMemoryCommunicator",
    "all_reduce_kind",
    "call_path",
    "one_shot_bytes",
]
