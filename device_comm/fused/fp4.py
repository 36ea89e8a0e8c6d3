"""Quantise normalised rows to 4-bit floats under block scales: the reference for `csrc/cuda/add_rms_norm_nvfp4.cu`.

`DESIGN.md`, *An output of 4-bit floats*, defines each bit. Every operation rounds once in float32.
"""

from __future__ import annotations

from typing import Final

import torch

from device_comm.fused.fp8 import check_scale, rounded_fp8
from shm_broadcast.errors import UsageError

__all__ = ["BLOCK", "blocks_quantised", "check_blocks"]

BLOCK: Final = 16
"""Elements that share a scale."""
LARGEST: Final = 6.0
"""The largest number of e2m1, whose sizes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 (OCP Microscaling Formats 1.0)."""

_NAN: Final = 7
_SIGN: Final = 8


def blocks_quantised(rows: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(packed, block_scales)`; does not check arguments.

    Args:
        rows: [tokens, hidden] of float32, float16 or bfloat16, without gradient; unchanged. 16 divides hidden.
        global_scale: One element of float32, by which every scale is multiplied before it is rounded.

    Returns:
        packed, a new [tokens, hidden / 2] of uint8, each with an even element in its lower half and the next in its
        upper one; and a new [tokens, hidden / 16] of float8_e4m3fn, one row after the other.
    """
    tokens, hidden = rows.shape
    blocks = rows.float().view(tokens, hidden // BLOCK, BLOCK)
    unit = global_scale.detach().reshape(())
    largest = blocks.abs().amax(2)
    # The divisor is a tensor on the device: for a Python number CUDA multiplies by the reciprocal instead.
    scales = rounded_fp8(largest / largest.new_full((), LARGEST) * unit)
    divisor = scales.float()
    factor = torch.where(divisor == 0, divisor.new_zeros(()), unit / divisor)
    codes = _rounded_fp4(blocks * factor.unsqueeze(2)).view(tokens, hidden)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


def _rounded_fp4(values: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest numbers, of two the even one, as uint8; a NaN becomes the largest number."""
    size = values.abs()
    # Where a number lies between two, the code grows by one; a middle belongs to the even one.
    code = (size > 0.25).to(torch.uint8)
    for middle, is_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += size >= middle if is_up else size > middle
    code = torch.where(values.signbit(), code | _SIGN, code)
    return torch.where(values.isnan(), code.new_full((), _NAN), code)


def check_blocks(hidden: int, global_scale: torch.Tensor, device: torch.device, name: str) -> None:
    """Raise unless rows of `hidden` elements consist of whole blocks, and `global_scale` is a float32 on the device.

    Raises:
        UsageError: They do not. Nothing was sent, the group is intact.
    """
    if global_scale is None:
        raise UsageError(f"{name}: a global scale is required")
    check_scale(global_scale, device, name)
    if hidden % BLOCK:
        raise UsageError(f"{name}: rows must consist of blocks of {BLOCK} elements, not of {hidden} elements")
