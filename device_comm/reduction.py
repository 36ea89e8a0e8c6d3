"""Reductions: which exist, what they mean for each dtype, and their result in rank order.

The result of a reduction here depends on the inputs and the rank order alone: elements are combined in
ascending rank order, floating types of 16 bits or fewer in float32 and rounded once at the end. So every
rank gets the same bits, whatever the algorithm and the size, except where NCCL sums. This module is the reference.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from shm_broadcast.errors import UsageError


class ReduceOperation(enum.Enum):
    """How elements of several ranks become one.

    On bool tensors SUM and MAX are a logical or, PRODUCT and MIN a logical and. MEAN is the sum divided
    by the number of ranks, for floating and complex types. Integers wrap around. For floating types MIN and
    MAX take the next rank's element where it is smaller (larger) or NaN. So the result is NaN if any rank has
    NaN, and of +0 and -0 the lowest rank's.
    """

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


_FP8: Final = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)
_NARROW_FLOATS: Final = frozenset({torch.float16, torch.bfloat16}) | _FP8
# torch has no arithmetic for these; int64 holds every value and wraps to the same low bits.
_WIDENED_INTEGERS: Final = frozenset({torch.uint16, torch.uint32})
_PLAIN: Final = frozenset(
    {torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)


# torch's own minimum, maximum and complex product give different bits in the vectorised body of their loop and
# in its tail (for +0 and -0, for NaN, in the last bit), so an element's result would depend on
# where it stands, and a rank that reduces a part of a tensor would differ from one that reduces all of it.


def _minimum_(into: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not into.is_floating_point():
        return torch.minimum(into, other, out=into)
    return torch.where((other < into) | other.isnan(), other, into, out=into)


def _maximum_(into: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not into.is_floating_point():
        return torch.maximum(into, other, out=into)
    return torch.where((other > into) | other.isnan(), other, into, out=into)


def _multiply_(into: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not into.is_complex():
        return into.mul_(other)
    a, b, c, d = into.real, into.imag, other.real, other.imag
    real, imaginary = a * c - b * d, a * d + b * c
    a.copy_(real)
    b.copy_(imaginary)
    return into


_COMBINE: Final[dict[ReduceOperation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    ReduceOperation.SUM: torch.Tensor.add_,
    ReduceOperation.MEAN: torch.Tensor.add_,
    ReduceOperation.PRODUCT: _multiply_,
    ReduceOperation.MIN: _minimum_,
    ReduceOperation.MAX: _maximum_,
}


def reduce_operation(op: object) -> ReduceOperation:
    """Return the operation that `op` names: a member, its value, or a `torch.distributed.ReduceOp`.

    Raises:
        UsageError: There is no such operation here.
    """
    if isinstance(op, ReduceOperation):
        return op
    if isinstance(op, str):
        for member in ReduceOperation:
            if op.lower() in (member.value, member.name.lower()):
                return member
        if op.lower() == "avg":
            # As torch names the mean.
            return ReduceOperation.MEAN
    elif isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        for member in ReduceOperation:
            # torch's names are the same, but for the mean's.
            name = "AVG" if member is ReduceOperation.MEAN else member.name
            if op == getattr(dist.ReduceOp, name):
                return member
    names = ", ".join(member.name for member in ReduceOperation)
    raise UsageError(f"unknown reduction {op!r}; choose one of {names}")


def check_reducible(dtype: torch.dtype, op: ReduceOperation) -> None:
    """Raise unless `op` has a meaning for `dtype`.

    Raises:
        UsageError: It has none, such as MEAN of integers or MIN of complex numbers.
    """
    if dtype.is_complex and op in (ReduceOperation.MIN, ReduceOperation.MAX):
        raise UsageError(f"{op.name} has no meaning for {dtype}: complex numbers have no order")
    if op is ReduceOperation.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"MEAN has no exact meaning for {dtype}: reduce with SUM and divide, or convert")
    known = dtype in _PLAIN or dtype in _NARROW_FLOATS or dtype in _WIDENED_INTEGERS
    if not known and dtype is not torch.bool and not dtype.is_complex:
        raise UsageError(f"cannot reduce {dtype}: view the tensor as another dtype, or gather it instead")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which elements of `dtype` are combined."""
    if dtype in _NARROW_FLOATS:
        return torch.float32
    if dtype in _WIDENED_INTEGERS:
        return torch.int64
    if dtype is torch.bool:
        return torch.uint8
    if dtype is torch.complex32:
        return torch.complex64
    return dtype


def reduce_in_rank_order(parts: Sequence[torch.Tensor], op: ReduceOperation) -> torch.Tensor:
    """Combine one tensor of each rank, in the order given.

    Args:
        parts: Tensors of one shape and dtype, one per rank, in ascending rank order. They are not changed.
        op: The reduction, which must have passed `check_reducible`.

    Returns:
        A new tensor of the parts' shape and dtype.
    """
    dtype = parts[0].dtype
    wide = accumulation_dtype(dtype)
    total = parts[0].detach().to(wide, copy=True)
    if dtype is torch.bool:
        op = ReduceOperation.MAX if op in (ReduceOperation.SUM, ReduceOperation.MAX) else ReduceOperation.MIN
    combine = _COMBINE[op]
    for part in parts[1:]:
        combine(total, part.detach().to(wide))
    if op is ReduceOperation.MEAN:
        components = torch.view_as_real(total) if total.is_complex() else total
        # The divisor is a tensor on the device: for a Python number CUDA would multiply by its reciprocal.
        components.div_(components.new_full((), len(parts)))
    return total.to(dtype)
