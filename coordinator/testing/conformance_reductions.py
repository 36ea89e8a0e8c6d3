"""Conformance of the reductions: every operation, dtype, dimension and layout against the reference."""

from __future__ import annotations

from typing import Any

import torch

from coordinator.testing.conformance import Checker
from coordinator.testing.conformance_inputs import LAYOUTS, large_shape, raw, reduction
from device_comm.base import SUM
from device_comm.reduction import ReduceOperation, check_reducible
from shm_broadcast.errors import UsageError

SHAPES = ((), (0,), (1,), (37,), (3, 5), (4, 1, 6), (2, 0, 3))


def has_meaning(dtype: torch.dtype, op: ReduceOperation) -> bool:
    """Return whether `op` is defined for `dtype`."""
    try:
        check_reducible(dtype, op)
    except UsageError:
        return False
    return True


def first_dtype(check: Checker, op: ReduceOperation = SUM) -> torch.dtype:
    """Return the first dtype under test that `op` can reduce, else float32."""
    return next((dtype for dtype in check.dtypes if has_meaning(dtype, op)), torch.float32)


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
        for op in ReduceOperation:
            if has_meaning(dtype, op):
                _all_reduce(check, (5, 7), dtype, op)
        if has_meaning(dtype, SUM):
            _all_reduce(check, large_shape(dtype), dtype, SUM)
        if dtype.is_complex:
            _all_reduce(check, (5, 7), dtype, SUM, "conjugated")
    dtype = first_dtype(check)
    for shape in SHAPES:
        _all_reduce(check, shape, dtype, SUM)
        for layout in LAYOUTS:
            _all_reduce(check, shape, dtype, SUM, layout)
    for op in ReduceOperation:
        if has_meaning(dtype, op):
            _all_reduce(check, large_shape(dtype), dtype, op, "strided")
    names: dict[Any, ReduceOperation] = {"max": ReduceOperation.MAX, "SUM": SUM}
    for name, op in names.items():
        if not has_meaning(dtype, op):
            continue
        expected, slack = reduction(check.inputs.all((9,), dtype), op, exact=check.exact)
        own = check.inputs.own((9,), dtype)
        check.compute(
            f"all_reduce({name!r})",
            own,
            lambda it, name=name: check.communicator.all_reduce(it, name),  # type: ignore[misc]
            expected,
            slack,
        )


def _all_reduce(
    check: Checker, shape: tuple[int, ...], dtype: torch.dtype, op: ReduceOperation, layout: str = ""
) -> None:
    expected, slack = reduction(check.inputs.all(shape, dtype), op, exact=check.exact)
    own = check.inputs.own(shape, dtype)
    check.compute(
        f"all_reduce({op.name}) of {dtype} {shape} {layout}".rstrip(),
        LAYOUTS[layout](own) if layout else own,
        lambda it: check.communicator.all_reduce(it, op),
        expected,
        slack,
        same_everywhere=True,
    )


def check_all_reduce_in_place(check: Checker) -> None:
    """Check that all_reduce_ returns the tensor itself and writes nothing beside it."""
    for dtype in check.dtypes:
        if has_meaning(dtype, SUM):
            _all_reduce_in_place(check, (5, 7), dtype)
            _all_reduce_in_place(check, large_shape(dtype), dtype)
    for shape in SHAPES:
        _all_reduce_in_place(check, shape, first_dtype(check))


