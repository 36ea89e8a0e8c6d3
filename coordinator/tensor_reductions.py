"""The reductions of a group: validated by the contract of `DeviceCommunicator`, and routed to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from coordinator import traced_calls
from coordinator.planes import GroupPlanes
from device_comm.async_calls import CallHandle
from device_comm.base import SUM
from device_comm.derived_reductions import Reducing, Reduction, reducer


class TensorReductions(GroupPlanes):
    """Collectives that combine the ranks' tensors; see `TensorCollectives` for what holds for all of them."""

    @overload
    def all_reduce(
        self,
        input_: torch.Tensor,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def all_reduce(
        self,
        input_: torch.Tensor,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[True],
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
            return traced_calls.all_reduce(self, input_, op, timeout_s)
        reducing: Reducing = self.device_communicator
        if op is not SUM:
            reducing = reducer(op, self.device_communicator)
        if async_op:
            return self._later("all_reduce", reducing.all_reduce, input_, op, timeout_s=timeout_s)
        if self._open_calls:
            self._calls.settle("all_reduce")
        self._health.check_usable("all_reduce")
        return reducing.all_reduce(input_, op, timeout_s=timeout_s)

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
            return traced_calls.all_reduce_add_rms_norm(self, input_, residual, weight, eps, timeout_s)
        if self._open_calls:
            self._calls.settle("all_reduce_add_rms_norm")
        self._health.check_usable("all_reduce_add_rms_norm")
        return self.device_communicator.all_reduce_add_rms_norm(
            input_, residual, weight, eps, timeout_s=timeout_s
        )

    @overload
    def all_reduce_(
        self,
        tensor: torch.Tensor,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def all_reduce_(
        self,
        tensor: torch.Tensor,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[True],
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
        reducing: Reducing = self.device_communicator
        if op is not SUM:
            reducing = reducer(op, self.device_communicator)
        if async_op:
            return self._later("all_reduce_", reducing.all_reduce_, tensor, op, timeout_s=timeout_s)
        if self._open_calls:
            self._calls.settle("all_reduce_")
        self._health.check_usable("all_reduce_")
        return reducing.all_reduce_(tensor, op, timeout_s=timeout_s)

    @overload
    def reduce(
        self,
        input_: torch.Tensor,
        dst: int = 0,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor | None: ...

    @overload
    def reduce(
        self,
        input_: torch.Tensor,
        dst: int = 0,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[True],
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
        reducing: Reducing = self.device_communicator
        if op is not SUM:
            reducing = reducer(op, self.device_communicator)
        if async_op:
            return self._later("reduce", reducing.reduce, input_, dst, op, timeout_s=timeout_s)
        if self._open_calls:
            self._calls.settle("reduce")
        self._health.check_usable("reduce")
        return reducing.reduce(input_, dst, op, timeout_s=timeout_s)

    @overload
    def reduce_scatter(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def reduce_scatter(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[True],
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
            return traced_calls.reduce_scatter(self, input_, dim, op, timeout_s)
        reducing: Reducing = self.device_communicator
        if op is not SUM:
            reducing = reducer(op, self.device_communicator)
        if async_op:
            return self._later(
                "reduce_scatter",
                reducing.reduce_scatter,
                input_,
                dim,
                op,
                timeout_s=timeout_s,
            )
        if self._open_calls:
            self._calls.settle("reduce_scatter")
        self._health.check_usable("reduce_scatter")
        return reducing.reduce_scatter(input_, dim, op, timeout_s=timeout_s)

    @overload
    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[True],
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
        reducing: Reducing = self.device_communicator
        if op is not SUM:
            reducing = reducer(op, self.device_communicator)
        if async_op:
            return self._later(
                "reduce_scatterv",
                reducing.reduce_scatterv,
                input_,
                dim,
                sizes,
                op,
                timeout_s=timeout_s,
            )
        if self._open_calls:
            self._calls.settle("reduce_scatterv")
        self._health.check_usable("reduce_scatterv")
        return reducing.reduce_scatterv(input_, dim, sizes, op, timeout_s=timeout_s)

    @overload
    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[True],
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
        reducing: Reducing = self.device_communicator
        if op is not SUM:
            reducing = reducer(op, self.device_communicator)
        if async_op:
            return self._later(
                "reduce_scatterv_into_output",
                reducing.reduce_scatterv_into_output,
                input_,
                output,
                dim,
                sizes,
                op,
                timeout_s=timeout_s,
            )
        if self._open_calls:
            self._calls.settle("reduce_scatterv_into_output")
        self._health.check_usable("reduce_scatterv_into_output")
        return reducing.reduce_scatterv_into_output(input_, output, dim, sizes, op, timeout_s=timeout_s)
