"""Conformance of the calls in which ranks have different roles: reduce, scatter, all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from coordinator.testing.conformance import Checker
from coordinator.testing.conformance_inputs import LAYOUTS, large_shape, raw, reduction
from coordinator.testing.conformance_reductions import SHAPES, first_dtype, has_meaning, part_of, uneven_sizes
from device_comm.base import SUM
from device_comm.reduction import ReduceOperation

# ------------------------------------------------------------------ reduce


def check_reduce(check: Checker) -> None:
    """Check reduce to every rank with every operation and dtype: all_reduce's bits there, None elsewhere."""
    for number, dtype in enumerate(check.dtypes):
        for op in ReduceOperation:
            if has_meaning(dtype, op):
                _reduce(check, (5, 7), dtype, op, number % check.world_size)
        if has_meaning(dtype, SUM):
            _reduce(check, large_shape(dtype), dtype, SUM, check.world_size - 1)
    dtype = first_dtype(check)
    for dst in range(check.world_size):
        for shape in SHAPES:
            _reduce(check, shape, dtype, SUM, dst)
        for layout in LAYOUTS:
            _reduce(check, (3, 5), dtype, SUM, dst, layout)
            _reduce(check, large_shape(dtype), dtype, SUM, dst, layout)


def _reduce(
    check: Checker,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    op: ReduceOperation,
    dst: int,
    layout: str = "",
) -> None:
    expected, slack = reduction(check.inputs.all(shape, dtype), op, exact=check.exact)
    own = check.inputs.own(shape, dtype)
    check.compute(
        f"reduce({op.name}, dst {dst}) of {dtype} {shape} {layout}".rstrip(),
        LAYOUTS[layout](own) if layout else own,
        lambda it: check.communicator.reduce(it, dst, op),
        expected if check.rank == dst else None,
        slack,
    )


# ------------------------------------------------------------------ scatter


def check_scatter(check: Checker) -> None:
    """Check scatter from every rank, along every dimension, even and uneven, from and into any layout."""
    for src in range(check.world_size):
        for sizes in (None, *uneven_sizes(check.world_size)):
            for dim in (0, 1, -1):
                for layout in ("contiguous", *LAYOUTS):
                    _scatter(check, (4, 3), dim, sizes, check.dtypes[0], src, layout)
        for shape, dim in (((), 0), ((0, 2), 0), ((2, 0), 0), ((2, 3, 4), -2)):
            _scatter(check, shape, dim, None, check.dtypes[0], src)
    for dtype in check.dtypes:
        _scatter(check, (4, 3), 0, uneven_sizes(check.world_size)[0], dtype, 0, "conjugated")
        _scatter(check, large_shape(dtype), 0, None, dtype, check.world_size - 1, "strided")


def _scatter(
    check: Checker,
    shape: tuple[int, ...],
    dim: int,
    sizes: tuple[int, ...] | None,
    dtype: torch.dtype,
    src: int,
    layout: str = "contiguous",
) -> None:
    """Check one scatter. `shape` is that of the outputs, except for `sizes` in dimension `dim`."""
    check.begin(f"scatter(src {src}, dim {dim}, sizes {sizes}) of {dtype} {shape} {layout}")
    whole_shape = list(shape) or [1]
    counts = (whole_shape[dim],) * check.world_size if sizes is None else sizes
    whole_shape[dim] = sum(counts)
    own_shape = list(shape) or [1]
    own_shape[dim] = counts[check.rank]
    expected = part_of(check.inputs.of(src, whole_shape, dtype), dim, counts, check.rank)
    expected = expected.reshape(own_shape if shape else ())
    source = check.inputs.own(whole_shape, dtype)
    source = source if layout == "contiguous" else LAYOUTS[layout](source)
    before = raw(source)
    output = torch.zeros_like(expected, device=check.communicator.device)
    beside = output.new_zeros((*output.shape, 2))
    if layout == "strided":
        output = beside[..., 1]
    elif layout != "contiguous":
        output = LAYOUTS[layout](output)
    if check.alike and check.rank != src:
        # In a fake group, a scatter from another rank leaves the output as it is.
        output.copy_(expected)
    result = check.communicator.scatter(output, source if check.rank == src else None, src, dim, sizes)
    if result is not output:
        check.fail("returns its argument", "another tensor than the output was returned")
    check.check_values(output, expected)
    if raw(beside[..., 0]).any():
        check.fail("nothing else written", "memory beside the output was changed")
    if not torch.equal(raw(source), before):
        check.fail("input unchanged", "the call changed its input")


# ------------------------------------------------------------------ all_to_all


def check_all_to_all(check: Checker) -> None:
    """Check all_to_all with every dtype, dimension and layout; even, and with its own size per pair of ranks."""
    size = check.world_size
    for dim in range(-3, 3):
        base = [2, 3, 4]
        base[dim] *= size
        for layout in ("", *LAYOUTS):
            _all_to_all(check, tuple(base), dim, None, check.dtypes[0], layout)
    for dtype in check.dtypes:
        _all_to_all(check, (2 * size, 3), None, None, dtype)
        _all_to_all(check, (large_shape(dtype)[0] * size,), 0, None, dtype)
    for shape, dim in (((0,), 0), ((size, 0), 0), ((0, 3), 0), ((size,), -1)):
        _all_to_all(check, shape, dim, None, check.dtypes[0])
    for table in _tables(size):
        for dim in (0, 1, -1):
            for layout in ("", "strided", "transposed", "conjugated"):
                _all_to_all(check, (4, 3), dim, table, check.dtypes[0], layout)
        for dtype in check.dtypes:
            _all_to_all(check, (4, 3), 0, table, dtype)
    # A tensor without dimensions counts as one of shape [1].
    last = size - 1
    _all_to_all(
        check, (), 0, [tuple(int(to == last) for to in range(size)) for _ in range(size)], check.dtypes[0]
    )


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


