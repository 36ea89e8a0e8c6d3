"""Run fused calls on CUDA tensors: in one kernel where the policy says so, else as an all-reduce and a local kernel."""

from __future__ import annotations

from abc import abstractmethod

import torch

from device_comm.base import SUM
from device_comm.cuda.alignment import aligned
from device_comm.cuda.custom.all_reduce import CustomAllReduce
from device_comm.cuda.custom.fused_calls import Scales
from device_comm.cuda.ordered_communicator import OrderedCommunicator
from device_comm.fused.fp4 import BLOCK, blocks_quantised
from device_comm.fused.fp8 import FP8, quantised_rows
from device_comm.process_group import dense
from shm_broadcast.errors import UsageError

__all__ = ["FusedCommunicator"]


class FusedCommunicator(OrderedCommunicator):
    """The fused calls of `CudaCommunicator`, which says what carries a call."""

    def _all_reduce_add_rms_norm(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        timeout_s: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        custom = self._fusing("all_reduce_add_rms_norm")
        if custom is None or not _is_whole(input_):
            return super()._all_reduce_add_rms_norm(input_, residual, weight, eps, timeout_s)
        result = torch.empty(input_.shape, dtype=input_.dtype, device=input_.device)
        total = self._norm(custom, (input_, residual, weight), eps, result, timeout_s)
        return result, total

    def _all_reduce_add_rms_norm_fp8(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        scale: torch.Tensor | None,
        timeout_s: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        custom = self._fusing("all_reduce_add_rms_norm_fp8")
        if custom is None or not _is_whole(input_):
            # Not by way of our own norm: only this call may be refused by its name.
            normed, total = super()._all_reduce_add_rms_norm(input_, residual, weight, eps, timeout_s)
            return *quantised_rows(normed, scale), total
        result = torch.empty(input_.shape, dtype=FP8, device=input_.device)
        if scale is None:
            scales = torch.empty(len(input_), 1, dtype=torch.float32, device=input_.device)
            addresses = Scales("fp8", 0, scales.data_ptr())
        else:
            scales = dense(scale)
            addresses = Scales("fp8", scales.data_ptr(), 0)
        total = self._norm(custom, (input_, residual, weight), eps, result, timeout_s, addresses)
        return result, scales if scale is None else scale, total

    def _all_reduce_add_rms_norm_nvfp4(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        global_scale: torch.Tensor,
        timeout_s: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        custom = self._fusing("all_reduce_add_rms_norm_nvfp4")
        if custom is None or not len(input_):
            normed, total = super()._all_reduce_add_rms_norm(input_, residual, weight, eps, timeout_s)
            return *blocks_quantised(normed, global_scale), total
        rows, hidden = input_.shape
        result = torch.empty(rows, hidden // 2, dtype=torch.uint8, device=input_.device)
        scales = torch.empty(rows, hidden // BLOCK, dtype=FP8, device=input_.device)
        given = dense(global_scale)
        addresses = Scales("nvfp4", given.data_ptr(), scales.data_ptr())
        total = self._norm(custom, (input_, residual, weight), eps, result, timeout_s, addresses)
        return result, scales, total

    def _norm(
        self,
        custom: CustomAllReduce,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        eps: float,
        result: torch.Tensor,
        timeout_s: float | None,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        """Queue a norm into `result`; return the sum with the residual."""
        tensors, stream = [aligned(dense(each)) for each in inputs], self._current()
        (rows, hidden), dtype = tensors[0].shape, tensors[0].dtype
        is_fused = custom.can_fuse(rows, hidden, dtype, stream)
        if not is_fused:
            # The policy chooses how to sum; `add_rms_norm` is the second half of the fused kernel, with equal bits.
            tensors[0] = self._all_reduce(tensors[0], SUM, timeout_s)
        total = torch.empty_like(tensors[0])
        addresses = [each.data_ptr() for each in (*tensors, result, total)]
        if is_fused:
            custom.all_reduce_add_rms_norm(addresses, rows, hidden, eps, dtype, stream, scales)
        else:
            custom.add_rms_norm(addresses, rows, hidden, eps, dtype, stream, scales)
        return total

    def _moe_finalize_all_reduce(
        self,
        expert_out: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        timeout_s: float | None,
    ) -> torch.Tensor:
        custom = self._fusing("moe_finalize_all_reduce")
        (tokens, k), (count, hidden) = rows.shape, expert_out.shape
        if custom is None or not tokens or hidden * expert_out.itemsize % 16:
            return super()._moe_finalize_all_reduce(expert_out, rows, weights, shared, timeout_s)
        source, addend = aligned(dense(expert_out)), None if shared is None else aligned(dense(shared))
        places, factors, stream = dense(rows), dense(weights), self._current()
        result = source.new_empty(tokens, hidden)
        addresses = [each.data_ptr() for each in (source, places, factors)]
        addresses += [0 if addend is None else addend.data_ptr(), result.data_ptr()]
        sizes = tokens, hidden, k, count
        if custom.can_finalize(tokens, hidden, source.dtype, stream):
            custom.moe_finalize_all_reduce(addresses, sizes, source.dtype, stream)
            return result
        custom.moe_finalize(addresses, sizes, source.dtype, stream)
        return self._all_reduce(result, SUM, timeout_s)

    def _fusing(self, name: str) -> CustomAllReduce | None:
        """Return what carries fused calls, None if the group has none."""
        if self._collected is not None:
            raise UsageError(f"{name} cannot be called within `group`: the sum is complete only at its end")
        return self._own(name)

    @abstractmethod
    def _own(self, name: str) -> CustomAllReduce | None:
        """Return our own collectives, None if the group has none. The first call decides that and is collective."""


def _is_whole(input_: torch.Tensor) -> bool:
    """Return whether the norm's kernels take the input: it has rows, and these consist of whole vectors."""
    return len(input_) > 0 and not input_.shape[1] * input_.itemsize % 16
