"""Map torch's dtypes and our reductions to NCCL's codes, and say which pairs NCCL supports."""

from __future__ import annotations

from typing import Final

import torch

from device_comm.nccl.library import version_text
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
# NCCL 2.24 was the first version with fp8 reductions.
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

# NCCL reduces bools as bytes of 0 or 1: "or" is MAX (2), "and" is MIN (3).
_OF_BOOLS: Final = {
    ReduceOperation.SUM: 2,
    ReduceOperation.MAX: 2,
    ReduceOperation.PRODUCT: 3,
    ReduceOperation.MIN: 3,
}
# A sum or mean of complex numbers is that of their real and imaginary parts.
_PARTS: Final[dict[torch.dtype, torch.dtype]] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_BY_PARTS: Final = frozenset({ReduceOperation.SUM, ReduceOperation.MEAN})


def reduction_code(dtype: torch.dtype, op: ReduceOperation, version: int) -> tuple[int, int, int]:
    """Return NCCL's data type, its reduction, and how many of its elements make up one element of `dtype`.

    The result is equal on all ranks, because it depends on the arguments only and `version` is agreed.

    Args:
        dtype: The tensors' dtype, which has passed `check_reducible`.
        op: The reduction.
        version: The library's version.

    Raises:
        CapabilityError: This version of NCCL cannot combine such elements. Nothing was queued, the group is intact.
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
