"""All-reduces with other work in the same call: a part of the contract of every communicator."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from device_comm import checks
from device_comm.fused import rms_norm
from device_comm.fused.finalize import check_experts, finalized
from device_comm.fused.fp4 import blocks_quantised, check_blocks
from device_comm.fused.fp8 import check_scale, quantised_rows
from device_comm.reduction import ReduceOperation

__all__ = ["FusedForms"]


class FusedForms(ABC):
    """Calls that make two or three steps at once; a part of `DeviceCommunicator`, whose contract they keep.

    Their bits are those of the steps one after the other. All results are new, also in a group of one.
    """

    device: torch.device

    def all_reduce_add_rms_norm_fp8(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        scale: torch.Tensor | None = None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `all_reduce_add_rms_norm`, with the normalised rows as 8-bit floats.

        Each row y of its result, rounded to the dtype, becomes e4m3fn(clamp(y / scale, ±448)) by a division in float32,
        rounded to nearest, ties to even. Each NaN becomes 0x7F.

        Args:
            input_: [tokens, hidden] of float32, float16 or bfloat16.
            residual: Of the input's shape and dtype; equal on all ranks where the results shall be.
            weight: [hidden], of the input's dtype.
            eps: Added to the mean of the squares; at least 0.
            scale: The scale of the tensor: one element of float32 on the device, of any value, which is not read on the
                host. None for a scale of each row, max(largest size of the row / 448, 1 / (448 * 512)) in float32.
                A row with a NaN gets the scale NaN, and then consists of NaN.
            timeout_s: Deadline in seconds.

        Returns:
            (quantised, scale, `all_reduce(input_) + residual`): [tokens, hidden] of float8_e4m3fn; the scale that was
            given, or [tokens, 1] of float32; and the sum, of the input's dtype.
        """
        name = "all_reduce_add_rms_norm_fp8"
        rms_norm.check_arguments(input_, residual, weight, eps, self.device, name)
        check_scale(scale, self.device, name)
        checks.check_timeout(timeout_s)
        return self._all_reduce_add_rms_norm_fp8(input_, residual, weight, eps, scale, timeout_s)

    def all_reduce_add_rms_norm_nvfp4(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        global_scale: torch.Tensor,
        *,
        timeout_s: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `all_reduce_add_rms_norm`, with the normalised rows as 4-bit floats (e2m1) in blocks of 16.

        A block of its result, rounded to the dtype, gets the scale s = e4m3fn(clamp(m / 6 * global_scale, ±448)), where
        m is the largest size in the block, and the codes e2m1(y * (global_scale / s)), or zeros where s is 0. Every
        operation is in float32; both formats round to nearest, ties to even, and beyond their largest number to that.
        A NaN makes its block's scale 0x7F and its codes 7.

        Args:
            input_: [tokens, hidden] of float32, float16 or bfloat16; 16 divides `hidden`.
            residual: Of the input's shape and dtype; equal on all ranks where the results shall be.
            weight: [hidden], of the input's dtype.
            eps: Added to the mean of the squares; at least 0.
            global_scale: One element of float32 on the device, of any value, which is not read on the host: usually
                448 * 6 divided by the largest size in the tensor.
            timeout_s: Deadline in seconds.

        Returns:
            (packed, block_scales, `all_reduce(input_) + residual`): [tokens, hidden / 2] of uint8, with an even element
            in the lower half of a byte and the next in the upper one; [tokens, hidden / 16] of float8_e4m3fn, one row
            after the other (not in the order of tiles that matrix products read); and the sum, of the input's dtype.
        """
        name = "all_reduce_add_rms_norm_nvfp4"
        rms_norm.check_arguments(input_, residual, weight, eps, self.device, name)
        check_blocks(input_.shape[1], global_scale, self.device, name)
        checks.check_timeout(timeout_s)
        return self._all_reduce_add_rms_norm_nvfp4(input_, residual, weight, eps, global_scale, timeout_s)

    def moe_finalize_all_reduce(
        self,
        expert_out: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Sum what this rank's experts returned for each token, and sum that over the ranks.

        A token's sum is that of `weights[token, k] * expert_out[rows[token, k]]` in the order of k from +0 on, then
        `shared[token]`, each operation in float32, and rounds once to the dtype. `all_reduce` follows.

        Args:
            expert_out: [n, hidden] of float32, float16 or bfloat16: the rows of this rank's experts; n may be 0.
            rows: [tokens, k] of int32: the row of `expert_out` for each token and expert. A negative one is left out:
                another rank has that expert. A row of n or more makes the token's result NaN on all ranks.
            weights: [tokens, k] of float32.
            shared: [tokens, hidden] of the dtype of `expert_out`, such as this rank's part of a shared expert, or None.
            timeout_s: Deadline in seconds.

        `tokens`, `hidden` and the dtype are equal on all ranks; n and k may differ, and so may whether there is a
        `shared`.

        Returns:
            [tokens, hidden] of the dtype of `expert_out`.
        """
        name = "moe_finalize_all_reduce"
        check_experts(expert_out, rows, weights, shared, self.device, name)
        checks.check_timeout(timeout_s)
        return self._moe_finalize_all_reduce(expert_out, rows, weights, shared, timeout_s)

    # ------------------------------------------------------------------ made of other calls, unless overridden

    def _all_reduce_add_rms_norm_fp8(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        scale: torch.Tensor | None,
        timeout_s: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normed, total = self._all_reduce_add_rms_norm(input_, residual, weight, eps, timeout_s)
        return *quantised_rows(normed, scale), total

    def _all_reduce_add_rms_norm_nvfp4(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        global_scale: torch.Tensor,
        timeout_s: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normed, total = self._all_reduce_add_rms_norm(input_, residual, weight, eps, timeout_s)
        return *blocks_quantised(normed, global_scale), total

    def _moe_finalize_all_reduce(
        self,
        expert_out: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        timeout_s: float | None,
    ) -> torch.Tensor:
        return self._all_reduce(finalized(expert_out, rows, weights, shared), ReduceOperation.SUM, timeout_s)

    # ------------------------------------------------------------------ what the rest of the contract has

    @abstractmethod
    def _all_reduce_add_rms_norm(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        timeout_s: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the normalised rows, the sum with the residual), both new."""

    @abstractmethod
    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        """Combine the ranks' tensors."""
