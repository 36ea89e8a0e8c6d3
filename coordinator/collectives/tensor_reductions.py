"""The reductions of a group: validated by the contract of `DeviceCommunicator`, and routed to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack, overload

import torch
from torch.compiler import is_dynamo_compiling

from coordinator.calls import Async, Blocking
from coordinator.planes import GroupPlanes
from coordinator.torch_interop import compile_ops
from device_comm.async_calls import CallHandle
from device_comm.base import SUM
from device_comm.derived_reductions import Reduction, reducer
from shm_broadcast.errors import UsageError


class TensorReductions(GroupPlanes):
    """Collectives that combine the ranks' tensors; see `TensorCollectives` for what holds for all of them."""

    @overload
    def all_reduce(
        self, input_: torch.Tensor, op: Reduction = SUM, **how: Unpack[Blocking]
    ) -> torch.Tensor: ...

    @overload
    def all_reduce(
        self, input_: torch.Tensor, op: Reduction = SUM, **how: Unpack[Async]
    ) -> CallHandle[torch.Tensor]: ...

    def all_reduce(
        self,
        input_: torch.Tensor,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Combine the ranks' tensors with `op`, in rank order.

        Args:
            input_: Any shape and any dtype that `op` has a meaning for; equal on all ranks.
            op: SUM, MEAN, PRODUCT, MIN or MAX; on integers BAND, BOR or BXOR; or a `premul_sum(factor)`.
            timeout_s: Deadline in seconds.
            async_op: Return a handle at once; see the class.

        Returns:
            A new tensor of the input's shape and dtype with the same bits on every rank; the input is
            unchanged. In a group of one: the input itself.
        """
        if is_dynamo_compiling() and not async_op:
            return compile_ops.all_reduce(self, input_, op, timeout_s)
        if op is SUM and not async_op:
            # Packing the arguments for `run` would take 0.15 us of the 2 us of a small sum.
            self._calls.enter("all_reduce")
            try:
                return self.device_communicator.all_reduce(input_, timeout_s=timeout_s)
            except UsageError as error:
                self._calls.refuse("all_reduce", error)
                raise
        there = reducer(op, self.device_communicator)
        return self._calls.run(
            "all_reduce", there.all_reduce, input_, op, timeout_s=timeout_s, async_op=async_op
        )

    def all_reduce_add_rms_norm(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        timeout_s: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the ranks' tensors, add `residual`, and normalise each row by its root mean square, in one call.

        What follows an attention or MLP block under tensor parallelism. The bits are those of `all_reduce`, `+` and
        `coordinator.rms_norm` one after the other, each of which rounds once to the dtype, on every device and
        whether or not the steps are fused there; `torch.nn.functional.rms_norm` differs by rounding.

        Args:
            input_: [tokens, hidden] of float32, float16 or bfloat16; equal shape and dtype on all ranks.
            residual: Of the input's shape and dtype. Not sent: equal on all ranks where the results shall be.
            weight: [hidden], of the input's dtype.
            eps: Added to the mean of the squares; at least 0.
            timeout_s: Deadline in seconds.

        Returns:
            (normed, new_residual): the normalised rows, and `all_reduce(input_) + residual`. Both are new contiguous
            tensors, also in a group of one; the arguments are unchanged.
        """
        if is_dynamo_compiling():
            return compile_ops.all_reduce_add_rms_norm(self, input_, residual, weight, eps, timeout_s)
        there = self.device_communicator
        name = "all_reduce_add_rms_norm"
        return self._calls.run(
            name, there.all_reduce_add_rms_norm, input_, residual, weight, eps, timeout_s=timeout_s
        )

    @overload
    def all_reduce_(
        self, tensor: torch.Tensor, op: Reduction = SUM, **how: Unpack[Blocking]
    ) -> torch.Tensor: ...

    @overload
    def all_reduce_(
        self, tensor: torch.Tensor, op: Reduction = SUM, **how: Unpack[Async]
    ) -> CallHandle[torch.Tensor]: ...

    def all_reduce_(
        self,
        tensor: torch.Tensor,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """As `all_reduce`, in place; return `tensor`, which must not overlap itself."""
        if op is SUM and not async_op:
            # Packing the arguments for `run` would take 0.15 us of the 2 us of a small sum.
            self._calls.enter("all_reduce_")
            try:
                return self.device_communicator.all_reduce_(tensor, timeout_s=timeout_s)
            except UsageError as error:
                self._calls.refuse("all_reduce_", error)
                raise
        there = reducer(op, self.device_communicator)
        return self._calls.run(
            "all_reduce_", there.all_reduce_, tensor, op, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def reduce(
        self, input_: torch.Tensor, dst: int = 0, op: Reduction = SUM, **how: Unpack[Blocking]
    ) -> torch.Tensor | None: ...

    @overload
    def reduce(
        self, input_: torch.Tensor, dst: int = 0, op: Reduction = SUM, **how: Unpack[Async]
    ) -> CallHandle[torch.Tensor | None]: ...

    def reduce(
        self,
        input_: torch.Tensor,
        dst: int = 0,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor | None] | None:
        """Combine the ranks' tensors with `op`, in rank order, on rank `dst`.

        Unlike `torch.distributed.reduce`, which works in place.

        Args:
            input_: As in `all_reduce`; unchanged on every rank.
            dst: The rank that gets the result.
            op: SUM, MEAN, PRODUCT, MIN or MAX; on integers BAND, BOR or BXOR; or a `premul_sum(factor)`.
            timeout_s: Deadline in seconds.
            async_op: Return a handle at once; see the class.

        Returns:
            On rank `dst` a new tensor of the input's shape and dtype with the bits that `all_reduce` gives, elsewhere
            None. In a group of one: the input itself.
        """
        there = reducer(op, self.device_communicator)
        return self._calls.run(
            "reduce", there.reduce, input_, dst, op, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def reduce_scatter(
        self, input_: torch.Tensor, dim: int = -1, op: Reduction = SUM, **how: Unpack[Blocking]
    ) -> torch.Tensor: ...

    @overload
    def reduce_scatter(
        self, input_: torch.Tensor, dim: int = -1, op: Reduction = SUM, **how: Unpack[Async]
    ) -> CallHandle[torch.Tensor]: ...

    def reduce_scatter(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Combine the ranks' tensors and keep this rank's part.

        Args:
            input_: Equal shape and dtype on all ranks; dimension `dim` must be divisible by `world_size`.
            dim: The dimension that is split, in rank order.
            op: SUM, MEAN, PRODUCT, MIN or MAX; on integers BAND, BOR or BXOR; or a `premul_sum(factor)`.
            timeout_s: Deadline in seconds.
            async_op: Return a handle at once; see the class.

        Returns:
            A new contiguous tensor whose dimension `dim` is the input's divided by `world_size`. In a
            group of one: the input itself.
        """
        if is_dynamo_compiling() and not async_op:
            return compile_ops.reduce_scatter(self, input_, dim, op, timeout_s)
        there = reducer(op, self.device_communicator)
        return self._calls.run(
            "reduce_scatter", there.reduce_scatter, input_, dim, op, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        **how: Unpack[Blocking],
    ) -> torch.Tensor: ...

    @overload
    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        **how: Unpack[Async],
    ) -> CallHandle[torch.Tensor]: ...

    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """As `reduce_scatter`, where rank i keeps `sizes[i]` of dimension `dim`; None splits evenly."""
        there = reducer(op, self.device_communicator)
        return self._calls.run(
            "reduce_scatterv",
            there.reduce_scatterv,
            input_,
            dim,
            sizes,
            op,
            timeout_s=timeout_s,
            async_op=async_op,
        )

    @overload
    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        **how: Unpack[Blocking],
    ) -> torch.Tensor: ...

    @overload
    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        **how: Unpack[Async],
    ) -> CallHandle[torch.Tensor]: ...

    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """As `reduce_scatterv`, into `output`, which is returned.

        `output` has the shape and dtype of the result and does not overlap the input. In a group of one
        too the result is copied into it.
        """
        there = reducer(op, self.device_communicator)
        return self._calls.run(
            "reduce_scatterv_into_output",
            there.reduce_scatterv_into_output,
            input_,
            output,
            dim,
            sizes,
            op,
            timeout_s=timeout_s,
            async_op=async_op,
        )
