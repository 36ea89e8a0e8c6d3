"""The communicator of a group of one: every result is the input itself."""

from __future__ import annotations

from typing import Any

import torch

from device_comm.base import CallPath, DeviceCommunicator
from device_comm.handles import Handle
from device_comm.outputs import fill
from shm_broadcast.errors import UsageError


class SoloCommunicator(DeviceCommunicator):
    """The null object: nothing is sent or waited for. Point to point has no peer.

    Calls with an output of the caller copy into it: `scatter` and `reduce_scatterv_into_output`. The results of
    `all_reduce_add_rms_norm` and of `FusedForms` are new tensors. All other results are the input.
    """

    algorithm = "alone"

    def path(self, operation: str, nbytes: int, dtype: torch.dtype) -> CallPath:
        """Return that nothing moves."""
        return CallPath(self.algorithm, "a group of one: the result is the input")

    def destroy(self) -> None:
        """Nothing to release."""

    def _all_reduce(self, input_: torch.Tensor, *_: Any) -> torch.Tensor:
        return input_

    def _reduce_scatter(self, input_: torch.Tensor, *_: Any) -> torch.Tensor:
        return input_

    def _all_gather(self, input_: torch.Tensor, *_: Any) -> torch.Tensor:
        return input_

    def _all_to_all(self, input_: torch.Tensor, *_: Any) -> torch.Tensor:
        return input_

    def _broadcast(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return tensor

    def _scatter(self, output: torch.Tensor, input_: torch.Tensor | None, *_: Any) -> None:
        if input_ is not None:
            fill(output, input_)

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        raise UsageError("send: a group of one has no other rank")

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        raise UsageError("recv: a group of one has no other rank")
