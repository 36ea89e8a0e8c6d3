"""What NCCL calls torch's dtypes and our reductions, and which of them it can combine."""

from __future__ import annotations

from typing import Final

import torch

from device_comm.nccl_library import version_text
from device_comm.reduction import ReduceOperation
from shm_broadcast.errors import CapabilityError

# ncclDataType_t.
UINT8: Final = 1
DATA_TYPES: Final[dict[torch.dtype, int]] = {
    torch.int8: 0,
    torch.uint8: UINT8,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 11,
}
FP8: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
# 2.24 was the first with fp8 reductions.
FP8_SINCE: Final = 22400

# ncclRedOp_t.
SUM: Final = 0
REDUCTIONS: Final[dict[ReduceOperation, int]] = {
    ReduceOperation.SUM: SUM,
    ReduceOperation.PRODUCT: 1,
    ReduceOperation.MAX: 2,
    ReduceOperation.MIN: 3,
    ReduceOperation.MEAN: 4,
}

# A bool is a byte of 0 or 1: or is the larger one, and is the smaller one.
_OF_BOOLS: Final = {
    ReduceOperation.SUM: 2,
    ReduceOperation.MAX: 2,
    ReduceOperation.PRODUCT: 3,
    ReduceOperation.MIN: 3,
}
# Sums and means of complex numbers are those of their parts.
_PARTS: Final[dict[torch.dtype, torch.dtype]] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_BY_PARTS: Final = frozenset({ReduceOperation.SUM, ReduceOperation.MEAN})


def reduction_code(dtype: torch.dtype, op: ReduceOperation, version: int) -> tuple[int, int, int]:
    """Return NCCL's data type, its reduction, and how many of its elements make one of `dtype`.

    The same on all ranks: a function of the arguments alone, and the ranks have agreed on `version`.

    Args:
        dtype: Of the tensors; `check_reducible` holds.
        op: The reduction.
        version: The library's.

    Raises:
        CapabilityError: NCCL of this version cannot combine such elements.
    """
    if dtype is torch.bool and op in _OF_BOOLS:
        return UINT8, _OF_BOOLS[op], 1
    if dtype in _PARTS and op in _BY_PARTS:
        return DATA_TYPES[_PARTS[dtype]], REDUCTIONS[op], 2
    code = DATA_TYPES.get(dtype)
    if code is None:
        raise CapabilityError(
            f"NCCL has no {op.name} of {dtype}: convert, or reduce on the host",
            requirement=f"{op.name} of {dtype}",
        )
    if dtype in FP8 and version < FP8_SINCE:
        raise CapabilityError(
            f"{op.name} of {dtype} needs NCCL {version_text(FP8_SINCE)} or newer, this is {version_text(version)}",
            requirement=f"NCCL >= {version_text(FP8_SINCE)}",
        )
    return code, REDUCTIONS[op], 1


__all__ = ["DATA_TYPES", "FP8_SINCE", "REDUCTIONS", "SUM", "UINT8", "reduction_code"]
