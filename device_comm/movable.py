"""Tensors of dtypes for which torch has no kernels are moved as bytes."""

from __future__ import annotations

from typing import Final

import torch

# torch can neither copy nor concatenate these; each element has a byte of its own.
_WITHOUT_KERNELS: Final = frozenset(
    getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in range(1, 8)
)


def movable_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype as which tensors of `dtype` are moved."""
    return torch.uint8 if dtype in _WITHOUT_KERNELS else dtype


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or where torch has no kernels for its dtype the same memory as uint8."""
    return tensor.view(torch.uint8) if tensor.dtype in _WITHOUT_KERNELS else tensor


def restored(result: torch.Tensor, moved: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return the result of moving `moved` as one of moving `original`."""
    if result is moved:
        return original
    return result if moved is original else result.view(original.dtype)
