"""RMSNorm with a defined order of summation, optionally after adding a residual: the reference for every kernel.

`DESIGN.md`, *Fused all-reduce, add and RMSNorm*, defines the order. Each operation is a separate tensor operation that
rounds once in float32, so that CPU tensors, tensors on accelerators and `csrc/cuda/add_rms_norm.cu` give the same bits.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from device_comm import checks
from shm_broadcast.errors import UsageError

# A row's sum of squares is split over 4 groups of 256 lanes on all hardware: the bits depend on it. One group is
# the work of a GPU's block with one lane per thread; the groups are that of a cluster of up to 4 blocks.
GROUPS: Final = 4
GROUP_LANES: Final = 256
# A lane takes this many bytes at a time.
VECTOR_BYTES: Final = 16

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)

# Elements of float32 squares per block, 1 MiB: they are read twice, and the second read hits the cache.
_BLOCK_ELEMENTS: Final = 1 << 18


def rms_norm(input_: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by its root mean square and multiply by `weight`; not collective.

    Equals `torch.nn.functional.rms_norm` within rounding, but gives the same bits on every device.

    Args:
        input_: [tokens, hidden] of float32, float16 or bfloat16; unchanged.
        weight: [hidden], of the input's dtype.
        eps: Added to the mean of the squares; at least 0.

    Returns:
        A new contiguous tensor of the input's shape and dtype, without gradient.

    Raises:
        UsageError: Shape, dtype, device or `eps` do not fit.
    """
    if not isinstance(input_, torch.Tensor):
        raise UsageError(f"rms_norm: expected a tensor, not {type(input_).__name__}")
    check_arguments(input_, None, weight, eps, input_.device, "rms_norm")
    return _normed(input_.detach().contiguous(), weight.detach(), eps)


def add_rms_norm(
    input_: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm(input_ + residual, weight, eps)` and the sum, both new tensors. Does not check arguments."""
    total = torch.add(input_.detach(), residual.detach()).contiguous()
    return _normed(total, weight.detach(), eps), total


def check_arguments(
    input_: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    device: torch.device,
    name: str,
) -> None:
    """Raise unless the arguments of `rms_norm` or, with a residual, of `all_reduce_add_rms_norm` are consistent.

    Raises:
        UsageError: They are not. Nothing was sent, the group is intact.
    """
    checks.check_tensor(input_, device, name)
    checks.check_tensor(weight, device, name)
    if input_.dim() != 2 or input_.shape[1] == 0:
        raise UsageError(f"{name}: the input must have shape [tokens, hidden], not {tuple(input_.shape)}")
    if input_.dtype not in DTYPES:
        raise UsageError(
            f"{name}: the input must be of {', '.join(map(str, DTYPES))}, not of {input_.dtype}; convert it"
        )
    if residual is not None:
        checks.check_tensor(residual, device, name)
        if residual.shape != input_.shape or residual.dtype != input_.dtype:
            raise UsageError(
                f"{name}: the residual has shape {tuple(residual.shape)} and dtype {residual.dtype}, "
                f"the input shape {tuple(input_.shape)} and dtype {input_.dtype}"
            )
    if tuple(weight.shape) != (input_.shape[1],) or weight.dtype != input_.dtype:
        raise UsageError(
            f"{name}: for an input of shape {tuple(input_.shape)} and dtype {input_.dtype} the weight must have shape "
            f"[{input_.shape[1]}] and that dtype, it has shape {list(weight.shape)} and dtype {weight.dtype}"
        )
    is_number = isinstance(eps, (int, float)) and not isinstance(eps, bool)
    if not is_number or not math.isfinite(eps) or eps < 0:
        raise UsageError(f"{name}: eps must be a finite number of at least 0, not {eps!r}")


def _normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    result = torch.empty_like(rows)
    tokens, hidden = rows.shape
    wide = weight.float()
    step = max(1, _BLOCK_ELEMENTS // hidden)
    for start in range(0, tokens, step):
        block = rows[start : start + step].float()
        total = sum_of_squares(block, VECTOR_BYTES // rows.itemsize)
        # The divisor is a tensor on the device: for a Python number CUDA multiplies by the reciprocal instead.
        mean = total / total.new_full((), hidden)
        # A float64 root rounded to float32 is correctly rounded: the exact root is at least 4 units of float64 away
        # from a rounding boundary. torch's float32 root uses a vector library that is off for 1 in 6 numbers.
        root = (mean + mean.new_full((), eps)).double().sqrt().float()
        scale = (root.new_full((), 1) / root).unsqueeze(1)
        result[start : start + step] = ((block * scale) * wide).to(rows.dtype)
    return result


def sum_of_squares(rows: torch.Tensor, vector: int) -> torch.Tensor:
    """Return the sum of the squares of each row, added in the defined order.

    Args:
        rows: [tokens, hidden] of float32.
        vector: Elements of the original dtype per 16 bytes.

    Returns:
        [tokens] of float32.
    """
    tokens, hidden = rows.shape
    squares = rows * rows
    # Groups beyond a short row would only add +0.
    groups = min(GROUPS, -(-hidden // (GROUP_LANES * vector)))
    lanes = groups * GROUP_LANES
    turns = -(-hidden // (lanes * vector))
    # A square is never -0, so padding with zeros does not change a sum's bits.
    padded = torch.nn.functional.pad(squares, (0, turns * lanes * vector - hidden))
    # [turn, element of the vector, token, lane]: terms that are added together are contiguous.
    terms = padded.view(tokens, turns, lanes, vector).permute(1, 3, 0, 2).reshape(-1, tokens, lanes)
    total = torch.zeros_like(terms[0])
    for term in terms:
        total += term
    total = total.view(tokens, groups, GROUP_LANES)
    step = GROUP_LANES // 2
    while step:
        total = total[:, :, :step] + total[:, :, step : 2 * step]
        step //= 2
    sums = torch.nn.functional.pad(total[:, :, 0], (0, GROUPS - groups))
    return (sums[:, 0] + sums[:, 2]) + (sums[:, 1] + sums[:, 3])
