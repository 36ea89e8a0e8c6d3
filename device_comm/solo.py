"""The communicator of a group of one: every result is the input itself."""

from __future__ import annotations

import torch

from device_comm.base import CallPath, DeviceCommunicator, Sizes, Timeout
from device_comm.handles import Handle
from device_comm.reduction import ReduceOperation
from shm_broadcast.errors import UsageError


class SoloCommunicator(DeviceCommunicator):
    """The null object: nothing is sent, copied or waited for. Point to point has no peer."""

    algorithm = "alone"

    def path(self, operation: str, nbytes: int, dtype: torch.dtype) -> CallPath:
        """Return that nothing moves."""
        del operation, nbytes, dtype
        return CallPath(self.algorithm, "a group of one: the result is the input")

    def destroy(self) -> None:
        """Nothing to release."""

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        del op, timeout_s
        return input_

    def _reduce_scatter(
        self, input_: torch.Tensor, dim: int, sizes: Sizes, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor:
        del dim, sizes, op, timeout_s
        return input_

    def _all_gather(
        self, input_: torch.Tensor, dim: int, sizes: tuple[int, ...], timeout_s: float | None
    ) -> torch.Tensor:
        del dim, sizes, timeout_s
        return input_

    def _scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None,
        src: int,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        del src, dim, sizes, timeout_s
        if input_ is not None:
            output.detach().copy_(input_.detach().reshape(output.shape))

    def _all_to_all(
        self, input_: torch.Tensor, dim: int, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> torch.Tensor:
        del dim, send_sizes, recv_sizes, timeout_s
        return input_

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
        del src, timeout_s
        return tensor

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        raise UsageError("send: a group of one has no other rank")

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        raise UsageError("recv: a group of one has no other rank")
