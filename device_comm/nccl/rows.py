"""The memory of rows that calls of NCCL fill, and how rows are divided among the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from device_comm.process_group import is_plain

__all__ = ["landing_of", "parts_of"]


def landing_of(output: torch.Tensor | None, rows: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return contiguous memory for `size` rows such as `rows`: the output's if it can take them as they are."""
    shape = (size, *rows.shape[1:])
    if output is None or dim or not is_plain(output):
        return rows.new_empty(shape)
    return output.view(shape)


def parts_of(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, start, size) of each part that is not empty."""
    starts = itertools.accumulate(sizes, initial=0)
    return (
        (rank, start, size) for rank, (start, size) in enumerate(zip(starts, sizes, strict=False)) if size
    )
