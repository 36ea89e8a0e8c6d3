"""The reductions of a group that do other work in the same call."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from coordinator.planes import GroupPlanes
from coordinator.torch_interop import compile_ops
from shm_broadcast.timeouts import AnyTimeout


class FusedReductions(GroupPlanes):
    """All-reduces fused with quantisation or with the sums of experts; see `TensorCollectives`.

    The bits are those of the steps one after the other, on every device, whether or not one kernel makes them.
    """

    def all_reduce_add_rms_norm_fp8(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        scale: torch.Tensor | None = None,
        *,
        timeout_s: AnyTimeout = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do `all_reduce_add_rms_norm` and quantise the normalised rows to 8-bit floats, in one call.

        The next layer's 8-bit matrix product follows. Each row y, rounded to the dtype as in `all_reduce_add_rms_norm`,
        becomes e4m3fn(clamp(y / scale, ±448)) by a division in float32, rounded to nearest, ties to even. Each NaN
        becomes 0x7F.

        Args:
            input_: [tokens, hidden] of float32, float16 or bfloat16; shape and dtype are equal on all ranks.
            residual: A tensor of the input's shape and dtype. It is not sent: only where it is equal on all ranks, the
                results are.
            weight: [hidden], of the input's dtype.
            eps: A number of at least 0, which is added to the mean of the squares.
            scale: The scale of the whole tensor, one element of float32 on the device; the host does not read it.
                None gives each row a scale: the largest size of its elements divided by 448, but at least
                1 / (448 * 512), in float32. A row with a NaN gets the scale NaN, and then consists of NaN.
            timeout_s: Deadline in seconds.

        Returns:
            (quantised, scale, new_residual): [tokens, hidden] of float8_e4m3fn; `scale` itself, or [tokens, 1] of
            float32; and `all_reduce(input_) + residual`. New contiguous tensors, also in a group of one, but for a
            `scale` that was given; the arguments do not change.
        """
        name = "all_reduce_add_rms_norm_fp8"
        if is_dynamo_compiling():
            tensors = (input_, residual, weight)
            traced = compile_ops.trace_fused(name, self, tensors, eps, last=scale, timeout_s=timeout_s)
            return traced[0], traced[1] if scale is None else scale, traced[2]
        make = self.device_communicator.all_reduce_add_rms_norm_fp8
        return self._calls.run(name, make, input_, residual, weight, eps, scale, timeout_s=timeout_s)

    def all_reduce_add_rms_norm_nvfp4(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        global_scale: torch.Tensor,
        *,
        timeout_s: AnyTimeout = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do `all_reduce_add_rms_norm` and quantise the normalised rows to 4-bit floats in blocks of 16, in one call.

        A block of 16 elements y of a row, rounded to the dtype, gets the scale
        s = e4m3fn(clamp(m / 6 * global_scale, ±448)), where m is the largest size in the block, and the codes
        e2m1(y * (global_scale / s)), or zeros where s is 0. Every operation is in float32; both formats round to
        nearest, ties to even, and beyond their largest number to that. A NaN makes its block's scale 0x7F and its
        codes 7.

        Args:
            input_: [tokens, hidden] of float32, float16 or bfloat16; shape and dtype are equal on all ranks, and 16
                divides `hidden`.
            residual: A tensor of the input's shape and dtype. It is not sent: only where it is equal on all ranks, the
                results are.
            weight: [hidden], of the input's dtype.
            eps: A number of at least 0, which is added to the mean of the squares.
            global_scale: One element of float32 on the device, which the host does not read: usually 448 * 6 divided by
                the largest size in the tensor.
            timeout_s: Deadline in seconds.

        Returns:
            (packed, block_scales, new_residual): [tokens, hidden / 2] of uint8, with an even element in the lower half
            of a byte and the next in the upper one; [tokens, hidden / 16] of float8_e4m3fn, one row after the other and
            not in the order of tiles that matrix products read; and `all_reduce(input_) + residual`. All are new
            contiguous tensors, also in a group of one.
        """
        name = "all_reduce_add_rms_norm_nvfp4"
        if is_dynamo_compiling():
            tensors = (input_, residual, weight)
            traced = compile_ops.trace_fused(name, self, tensors, eps, last=global_scale, timeout_s=timeout_s)
            return traced[0], traced[1], traced[2]
        make = self.device_communicator.all_reduce_add_rms_norm_nvfp4
        return self._calls.run(name, make, input_, residual, weight, eps, global_scale, timeout_s=timeout_s)

    def moe_finalize_all_reduce(
        self,
        expert_out: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        *,
        timeout_s: AnyTimeout = None,
    ) -> torch.Tensor:
        """Sum what this rank's experts returned for each token, and sum that over the ranks, in one call.

        It ends a mixture of experts whose experts, or parts of them, are spread over the ranks. A token's sum is that
        of `weights[token, k] * expert_out[rows[token, k]]` in the order of k from +0 on, then of `shared[token]`, each
        operation in float32; it rounds once to the dtype, and `all_reduce` follows.

        Args:
            expert_out: [n, hidden] of float32, float16 or bfloat16: the rows of this rank's experts; n may be 0.
            rows: [tokens, k] of int32: the row of `expert_out` for each token and expert. A negative one is left out:
                another rank has that expert. The values are not checked; one of n or more makes the token's result NaN
                on all ranks.
            weights: [tokens, k] of float32.
            shared: [tokens, hidden] of the dtype of `expert_out`, such as this rank's part of a shared expert, or None.
            timeout_s: Deadline in seconds.

        `tokens`, `hidden` and the dtype are equal on all ranks; n, k and whether there is a `shared` may differ.

        Returns:
            A new contiguous tensor [tokens, hidden] of the dtype of `expert_out`, also in a group of one.
        """
        name = "moe_finalize_all_reduce"
        if is_dynamo_compiling():
            tensors = (expert_out, rows, weights)
            traced: torch.Tensor = compile_ops.trace_fused(
                name, self, tensors, last=shared, timeout_s=timeout_s
            )
            return traced
        make = self.device_communicator.moe_finalize_all_reduce
        return self._calls.run(name, make, expert_out, rows, weights, shared, timeout_s=timeout_s)