def _all_reduce_in_place(check: Checker, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    expected, slack = reduction(check.inputs.all(shape, dtype), SUM, exact=check.exact)
    for layout in ("contiguous", "strided", *(["conjugated"] if dtype.is_complex else [])):
        check.begin(f"all_reduce_(SUM) of {dtype} {shape} {layout}")
        own = check.inputs.own(shape, dtype)
        buffer = own.new_zeros((*own.shape, 2))
        target = (
            buffer[..., 1]
            if layout == "strided"
            else LAYOUTS[layout](own)
            if layout == "conjugated"
            else own.clone()
        )
        target.copy_(own)
        result = check.communicator.all_reduce_(target, SUM)
        if result is not target:
            check.fail("returns its argument", "another tensor was returned")
        if check.world_size > 1:
            check.check_values(target, expected, slack)
        elif not torch.equal(raw(target), raw(own)):
            check.fail("value", "in a group of one the tensor must stay as it is")
        if raw(buffer[..., 0]).any():
            check.fail("nothing else written", "memory beside the tensor was changed")


def check_autograd(check: Checker) -> None:
    """Check inputs that require grad, and tensors made in inference mode."""
    dtype = next((each for each in check.dtypes if each.is_floating_point and has_meaning(each, SUM)), None)
    if dtype is None:
        return
    communicator, shape = check.communicator, (4, 3)
    expected, slack = reduction(check.inputs.all(shape, dtype), SUM, exact=check.exact)
    if check.world_size == 1:
        expected, slack = check.inputs.of(0, shape, dtype), None
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


def check_reduce_scatter(check: Checker) -> None:
    """Check reduce_scatter along every dimension with every operation; rank i gets the i-th part."""
    size = check.world_size
    base = (2, 3, 4)
    for dim in range(-3, 3):
        shape = tuple(each * size if at == dim % 3 else each for at, each in enumerate(base))
        for layout in ("", *LAYOUTS):
            _reduce_scatter(check, shape, first_dtype(check), SUM, dim, layout)
    for dtype in check.dtypes:
        for op in ReduceOperation:
            if has_meaning(dtype, op):
                _reduce_scatter(check, (5, 7 * size), dtype, op, None)
    dtype = first_dtype(check)
    for shape, dim in (((size, 0), 0), ((0,), 0), ((0, 3), 0), ((size,), -1), ((11 * size, 1789), 0)):
        _reduce_scatter(check, shape, dtype, SUM, dim)


def _reduce_scatter(
    check: Checker,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    op: ReduceOperation,
    dim: int | None,
    layout: str = "",
) -> None:
    whole, slack = reduction(check.inputs.all(shape, dtype), op, exact=check.exact)
    at = -1 if dim is None else dim
    sizes = (shape[at] // check.world_size,) * check.world_size
    own = check.inputs.own(shape, dtype)
    arguments: dict[str, Any] = {"op": op} if dim is None else {"op": op, "dim": dim}
    check.compute(
        f"reduce_scatter({op.name}, dim {at}) of {dtype} {shape} {layout}".rstrip(),
        LAYOUTS[layout](own) if layout else own,
        lambda it: check.communicator.reduce_scatter(it, **arguments),
        part_of(whole, at, sizes, check.rank),
        None if slack is None else part_of(slack, at, sizes, check.rank),
    )


def check_reduce_scatterv(check: Checker) -> None:
    """Check reduce_scatterv with uneven sizes, including zeros, along every dimension; None splits evenly."""
    dtype = first_dtype(check)
    for sizes in uneven_sizes(check.world_size):
        for dim in (0, 1, -1):
            shape = (sum(sizes), 3) if dim == 0 else (4, sum(sizes))
            for layout in ("", "strided", "transposed"):
                _reduce_scatterv(check, shape, dim, sizes, dtype, layout)
    for each in check.dtypes:
        if has_meaning(each, SUM):
            sizes = uneven_sizes(check.world_size)[0]
            _reduce_scatterv(check, (sum(sizes), 3), 0, sizes, each)
    _reduce_scatterv(check, (3 * check.world_size, 2), 0, None, dtype)
    # A tensor without dimensions counts as one of shape [1].
    sizes = (*(0 for _ in range(check.world_size - 1)), 1)
    _reduce_scatterv(check, (), 0, sizes, dtype)


def _reduce_scatterv(
    check: Checker,
    shape: tuple[int, ...],
    dim: int,
    sizes: tuple[int, ...] | None,
    dtype: torch.dtype,
    layout: str = "",
) -> None:
    whole, slack = reduction(check.inputs.all(shape, dtype), SUM, exact=check.exact)
    whole = whole.reshape(1) if not shape else whole
    slack = slack.reshape(whole.shape) if slack is not None else None
    counts = (whole.shape[dim] // check.world_size,) * check.world_size if sizes is None else sizes
    own = check.inputs.own(shape, dtype)
    check.compute(
        f"reduce_scatterv(SUM, dim {dim}, sizes {sizes}) of {dtype} {shape} {layout}".rstrip(),
        LAYOUTS[layout](own) if layout else own,
        lambda it: check.communicator.reduce_scatterv(it, dim, sizes),
        part_of(whole, dim, counts, check.rank),
        None if slack is None else part_of(slack, dim, counts, check.rank),
    )


def check_reduce_scatterv_into_output(check: Checker) -> None:
    """Check that the output, contiguous or not, is filled and returned, and that nothing beside it is written."""
    dtype = first_dtype(check)
    even = (2,) * check.world_size
    for sizes in (None, even, *uneven_sizes(check.world_size)):
        counts = even if sizes is None else sizes
        shape = (sum(counts), 3)
        whole, slack = reduction(check.inputs.all(shape, dtype), SUM, exact=check.exact)
        expected = part_of(whole, 0, counts, check.rank)
        own_slack = None if slack is None else part_of(slack, 0, counts, check.rank)
        for layout in ("contiguous", "strided"):
            check.begin(f"reduce_scatterv_into_output(SUM, sizes {sizes}) of {dtype} {shape} into {layout}")
            own = check.inputs.own(shape, dtype)
            before = raw(own)
            buffer = own.new_zeros((*expected.shape, 2))
            output = own.new_empty(expected.shape) if layout == "contiguous" else buffer[..., 1]
            result = check.communicator.reduce_scatterv_into_output(own, output, 0, sizes)
            if result is not output:
                check.fail("returns its argument", "another tensor than the output was returned")
            check.check_values(output, expected, own_slack)
            if raw(buffer[..., 0]).any():
                check.fail("nothing else written", "memory beside the output was changed")
            if not torch.equal(raw(own), before):
                check.fail("input unchanged", "the call changed its input")
