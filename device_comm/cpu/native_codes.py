"""How the native core names dtypes and reductions, and how it is told the layout of tensors.

Every dtype that can be reduced has a kernel; a test compares this table with `reduction.check_reducible`. What is only
copied may have any dtype: ranks then compare byte counts and `COPY_ONLY`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from device_comm import _core
from device_comm.reduction import ReduceOperation

TYPE_CODES: Final[dict[torch.dtype, int]] = {
    getattr(torch, name): code for code, name in _core.TYPE_NAMES.items() if hasattr(torch, name)
}

# `reduce::Op` has the same order.
OPERATION_CODES: Final = {operation: code for code, operation in enumerate(ReduceOperation)}

COPY_ONLY: Final = 0xFF
"""Stands for a dtype without a kernel."""


def copy_code(dtype: torch.dtype) -> int:
    """Return the code under which elements of `dtype` are copied."""
    return TYPE_CODES.get(dtype, COPY_ONLY)


def columns(tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return how many rows a tensor has that is concatenated along `dim`, and each rank's bytes of a row."""
    inner = math.prod(tensor.shape[dim + 1 :]) * tensor.itemsize
    return math.prod(tensor.shape[:dim]), tuple(size * inner for size in sizes)


def _teach_core() -> None:
    """Let `SharedRegion` itself take contiguous tensors of the dtypes that DLPack carries. Once per process.

    Its methods `all_reduce`, `all_reduce_into` and `all_gather` do.

    Complex tensors are left out because DLPack does not tell whether they are conjugated. So are bool tensors.
    """
    # The function that the public one calls in the end. It saves Python frames; not every torch has it.
    imports: Callable[[object], torch.Tensor] = getattr(torch._C, "_from_dlpack", from_dlpack)  # noqa: SLF001
    carried = {}
    for dtype, code in TYPE_CODES.items():
        if dtype.is_complex or dtype is torch.bool:
            continue
        try:
            returned = imports(to_dlpack(torch.empty(1, dtype=dtype, device="cpu")))
        except (BufferError, RuntimeError):  # a dtype that DLPack, or this torch's part of it, does not have
            continue
        if returned.dtype is dtype:
            carried[dtype] = code
    _core.ordinary_tensors(torch.Tensor, to_dlpack, imports, carried)


_teach_core()
