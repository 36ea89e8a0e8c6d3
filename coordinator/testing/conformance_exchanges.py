"""Conformance of the calls in which ranks have different roles: reduce, scatter, all-to-all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from coordinator.testing.conformance import Checker
from coordinator.testing.conformance_inputs import LAYOUTS, Case, large_shape, repeated
from coordinator.testing.conformance_reductions import (
    SHAPES,
    first_dtype,
    operations,
    part_of,
    summable,
    uneven_sizes,
)

# ------------------------------------------------------------------ reduce


def check_reduce(check: Checker) -> None:
    """Check reduce to every rank with every operation and dtype: all_reduce's bits there, None elsewhere."""
    for number, dtype in enumerate(check.dtypes):
        for op in operations(dtype):
            _reduce(check, Case((5, 7), dtype, op=op, root=number % check.world_size))
    for dtype in summable(check):
        _reduce(check, Case(large_shape(dtype), dtype, root=check.world_size - 1))
    dtype = first_dtype(check)
    for dst in range(check.world_size):
        for shape in SHAPES:
            _reduce(check, Case(shape, dtype, root=dst))
        for layout in LAYOUTS:
            _reduce(check, Case((3, 5), dtype, layout, root=dst))
            _reduce(check, Case(large_shape(dtype), dtype, layout, root=dst))


def _reduce(check: Checker, case: Case) -> None:
    expected, slack = check.reduced(case)
    check.compute(
        f"reduce({case.op.name}, dst {case.root})",
        case,
        lambda it: check.communicator.reduce(it, case.root, case.op),
        expected if check.rank == case.root else None,
        slack,
    )


# ------------------------------------------------------------------ scatter


def check_scatter(check: Checker) -> None:
    """Check scatter from every rank, along every dimension, even and uneven, from and into any layout."""
    first = check.dtypes[0]
    for src in range(check.world_size):
        for sizes in (None, *uneven_sizes(check.world_size)):
            for dim in (0, 1, -1):
                for layout in LAYOUTS:
                    _scatter(check, Case((4, 3), first, layout, dim=dim, sizes=sizes, root=src))
        for shape, dim in (((), 0), ((0, 2), 0), ((2, 0), 0), ((2, 3, 4), -2)):
            _scatter(check, Case(shape, first, dim=dim, root=src))
    for dtype in check.dtypes:
        _scatter(check, Case((4, 3), dtype, "conjugated", sizes=uneven_sizes(check.world_size)[0]))
        _scatter(check, Case(large_shape(dtype), dtype, "strided", root=check.world_size - 1))


def _scatter(check: Checker, case: Case) -> None:
    """Check one scatter. `case` has the shape of the outputs, except for `sizes`, and the layout of all tensors."""
    shape = list(case.shape) or [1]
    counts = (shape[case.dim],) * check.world_size if case.sizes is None else case.sizes
    shape[case.dim] = sum(counts)
    expected = part_of(check.inputs.of(case.root, shape, case.dtype), case.dim, counts, check.rank)
    expected = expected if case.shape else expected.reshape(())
    source = LAYOUTS[case.layout](check.inputs.own(shape, case.dtype))
    given = source if check.rank == case.root else None
    if check.alike and given is None:
        # In a fake group, a scatter from another rank leaves the output as it is.
        expected = torch.zeros_like(expected)
    check.fill(
        f"scatter(src {case.root}, dim {case.dim}, sizes {case.sizes})",
        dataclasses.replace(case, shape=tuple(expected.shape)),
        lambda output: check.communicator.scatter(output, given, case.root, case.dim, case.sizes),
        expected,
        source=source,
    )


# ------------------------------------------------------------------ all_to_all


def check_all_to_all(check: Checker) -> None:
    """Check all_to_all with every dtype, dimension and layout; even, and with its own size per pair of ranks."""
    size, first = check.world_size, check.dtypes[0]
    for dim in range(-3, 3):
        shape = [2, 3, 4]
        shape[dim] *= size
        for layout in LAYOUTS:
            _all_to_all(check, Case(tuple(shape), first, layout, dim=dim))
    for dtype in check.dtypes:
        _all_to_all(check, Case((2 * size, 3), dtype, passes_dim=False))
        _all_to_all(check, Case((large_shape(dtype)[0] * size,), dtype))
    for even, dim in (((0,), 0), ((size, 0), 0), ((0, 3), 0), ((size,), -1)):
        _all_to_all(check, Case(even, first, dim=dim))
    for table in _tables(size):
        for dim in (0, 1, -1):
            for layout in ("contiguous", "strided", "transposed", "conjugated"):
                _all_to_all(check, Case((4, 3), first, layout, dim=dim), table)
        for dtype in check.dtypes:
            _all_to_all(check, Case((4, 3), dtype), table)
    # A tensor without dimensions counts as one of shape [1].
    to_the_last = (*(0 for _ in range(size - 1)), 1)
    _all_to_all(check, Case((), first), [to_the_last] * size)


def _tables(size: int) -> list[list[tuple[int, ...]]]:
    """Return tables of what each rank sends to each: all different, with zeros, all to one, one large, nothing."""
    ranks = range(size)
    return [
        [tuple((2 * a + 3 * b) % 5 + 1 for b in ranks) for a in ranks],
        [tuple((a + b) % 2 * (a + 1) for b in ranks) for a in ranks],
        [tuple(3 if b == size - 1 else 0 for b in ranks) for _ in ranks],
        [tuple(30_000 if (a, b) == (0, size - 1) else b for b in ranks) for a in ranks],
        [(0,) * size for _ in ranks],
    ]


def _all_to_all(check: Checker, case: Case, table: Sequence[tuple[int, ...]] | None = None) -> None:
    """Check one all_to_all. `table` says how much each rank sends to each; without it all parts are equal."""
    rank, size = check.rank, check.world_size
    shape = list(case.shape) or [1]
    rows = table or [(shape[case.dim] // size,) * size] * size
    received = [row[rank] for row in rows]
    arguments: tuple[Any, ...] = case.dims if table is None else (case.dim, rows[rank], received)
    parts = []
    for sender, row in enumerate(rows):
        shape[case.dim] = sum(row)
        parts.append(part_of(check.inputs.of(sender, shape, case.dtype), case.dim, row, rank))
    if check.alike:
        # In a fake group each rank sends what this rank sends to itself.
        parts = [repeated(parts[rank], case.dim, each) for each in received]
    shape[case.dim] = sum(rows[rank])
    check.compute(
        f"all_to_all(dim {case.dim}, sizes {table})",
        dataclasses.replace(case, shape=tuple(shape) if case.shape else ()),
        lambda it: check.communicator.all_to_all(it, *arguments),
        torch.cat(parts, case.dim),
    )
