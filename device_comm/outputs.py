"""The calls of the contract that write their result into a tensor of the caller.

They have the results, refusals and deadlines of the calls that return a new tensor. A communicator that can write to
any address fills in the methods whose names end with `_into`; for the others the result is copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch

from device_comm import checks
from device_comm.movable import movable
from device_comm.reduction import ReduceOperation

SUM: Final = ReduceOperation.SUM

# In the methods that an implementation fills in: one size for each rank; a deadline in seconds. None is the group's
# deadline, except in `_recv` and `_irecv`, where it is no limit: nobody knows when a message will be sent.
Sizes: TypeAlias = tuple[int, ...]
Timeout: TypeAlias = float | None


class OutputForms(ABC):
    """Calls into an output; a part of `DeviceCommunicator`.

    What they have in common:

    * The output has the shape, dtype and device of the result, overlaps neither itself nor, except where a call says
      so, the input, and is returned. In a group of one too the result is written into it.
    * A contiguous output is written directly where the communicator can; a copy fills any other.
    * As in all in-place calls, no gradient flows.
    """

    device: torch.device
    rank_in_group: int
    world_size: int

    def all_reduce_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """As `all_reduce`, into `output`, which is returned; it may be the memory of the input."""
        name = "all_reduce_into_output"
        op = self._check_reduction(name, input_, op, timeout_s)
        self._check_output(name, output, input_.shape, input_.dtype)
        if checks.is_same_memory(input_, output):
            self.all_reduce_(output, op, timeout_s=timeout_s)
            return output
        checks.check_no_overlap(input_, output, name)
        self._all_reduce_into(output.detach(), input_, op, timeout_s)
        return output

    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """As `reduce_scatterv`, into `output`, which is returned.

        Where the parts lie one after the other in memory, `output` may be this rank's own part of the input. The rest
        of the input does not change.
        """
        name = "reduce_scatterv_into_output"
        op = self._check_reduction(name, input_, op, timeout_s)
        at = checks.check_dim(dim, input_)
        shape = list(input_.shape) or [1]
        if sizes is None:
            checks.check_divisible(input_, at, self.world_size)
            counts = (shape[at] // self.world_size,) * self.world_size
        else:
            counts = checks.check_sizes(sizes, self.world_size)
            checks.check_total_size(input_, at, counts)
        shape[at] = counts[self.rank_in_group]
        self._check_output(name, output, shape, input_.dtype)
        checks.check_own_place(input_, output, at, counts, self.rank_in_group, name)
        self._reduce_scatter_into(output.detach(), input_, at, counts, op, timeout_s)
        return output

    def all_gatherv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """As `all_gatherv` of one tensor, into `output`, which is returned; without `sizes` all bring the same.

        Where the parts lie one after the other in memory, `input_` may be this rank's own part of the output.
        """
        name = "all_gatherv_into_output"
        self._check_call(name, input_, timeout_s)
        at = checks.check_dim(dim, input_)
        shape = list(input_.shape) or [1]
        if sizes is None:
            counts = (shape[at],) * self.world_size
        else:
            counts = checks.check_sizes(sizes, self.world_size)
            checks.check_own_size(input_, at, counts, self.rank_in_group)
        shape[at] = sum(counts)
        self._check_output(name, output, shape, input_.dtype)
        checks.check_own_place(output, input_, at, counts, self.rank_in_group, name)
        self._all_gather_into(movable(output.detach()), movable(input_), at, counts, timeout_s)
        return output

    def all_to_all_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = 0,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """As `all_to_all`, into `output`, which is returned."""
        name = "all_to_all_into_output"
        self._check_call(name, input_, timeout_s)
        at = checks.check_dim(dim, input_)
        sent, received = checks.check_exchange_sizes(
            input_, at, send_sizes, recv_sizes, self.rank_in_group, self.world_size
        )
        shape = list(input_.shape) or [1]
        shape[at] = sum(received)
        self._check_output(name, output, shape, input_.dtype)
        checks.check_no_overlap(input_, output, name)
        self._all_to_all_into(movable(output.detach()), movable(input_), at, sent, received, timeout_s)
        return output

    def _check_output(
        self, name: str, output: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Raise unless `output` can take a result of `shape`. A 0-dim output counts as one of shape [1]."""
        checks.check_tensor(output, self.device, name)
        checks.check_output(output, shape, dtype)
        checks.check_writable(output, name)

    # ------------------------------------------------------------------ made of other calls, unless overridden
    # The output is detached, of the shape and dtype of the result and of any layout that does not overlap itself.

    def _all_reduce_into(
        self, output: torch.Tensor, input_: torch.Tensor, op: ReduceOperation, timeout_s: Timeout
    ) -> None:
        fill(output, self._all_reduce(input_, op, timeout_s))

    def _reduce_scatter_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        sizes: Sizes,
        op: ReduceOperation,
        timeout_s: Timeout,
    ) -> None:
        fill(output, self._reduce_scatter(input_, dim, sizes, op, timeout_s))

    def _all_gather_into(
        self, output: torch.Tensor, input_: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout
    ) -> None:
        fill(output, self._all_gather(input_, dim, sizes, timeout_s))

    def _all_to_all_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        send_sizes: Sizes,
        recv_sizes: Sizes,
        timeout_s: Timeout,
    ) -> None:
        fill(output, self._all_to_all(input_, dim, send_sizes, recv_sizes, timeout_s))

    # ------------------------------------------------------------------ what the rest of the contract has

    @abstractmethod
    def all_reduce_(
        self, tensor: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Combine the ranks' tensors in place; return `tensor`."""

    @abstractmethod
    def _check_call(self, name: str, tensor: torch.Tensor, timeout_s: float | None) -> None:
        """Raise unless the input and the deadline are valid."""

    @abstractmethod
    def _check_reduction(
        self, name: str, tensor: torch.Tensor, op: object, timeout_s: float | None
    ) -> ReduceOperation:
        """Return the operation, or raise unless the arguments of a reduction are valid."""

    @abstractmethod
    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: Timeout) -> torch.Tensor:
        """Combine the ranks' tensors."""

    @abstractmethod
    def _reduce_scatter(
        self, input_: torch.Tensor, dim: int, sizes: Sizes, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor:
        """Combine the ranks' tensors; return this rank's part along `dim`."""

    @abstractmethod
    def _all_gather(self, input_: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout) -> torch.Tensor:
        """Concatenate along `dim`, where rank i brings `sizes[i]`; a 0-dim input counts as one of shape [1]."""

    @abstractmethod
    def _all_to_all(
        self, input_: torch.Tensor, dim: int, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> torch.Tensor:
        """Send the parts of the input along `dim`; return what came from each rank, in rank order."""


def fill(output: torch.Tensor, result: torch.Tensor) -> None:
    """Copy the result of a call into the caller's output; no gradient flows."""
    # Outside of inference mode torch refuses to write into tensors that were made in it. To leave that mode turns grad
    # mode on, in which torch refuses to write into a parameter: both sides are detached.
    with torch.inference_mode(output.is_inference() or torch.is_inference_mode_enabled()):
        output.detach().copy_(result.detach().reshape(output.shape))


__all__ = ["SUM", "OutputForms", "Sizes", "Timeout", "fill"]