def _all_to_all(
    check: Checker,
    shape: tuple[int, ...],
    dim: int | None,
    table: Sequence[tuple[int, ...]] | None,
    dtype: torch.dtype,
    layout: str = "",
) -> None:
    """Check one all_to_all. `table` says how much each rank sends to each; `shape` holds the other dimensions."""
    at = 0 if dim is None else dim
    rank, size = check.rank, check.world_size
    rows = table or [((list(shape) or [1])[at] // size,) * size] * size
    arguments: tuple[Any, ...] = () if dim is None else (dim,)
    if table is not None:
        arguments = (at, rows[rank], [row[rank] for row in rows])
    inputs = []
    for sender, row in enumerate(rows):
        own_shape = list(shape) or [1]
        own_shape[at] = sum(row)
        inputs.append(check.inputs.of(sender, own_shape, dtype))
    parts = [part_of(each, at, row, rank) for each, row in zip(inputs, rows, strict=True)]
    if check.alike:
        # In a fake group each rank sends what this rank sends to itself, repeated; zeros if that is nothing.
        own_part, count = parts[rank], rows[rank][rank]
        sizes = [row[rank] for row in rows]
        parts = [_repeated(own_part, at, count, each) for each in sizes]
    expected = torch.cat(parts, at)
    own = inputs[rank].to(check.communicator.device)
    own = own if shape or table is None or sum(rows[rank]) != 1 else own.reshape(())
    check.compute(
        f"all_to_all(dim {at}, sizes {table}) of {dtype} {shape} {layout}".rstrip(),
        LAYOUTS[layout](own) if layout else own,
        lambda it: check.communicator.all_to_all(it, *arguments),
        expected,
    )


def _repeated(part: torch.Tensor, dim: int, count: int, size: int) -> torch.Tensor:
    """Return `part`, which has `count` elements in dimension `dim`, repeated up to `size`; zeros if `count` is 0."""
    if count:
        return torch.cat([part] * -(-max(size, 1) // count), dim).narrow(dim, 0, size)
    shape = list(part.shape)
    shape[dim] = size
    return part.new_zeros(shape)


# ------------------------------------------------------------------ refusals


def exchange_refusals(check: Checker, t: torch.Tensor) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the calls that must be refused, by method; `t` is [2 * world size, 3] of float32."""
    it: Any = check.communicator
    me, size = check.rank, check.world_size
    ones, other = (1,) * size, (me + 1) % size
    odd = torch.ones(size + 1, device=t.device)
    attempts: dict[str, dict[str, Callable[[], object]]] = {
        "reduce": {
            **rank_refusals(lambda rank: it.reduce(t, rank), size),
            "an unknown op": lambda: it.reduce(t, 0, "xor"),
            "MEAN of integers": lambda: it.reduce(t.int(), 0, "mean"),
        },
        "scatter": {
            **rank_refusals(lambda rank: it.scatter(t.clone(), t, rank), size),
            "no output": lambda: it.scatter(None, t, me),
            "no input": lambda: it.scatter(t, None, me),
            "an input of another shape": lambda: it.scatter(t[:1].clone(), t, me),
            "an input of another dtype": lambda: it.scatter(t[:2].int(), t, me),
            "an output in the input": lambda: it.scatter(t[:2], t, me),
            "an output that overlaps itself": lambda: it.scatter(t[:1].expand(2, 3), t, other),
            "other sizes than its own": lambda: it.scatter(t.clone(), t, me, 0, (2 * size + 1,) * size),
            "too few sizes": lambda: it.scatter(t.clone(), t, me, 0, (2 * size,) * (size - 1)),
            "dim 2 of 2": lambda: it.scatter(t.clone(), t, me, 2),
        },
        "all_to_all": {
            "no tensor": lambda: it.all_to_all([t]),
            "dim 2 of 2": lambda: it.all_to_all(t, 2),
            "sizes to send alone": lambda: it.all_to_all(t, 0, (2,) * size),
            "sizes to receive alone": lambda: it.all_to_all(t, 0, None, (2,) * size),
            "sizes that add up to less": lambda: it.all_to_all(t, 0, ones, ones),
            "too many sizes": lambda: it.all_to_all(t, 0, (2,) * size, (2,) * (size + 1)),
            "a negative size": lambda: it.all_to_all(t, 0, (2,) * size, (-2,) * size),
            "another size to itself than from itself": lambda: it.all_to_all(t, 0, (2,) * size, ones),
        },
    }
    if size > 1:
        attempts["all_to_all"]["an uneven split"] = lambda: it.all_to_all(odd)
    return attempts


def rank_refusals(call: Callable[[Any], object], size: int) -> dict[str, Callable[[], object]]:
    """Return calls with invalid ranks, by the text of the rank."""
    return {f"rank {rank!r}": lambda rank=rank: call(rank) for rank in (size, -1, True, 0.0, "0")}  # type: ignore[misc]
