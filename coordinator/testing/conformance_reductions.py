"""Conformance of the reductions: every operation, dtype, dimension and layout against the reference."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

from coordinator.testing.conformance import Checker
from coordinator.testing.conformance_inputs import LAYOUTS, Case, large_shape
from device_comm.base import SUM
from device_comm.reduction import ReduceOperation, check_reducible, reduce_operation
from shm_broadcast.errors import UsageError

SHAPES = ((), (0,), (1,), (37,), (3, 5), (4, 1, 6), (2, 0, 3))


def operations(dtype: torch.dtype) -> list[ReduceOperation]:
    """Return the operations that are defined for `dtype`."""
    defined = []
    for op in ReduceOperation:
        with contextlib.suppress(UsageError):
            check_reducible(dtype, op)
            defined.append(op)
    return defined


def summable(check: Checker) -> list[torch.dtype]:
    """Return the dtypes under test that can be summed."""
    return [dtype for dtype in check.dtypes if SUM in operations(dtype)]


def first_dtype(check: Checker) -> torch.dtype:
    """Return the first dtype under test that can be summed, else float32."""
    return next(iter(summable(check)), torch.float32)


def uneven_sizes(world_size: int) -> list[tuple[int, ...]]:
    """Return split sizes of a dimension, one per rank: uneven, with zeros, all to one rank, nothing."""
    return [
        tuple(rank % 3 + 1 for rank in range(world_size)),
        tuple(0 if rank % 2 else rank + 2 for rank in range(world_size)),
        (*(0 for _ in range(world_size - 1)), 5),
        (0,) * world_size,
    ]


def part_of(whole: torch.Tensor, dim: int, sizes: tuple[int, ...], rank: int) -> torch.Tensor:
    """Return rank `rank`'s part of a tensor that is split along `dim`."""
    return whole.narrow(dim, sum(sizes[:rank]), sizes[rank])


# ------------------------------------------------------------------ all_reduce


def check_all_reduce(check: Checker) -> None:
    """Check all_reduce with every operation and dtype, every shape and layout, small and large."""
    for dtype in check.dtypes:
        for op in operations(dtype):
            _all_reduce(check, Case((5, 7), dtype, op=op))
    for dtype in summable(check):
        _all_reduce(check, Case(large_shape(dtype), dtype))
        _all_reduce(check, Case((5, 7), dtype, "conjugated"))
    dtype = first_dtype(check)
    for shape in SHAPES:
        for layout in LAYOUTS:
            _all_reduce(check, Case(shape, dtype, layout))
    for op in operations(dtype):
        _all_reduce(check, Case(large_shape(dtype), dtype, "strided", op))
    for name in ("max", "SUM"):
        op = reduce_operation(name)
        if op in operations(dtype):
            _all_reduce(check, Case((9,), dtype, op=op), name)


def _all_reduce(check: Checker, case: Case, name: str | None = None) -> None:
    """Check one all_reduce, to which the operation is passed by `name` if that is given."""
    op: Any = name or case.op
    check.compute(
        f"all_reduce({name or case.op.name})",
        case,
        lambda it: check.communicator.all_reduce(it, op),
        *check.reduced(case),
    )


def check_all_reduce_in_place(check: Checker) -> None:
    """Check that all_reduce_ returns the tensor itself and writes nothing beside it."""
    cases = [Case(shape, dtype) for dtype in summable(check) for shape in ((5, 7), large_shape(dtype))]
    cases += [Case(shape, first_dtype(check)) for shape in SHAPES]
    for each in cases:
        for layout in ("contiguous", "strided", "conjugated"):
            case = dataclasses.replace(each, layout=layout)
            check.fill("all_reduce_(SUM)", case, check.communicator.all_reduce_, *check.reduced(case))


