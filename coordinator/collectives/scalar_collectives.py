"""Small collectives for training and evaluation loops: a flag for all ranks, a sum of numbers, a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from coordinator.collectives.object_collectives import ObjectCollectives
from coordinator.collectives.tensor_collectives import TensorCollectives
from coordinator.gradients import refuse_lost_gradient
from device_comm import checks
from device_comm.outputs import fill
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout

_LARGEST = (1 << 63) - 1


class ScalarCollectives(TensorCollectives, ObjectCollectives):
    """Small collectives; flags and sums go over the host plane and never wait for an accelerator."""

    def broadcast_flag(self, flag: bool, src: int = 0, *, timeout_s: AnyTimeout = None) -> bool:
        """Return rank `src`'s flag on every rank. Collective.

        Blocks until rank `src` has called it, without limit unless given `timeout_s`.

        Args:
            flag: The decision on rank `src`; ignored elsewhere, but it must be a bool on every rank.
            src: Rank in the group.
            timeout_s: Deadline in seconds.

        Raises:
            UsageError: `flag` is not a bool, or there is no rank `src`. Nothing is sent.
        """

        def take(limit_s: float | None) -> bool:
            checks.check_rank(src, self.world_size, "src")
            if not isinstance(flag, bool):
                raise UsageError(f"{self._health.where('broadcast_flag')}: flag must be a bool, not {flag!r}")
            found: bool = self._broadcast(flag, src, limit_s, bool)
            return found

        return self._make_broadcast("broadcast_flag", src, timeout_s, take)

    def all_sum(self, value: float, *, timeout_s: AnyTimeout = None) -> torch.Tensor:
        """Return the sum of all ranks' numbers as a 0-dim tensor on the group's device. Collective.

        Integers are summed exactly, and the result is an int64. If one rank passes a float, all ranks get the same
        float64, which is added in rank order.

        Args:
            value: This rank's number.
            timeout_s: Deadline in seconds; by default the group's.

        Raises:
            UsageError: `value` is not a number, and nothing is sent. Or the sum does not fit into an int64, which every
                rank raises.
        """
        name = "all_sum"
        with self._calls.call(name, timeout_s, plane="host") as limit_s:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UsageError(
                    f"{self._health.where(name)}: value must be an int or a float, not {value!r}"
                )
            total = sum(self._host.all_gather_object(value, limit_s))
            if isinstance(total, float):
                return torch.tensor(total, dtype=torch.float64, device=self.device)
            if abs(total) > _LARGEST:
                raise UsageError(f"{self._health.where(name)}: the sum {total} does not fit into 64 bits")
            return torch.tensor(total, dtype=torch.int64, device=self.device)

    def all_gather_to_list(
        self, input_: torch.Tensor, outputs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order. Collective.

        Args:
            input_: A tensor of equal shape and dtype on all ranks.
            outputs: The tensors to fill: one for each rank, of the input's shape, dtype and device. By default the
                results are new tensors, which share one block of memory.

        Returns:
            `outputs` as a list, or new tensors. They share no memory with `input_`, also in a group of one.

        Raises:
            UsageError: `outputs` does not fit, or a gradient would be lost. Nothing is sent.
            Others: As in `all_gather`.
        """
        name = "all_gather_to_list"
        with self._calls.call(name, plane="device"):
            checks.check_tensor(input_, self.device, name)
            if outputs is not None:
                self._check_outputs(name, input_, outputs)
            if self.world_size > 1:
                refuse_lost_gradient(name, (input_, outputs), self.world_size)
            shape = tuple(input_.shape)
            # Gathered as a row, because a 0-dim tensor has no dimension.
            rows = self.device_communicator.all_gather(input_.reshape(1, math.prod(shape)), 0)
            gathered = [row.view(shape) for row in rows.unbind(0)]
            if outputs is None:
                return gathered if self.world_size > 1 else [gathered[0].clone()]
            for into, row in zip(outputs, gathered, strict=True):
                fill(into, row)
            return list(outputs)

    def _check_outputs(self, name: str, input_: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        if len(outputs) != self.world_size:
            raise UsageError(
                f"{self._health.where(name)}: {len(outputs)} outputs for {self.world_size} ranks"
            )
        for rank, output in enumerate(outputs):
            checks.check_tensor(output, self.device, name)
            if output.shape != input_.shape or output.dtype != input_.dtype:
                raise UsageError(
                    f"{self._health.where(name)}: output {rank} is {output.dtype} {tuple(output.shape)}, the input "
                    f"{input_.dtype} {tuple(input_.shape)}"
                )
            checks.check_writable(output, name)
