"""Collectives into a tensor of the caller, with torch's names and its order of arguments: the output first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from coordinator.collectives.tensor_reductions import TensorReductions
from coordinator.gradients import refuse_lost_gradient
from coordinator.torch_interop import compile_ops
from device_comm import checks
from device_comm.async_calls import CallHandle
from device_comm.base import SUM, DeviceCommunicator
from device_comm.derived_reductions import Reduction
from device_comm.outputs import fill
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout


class TensorOutputs(TensorReductions):
    """The calls that torch and engines make with an output; `TensorCollectives` describes what they have in common.

    They write directly into the output wherever the group's communicator can, so nothing is allocated. The output has
    the dtype and device of the input and is returned; in a group of one it is filled too. They can be compiled, and no
    gradient flows through them.
    """

    def all_gather_into_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - engines pass it by this name
        *,
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Fill `output` with the ranks' tensors, one after the other in rank order.

        Args:
            output: For an input of shape [n, …] a tensor of shape [world_size * n, …] or [world_size, n, …], or one of
                a single dimension with as many elements.
            input: A tensor of equal shape and dtype on all ranks. It may be this rank's own part of the output.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.

        Raises:
            UsageError: The output does not fit, or it overlaps itself or the input otherwise. Nothing was sent.
        """
        try:
            rows = _flat_parts(output, input, self.world_size, "all_gather_into_tensor", writes=True)
        except UsageError as error:
            self._calls.refuse_unadmitted("all_gather_into_tensor", error)
        name, own = "all_gatherv_into_output", input.reshape(1, -1)
        return self._into(name, own, rows, timeout_s, async_op, result=output, dim=0, sizes=None)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - engines pass it by this name
        op: Reduction = SUM,
        *,
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Combine the ranks' tensors with `op`; fill `output` with this rank's part.

        Args:
            output: A tensor of any shape [n, …]. It may be this rank's own part of the input.
            input: A tensor of shape [world_size * n, …] or [world_size, n, …], or one of a single dimension with as
                many elements.
            op: As in `all_reduce`.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.

        Raises:
            UsageError: The output does not fit, or it overlaps itself or the input otherwise. Nothing was sent.
        """
        try:
            rows = _flat_parts(input, output, self.world_size, "reduce_scatter_tensor", writes=False)
            own = _flat_row(output, "reduce_scatter_tensor")
        except UsageError as error:
            self._calls.refuse_unadmitted("reduce_scatter_tensor", error)
        name = "reduce_scatterv_into_output"
        return self._into(name, rows, own, timeout_s, async_op, result=output, dim=0, sizes=None, op=op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - engines pass it by this name
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Send the i-th part of the input's first dimension to rank i; fill `output` with the parts received.

        Args:
            output: A tensor with `sum(output_split_sizes)` in its first dimension, else of the input's shape. It does
                not overlap the input.
            input: A tensor whose dtype, and whose shape but for the first dimension, is equal on all ranks.
            output_split_sizes: How much comes from each rank; equals what that rank states for this one. Pass both
                lists or neither; without them all parts are equal.
            input_split_sizes: How much goes to each rank.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.

        Raises:
            UsageError: The output or the sizes do not fit. Nothing was sent.
            DisagreementError: As in `all_to_all`.
        """
        sizes: dict[str, Any] = {"send_sizes": input_split_sizes, "recv_sizes": output_split_sizes}
        return self._into("all_to_all_into_output", input, output, timeout_s, async_op, dim=0, **sizes)

    @overload
    def _gather_into_list(
        self,
        input_: torch.Tensor,
        outputs: list[torch.Tensor],
        timeout_s: AnyTimeout,
        async_op: Literal[False],
    ) -> list[torch.Tensor]: ...

    @overload
    def _gather_into_list(
        self, input_: torch.Tensor, outputs: list[torch.Tensor], timeout_s: AnyTimeout, async_op: bool
    ) -> list[torch.Tensor] | CallHandle[list[torch.Tensor]]: ...

    def _gather_into_list(
        self, input_: torch.Tensor, outputs: list[torch.Tensor], timeout_s: AnyTimeout, async_op: bool
    ) -> list[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        """Fill the i-th tensor of `outputs` with the input of rank i; see `all_gather`."""
        if is_dynamo_compiling() and not async_op:
            refuse_lost_gradient("all_gather into a list", (input_, outputs), self.world_size)
            rows = compile_ops.trace("all_gather", self, input_.detach().reshape(1, -1), timeout_s, dim=0)
            for output, row in zip(outputs, rows, strict=True):
                output.copy_(row.view(output.shape))
            return outputs
        if is_grad_enabled():
            self._calls.refuse_lost_gradient("all_gather into a list", (input_, outputs))
        make = partial(_gather_into_list, self.device_communicator, outputs)
        return self._calls.run("all_gather", make, input_, outputs, timeout_s=timeout_s, async_op=async_op)


def _flat_parts(
    whole: torch.Tensor, part: torch.Tensor, world_size: int, name: str, *, writes: bool
) -> torch.Tensor:
    """Return `whole` as [world_size, elements of a part]: a view of it, or if it is only read perhaps a copy.

    Raises:
        UsageError: The shapes do not fit each other, or there is no such view of `whole`.
    """
    for each in (whole, part):
        if not isinstance(each, torch.Tensor):
            raise UsageError(f"{name}: expected a tensor, not {type(each).__name__}")
    shape = tuple(part.shape) or (1,)
    joined = (world_size * shape[0], *shape[1:])
    if tuple(whole.shape) not in (joined, (world_size, *part.shape), (world_size * part.numel(),)):
        raise UsageError(
            f"{name}: with {world_size} ranks and a part of shape {tuple(part.shape)} the larger tensor has shape "
            f"{joined} or {(world_size, *part.shape)}, not {tuple(whole.shape)}"
        )
    if writes and not whole.is_contiguous():
        raise UsageError(f"{name}: the output must be contiguous, its strides are {whole.stride()}")
    return whole.reshape(world_size, part.numel())


def _flat_row(output: torch.Tensor, name: str) -> torch.Tensor:
    if not output.is_contiguous():
        raise UsageError(f"{name}: the output must be contiguous, its strides are {output.stride()}")
    return output.view(1, -1)


def _gather_into_list(
    there: DeviceCommunicator,
    result: list[torch.Tensor],
    input_: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    *,
    timeout_s: float | None = None,
) -> list[torch.Tensor]:
    """Fill each of `outputs` with one rank's tensor; directly, if they lie one after the other in memory.

    `result`, the caller's list, is returned, and not read.
    """
    checks.check_tensor(input_, there.device, "all_gather")
    if not isinstance(outputs, (list, tuple)) or len(outputs) != there.world_size:
        raise UsageError(
            f"all_gather: output_tensor_list must hold {there.world_size} tensors, one for each rank"
        )
    for output in outputs:
        checks.check_tensor(output, there.device, "all_gather")
        checks.check_output(output, input_.shape, input_.dtype)
        checks.check_writable(output, "all_gather")
    own, first = input_.reshape(1, -1), outputs[0].detach()
    if _are_adjacent(outputs):
        whole = first.as_strided((there.world_size, input_.numel()), (input_.numel(), 1))
        there.all_gatherv_into_output(own, whole, 0, timeout_s=timeout_s)
        return result
    rows = there.all_gather(own, 0, timeout_s=timeout_s)
    for output, row in zip(outputs, rows, strict=True):
        fill(output, row)
    return result


def _are_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors are contiguous and lie one after the other in one storage."""
    first = tensors[0]
    return all(
        each.is_contiguous()
        and each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and each.storage_offset() == first.storage_offset() + number * first.numel()
        for number, each in enumerate(tensors)
    )
