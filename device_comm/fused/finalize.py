"""The weighted sum of each token's experts: the reference for `csrc/cuda/moe_finalize.cu`.

`DESIGN.md`, *Finalize and all-reduce*, defines each bit.
"""

from __future__ import annotations

import torch

from device_comm import checks
from device_comm.fused.rms_norm import DTYPES
from shm_broadcast.errors import UsageError

__all__ = ["check_experts", "finalized"]


def finalized(
    expert_out: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each token's sum of `weights[token, k] * expert_out[rows[token, k]]`; does not check arguments.

    The sum starts at +0 and takes the experts in the order of k, then `shared[token]`. Each product and each addition
    rounds to float32, and the sum once to the dtype.

    Args:
        expert_out: [n, hidden] of float32, float16 or bfloat16: what this rank's experts returned; n may be 0.
        rows: [tokens, k] of int32: rows of `expert_out`. A negative one is left out, one of n or more gives NaN.
        weights: [tokens, k] of float32.
        shared: [tokens, hidden] of the dtype of `expert_out`, or None.

    Returns:
        A new contiguous [tokens, hidden] of the dtype of `expert_out`, without gradient.
    """
    source, places, factors = expert_out.detach(), rows.detach(), weights.detach()
    count, hidden = source.shape
    if not count:
        # All rows that are not left out lie behind the last one.
        source = source.new_zeros(1, hidden)
    total = torch.zeros(len(places), hidden, dtype=torch.float32, device=source.device)
    nan = total.new_full((), torch.nan)
    for row, factor in zip(places.t().unsqueeze(2), factors.t().unsqueeze(2), strict=True):
        values = source[row[:, 0].clamp(0, len(source) - 1).long()].float()
        addend = torch.where(row < count, factor * values, nan)
        total = torch.where(row < 0, total, total + addend)
    if shared is not None:
        total = total + shared.detach().float()
    return total.to(source.dtype)


def check_experts(
    expert_out: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    device: torch.device,
    name: str,
) -> None:
    """Raise unless the arguments of `moe_finalize_all_reduce` are consistent; the values of `rows` are not looked at.

    Raises:
        UsageError: They are not. Nothing was sent, the group is intact.
    """
    for tensor in (expert_out, rows, weights):
        checks.check_tensor(tensor, device, name)
    if expert_out.dim() != 2 or expert_out.shape[1] == 0 or expert_out.dtype not in DTYPES:
        raise UsageError(
            f"{name}: expert_out must have shape [n, hidden] and a dtype of {', '.join(map(str, DTYPES))}, "
            f"not {tuple(expert_out.shape)} and {expert_out.dtype}"
        )
    if rows.dim() != 2 or rows.dtype is not torch.int32:
        raise UsageError(
            f"{name}: rows must have shape [tokens, k] and dtype torch.int32, not {tuple(rows.shape)} and {rows.dtype}"
        )
    if weights.shape != rows.shape or weights.dtype is not torch.float32:
        raise UsageError(
            f"{name}: for rows of shape {tuple(rows.shape)} the weights must have that shape and dtype torch.float32, "
            f"not {tuple(weights.shape)} and {weights.dtype}"
        )
    if shared is None:
        return
    checks.check_tensor(shared, device, name)
    if tuple(shared.shape) != (rows.shape[0], expert_out.shape[1]) or shared.dtype != expert_out.dtype:
        raise UsageError(
            f"{name}: shared must have shape {(rows.shape[0], expert_out.shape[1])} and dtype {expert_out.dtype}, "
            f"not {tuple(shared.shape)} and {shared.dtype}"
        )