def check_autograd(check: Checker) -> None:
    """Check inputs that require grad, and tensors made in inference mode."""
    dtype = next((each for each in summable(check) if each.is_floating_point), None)
    if dtype is None:
        return
    communicator, shape = check.communicator, (4, 3)
    expected, slack = check.reduced(Case(shape, dtype))
    own = check.inputs.own(shape, dtype)
    with torch.inference_mode():
        made_in_inference_mode = own.clone()
    for kind, target in (
        ("a leaf that requires grad", own.clone().requires_grad_()),
        ("a tensor made in inference mode", made_in_inference_mode),
    ):
        check.begin(f"all_reduce(SUM) of {kind}")
        result = communicator.all_reduce(target)
        if check.world_size > 1 and result.requires_grad:
            check.fail("no gradient", "the result requires grad")
        check.check_values(result, expected, slack)
        check.begin(f"broadcast(src 0) into {kind}")
        communicator.broadcast(target, 0)
        check.check_values(target, check.inputs.of(0, shape, dtype))
        check.begin(f"all_reduce_(SUM) of {kind}")
        target.detach().copy_(own)
        communicator.all_reduce_(target)
        check.check_values(target, expected, slack)
    with torch.inference_mode():
        check.begin("all_reduce(SUM) in inference mode")
        check.check_values(communicator.all_reduce(own), expected, slack)


# ------------------------------------------------------------------ reduce_scatter


def own_part(check: Checker, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return this rank's part of a reduction, and its tolerance; without sizes all parts are equal."""

    def part(whole: torch.Tensor) -> torch.Tensor:
        # A tensor without dimensions counts as one of shape [1].
        whole = whole.reshape(case.shape or 1)
        even = (whole.shape[case.dim] // check.world_size,) * check.world_size
        return part_of(whole, case.dim, even if case.sizes is None else case.sizes, check.rank)

    expected, slack = check.reduced(case)
    return part(expected), None if slack is None else part(slack)


def check_reduce_scatter(check: Checker) -> None:
    """Check reduce_scatter along every dimension with every operation; rank i gets the i-th part."""
    size, dtype = check.world_size, first_dtype(check)
    for dim in range(-3, 3):
        shape = [2, 3, 4]
        shape[dim] *= size
        for layout in LAYOUTS:
            _reduce_scatter(check, Case(tuple(shape), dtype, layout, dim=dim))
    for each in check.dtypes:
        for op in operations(each):
            _reduce_scatter(check, Case((5, 7 * size), each, op=op, dim=-1, passes_dim=False))
    for case_shape, dim in (((size, 0), 0), ((0,), 0), ((0, 3), 0), ((size,), -1), ((11 * size, 1789), 0)):
        _reduce_scatter(check, Case(case_shape, dtype, dim=dim))


def _reduce_scatter(check: Checker, case: Case) -> None:
    named: dict[str, Any] = {"dim": case.dim} if case.passes_dim else {}
    check.compute(
        f"reduce_scatter({case.op.name}, dim {case.dim})",
        case,
        lambda it: check.communicator.reduce_scatter(it, op=case.op, **named),
        *own_part(check, case),
    )


def check_reduce_scatterv(check: Checker) -> None:
    """Check reduce_scatterv with uneven sizes, including zeros, along every dimension; None splits evenly."""
    dtype = first_dtype(check)
    for sizes in uneven_sizes(check.world_size):
        for dim in (0, 1, -1):
            shape = (sum(sizes), 3) if dim == 0 else (4, sum(sizes))
            for layout in ("contiguous", "strided", "transposed"):
                _reduce_scatterv(check, Case(shape, dtype, layout, dim=dim, sizes=sizes))
    sizes = uneven_sizes(check.world_size)[0]
    for each in summable(check):
        _reduce_scatterv(check, Case((sum(sizes), 3), each, sizes=sizes))
    _reduce_scatterv(check, Case((3 * check.world_size, 2), dtype))
    _reduce_scatterv(check, Case((), dtype, sizes=(*(0 for _ in range(check.world_size - 1)), 1)))


def _reduce_scatterv(check: Checker, case: Case) -> None:
    check.compute(
        f"reduce_scatterv(SUM, dim {case.dim}, sizes {case.sizes})",
        case,
        lambda it: check.communicator.reduce_scatterv(it, case.dim, case.sizes),
        *own_part(check, case),
    )
