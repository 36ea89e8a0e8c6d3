"""Run collectives with NCCL, queued on the caller's current stream; see `DESIGN.md`, section NCCL.

Operations that only move data send bytes. Reductions follow NCCL: it guarantees neither an order of summation nor equal
bits for different sizes, and it decides how MIN and MAX treat NaN.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import ClassVar, Final

import torch

from device_comm.base import SUM, CallPath, CommunicatorContext
from device_comm.cuda_settings import cuda_settings
from device_comm.nccl.batching import NcclQueue
from device_comm.nccl.dtypes import DATA_TYPES, FP8, FP8_SINCE, UINT8, reduction_code
from device_comm.nccl.dtypes import SUM as SUM_CODE
from device_comm.nccl.library import NcclLibrary
from device_comm.nccl.rows import landing_of, parts_of
from device_comm.nccl.streams import Progress, Streams, TorchStreams
from device_comm.nccl.transfers import Post
from device_comm.nccl.window import fits
from device_comm.outputs import fill
from device_comm.process_group import dense, is_plain
from device_comm.reduction import ReduceOperation
from shm_broadcast.errors import UsageError
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import DONE, FAILED, NOBODY

_SUM: Final = ctypes.c_int(SUM_CODE)
_STRIDED: Final = torch.strided
_ALL_REDUCE: Final = kind_of("all_reduce")

open_library: Callable[[str | None], NcclLibrary] = functools.cache(NcclLibrary)


class NcclCommunicator(NcclQueue):
    """Run collectives with NCCL.

    * Connecting: the first collective connects, or the constructor with `eager`. A point-to-point call cannot connect
      a group of more than two ranks, because the others do not take part in it.
    * Capture: every call may be captured into a CUDA graph once the communicator is connected, because no call waits
      for the device.
    * Deadlines: a call that blocks in the library breaks the group when its deadline passes. With a `progress`, so
      does a call that stays incomplete on the device.
    """

    algorithm = "nccl"
    needs_process_group: ClassVar[bool] = False

    def __init__(
        self,
        context: CommunicatorContext,
        *,
        library: NcclLibrary | None = None,
        streams: Streams | None = None,
        progress: Progress | None = None,
        eager: bool = False,
    ) -> None:
        """Prepare a communicator; collective only with `eager`.

        Args:
            context: The group; `exchange` must be set.
            library: The NCCL library; defaults to the one that `context.cuda.nccl_library` names, else to the one
                that `NcclLibrary` finds.
            streams: The device's streams; defaults to torch's.
            progress: Tells whether queued work is complete; without it only the host's waits have deadlines.
            eager: Connect now.

        Raises:
            CapabilityError: No usable library was found.
        """
        super().__init__(
            context,
            library or open_library(cuda_settings(context.cuda).nccl_library),
            streams or TorchStreams(context.device),
            progress,
        )
        self._index = -1 if self.device.type == "cpu" else getattr(self._streams, "index", self.device.index)
        # The fast path of `all_reduce` needs these as ctypes objects; they are converted once.
        self._all_reduce_function = self.library.functions["ncclAllReduce"]
        self._summed = {
            dtype: ctypes.c_int(code)
            for dtype, code in DATA_TYPES.items()
            if dtype not in FP8 or self.library.version >= FP8_SINCE
        }
        if eager:
            self._connection.connect()

    # ------------------------------------------------------------------ life

    def connect(self) -> None:
        """Connect the ranks now, instead of in the first collective. Collective."""
        self._connection.connect()

    def prepare_buffers(self, message_bytes: int) -> None:
        """Connect, so that the first call of the application does not have to. Collective."""
        del message_bytes
        self._connection.connect()

    def end_calls(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the abort of a broken group; its keeper aborts whether anybody waits or not."""
        self._connection.await_abort(timeout_s)

    def destroy(self) -> None:
        """Wait for queued calls and free the communicator; abort it if that takes longer than 3 s."""
        self._receives.clear()
        self._connection.close()

    def path(self, operation: str, nbytes: int, dtype: torch.dtype) -> CallPath:
        """Return "nccl", and for a SUM by `all_reduce` whether and why it is staged through a window or not."""
        return CallPath("nccl", self._about_window(operation, nbytes, dtype))

    def _about_window(self, operation: str, nbytes: int, dtype: torch.dtype) -> str:
        connection = self._connection
        if operation.rstrip("_") != "all_reduce":
            return "only all_reduce is staged through a symmetric window"
        window = connection.window
        if window is None:
            return f"no symmetric window: {connection.no_window}"
        arguments = (0, 0, nbytes // dtype.itemsize, DATA_TYPES.get(dtype, -1), SUM_CODE)
        if fits("ncclAllReduce", arguments, window.nbytes):
            return "staged through the symmetric window"
        return f"the symmetric window is for sums of 16 or 32 bit floats of up to {window.nbytes} bytes"

    # ------------------------------------------------------------------ reductions

    def all_reduce(
        self, input_: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Combine the ranks' tensors; every rank gets a new tensor of the input's shape and dtype.

        A contiguous sum with default arguments is served here, with few checks.
        """
        code = self._code_of_sum(input_, op, timeout_s)
        if code is None or not (source := input_.data_ptr()):
            return super().all_reduce(input_, op, timeout_s=timeout_s)
        result = torch.empty_like(input_)
        self._sum(source, result.data_ptr(), input_.numel(), input_.itemsize, code)
        return result

    def _code_of_sum(
        self, tensor: torch.Tensor, op: ReduceOperation, timeout_s: float | None
    ) -> ctypes.c_int | None:
        """Return NCCL's code of the dtype if `_sum` can take the tensor's memory as it is, else None.

        The caller must check that the tensor has an address. A tensor without one is empty, or on the meta
        device, which has the same index as the CPU.
        """
        if (
            self._connection.hot is None
            or op is not SUM
            or timeout_s is not None
            or not self._is_memory_of_values(tensor)
        ):
            return None
        return self._summed.get(tensor.dtype)

    def _is_memory_of_values(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's memory, if it has any, is on the device and holds its values one by one."""
        return (
            type(tensor) is torch.Tensor
            and tensor.get_device() == self._index
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
            and not tensor.is_neg()
        )

    def _sum(self, source: int, result: int, count: int, size: int, code: ctypes.c_int) -> None:
        """Queue one all-reduce. The arguments are those of ncclAllReduce, and the bytes of an element.

        `_code_of_sum` has allowed it.
        """
        stream = self._current()
        order = self._order
        if order is None or stream != order.hot:
            self._admit(stream, "all_reduce")
        connection = self._connection
        connection.call = connection.everyone
        connection.entered += 1
        # Nothing is called from here to the `try`: a handler that strikes would leave the call entered for ever.
        lane, outcome = connection.lane, FAILED
        try:
            lane.begin(_ALL_REDUCE, connection.entered - connection.transfers, count * size, NOBODY)
            # Read `hot` only after `entered` is written: see `NcclConnection`.
            comm = connection.hot
            if comm is None:
                comm = connection.handle()
            window = connection.window
            if window is None or not window.carry(
                "ncclAllReduce",
                (source, result, count, code.value, SUM_CODE),
                comm,
                stream,
                connection.settle,
            ):
                status = self._all_reduce_function(source, result, count, code, _SUM, comm, stream)
                if status:
                    connection.settle("ncclAllReduce", status)
            if self._progress is not None:
                self._progress.mark(stream)
            outcome = DONE
        finally:
            connection.returned = connection.entered
            lane.end(outcome)

    def all_reduce_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """As `all_reduce`, into `output`, which is returned; it may be the memory of the input.

        A sum of separate or equal contiguous memory with default arguments is served here, with few checks.
        """
        code = self._code_of_sum(input_, op, timeout_s)
        if (
            code is not None
            and self._is_memory_of_values(output)
            and output.dtype is input_.dtype
            and output.shape == input_.shape
        ):
            source, result = input_.data_ptr(), output.data_ptr()
            if source and result and (source == result or abs(source - result) >= input_.nbytes):
                self._sum(source, result, input_.numel(), input_.itemsize, code)
                return output
        return super().all_reduce_into_output(input_, output, op, timeout_s=timeout_s)

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        return self._combined(None, input_, op, timeout_s)

    def _all_reduce_into(
        self, output: torch.Tensor, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None
    ) -> None:
        self._combined(output, input_, op, timeout_s)

    def _combined(
        self,
        output: torch.Tensor | None,
        input_: torch.Tensor,
        op: ReduceOperation,
        timeout_s: float | None,
    ) -> torch.Tensor:
        """Do an all-reduce, into `output` if there is one."""
        self._begin("all_reduce", connects=True)
        code, red, parts = reduction_code(input_.dtype, op, self.library.version)
        source = dense(input_)
        is_direct = output is not None and is_plain(output)
        landing = output if output is not None and is_direct else torch.empty_like(source)
        finish = None if output is None or is_direct else lambda: fill(output, landing)
        self._reduce_into("ncclAllReduce", source, landing, (code, red), parts, timeout_s, finish)
        return landing

    def all_reduce_(
        self, tensor: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Combine the ranks' tensors in place and return `tensor`, whose elements must not overlap in memory.

        A contiguous sum with default arguments is served with few checks, as in `all_reduce`.
        """
        code = self._code_of_sum(tensor, op, timeout_s)
        if code is not None and (address := tensor.data_ptr()):
            self._sum(address, address, tensor.numel(), tensor.itemsize, code)
            return tensor
        return self._all_reduce_in_place(tensor, op, timeout_s)

    def _all_reduce_in_place(
        self, tensor: torch.Tensor, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor:
        """Do an `all_reduce_` whose arguments have not been checked."""
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            if self._collected is not None:
                raise UsageError("all_reduce_: within `group` the tensor must be contiguous")
            return super().all_reduce_(tensor, op, timeout_s=timeout_s)
        op = self._check_reduction("all_reduce_", tensor, op, timeout_s)
        self._begin("all_reduce_", connects=True)
        code, red, parts = reduction_code(tensor.dtype, op, self.library.version)
        into = tensor.detach()
        self._reduce_into("ncclAllReduce", into, into, (code, red), parts, timeout_s)
        return tensor

    def _reduce_into(
        self,
        function: str,
        source: torch.Tensor,
        result: torch.Tensor | None,
        codes: tuple[int, ...],
        parts: int,
        timeout_s: float | None,
        finish: Callable[[], object] | None = None,
    ) -> None:
        """Queue an all-reduce or, if `codes` holds the root as third item, a reduce."""
        posts = []
        if source.numel():
            address = 0 if result is None else result.data_ptr()
            arguments = (source.data_ptr(), address, source.numel() * parts, *codes)
            posts = [Post(function, arguments, (source, result))]
        self._call("reduce" if len(codes) == 3 else "all_reduce", posts, timeout_s, finish=finish)

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor | None:
        self._begin("reduce", connects=True)
        code, red, parts = reduction_code(input_.dtype, op, self.library.version)
        source = dense(input_)
        result = torch.empty_like(source) if self.rank_in_group == dst else None
        self._reduce_into("ncclReduce", source, result, (code, red, dst), parts, timeout_s)
        return result

    def _reduce_scatter(
        self,
        input_: torch.Tensor,
        dim: int,
        sizes: tuple[int, ...],
        op: ReduceOperation,
        timeout_s: float | None,
    ) -> torch.Tensor:
        return self._reduced_rows(None, input_, dim, sizes, op, timeout_s)

    def _reduce_scatter_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        sizes: tuple[int, ...],
        op: ReduceOperation,
        timeout_s: float | None,
    ) -> None:
        self._reduced_rows(output, input_, dim, sizes, op, timeout_s)

    def _reduced_rows(
        self,
        output: torch.Tensor | None,
        input_: torch.Tensor,
        dim: int,
        sizes: tuple[int, ...],
        op: ReduceOperation,
        timeout_s: float | None,
    ) -> torch.Tensor:
        """Do a reduce-scatter, into `output` if there is one."""
        self._begin("reduce_scatter", connects=True)
        code, red, parts = reduction_code(input_.dtype, op, self.library.version)
        rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
        own = landing_of(output, rows, dim, sizes[self.rank_in_group])
        per_row = math.prod(rows.shape[1:]) * parts
        keep = (rows, own)
        posts: list[Post] = []
        arguments: tuple[int, ...]
        if per_row and len(set(sizes)) == 1 and sizes[0]:
            arguments = (rows.data_ptr(), own.data_ptr(), sizes[0] * per_row, code, red)
            posts = [Post("ncclReduceScatter", arguments, keep)]
        elif per_row:
            step = per_row // parts * rows.itemsize
            for rank, start, size in parts_of(sizes):
                into = own.data_ptr() if rank == self.rank_in_group else 0
                arguments = (rows.data_ptr() + start * step, into, size * per_row, code, red, rank)
                posts.append(Post("ncclReduce", arguments, keep))
        return self._moved("reduce_scatter", posts, own, dim, timeout_s, output)

    # ------------------------------------------------------------------ moving data

    def _all_gather(
        self, input_: torch.Tensor, dim: int, sizes: tuple[int, ...], timeout_s: float | None
    ) -> torch.Tensor:
        return self._gathered_rows(None, input_, dim, sizes, timeout_s)

    def _all_gather_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        self._gathered_rows(output, input_, dim, sizes, timeout_s)

    def _gathered_rows(
        self,
        output: torch.Tensor | None,
        input_: torch.Tensor,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> torch.Tensor:
        """Do an all-gather, into `output` if there is one."""
        self._begin("all_gather", connects=True)
        rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
        result = landing_of(output, rows, dim, sum(sizes))
        step = math.prod(rows.shape[1:]) * rows.itemsize
        keep = (rows, result)
        posts: list[Post] = []
        arguments: tuple[int, ...]
        if step and len(set(sizes)) == 1 and sizes[0]:
            arguments = (rows.data_ptr(), result.data_ptr(), rows.nbytes, UINT8)
            posts = [Post("ncclAllGather", arguments, keep)]
        elif step:
            for rank, start, size in parts_of(sizes):
                arguments = (rows.data_ptr(), result.data_ptr() + start * step, size * step, UINT8, rank)
                posts.append(Post("ncclBroadcast", arguments, keep))
        return self._moved("all_gather", posts, result, dim, timeout_s, output)

    def _gather(
        self, input_: torch.Tensor, dst: int, dim: int, timeout_s: float | None
    ) -> torch.Tensor | None:
        self._begin("gather", connects=True)
        rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
        posts = []
        result = None
        if rows.numel():
            posts = [Post("ncclSend", (rows.data_ptr(), rows.nbytes, UINT8, dst), rows)]
        if self.rank_in_group == dst:
            result = rows.new_empty((rows.shape[0] * self.world_size, *rows.shape[1:]))
            if rows.numel():
                for rank in range(self.world_size):
                    place = result.data_ptr() + rank * rows.nbytes
                    posts.append(Post("ncclRecv", (place, rows.nbytes, UINT8, rank), result))
            return self._moved("gather", posts, result, dim, timeout_s)
        self._call("gather", posts, timeout_s)
        return None

    def _scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None,
        src: int,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        self._begin("scatter", connects=True)
        into = output.detach()
        shaped = into.reshape(1) if into.dim() == 0 else into.movedim(dim, 0)
        landing = shaped if is_plain(shaped) else shaped.new_empty(shaped.shape)
        step = math.prod(landing.shape[1:]) * landing.itemsize
        posts = []
        if input_ is not None and step:
            rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
            for rank, start, size in parts_of(sizes):
                arguments = (rows.data_ptr() + start * step, size * step, UINT8, rank)
                posts.append(Post("ncclSend", arguments, rows))
        if landing.numel():
            posts.append(Post("ncclRecv", (landing.data_ptr(), landing.nbytes, UINT8, src), landing))
        finish = None if landing is shaped else lambda: fill(shaped, landing)
        self._call("scatter", posts, timeout_s, finish=finish)

    def _all_to_all(
        self,
        input_: torch.Tensor,
        dim: int,
        send_sizes: tuple[int, ...],
        recv_sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> torch.Tensor:
        return self._exchanged_rows(None, input_, dim, send_sizes, recv_sizes, timeout_s)

    def _all_to_all_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        send_sizes: tuple[int, ...],
        recv_sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        self._exchanged_rows(output, input_, dim, send_sizes, recv_sizes, timeout_s)

    def _exchanged_rows(
        self,
        output: torch.Tensor | None,
        input_: torch.Tensor,
        dim: int,
        send_sizes: tuple[int, ...],
        recv_sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> torch.Tensor:
        """Do an all-to-all, into `output` if there is one."""
        self._begin("all_to_all", connects=True)
        rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
        result = landing_of(output, rows, dim, sum(recv_sizes))
        step = math.prod(rows.shape[1:]) * rows.itemsize
        posts = []
        for function, tensor, sizes in (("ncclSend", rows, send_sizes), ("ncclRecv", result, recv_sizes)):
            for rank, start, size in parts_of(sizes) if step else ():
                arguments = (tensor.data_ptr() + start * step, size * step, UINT8, rank)
                posts.append(Post(function, arguments, tensor))
        return self._moved("all_to_all", posts, result, dim, timeout_s, output)

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
        self._begin("broadcast", connects=True)
        into = tensor.detach()
        landing = into if is_plain(into) else dense(into)
        posts = []
        if landing.numel():
            arguments = (landing.data_ptr(), landing.data_ptr(), landing.nbytes, UINT8, src)
            posts = [Post("ncclBroadcast", arguments, landing)]
        is_aside = landing is not into and self.rank_in_group != src
        finish = (lambda: fill(into, landing)) if is_aside else None
        self._call("broadcast", posts, timeout_s, finish=finish)
        return tensor


__all__ = ["NcclCommunicator", "open_library"]
