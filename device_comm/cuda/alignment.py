"""Whether our kernels can read and write a tensor where it lies. Only its own rank knows, so it decides no path."""

from __future__ import annotations

import torch

from device_comm.process_group import is_plain

__all__ = ["aligned", "can_land", "is_strided"]


def is_strided(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is dense and contiguous and its memory holds its values as they are."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()


def can_land(output: torch.Tensor) -> bool:
    """Return whether our kernels can write to the output. If not, this rank copies; the algorithm stays the same."""
    return is_plain(output) and not output.data_ptr() & 15


def aligned(tensor: torch.Tensor, unit: int = 16) -> torch.Tensor:
    """Return the contiguous tensor, copied if it does not begin at a multiple of `unit` bytes."""
    return tensor.clone() if tensor.data_ptr() % unit else tensor
