"""Conformance of the calls that write into a tensor of the caller."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from coordinator.testing.conformance import Checker
from coordinator.testing.conformance_inputs import Case, large_shape, raw, repeated
from coordinator.testing.conformance_reductions import (
    SHAPES,
    first_dtype,
    operations,
    own_part,
    part_of,
    summable,
    uneven_sizes,
)

# An output is filled as it is if it is contiguous, also where it does not begin with its storage; else by a copy.
OUTPUTS = ("contiguous", "shifted", "strided")


def check_all_reduce_into_output(check: Checker) -> None:
    """Check that the output gets the bits of all_reduce and the input stays; also where both are one tensor."""
    dtype = first_dtype(check)
    cases = [Case(shape, dtype) for shape in SHAPES]
    cases += [Case(shape, each) for each in summable(check) for shape in ((5, 7), large_shape(each))]
    cases += [Case((5, 7), dtype, op=op) for op in operations(dtype)]
    for each in cases:
        own, (expected, slack) = check.inputs.own(each.shape, each.dtype), check.reduced(each)
        for layout in OUTPUTS:
            case = dataclasses.replace(each, layout=layout)
            call = f"all_reduce_into_output({case.op.name})"
            check.fill(call, case, _all_reduce(check, case, own), expected, slack, source=own)
    for layout in OUTPUTS:
        case = Case((3, 5), dtype, layout)
        in_place = "all_reduce_into_output(SUM, the input)"
        check.fill(in_place, case, _all_reduce(check, case), *check.reduced(case))


def _all_reduce(check: Checker, case: Case, own: torch.Tensor | None = None) -> Any:
    """Return a call that fills its argument with the sum of `own`; without `own` with that of the argument itself."""
    return lambda output: check.communicator.all_reduce_into_output(
        output if own is None else own, output, case.op
    )


def check_reduce_scatterv_into_output(check: Checker) -> None:
    """Check every dimension, even and uneven; the output may be this rank's own part of the input."""
    even, dtype = (2,) * check.world_size, first_dtype(check)
    for sizes in (None, even, *uneven_sizes(check.world_size)):
        total = sum(even if sizes is None else sizes)
        for dim in (0, 1):
            for layout in OUTPUTS:
                shape = (total, 3) if dim == 0 else (4, total)
                _reduce_scatterv(check, Case(shape, dtype, layout, dim=dim, sizes=sizes))
        _reduce_scatter_in_place(check, Case((total, 3), dtype, sizes=sizes))
    for each in summable(check):
        _reduce_scatterv(check, Case((large_shape(each)[0] * check.world_size,), each))


def _reduce_scatterv(check: Checker, case: Case) -> None:
    """Check one call; `case` has the shape of the input and the layout of the output."""
    own = check.inputs.own(case.shape, case.dtype)
    expected, slack = own_part(check, case)
    check.fill(
        f"reduce_scatterv_into_output(SUM, dim {case.dim}, sizes {case.sizes})",
        dataclasses.replace(case, shape=tuple(expected.shape)),
        lambda output: check.communicator.reduce_scatterv_into_output(own, output, case.dim, case.sizes),
        expected,
        slack,
        source=own,
    )


def _reduce_scatter_in_place(check: Checker, case: Case) -> None:
    check.begin(f"reduce_scatterv_into_output(SUM, sizes {case.sizes}, the input's own part) of {case}")
    own = check.inputs.own(case.shape, case.dtype)
    even = (case.shape[0] // check.world_size,) * check.world_size
    sizes = even if case.sizes is None else case.sizes
    before, output = own.clone(), part_of(own, 0, sizes, check.rank)
    check.communicator.reduce_scatterv_into_output(own, output, 0, case.sizes)
    check.check_values(output, *own_part(check, case))
    part_of(before, 0, sizes, check.rank).copy_(output)
    check.check_unchanged(own, raw(before))


def check_all_gatherv_into_output(check: Checker) -> None:
    """Check every dtype and dimension, even and uneven; the input may be this rank's own part of the output."""
    first = check.dtypes[0]
    for sizes in (None, *uneven_sizes(check.world_size)):
        for dim in (0, 1, -1):
            for layout in OUTPUTS:
                _all_gatherv(check, Case((4, 3), first, layout, dim=dim, sizes=sizes))
        _all_gatherv(check, Case((4, 3), first, sizes=sizes), is_in_place=True)
    for dtype in check.dtypes:
        _all_gatherv(check, Case((3, 5), dtype))
        _all_gatherv(check, Case(large_shape(dtype), dtype))
        _all_gatherv(check, Case(large_shape(dtype), dtype), is_in_place=True)


def _all_gatherv(check: Checker, case: Case, *, is_in_place: bool = False) -> None:
    """Check one call; `case` has the shape of the ranks' inputs, except for `sizes`, and the layout of the output."""
    dim = case.dim % len(case.shape)
    counts = (case.shape[dim],) * check.world_size if case.sizes is None else case.sizes
    parts = check.inputs.uneven(case.shape, dim, counts, case.dtype)
    expected, own = torch.cat(parts, dim), parts[check.rank].to(check.communicator.device)
    given = "the output's own part" if is_in_place else "an input"

    def gather(output: torch.Tensor) -> torch.Tensor:
        source = own
        if is_in_place:
            source = part_of(output, dim, counts, check.rank)
            source.copy_(own)
        return check.communicator.all_gatherv_into_output(source, output, case.dim, case.sizes)

    check.fill(
        f"all_gatherv_into_output({given}, dim {case.dim}, sizes {case.sizes})",
        dataclasses.replace(case, shape=tuple(expected.shape)),
        gather,
        expected,
        source=own,
    )


def check_all_to_all_into_output(check: Checker) -> None:
    """Check every dtype and dimension, even, and with its own size for each pair of ranks."""
    size, first = check.world_size, check.dtypes[0]
    ranks = range(size)
    uneven = [tuple((2 * a + 3 * b) % 4 for b in ranks) for a in ranks]
    for table in ([(2,) * size] * size, uneven):
        for dim in (0, 1, -1):
            for layout in OUTPUTS:
                _all_to_all(check, Case((4, 3), first, layout, dim=dim), table)
        for dtype in check.dtypes:
            _all_to_all(check, Case((4, 3), dtype), table)


def _all_to_all(check: Checker, case: Case, table: list[tuple[int, ...]]) -> None:
    rank, dim, shape = check.rank, case.dim, list(case.shape)
    received, parts = tuple(row[rank] for row in table), []
    for sender, row in enumerate(table):
        shape[dim] = sum(row)
        parts.append(part_of(check.inputs.of(sender, shape, case.dtype), dim, row, rank))
    if check.alike:
        # In a fake group each rank sends what this rank sends to itself.
        parts = [repeated(parts[rank], dim, each) for each in received]
    shape[dim] = sum(table[rank])
    own, expected = check.inputs.own(shape, case.dtype), torch.cat(parts, dim)
    check.fill(
        f"all_to_all_into_output(dim {dim}, sizes {table})",
        dataclasses.replace(case, shape=tuple(expected.shape)),
        lambda output: check.communicator.all_to_all_into_output(own, output, dim, table[rank], received),
        expected,
        source=own,
    )
