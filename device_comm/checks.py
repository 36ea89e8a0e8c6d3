"""Argument checks of the collectives, shared by all communicators and by the fakes.

Each raises `UsageError` before anything is sent. They look at this rank's arguments alone; whether the
ranks agree with each other is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shm_broadcast.errors import UsageError


def check_tensor(value: object, device: torch.device, name: str) -> None:
    """Raise unless `value` is a dense tensor on `device`."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name}: expected a tensor, not {type(value).__name__}")
    if value.device.type != device.type:
        raise UsageError(f"{name}: the tensor is on {value.device}, this group's device is {device}")
    if value.layout is not torch.strided or value.is_quantized:
        raise UsageError(f"{name}: only dense, unquantized tensors can be moved, not {value.layout}")


def check_rank(rank: object, world_size: int, name: str) -> int:
    """Return `rank` if it is a rank in the group."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise UsageError(f"{name} must be a rank in the group, an integer, not {rank!r}")
    if not 0 <= rank < world_size:
        raise UsageError(f"{name} is {rank}, but ranks in this group go from 0 to {world_size - 1}")
    return rank


def check_peer(rank: object, own: int, world_size: int, name: str) -> int:
    """Return `rank` if it is another rank in the group."""
    peer = check_rank(rank, world_size, name)
    if peer == own:
        raise UsageError(f"{name} is {peer}, which is this rank itself: nobody would answer")
    return peer


def check_dim(dim: object, tensor: torch.Tensor) -> int:
    """Return `dim` counted from the front. A 0-dim tensor counts as one of shape [1]."""
    dims = max(tensor.dim(), 1)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise UsageError(f"dim must be an integer, not {dim!r}")
    if not -dims <= dim < dims:
        raise UsageError(f"dim {dim} is out of range for shape {tuple(tensor.shape)}")
    return dim % dims


def check_divisible(tensor: torch.Tensor, dim: int, world_size: int) -> None:
    """Raise unless dimension `dim` can be split evenly over the ranks."""
    size = tensor.shape[dim] if tensor.dim() else 1
    if size % world_size:
        raise UsageError(
            f"dimension {dim} of shape {tuple(tensor.shape)} cannot be split evenly over {world_size} ranks; "
            "reduce_scatterv takes uneven sizes"
        )


def check_sizes(sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return `sizes` as a tuple if it holds one count for each rank."""
    counts = tuple(sizes)
    if len(counts) != world_size:
        raise UsageError(f"sizes has {len(counts)} entries, the group has {world_size} ranks")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(f"sizes must be counts, got {count!r}")
    return counts


def check_own_size(tensor: torch.Tensor, dim: int, sizes: Sequence[int], rank: int) -> None:
    """Raise unless this rank's tensor has the size that `sizes` states for it."""
    size = tensor.shape[dim] if tensor.dim() else 1
    if size != sizes[rank]:
        raise UsageError(
            f"dimension {dim} of shape {tuple(tensor.shape)} has size {size}, but sizes[{rank}] is {sizes[rank]}"
        )


def check_total_size(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> None:
    """Raise unless `sizes` adds up to dimension `dim`."""
    size = tensor.shape[dim] if tensor.dim() else 1
    if size != sum(sizes):
        raise UsageError(
            f"sizes add up to {sum(sizes)}, dimension {dim} of shape {tuple(tensor.shape)} has {size}"
        )


def check_output(output: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise unless `output` has the shape and dtype of the result."""
    if tuple(output.shape) != tuple(shape) or output.dtype != dtype:
        raise UsageError(
            f"output has shape {tuple(output.shape)} and dtype {output.dtype}, "
            f"the result has shape {tuple(shape)} and dtype {dtype}"
        )


def check_timeout(timeout_s: object) -> None:
    """Raise unless `timeout_s` is a positive number of seconds or None."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise UsageError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
