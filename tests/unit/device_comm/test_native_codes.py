"""The native core has a kernel for every dtype that can be reduced."""

import pytest
import torch

from device_comm.cpu.native_codes import COPY_ONLY, OPERATION_CODES, TYPE_CODES, copy_code
from device_comm.reduction import ReduceOperation, check_reducible
from shm_broadcast.errors import UsageError

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def is_reducible(dtype: torch.dtype, op: ReduceOperation) -> bool:
    try:
        check_reducible(dtype, op)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("op", list(ReduceOperation), ids=lambda op: op.name)
def test_what_can_be_reduced_has_a_kernel(op: ReduceOperation) -> None:
    """So shared memory needs no slow path for reductions."""
    assert op in OPERATION_CODES
    assert [dtype for dtype in DTYPES if is_reducible(dtype, op) and dtype not in TYPE_CODES] == []


def test_what_has_no_kernel_is_only_copied() -> None:
    """Such dtypes share a code of their own."""
    assert copy_code(torch.uint64) == COPY_ONLY
    assert copy_code(torch.float32) == TYPE_CODES[torch.float32] != COPY_ONLY
