"""Run collectives on CUDA tensors: small sums with our own kernels, the rest with NCCL; see `DESIGN.md`, CUDA.

The policy chooses between the two from facts that all ranks share. Every call is queued on the caller's current
stream, both eagerly and in CUDA graphs.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, cast

import torch

from device_comm import checks
from device_comm.base import SUM, CallPath, CommunicatorContext
from device_comm.cuda.alignment import aligned, can_land, is_strided
from device_comm.cuda.custom.all_reduce import CustomAllReduce
from device_comm.cuda.custom.ending import EndingCommunicator
from device_comm.cuda.custom.expert_parallel import ExpertKernels
from device_comm.cuda.custom.kernel_calls import KernelCalls
from device_comm.cuda.custom.launches import CubinSource
from device_comm.cuda.driver import Driver
from device_comm.cuda.driver_bindings import CudaDriver
from device_comm.cuda.event_progress import EventProgress
from device_comm.cuda.fused_communicator import FusedCommunicator
from device_comm.cuda.policy.decision import GroupFacts
from device_comm.cuda.policy.table import Operation
from device_comm.cuda.setup import build_custom, build_experts
from device_comm.cuda.side_stream import SideStream
from device_comm.cuda_settings import cuda_settings
from device_comm.health import Operation as GroupOperation
from device_comm.nccl.library import NcclLibrary
from device_comm.nccl.streams import Streams, TorchStreams
from device_comm.outputs import fill
from device_comm.process_group import dense, is_plain
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from device_comm.stages import in_parts
from shm_broadcast.errors import CapabilityError, UsageError

__all__ = ["CudaCommunicator"]

logger: logging.Logger = logging.getLogger(__name__)

_INEXACT: Final = (ReduceOperation.SUM, ReduceOperation.MEAN, ReduceOperation.PRODUCT)
_PLANNED: Final = ("all_reduce", "reduce_scatter", "all_gather")
# Bounds the set of (dtype, count) that go to NCCL, for which no result is allocated here. Engines use a few dozen.
_MOST_SIZES: Final = 4096


class CudaCommunicator(EndingCommunicator, FusedCommunicator):
    """Run all-reduce, reduce-scatter, all-gather and fused calls with our kernels or NCCL, as the policy chooses.

    * Lazy: the first such call or capture builds what our kernels need. NCCL connects a group of two with the first
      call that it carries, and a larger group at creation. Both steps are collective, and neither can happen while a
      stream is being captured.
    * Any stream: the calls of NCCL and of our kernels have one order; see `StreamOrder`. `capture` orders the captured
      stream behind the stream in use, and back. Asynchronous calls run on a stream of the group's own.
    * `cuda.deterministic`: every algorithm sums floats in rank order and rounds once. NCCL then only moves data.
    """

    algorithm = "custom kernels and nccl"

    def __init__(
        self,
        context: CommunicatorContext,
        *,
        open_driver: Callable[[], Driver] | None = None,
        library: NcclLibrary | None = None,
        streams: Streams | None = None,
        cubin: CubinSource | None = None,
    ) -> None:
        """Prepare a communicator; collective for more than two ranks, because they connect NCCL here.

        Args:
            context: The group; `exchange` must be set.
            open_driver: Opens this rank's device; defaults to the CUDA driver.
            library: As for `NcclCommunicator`.
            streams: As for `NcclCommunicator`.
            cubin: Returns compiled kernels; defaults to NVRTC with a cache on disk.
        """
        self._open = open_driver or functools.partial(CudaDriver, context.device.index or 0)
        self._opened: Driver | None = None
        self._events = EventProgress(self._driver, context.health.log_fields())
        # With two ranks, both take part in a first send and can connect then. With more, the others would not connect.
        eager = context.world_size > 2
        streams = streams or TorchStreams(context.device, self._relaxed)
        super().__init__(context, library=library, streams=streams, progress=self._events, eager=eager)
        self.aside: SideStream = SideStream(self._streams, self._orders, self._capture_of, self._ordering)
        self._cubin = cubin
        self._is_deterministic = cuda_settings(context.cuda).deterministic
        self._custom: CustomAllReduce | None = None
        self._expert: ExpertKernels | None = None
        self._is_decided = self._is_expert_decided = False
        self._obstacle = ""
        self._is_capturing = False
        self._elsewhere: set[tuple[torch.dtype, int]] = set()
        self._told: set[str] = set()

    def _driver(self) -> Driver:
        """Return this rank's device, opened at first use."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _relaxed(self) -> AbstractContextManager[None]:
        # Every call has opened the driver, unless there is none.
        return nullcontext() if self._opened is None else self._opened.relaxed_capture()

    # ------------------------------------------------------------------ choice of the algorithm

    def _own(self, name: str) -> CustomAllReduce | None:
        """Return our own collectives, None if the group has none. The first call decides that and is collective."""
        if not self._is_decided:
            self._health.check_usable(name)
            self._refuse_capture(name, "capture inside of `group.graph_capture()`, or ")
            self._custom, self._obstacle = build_custom(
                *(self.context, self._driver, self._cubin, self._shared_order)
            )
            self._is_decided = True
            if self._obstacle:
                self._tell(self._obstacle)
        return self._custom

    def _refuse_capture(self, name: str, advice: str) -> None:
        if self._is_captured():
            begin = f"{self._health.where(name)}: the first such call of a group cannot be captured"
            raise UsageError(f"{begin}; {advice}make one such call before")

    def _kernels(self) -> list[KernelCalls]:
        """Return those of our kernels that have been built, the all-reduces first."""
        return [each for each in (self._custom, self._expert) if each is not None]

    def _is_captured(self) -> bool:
        try:
            return self._driver().stream_is_capturing(self._current())
        except CapabilityError:
            # Without the driver's bindings NCCL carries everything, and it detects captures itself.
            return False

    def _tell(self, reason: str) -> None:
        """Log why calls go through NCCL; each reason is logged once."""
        if reason not in self._told and len(self._told) < _MOST_SIZES:
            self._told.add(reason)
            fields = self._health.log_fields("all_reduce", "nccl")
            logger.info("%s: through NCCL: %s", self._health.where("all_reduce"), reason, extra=fields)

    def path(self, operation: str, nbytes: int, dtype: torch.dtype) -> CallPath:
        """Return the algorithm that carries a call and why; "undecided" before the first call. Not collective."""
        operation = operation.rstrip("_")
        if operation not in _PLANNED:
            return CallPath("nccl", "our kernels do not implement this operation")
        if not self._is_decided:
            return CallPath("undecided", "the first call of the group decides")
        algorithm, reason = "nccl", self._obstacle
        if self._custom is not None:
            plan = self._custom.plan(cast("Operation", operation), dtype, nbytes, self._current())
            algorithm, reason = plan.algorithm.value, plan.reason
        wants_window = cuda_settings(self.context.cuda).nccl_window_bytes and not self._is_deterministic
        if algorithm == "nccl" and operation == "all_reduce" and wants_window:
            reason = f"{reason}; {self._about_window(operation, nbytes, dtype)}"
        return CallPath(algorithm, reason)

    def _must_keep_order(self, dtype: torch.dtype, op: ReduceOperation) -> bool:
        is_float = dtype.is_floating_point or dtype.is_complex
        return self._is_deterministic and is_float and op in _INEXACT

    # ------------------------------------------------------------------ reductions

    def all_reduce(
        self, input_: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Combine the ranks' tensors; every rank gets a new tensor of the input's shape and dtype.

        A small contiguous sum with default arguments is served here, with few checks.
        """
        custom = self._custom
        if (
            custom is None
            or op is not SUM
            or type(input_) is not torch.Tensor
            or timeout_s is not None
            or input_.get_device() != self._index
            or self._collected is not None
        ):
            return super().all_reduce(input_, op, timeout_s=timeout_s)
        count = input_.numel()
        dtype = input_.dtype
        if ((dtype, count) in self._elsewhere and not self._is_capturing) or not is_strided(input_):
            return super().all_reduce(input_, op, timeout_s=timeout_s)
        address = input_.data_ptr()
        # An empty tensor has address 0.
        if not address or address & 15:
            return super().all_reduce(input_, op, timeout_s=timeout_s)
        result = torch.empty_like(input_)
        if custom.all_reduce(address, result.data_ptr(), count, dtype, self._current()):
            return result
        self._remember(dtype, count)
        return super().all_reduce(input_, op, timeout_s=timeout_s)

    def _code_of_sum(
        self, tensor: torch.Tensor, op: ReduceOperation, timeout_s: float | None
    ) -> ctypes.c_int | None:
        """As in `NcclCommunicator`; None too unless it is known that NCCL carries sums of this dtype and size."""
        if not self._is_decided or self._is_deterministic:
            return None
        code = super()._code_of_sum(tensor, op, timeout_s)
        if code is None or self._custom is None:
            return code
        is_elsewhere = not self._is_capturing and (tensor.dtype, tensor.numel()) in self._elsewhere
        return code if is_elsewhere else None

    def _remember(self, dtype: torch.dtype, count: int) -> None:
        if not self._is_capturing:
            if len(self._elsewhere) >= _MOST_SIZES:
                self._elsewhere.clear()
            self._elsewhere.add((dtype, count))

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        custom = self._own("all_reduce")
        source = dense(input_)
        if custom is not None and self._collected is None:
            if op is SUM and custom.carries("all_reduce", source.dtype, source.nbytes, self._current()):
                source = aligned(source)
                result = torch.empty_like(source)
                arguments = (source.data_ptr(), result.data_ptr(), source.numel(), source.dtype)
                custom.all_reduce(*arguments, self._current())
                return result
            reduction, stream = op.name.lower(), self._current()
            self._tell(custom.plan("all_reduce", source.dtype, source.nbytes, stream, reduction).reason)
        if self._must_keep_order(source.dtype, op):
            return self._all_reduce_in_order(source, op, timeout_s)
        return super()._all_reduce(source, op, timeout_s)

    def _all_reduce_into(
        self, output: torch.Tensor, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None
    ) -> None:
        custom = self._own("all_reduce")
        stream, nbytes = self._current(), input_.nbytes
        if (
            custom is None
            or op is not SUM
            or self._collected is not None
            or not custom.carries("all_reduce", input_.dtype, nbytes, stream)
        ):
            if self._must_keep_order(input_.dtype, op):
                fill(output, self._all_reduce_in_order(dense(input_), op, timeout_s))
            else:
                super()._all_reduce_into(output, input_, op, timeout_s)
        elif can_land(output):
            source = aligned(dense(input_))
            custom.all_reduce(source.data_ptr(), output.data_ptr(), source.numel(), source.dtype, stream)
        else:
            fill(output, self._all_reduce(input_, op, timeout_s))

    def _all_reduce_in_place(
        self, tensor: torch.Tensor, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor:
        op = self._check_reduction("all_reduce_", tensor, op, timeout_s)
        checks.check_writable(tensor, "all_reduce_")
        if not is_plain(tensor) or tensor.data_ptr() & 15:
            # Stage out of place: alignment is local to a rank and must not decide the algorithm.
            if self._collected is not None:
                raise UsageError(
                    "all_reduce_: within `group` the tensor must be contiguous and begin at a multiple of 16 bytes"
                )
            fill(tensor, self._all_reduce(tensor, op, timeout_s))
            return tensor
        custom = self._own("all_reduce_")
        if custom is not None and op is SUM and self._collected is None:
            address = tensor.data_ptr()
            if custom.all_reduce(address, address, tensor.numel(), tensor.dtype, self._current()):
                return tensor
            self._remember(tensor.dtype, tensor.numel())
        if self._must_keep_order(tensor.dtype, op):
            into = tensor.detach()
            fill(into, self._all_reduce_in_order(into, op, timeout_s))
            return tensor
        return super()._all_reduce_in_place(tensor, op, timeout_s)

    def _all_reduce_in_order(
        self, source: torch.Tensor, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor:
        """Send shard i of every rank to rank i, sum it there in rank order, and gather the results."""
        size = self.world_size
        shard = -(-source.numel() // size)
        padded = source.new_zeros(shard * size)
        padded[: source.numel()].copy_(source.view(-1))
        gather = super()._all_gather

        def stages() -> torch.Tensor:
            own = self._sum_in_order(padded, (shard,) * size, op, timeout_s)
            return gather(own, 0, (shard,) * size, timeout_s)

        result = in_parts(self.context.health, GroupOperation("device", "all_reduce", 0), stages)
        return result[: source.numel()].clone().view(source.shape)

    def _sum_in_order(
        self, flat: torch.Tensor, counts: tuple[int, ...], op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor:
        """Return this rank's part of the reduction of all `flat`, split by `counts` and combined in rank order."""
        if self._collected is not None:
            raise UsageError(
                "within `group` nothing can be combined in rank order: the data arrives only at its end"
            )
        own = counts[self.rank_in_group]
        received = super()._all_to_all(flat, 0, counts, (own,) * self.world_size, timeout_s)
        return reduce_in_rank_order(list(received.view(self.world_size, own)), op)

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor | None:
        if not self._must_keep_order(input_.dtype, op):
            return super()._reduce(input_, dst, op, timeout_s)
        result = self._all_reduce_in_order(dense(input_), op, timeout_s)
        return result if self.rank_in_group == dst else None

    def _reduce_scatter(
        self,
        input_: torch.Tensor,
        dim: int,
        sizes: tuple[int, ...],
        op: ReduceOperation,
        timeout_s: float | None,
    ) -> torch.Tensor:
        custom = self._own("reduce_scatter")
        if op is not SUM or len(set(sizes)) > 1 or self._collected is not None:
            custom = None
        keeps_order = self._must_keep_order(input_.dtype, op)
        if custom is None and not keeps_order:
            return super()._reduce_scatter(input_, dim, sizes, op, timeout_s)
        rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
        shape = (sizes[self.rank_in_group], *rows.shape[1:])
        if custom is not None and custom.carries("reduce_scatter", rows.dtype, rows.nbytes, self._current()):
            rows = aligned(rows)
            own = rows.new_empty(shape)
            custom.reduce_scatter(rows.data_ptr(), own.data_ptr(), own.numel(), own.dtype, self._current())
            return own.movedim(0, dim).contiguous()
        if not keeps_order:
            return super()._reduce_scatter(input_, dim, sizes, op, timeout_s)
        per_row = math.prod(rows.shape[1:])
        counts = tuple(size * per_row for size in sizes)
        part = self._sum_in_order(rows.view(-1), counts, op, timeout_s)
        return part.view(shape).movedim(0, dim).contiguous()

    def _reduce_scatter_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        sizes: tuple[int, ...],
        op: ReduceOperation,
        timeout_s: float | None,
    ) -> None:
        custom = self._own("reduce_scatter")
        stream = self._current()
        if (
            custom is None
            or op is not SUM
            or len(set(sizes)) > 1
            or self._collected is not None
            or not custom.carries("reduce_scatter", input_.dtype, input_.nbytes, stream)
        ):
            if self._must_keep_order(input_.dtype, op):
                fill(output, self._reduce_scatter(input_, dim, sizes, op, timeout_s))
            else:
                super()._reduce_scatter_into(output, input_, dim, sizes, op, timeout_s)
        elif dim == 0 and can_land(output):
            rows = aligned(dense(input_))
            custom.reduce_scatter(rows.data_ptr(), output.data_ptr(), output.numel(), output.dtype, stream)
        else:
            fill(output, self._reduce_scatter(input_, dim, sizes, op, timeout_s))

    # ------------------------------------------------------------------ moving data

    def expert_exchange(self, *, may_build: bool = True) -> ExpertKernels | None:
        """Return the kernels for expert parallelism, None if the group has none.

        The first call that `may_build` decides that: it is collective, and raises `UsageError` during a capture.
        """
        if not self._is_expert_decided and may_build:
            self._health.check_usable("dispatch")
            self._refuse_capture("dispatch", "")
            custom = self._own("dispatch")
            if custom is not None:
                custom.check("dispatch")
            self._expert, obstacle = build_experts(custom, self._current)
            self._is_expert_decided = True
            if obstacle:
                self._tell(obstacle)
        return self._expert

    def _all_gather(
        self, input_: torch.Tensor, dim: int, sizes: tuple[int, ...], timeout_s: float | None
    ) -> torch.Tensor:
        custom = self._own("all_gather")
        if (
            custom is None
            or len(set(sizes)) != 1
            or not input_.numel()
            or self._collected is not None
            or not custom.carries("all_gather", torch.uint8, input_.nbytes, self._current())
        ):
            return super()._all_gather(input_, dim, sizes, timeout_s)
        rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
        result = rows.new_empty((sum(sizes), *rows.shape[1:]))
        custom.all_gather(rows.data_ptr(), result.data_ptr(), rows.nbytes, self._current())
        return result.movedim(0, dim).contiguous()

    def _all_gather_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        custom = self._own("all_gather")
        stream = self._current()
        if (
            custom is None
            or len(set(sizes)) != 1
            or not input_.numel()
            or self._collected is not None
            or not custom.carries("all_gather", torch.uint8, input_.nbytes, stream)
        ):
            super()._all_gather_into(output, input_, dim, sizes, timeout_s)
        elif dim == 0 and can_land(output):
            rows = dense(input_)
            custom.all_gather(rows.data_ptr(), output.data_ptr(), rows.nbytes, stream)
        else:
            fill(output, self._all_gather(input_, dim, sizes, timeout_s))

    # ------------------------------------------------------------------ capture and life

    @contextmanager
    def capture(self, stream: Any) -> Iterator[None]:
        """Allow captured calls on `stream` within the context. Collective on entry and on exit.

        Entering builds and loads what cannot be made during a capture. Leaving tells all ranks the captured inputs;
        the graph must not be replayed before that.

        If the body raises an `Exception` on one rank, drop the graphs. The others raise `CapabilityError` where they
        leave, and the group is intact, if they come there within `capture_failure.TELL_WITHIN_S` (5 s, or half the
        group's deadline). Otherwise, as when they wait for that rank inside of their body, the group is broken and they
        raise `PeerLostError` with the text of the exception.
        """
        number = stream if isinstance(stream, int) else stream.cuda_stream
        custom = self._own("graph_capture")
        self.connect()
        if custom is None:
            yield
            return
        # All our kernels share one order, also those that are built within the context.
        bound = custom.stream
        try:
            self.use_stream(number)
            custom.begin_capture(number)
            self._is_capturing = True
            try:
                yield
            except Exception as error:
                custom.fail_capture(error)
                raise
            finally:
                self._is_capturing = False
            custom.finish_capture()
        except BaseException:
            custom.abandon_capture(bound)
            raise
        custom.restore_stream(bound)

    def use_stream(self, stream: Any) -> None:
        """Queue later calls of our kernels on `stream`, behind all work queued so far. Not collective."""
        number = stream if isinstance(stream, int) else stream.cuda_stream
        if self._custom is not None:
            # All our kernels share one order.
            self._custom.use_stream(number)

    def check(self) -> None:
        """Raise if one of our kernels has failed.

        A result is valid once its stream was synchronized and a later `check` did not raise.

        Raises:
            CommTimeoutError, PeerLostError: The group is broken.
        """
        for each in self._kernels():
            each.check()

    def prepare_kernels(self) -> GroupFacts | None:
        """Build what our kernels need; return the facts that the policy uses, or None where the kernels cannot run.

        Collective. Without it the first call or capture builds them. `path` says why they cannot run.
        """
        custom = self._own("prepare_kernels")
        return None if custom is None else custom.facts

    def prepare_buffers(self, message_bytes: int) -> None:
        """Build what our kernels need and connect NCCL. Collective."""
        self.prepare_kernels()
        super().prepare_buffers(message_bytes)
