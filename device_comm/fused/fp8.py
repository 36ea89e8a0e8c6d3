"""Quantise normalised rows to 8-bit floats (e4m3fn): the reference for `csrc/cuda/add_rms_norm_fp8.cu`.

`DESIGN.md`, *An output of 8-bit floats*, defines each bit. Every operation rounds once in float32, so that CPU tensors,
tensors on accelerators and the kernels agree.
"""

from __future__ import annotations

from typing import Final

import torch

from device_comm import checks
from shm_broadcast.errors import UsageError

__all__ = ["FP8", "LARGEST", "SMALLEST_SCALE", "check_scale", "quantised_rows", "rounded_fp8"]

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
"""The largest finite number; the format has no infinity ("FP8 Formats for Deep Learning", arXiv:2209.05433)."""
SMALLEST_SCALE: Final = 1.0 / (LARGEST * 512.0)
"""The smallest scale of a row, so that a row of zeros is not divided by zero. vLLM's kernels have the same bound
(`min_scaling_factor` in csrc/quantization/fp8)."""

_NAN: Final = 0x7F


def quantised_rows(
    rows: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(quantised, scale)` with quantised = e4m3fn(clamp(rows / scale, ±448)); does not check arguments.

    Args:
        rows: [tokens, hidden] of float32, float16 or bfloat16, without gradient; unchanged.
        scale: The scale of the whole tensor, one element of float32. None for one of each row, which is
            max(largest size of the row / 448, `SMALLEST_SCALE`). A row with a NaN gets the scale NaN, and one whose
            largest size is infinite gets that.

    Returns:
        quantised, a new [tokens, hidden] of float8_e4m3fn in which each NaN is 0x7F; and `scale` itself, or a new
        [tokens, 1] of float32.
    """
    wide = rows.float()
    if scale is None:
        largest = wide.abs().amax(1, keepdim=True)
        # The divisor is a tensor on the device: for a Python number CUDA multiplies by the reciprocal instead.
        scale = (largest / largest.new_full((), LARGEST)).clamp(min=SMALLEST_SCALE)
    return rounded_fp8(wide / scale.detach().reshape(-1, 1)), scale


def rounded_fp8(values: torch.Tensor) -> torch.Tensor:
    """Return e4m3fn(clamp(values, ±448)) of float32 values, in which each NaN is 0x7F."""
    bits = values.clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
    return torch.where(values.isnan(), bits.new_full((), _NAN), bits).view(FP8)


def check_scale(scale: torch.Tensor | None, device: torch.device, name: str) -> None:
    """Raise unless `scale` is None or one element of float32 on the device; its value is not looked at.

    Raises:
        UsageError: It is something else. Nothing was sent, the group is intact.
    """
    if scale is None:
        return
    checks.check_tensor(scale, device, name)
    if scale.dtype is not torch.float32 or scale.numel() != 1:
        raise UsageError(
            f"{name}: the scale must be one element of torch.float32, not {scale.dtype} of shape {tuple(scale.shape)}"
        )
