"""Reductions: the result depends on the inputs and the rank order, and on nothing else."""

import functools
import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from device_comm.reduction import (
    ReduceOperation,
    accumulation_dtype,
    check_reducible,
    reduce_in_rank_order,
    reduce_operation,
)
from shm_broadcast.errors import UsageError

SUM, MEAN, PRODUCT, MIN, MAX = ReduceOperation
NAN, INF = float("nan"), float("inf")
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, *FP8]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32]
COMPLEX = [torch.complex64, torch.complex128]


def random(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(*shape, dtype=dtype, generator=generator)
    if dtype is torch.bool:
        return torch.rand(*shape, generator=generator) < 0.5
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        low, high = max(limits.min, -(1 << 40)), min(limits.max, 1 << 40)
        return torch.randint(low, high, shape, generator=generator).to(dtype)
    return (torch.randn(*shape, dtype=torch.float64, generator=generator) * 3).to(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def reducible(dtype: torch.dtype) -> list[ReduceOperation]:
    found = []
    for op in ReduceOperation:
        try:
            check_reducible(dtype, op)
        except UsageError:
            continue
        found.append(op)
    return found


# --- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ReduceOperation)
def test_an_operation_has_several_names(op: ReduceOperation) -> None:
    """A member, its name and value in any case, and torch's ReduceOp mean the same."""
    torch_name = "AVG" if op is MEAN else op.name
    reduce_op = getattr(dist.ReduceOp, torch_name)
    for name in (
        op,
        op.name,
        op.value,
        op.name.lower(),
        op.value.upper(),
        torch_name,
        torch_name.lower(),
        reduce_op,
        dist.ReduceOp(reduce_op),
    ):
        assert reduce_operation(name) is op


@pytest.mark.parametrize(
    "name", ["xor", "", None, 1, dist.ReduceOp.BAND, dist.ReduceOp.PREMUL_SUM, max, torch.sum]
)
def test_an_unknown_operation_is_refused(name: object) -> None:
    """An unknown operation raises a UsageError that lists the valid ones."""
    with pytest.raises(UsageError, match="SUM, MEAN, PRODUCT, MIN, MAX"):
        reduce_operation(name)


@pytest.mark.guarantee("D4")
def test_operations_without_meaning_are_refused() -> None:
    """Ordering complex numbers, means of integers, and non-numeric dtypes are refused."""
    for dtype in (*COMPLEX, torch.complex32):
        assert reducible(dtype) == [SUM, MEAN, PRODUCT]
    for dtype in (*INTEGERS, torch.bool):
        assert reducible(dtype) == [SUM, PRODUCT, MIN, MAX]
    for dtype in FLOATS:
        assert reducible(dtype) == list(ReduceOperation)
    for dtype in (torch.uint64, torch.float8_e8m0fnu, torch.bits8):
        assert reducible(dtype) == []
    with pytest.raises(UsageError, match="complex numbers have no order"):
        check_reducible(torch.complex64, MIN)
    with pytest.raises(UsageError, match="reduce with SUM and divide"):
        check_reducible(torch.int32, MEAN)
    with pytest.raises(UsageError, match="view the tensor as another dtype"):
        check_reducible(torch.uint64, SUM)


# --- values ---------------------------------------------------------------------------------------------------

FOLDS: dict[ReduceOperation, Callable[[np.float32, np.float32], np.float32]] = {
    SUM: operator.add,
    MEAN: operator.add,
    PRODUCT: operator.mul,
    MIN: min,
    MAX: max,
}


@pytest.mark.parametrize("op", ReduceOperation)
@pytest.mark.parametrize("dtype", FLOATS[:1] + FLOATS[2:], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_floats_are_combined_in_rank_order_in_float32(
    op: ReduceOperation, dtype: torch.dtype, ranks: int
) -> None:
    """The result equals numpy's float32 fold from rank 0 up, rounded to the dtype once at the end."""
    parts = [random(dtype, 101, seed=rank) for rank in range(ranks)]
    columns = zip(*(part.float().tolist() for part in parts), strict=True)
    folded = [functools.reduce(FOLDS[op], map(np.float32, column)) for column in columns]
    if op is MEAN:
        folded = [value / np.float32(ranks) for value in folded]
    expected = torch.tensor(np.array(folded, np.float32)).to(dtype)
    assert bits(reduce_in_rank_order(parts, op)) == bits(expected)


def test_the_order_of_ranks_shows() -> None:
    """Another order gives other bits, so the rank order is a real promise."""
    parts = [torch.tensor([1.0]), torch.tensor([2.0**-24]), torch.tensor([2.0**-24])]
    assert reduce_in_rank_order(parts, SUM).item() == 1.0
    assert reduce_in_rank_order(parts[::-1], SUM).item() == 1.0 + 2.0**-23


def test_narrow_floats_are_rounded_once() -> None:
    """In float16, 2048 + 1 + 1 would stay 2048 and 60000 + 60000 - 60000 would be infinite."""
    ones = [torch.tensor([value], dtype=torch.float16) for value in (2048.0, 1.0, 1.0)]
    assert reduce_in_rank_order(ones, SUM).item() == 2050
    large = [torch.tensor([value], dtype=torch.float16) for value in (6e4, 6e4, -6e4)]
    assert reduce_in_rank_order(large, SUM).item() == torch.tensor(6e4, dtype=torch.float16).item()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap_around(dtype: torch.dtype) -> None:
    """SUM and PRODUCT wrap modulo two to the width; MIN and MAX are exact."""
    parts = [random(dtype, 50, seed=rank) for rank in range(5)]
    columns = list(zip(*(part.tolist() for part in parts), strict=True))
    limits = torch.iinfo(dtype)
    modulus = 1 << limits.bits

    def wrapped(value: int) -> int:
        return (value - limits.min) % modulus + limits.min

    assert reduce_in_rank_order(parts, SUM).tolist() == [wrapped(sum(column)) for column in columns]
    products = [wrapped(functools.reduce(operator.mul, column)) for column in columns]
    assert reduce_in_rank_order(parts, PRODUCT).tolist() == products
    assert reduce_in_rank_order(parts, MIN).tolist() == [min(column) for column in columns]
    assert reduce_in_rank_order(parts, MAX).tolist() == [max(column) for column in columns]


def test_truth_values() -> None:
    """SUM and MAX are a logical or, PRODUCT and MIN a logical and, for many ranks too."""
    parts = [torch.tensor([True, False, rank == 0]) for rank in range(300)]
    for op in (SUM, MAX):
        assert reduce_in_rank_order(parts, op).tolist() == [True, False, True]
    for op in (PRODUCT, MIN):
        assert reduce_in_rank_order(parts, op).tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers(dtype: torch.dtype) -> None:
    """SUM and MEAN work by component, PRODUCT multiplies out, and each step rounds."""
    parts = [random(dtype, 40, seed=rank) for rank in range(3)]
    real = np.float32 if dtype is torch.complex64 else np.float64
    columns = list(zip(*(torch.view_as_real(part).tolist() for part in parts), strict=True))
    products = []
    for column in columns:
        (a, b), *others = [[real(x), real(y)] for x, y in column]
        for c, d in others:
            a, b = a * c - b * d, a * d + b * c
        products.append([a, b])
    result = torch.view_as_real(reduce_in_rank_order(parts, PRODUCT))
    assert bits(result) == bits(torch.tensor(np.array(products)))
    sums = [
        [sum((x for x, _ in each), real(0)), sum((y for _, y in each), real(0))]
        for each in _typed(columns, real)
    ]
    total = torch.tensor(np.array(sums))
    assert bits(torch.view_as_real(reduce_in_rank_order(parts, SUM))) == bits(total)
    assert bits(torch.view_as_real(reduce_in_rank_order(parts, MEAN))) == bits(total / 3)


def _typed(columns: list, real: type) -> list:
    return [[(real(x), real(y)) for x, y in column] for column in columns]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_half_complex_numbers_are_combined_in_single_precision() -> None:
    """For half complex numbers too, 2048 + 1 + 1 gives 2050."""
    parts = [torch.tensor([value + 0j], dtype=torch.complex64).to(torch.complex32) for value in (2048, 1, 1)]
    result = reduce_in_rank_order(parts, SUM)
    assert result.dtype is torch.complex32
    assert result.to(torch.complex64).item() == 2050


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_special_values(dtype: torch.dtype) -> None:
    """A NaN of any rank gives NaN; infinities and signs of zeros follow the order."""

    def result(op: ReduceOperation, *values: float) -> str:
        return repr(reduce_in_rank_order([torch.tensor([each], dtype=dtype) for each in values], op).item())

    for op in ReduceOperation:
        for values in ((NAN, 1, 2), (1, NAN, 2), (1, 2, NAN), (NAN, NAN, NAN)):
            assert result(op, *values) == "nan"
    assert result(SUM, INF, -INF) == "nan"
    assert result(SUM, INF, 1, INF) == "inf"
    assert result(MIN, INF, -INF, 0) == "-inf"
    assert result(MAX, -INF, INF, 0) == "inf"
    assert result(SUM, -0.0, -0.0) == "-0.0"
    assert result(SUM, -0.0, 0.0) == "0.0"
    for op in (MIN, MAX):
        assert result(op, -0.0, 0.0) == "-0.0"
        assert result(op, 0.0, -0.0) == "0.0"
    assert result(PRODUCT, -0.0, 5) == "-0.0"


# --- independence ---------------------------------------------------------------------------------------------


@pytest.mark.guarantee("D2")
@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX, torch.bool], ids=str)
def test_a_result_does_not_depend_on_where_its_element_stands(dtype: torch.dtype) -> None:
    """Vector body, tail and threads give the same bits, so a shard reduces like the whole."""
    parts = [random(dtype, 40_007, seed=rank) for rank in range(3)]
    if dtype.is_floating_point:
        for rank, part in enumerate(parts):
            part[rank::5] = 0.0
            part[rank + 1 :: 7] = -0.0
            part[rank * 2 :: 11] = NAN
    for op in reducible(dtype):
        whole = reduce_in_rank_order(parts, op)
        for start, end in ((1, 40_007), (3, 10), (9, 10), (20_000, 20_033)):
            shard = reduce_in_rank_order([part[start:end] for part in parts], op)
            expected = whole[start:end]
            if not dtype.is_floating_point:
                assert bits(shard) == bits(expected)
                continue
            # All NaNs count as equal, whatever their bits.
            shard, expected = shard.double(), expected.double()
            assert torch.equal(shard.isnan(), expected.isnan())
            assert bits(shard.nan_to_num(1e300)) == bits(expected.nan_to_num(1e300))


@given(st.integers(1, 6), st.integers(0, 300), st.data())
def test_any_split_gives_the_same_bits(ranks: int, length: int, data: st.DataObject) -> None:
    """Reducing piece by piece gives the same bits as reducing the whole."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex64, torch.int8]))
    parts = [random(dtype, length, seed=rank) for rank in range(ranks)]
    cut = data.draw(st.integers(0, length))
    op = data.draw(st.sampled_from(reducible(dtype)))
    pieces = [reduce_in_rank_order([part[:cut] for part in parts], op)]
    pieces.append(reduce_in_rank_order([part[cut:] for part in parts], op))
    assert bits(torch.cat(pieces)) == bits(reduce_in_rank_order(parts, op))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int8, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_parts_are_left_alone(dtype: torch.dtype, ranks: int) -> None:
    """The result is new memory with the parts' shape and dtype, without gradient."""
    parts = [random(dtype, 2, 3, seed=rank) for rank in range(ranks)]
    if dtype is torch.float32:
        parts = [part.requires_grad_() for part in parts]
    before = [bits(part.detach()) for part in parts]
    for op in reducible(dtype):
        result = reduce_in_rank_order(parts, op)
        assert (result.shape, result.dtype, result.requires_grad) == ((2, 3), dtype, False)
        assert result.data_ptr() not in [part.data_ptr() for part in parts]
    assert [bits(part.detach()) for part in parts] == before


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 1)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    """Empty tensors and tensors without dimensions are reduced too."""
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool):
        for op in reducible(dtype):
            assert reduce_in_rank_order([torch.ones(shape, dtype=dtype)] * 2, op).shape == shape


def test_accumulation_dtypes() -> None:
    """Narrow floats are combined in float32; dtypes without torch arithmetic in a wider one."""
    for dtype in (torch.float16, torch.bfloat16, *FP8):
        assert accumulation_dtype(dtype) is torch.float32
    assert accumulation_dtype(torch.uint16) is torch.int64
    assert accumulation_dtype(torch.complex32) is torch.complex64
    for dtype in (torch.float64, torch.int8, torch.complex128):
        assert accumulation_dtype(dtype) is dtype
