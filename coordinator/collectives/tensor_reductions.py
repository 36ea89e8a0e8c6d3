"""The reductions of a group, which its `DeviceCommunicator` checks and carries out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack, overload

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from coordinator.calls import Async, Blocking
from coordinator.gradients import wants_gradient
from coordinator.planes import GroupPlanes
from coordinator.torch_interop import compile_ops
from device_comm.async_calls import CallHandle
from device_comm.base import SUM
from device_comm.derived_reductions import Reduction, reducer
from shm_broadcast.timeouts import AnyTimeout, seconds


class TensorReductions(GroupPlanes):
    """Collectives that combine the ranks' tensors; `TensorCollectives` describes what they have in common."""

    @overload
    def all_reduce(
        self,
        input_: torch.Tensor,
        op: Reduction = SUM,
        *,
        out: torch.Tensor | None = None,
        **how: Unpack[Blocking],
    ) -> torch.Tensor: ...

    @overload
    def all_reduce(
        self,
        input_: torch.Tensor,
        op: Reduction = SUM,
        *,
        out: torch.Tensor | None = None,
        **how: Unpack[Async],
    ) -> CallHandle[torch.Tensor]: ...

    def all_reduce(
        self,
        input_: torch.Tensor,
        op: Reduction = SUM,
        *,
        out: torch.Tensor | None = None,
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Combine the ranks' tensors with `op`, in rank order.

        Args:
            input_: A tensor of any shape, and of any dtype for which `op` is defined; both are equal on all ranks.
            op: SUM, MEAN, PRODUCT, MIN or MAX; for integers also BAND, BOR or BXOR; or a `premul_sum(factor)`.
            out: A tensor of the input's shape and dtype for the result, also in a group of one; it may be the input.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.

        Returns:
            `out`, or a new tensor of the input's shape and dtype. It has the same bits on every rank, and the input
            does not change. A group of one returns the input itself.
        """
        is_special = is_dynamo_compiling() or (
            is_grad_enabled()
            and (getattr(input_, "requires_grad", False) or getattr(out, "requires_grad", False))
        )
        if out is not None and (is_special or async_op or op is not SUM):
            return self._into("all_reduce_into_output", input_, out, timeout_s, async_op, op=op)
        if is_special and not async_op:
            return compile_ops.trace("all_reduce", self, input_, timeout_s, op=op)
        if op is SUM and not async_op:
            # The way through `run` would take 0.15 us of the 2 us of a small sum, or 5 us of one into an output.
            name = "all_reduce" if out is None else "all_reduce_into_output"
            timeout_s = self._calls.enter(name, True, timeout_s)
            try:
                limit_s = None if timeout_s is None else seconds(timeout_s)
                if out is None:
                    return self.device_communicator.all_reduce(input_, timeout_s=limit_s)
                return self.device_communicator.all_reduce_into_output(input_, out, timeout_s=limit_s)
            except BaseException as error:
                self._calls.unwind(name, error, "device")
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
        if is_dynamo_compiling() and not async_op:
            return compile_ops.trace_writing("all_reduce_", self, [tensor], timeout_s, op=op)
        if op is SUM and not async_op:
            # Packing the arguments for `run` would take 0.15 us of the 2 us of a small sum.
            timeout_s = self._calls.enter("all_reduce_", True, timeout_s)
            if is_grad_enabled() and getattr(tensor, "requires_grad", False):
                self._calls.refuse_lost_gradient("all_reduce_", (tensor,))
            try:
                limit_s = None if timeout_s is None else seconds(timeout_s)
                return self.device_communicator.all_reduce_(tensor, timeout_s=limit_s)
            except BaseException as error:
                self._calls.unwind("all_reduce_", error, "device")
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
        if not async_op and (is_dynamo_compiling() or wants_gradient(input_)):
            return compile_ops.trace("reduce_scatter", self, input_, timeout_s, dim=dim, op=op)
        make = reducer(op, self.device_communicator).reduce_scatter
        return self._calls.run(
            "reduce_scatter", make, input_, dim, op, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int | None = None,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        *,
        output: torch.Tensor | None = None,
        **how: Unpack[Blocking],
    ) -> torch.Tensor: ...

    @overload
    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int | None = None,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        *,
        output: torch.Tensor | None = None,
        **how: Unpack[Async],
    ) -> CallHandle[torch.Tensor]: ...

    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int | None = None,
        sizes: Sequence[int] | None = None,
        op: Reduction = SUM,
        *,
        output: torch.Tensor | None = None,
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Do `reduce_scatter` with a part of size `sizes[i]` along `dim` for rank i; None splits evenly.

        Args:
            input_: As in `reduce_scatter`, with `sum(sizes)` in dimension `dim`.
            dim: The dimension that is split: by default the last one, but the first one if there is an `output`. The
                engines that pass one mean that.
            sizes: The size of each rank's part, equal on all ranks.
            op: As in `reduce_scatter`.
            output: A tensor for the result; see `reduce_scatterv_into_output`.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.
        """
        name = "reduce_scatterv"
        if output is not None:
            along = 0 if dim is None else dim
            arguments: dict[str, Any] = {"dim": along, "sizes": sizes, "op": op}
            return self._into(f"{name}_into_output", input_, output, timeout_s, async_op, **arguments)
        along = -1 if dim is None else dim
        if not async_op and (is_dynamo_compiling() or wants_gradient(input_)):
            return compile_ops.trace(name, self, input_, timeout_s, dim=along, sizes=sizes, op=op)
        make = reducer(op, self.device_communicator).reduce_scatterv
        return self._calls.run(name, make, input_, along, sizes, op, timeout_s=timeout_s, async_op=async_op)

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

        `output` has the shape and dtype of the result. It does not overlap the input, except that it may be this rank's
        own part of a contiguous input that is split along its first dimension. A group of one copies its input into it.
        """
        name = "reduce_scatterv_into_output"
        return self._into(name, input_, output, timeout_s, async_op, dim=dim, sizes=sizes, op=op)

    def _into(
        self,
        name: str,
        input_: torch.Tensor,
        output: torch.Tensor,
        timeout_s: AnyTimeout,
        async_op: bool,
        result: torch.Tensor | None = None,
        **arguments: Any,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Make the call `name` of the communicator, which fills `output`.

        Args:
            name: The communicator's method.
            input_: Its input.
            output: What it fills.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once.
            result: What the call returns, if not `output`: the tensor of which that is a view.
            arguments: The method's other arguments, in its order.
        """
        if is_dynamo_compiling() and not async_op:
            compile_ops.trace_writing(name, self, [input_, output], timeout_s, **arguments)
            return output if result is None else result
        make: Callable[..., torch.Tensor] = getattr(
            reducer(arguments.get("op", SUM), self.device_communicator), name
        )
        if result is not None:
            make = partial(_make_and_return, make, result)
        given = (input_, output, *arguments.values())
        return self._calls.run(name, make, *given, timeout_s=timeout_s, async_op=async_op)


def _make_and_return(
    make: Callable[..., torch.Tensor], result: torch.Tensor, *args: Any, **named: Any
) -> torch.Tensor:
    make(*args, **named)
    return result
