"""NCCL's names for our dtypes and reductions."""

import pytest
import torch

from device_comm.nccl.dtypes import DATA_TYPES, reduction_code
from device_comm.reduction import ReduceOperation
from shm_broadcast.errors import CapabilityError

NEW, OLD = 23203, 22304


def test_every_dtype_of_nccl_has_every_reduction() -> None:
    """Twelve data types and five reductions map to distinct numbers."""
    assert sorted(DATA_TYPES.values()) == list(range(12))
    for dtype, code in DATA_TYPES.items():
        codes = [reduction_code(dtype, op, NEW) for op in ReduceOperation]
        assert {each[0] for each in codes} == {code}
        assert sorted(each[1] for each in codes) == list(range(5))
        assert {each[2] for each in codes} == {1}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_needs_a_library_that_has_it(dtype: torch.dtype) -> None:
    """FP8 needs NCCL 2.24; with an older version, on which all ranks have agreed, it is refused."""
    assert reduction_code(dtype, ReduceOperation.SUM, 22400)[0] >= 10
    with pytest.raises(CapabilityError, match=r"2\.24\.0 or newer, this is 2\.23\.4") as caught:
        reduction_code(dtype, ReduceOperation.SUM, OLD)
    assert caught.value.requirement == "NCCL >= 2.24.0"


def test_bools_and_complex_numbers_are_reduced_as_what_they_consist_of() -> None:
    """Bools reduce as bytes (or is MAX, and is MIN); sums of complex numbers reduce their parts."""
    expected = {"SUM": 2, "MAX": 2, "PRODUCT": 3, "MIN": 3}
    for name, code in expected.items():
        assert reduction_code(torch.bool, ReduceOperation[name], NEW) == (1, code, 1)
    assert reduction_code(torch.complex64, ReduceOperation.SUM, NEW) == (7, 0, 2)
    assert reduction_code(torch.complex128, ReduceOperation.MEAN, NEW) == (8, 4, 2)
    for dtype, op in ((torch.complex64, ReduceOperation.PRODUCT), (torch.int16, ReduceOperation.SUM)):
        with pytest.raises(CapabilityError):
            reduction_code(dtype, op, NEW)
