"""Argument checks of the collectives, shared by all communicators and by the fakes.

Each check raises `UsageError` before anything is sent, so the group stays intact. The checks see only this rank's
arguments; only `check_exchange_table` compares the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from shm_broadcast.errors import DisagreementError, UsageError

BOTH_OR_NEITHER: Final = "all_to_all: send_sizes and recv_sizes are given together, or neither"


def check_tensor(value: object, device: torch.device, name: str) -> None:
    """Raise unless `value` is a dense tensor on `device`."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name}: expected a tensor, not {type(value).__name__}")
    other_index = None not in (value.device.index, device.index) and value.device.index != device.index
    if value.device.type != device.type or other_index:
        raise UsageError(f"{name}: the tensor is on {value.device}, this group's device is {device}")
    if value.layout is not torch.strided or value.is_quantized:
        raise UsageError(f"{name}: only dense, unquantized tensors can be moved, not {value.layout}")


def check_tensors(value: object, name: str) -> list[torch.Tensor]:
    """Return `value` as a list if it is a sequence. The items are not checked."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise UsageError(f"{name}: expected a tensor or a sequence of tensors, not {type(value).__name__}")
    return list(value)


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


def check_divisible(
    tensor: torch.Tensor, dim: int, world_size: int, remedy: str = "reduce_scatterv takes uneven sizes"
) -> None:
    """Raise unless dimension `dim` can be split evenly over the ranks; `remedy` names an alternative for the text."""
    size = tensor.shape[dim] if tensor.dim() else 1
    if size % world_size:
        raise UsageError(
            f"dimension {dim} of shape {tuple(tensor.shape)} cannot be split evenly over {world_size} ranks; {remedy}"
        )


def check_sizes(sizes: object, world_size: int, name: str = "sizes") -> tuple[int, ...]:
    """Return `sizes` as a tuple if it holds one count for each rank; `name` is the argument's name."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, (str, bytes)):
        raise UsageError(f"{name} must hold one count for each rank, not {sizes!r}")
    counts = tuple(sizes)
    if len(counts) != world_size:
        raise UsageError(f"{name} has {len(counts)} entries, the group has {world_size} ranks")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(f"{name} must be counts, got {count!r}")
    return counts


def check_own_size(tensor: torch.Tensor, dim: int, sizes: Sequence[int], rank: int) -> None:
    """Raise unless this rank's tensor has the size that `sizes` states for it."""
    size = tensor.shape[dim] if tensor.dim() else 1
    if size != sizes[rank]:
        raise UsageError(
            f"dimension {dim} of shape {tuple(tensor.shape)} has size {size}, but sizes[{rank}] is {sizes[rank]}"
        )


def check_total_size(tensor: torch.Tensor, dim: int, sizes: Sequence[int], name: str = "sizes") -> None:
    """Raise unless `sizes` add up to dimension `dim`; `name` is the argument's name."""
    size = tensor.shape[dim] if tensor.dim() else 1
    if size != sum(sizes):
        raise UsageError(
            f"{name} add up to {sum(sizes)}, dimension {dim} of shape {tuple(tensor.shape)} has {size}"
        )


def check_scattered(input_: torch.Tensor, output: torch.Tensor, dim: int, sizes: Sequence[int]) -> None:
    """Raise unless `input_` is the concatenation of parts along `dim` (at least 0), one of which fits `output`."""
    shape = list(output.shape) or [1]
    shape[dim] = sum(sizes)
    if (list(input_.shape) or [1]) != shape or input_.dtype != output.dtype:
        raise UsageError(
            f"scatter: for an output of shape {tuple(output.shape)} and dtype {output.dtype} and parts of sizes "
            f"{tuple(sizes)} the input must have shape {tuple(shape)}, it has shape {tuple(input_.shape)} and dtype "
            f"{input_.dtype}"
        )
    check_no_overlap(input_, output, "scatter")


