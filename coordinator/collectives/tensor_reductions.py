"""The reductions of a group, which its `DeviceCommunicator` checks and carries out."""

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
from shm_broadcast.timeouts import AnyTimeout, seconds


class TensorReductions(GroupPlanes):
    """Collectives that combine the ranks' tensors; `TensorCollectives` describes what they have in common."""

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
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Combine the ranks' tensors with `op`, in rank order.

        Args:
            input_: A tensor of any shape, and of any dtype for which `op` is defined; both are equal on all ranks.
            op: SUM, MEAN, PRODUCT, MIN or MAX; for integers also BAND, BOR or BXOR; or a `premul_sum(factor)`.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.

        Returns:
            A new tensor of the input's shape and dtype with the same bits on every rank; the input does not change.
            A group of one returns the input itself.
        """
        if is_dynamo_compiling() and not async_op:
            return compile_ops.trace("all_reduce", self, input_, timeout_s, op=op)
        if op is SUM and not async_op:
            # Packing the arguments for `run` would take 0.15 us of the 2 us of a small sum.
            self._calls.enter("all_reduce")
            try:
                limit_s = None if timeout_s is None else seconds(timeout_s)
                return self.device_communicator.all_reduce(input_, timeout_s=limit_s)
            except UsageError as error:
                self._calls.refuse("all_reduce", error)
                raise
        make = reducer(op, self.device_communicator).all_reduce
        return self._calls.run("all_reduce", make, input_, op, timeout_s=timeout_s, async_op=async_op)

    def all_reduce_add_rms_norm(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        timeout_s: AnyTimeout = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the ranks' tensors, add `residual`, and normalise each row by its root mean square, in one call.

        Under tensor parallelism these steps follow an attention or MLP block. The bits equal those of `all_reduce`,
        `+` and `coordinator.rms_norm` called one after the other, each of which rounds once to the dtype. This holds on
        every device, whether or not it fuses the steps. `torch.nn.functional.rms_norm` rounds differently.

        Args:
            input_: [tokens, hidden] of float32, float16 or bfloat16; shape and dtype are equal on all ranks.
            residual: A tensor of the input's shape and dtype. It is not sent: only where it is equal on all ranks, the
                results are.
            weight: [hidden], of the input's dtype.
            eps: A number of at least 0, which is added to the mean of the squares.
            timeout_s: Deadline in seconds.

        Returns:
            (normed, new_residual): the normalised rows, and `all_reduce(input_) + residual`. Both are new contiguous
            tensors, also in a group of one; the arguments do not change.
        """
        if is_dynamo_compiling():
            return compile_ops.trace_norm(self, input_, residual, weight, eps, timeout_s)
        name, make = "all_reduce_add_rms_norm", self.device_communicator.all_reduce_add_rms_norm
        return self._calls.run(name, make, input_, residual, weight, eps, timeout_s=timeout_s)

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
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Do `all_reduce` in place; return `tensor`, which must not overlap itself."""
        if op is SUM and not async_op:
            # Packing the arguments for `run` would take 0.15 us of the 2 us of a small sum.
            self._calls.enter("all_reduce_")
            try:
                limit_s = None if timeout_s is None else seconds(timeout_s)
                return self.device_communicator.all_reduce_(tensor, timeout_s=limit_s)
            except UsageError as error:
                self._calls.refuse("all_reduce_", error)
                raise
        make = reducer(op, self.device_communicator).all_reduce_
        return self._calls.run("all_reduce_", make, tensor, op, timeout_s=timeout_s, async_op=async_op)

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
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor | None] | None:
        """Combine the ranks' tensors with `op`, in rank order, on rank `dst`.

        Unlike `torch.distributed.reduce`, this does not work in place.

        Args:
            input_: As in `all_reduce`; it does not change on any rank.
            dst: The rank that gets the result.
            op: SUM, MEAN, PRODUCT, MIN or MAX; for integers also BAND, BOR or BXOR; or a `premul_sum(factor)`.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.

        Returns:
            On rank `dst` a new tensor of the input's shape and dtype with the bits of `all_reduce`, elsewhere None. A
            group of one returns the input itself.
        """
        make = reducer(op, self.device_communicator).reduce
        return self._calls.run("reduce", make, input_, dst, op, timeout_s=timeout_s, async_op=async_op)

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
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Combine the ranks' tensors and keep this rank's part.

        Args:
            input_: A tensor of equal shape and dtype on all ranks; `world_size` must divide dimension `dim`.
            dim: The dimension that is split, in rank order.
            op: SUM, MEAN, PRODUCT, MIN or MAX; for integers also BAND, BOR or BXOR; or a `premul_sum(factor)`.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.

        Returns:
            A new contiguous tensor whose dimension `dim` is the input's divided by `world_size`. A group of one
            returns the input itself.
        """
        if is_dynamo_compiling() and not async_op:
            return compile_ops.trace("reduce_scatter", self, input_, timeout_s, dim=dim, op=op)
        make = reducer(op, self.device_communicator).reduce_scatter
        return self._calls.run(
            "reduce_scatter", make, input_, dim, op, timeout_s=timeout_s, async_op=async_op
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
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Do `reduce_scatter` with a part of size `sizes[i]` along `dim` for rank i; None splits evenly."""
        make = reducer(op, self.device_communicator).reduce_scatterv
        return self._calls.run(
            "reduce_scatterv", make, input_, dim, sizes, op, timeout_s=timeout_s, async_op=async_op
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
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Do `reduce_scatterv` into `output`, and return `output`.

        `output` has the shape and dtype of the result and does not overlap the input. A group of one copies its input
        into it.
        """
        name = "reduce_scatterv_into_output"
        make = reducer(op, self.device_communicator).reduce_scatterv_into_output
        return self._calls.run(
            name, make, input_, output, dim, sizes, op, timeout_s=timeout_s, async_op=async_op
        )
