"""How the native core names dtypes and reductions.

Every dtype that can be reduced has a kernel; a test compares this table with `reduction.check_reducible`. What is only
copied may have any dtype: ranks then compare byte counts and `COPY_ONLY`.
"""

from __future__ import annotations

from typing import Final

import torch

from device_comm import _core
from device_comm.cpu.ordinary_tensors import teach_core
from device_comm.reduction import ReduceOperation

TYPE_CODES: Final[dict[torch.dtype, int]] = {
    getattr(torch, name): code for code, name in _core.TYPE_NAMES.items() if hasattr(torch, name)
}

OPERATION_CODES: Final[dict[ReduceOperation, int]] = {
    ReduceOperation.SUM: 0,
    ReduceOperation.MEAN: 1,
    ReduceOperation.PRODUCT: 2,
    ReduceOperation.MIN: 3,
    ReduceOperation.MAX: 4,
}

COPY_ONLY: Final = 0xFF
"""Stands for a dtype without a kernel."""

teach_core({dtype: code for dtype, code in TYPE_CODES.items() if dtype is not torch.bool})


def copy_code(dtype: torch.dtype) -> int:
    """Return the code under which elements of `dtype` are copied."""
    return TYPE_CODES.get(dtype, COPY_ONLY)