def check_exchange_sizes(
    tensor: torch.Tensor, dim: int, send_sizes: object, recv_sizes: object, rank: int, world_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes along `dim` that this rank sends to and receives from each rank; None splits evenly."""
    if send_sizes is None and recv_sizes is None:
        check_divisible(tensor, dim, world_size, "send_sizes and recv_sizes may be uneven")
        size = tensor.shape[dim] if tensor.dim() else 1
        even = (size // world_size,) * world_size
        return even, even
    if send_sizes is None or recv_sizes is None:
        raise UsageError(BOTH_OR_NEITHER)
    sent = check_sizes(send_sizes, world_size, "send_sizes")
    received = check_sizes(recv_sizes, world_size, "recv_sizes")
    check_total_size(tensor, dim, sent, "send_sizes")
    if sent[rank] != received[rank]:
        raise UsageError(
            f"all_to_all: this rank sends {sent[rank]} to itself by send_sizes[{rank}], but expects {received[rank]} "
            f"from itself by recv_sizes[{rank}]"
        )
    return sent, received


def check_exchange_table(where: str, ranks: Sequence[int], table: Sequence[Sequence[int]]) -> None:
    """Raise unless each rank sends to each other rank what that rank expects; all ranks raise the same.

    Args:
        where: The call, for the text.
        ranks: Global ranks, in group order.
        table: For each rank the sizes that it sends to each rank, followed by those that it expects from each.

    Raises:
        DisagreementError: They do not match. The text lists what every rank sends and expects.
    """
    size = len(ranks)
    if all(table[a][b] == table[b][size + a] for a in range(size) for b in range(size)):
        return
    views = {
        rank: f"sends {tuple(row[:size])}, expects {tuple(row[size:])}"
        for rank, row in zip(ranks, table, strict=True)
    }
    listed = "; ".join(f"rank {rank}: {view}" for rank, view in views.items())
    raise DisagreementError(f"{where}: the ranks send other sizes than are expected: {listed}", views=views)


def check_output(output: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise unless `output` has the shape and dtype of the result."""
    given = tuple(output.shape)
    # A 0-dim output takes the one element of a 0-dim input's result.
    if (given != tuple(shape) and (given or tuple(shape) != (1,))) or output.dtype != dtype:
        raise UsageError(
            f"output has shape {tuple(output.shape)} and dtype {output.dtype}, "
            f"the result has shape {tuple(shape)} and dtype {dtype}"
        )


def check_shape(size: object) -> tuple[int, ...]:
    """Return `size` as a tuple if it is the shape of a tensor."""
    if not isinstance(size, Sequence) or isinstance(size, (str, bytes)):
        raise UsageError(f"size must be the shape of a tensor, not {size!r}")
    shape = tuple(size)
    for extent in shape:
        if isinstance(extent, bool) or not isinstance(extent, int) or extent < 0:
            raise UsageError(f"size must be the shape of a tensor, not {shape}")
    return shape


def check_dtype(dtype: object) -> torch.dtype:
    """Return `dtype` if it is a torch.dtype."""
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype must be a torch.dtype, not {dtype!r}")
    return dtype


def check_writable(tensor: torch.Tensor, name: str) -> None:
    """Raise if elements of `tensor` share memory with each other, as in an expanded tensor."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return
    pairs = sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )
    # The elements are disjoint if each stride exceeds the reach of all smaller strides.
    reach, disjoint = 0, True
    for stride, size in pairs:
        disjoint = disjoint and stride > reach
        reach += stride * (size - 1)
    if disjoint or (pairs[0][0] > 0 and _marked(tensor, 0, reach + 1).sum() == tensor.numel()):
        return
    raise UsageError(
        f"{name}: the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} overlaps itself, so "
        "it cannot be written to; pass a contiguous copy"
    )


def check_no_overlap(input_: torch.Tensor, output: torch.Tensor, name: str) -> None:
    """Raise if two tensors of one dtype share elements in memory."""
    if share_memory(input_, output):
        raise UsageError(f"{name}: the output shares memory with the input; pass memory of its own")


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are the same elements of the same memory."""
    return one is other or (one.data_ptr() == other.data_ptr() and one.stride() == other.stride())


def check_own_place(
    whole: torch.Tensor, part: torch.Tensor, dim: int, sizes: Sequence[int], rank: int, name: str
) -> None:
    """Raise if `part` shares memory with `whole`, unless it is that rank's part of it and the parts are contiguous.

    Args:
        whole: The tensor that holds the parts of all ranks along `dim`.
        part: This rank's part, in memory of its own or in its place.
        dim: The dimension, at least 0.
        sizes: The size of each rank's part.
        rank: This rank.
        name: The call, for the text.
    """
    if not share_memory(whole, part):
        return
    rows = 1
    for extent in whole.shape[:dim]:
        rows *= extent
    if rows == 1 and whole.is_contiguous() and part.is_contiguous():
        size = whole.shape[dim] if whole.dim() else 1
        step = whole.numel() // max(size, 1) * whole.itemsize
        if part.data_ptr() == whole.data_ptr() + sum(sizes[:rank]) * step:
            return
    raise UsageError(
        f"{name}: input and output share memory; only this rank's own part of the larger one may be the other, if the "
        "parts lie one after the other; pass memory of its own"
    )


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype share elements in memory."""
    first, second = _byte_range(one), _byte_range(other)
    start, end = max(first[0], second[0]), min(first[1], second[1])
    if start >= end or one.device != other.device:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    # For interleaved views of one buffer, such as two columns, mark the elements of each and compare.
    low, high = min(first[0], second[0]), max(first[1], second[1])
    if (first[0] - second[0]) % one.itemsize:
        return True
    length = (high - low) // one.itemsize
    marks = _marked(one, (first[0] - low) // one.itemsize, length)
    return bool((marks & _marked(other, (second[0] - low) // one.itemsize, length)).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of `tensor` and of the byte after its last."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


def _marked(tensor: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    """Return `length` flags in host memory; the flags at the positions of the tensor's elements are set."""
    flags = torch.zeros(length, dtype=torch.bool)
    # An expanded dimension adds no positions, and torch refuses to fill it.
    shape = [1 if stride == 0 else size for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    flags.as_strided(shape, tensor.stride(), offset).fill_(True)
    return flags


def check_timeout(timeout_s: object) -> None:
    """Raise unless `timeout_s` is a positive number of seconds or None."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise UsageError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
