"""What the ranks bring and what must come out: made, summed and compared on the CPU by torch alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from device_comm.reduction import ReduceOperation, reduce_in_rank_order

__all__ = ["DTYPES", "SIZES", "WrongResultError", "expect_equal", "expected_sum", "random_words", "raw"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Around the limits of vectors of 16 bytes, shards of up to 8 ranks, blocks and grids; then what engines send.
SIZES = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129),
    *(255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 2048, 4097, 8192),
    *(16384, 16411, 32768, 65536, 131072, 262147),
)
_FLOAT32_NAN, _HALF_NAN = 0x7FFFFFFF, 0x7FFF


class WrongResultError(AssertionError):
    """A result has other bits than it must have."""


def random_words(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of which a quarter is special: NaN, the sentinel, -0, infinities, denormals, random bits."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    values = (torch.randn(count, generator=generator) * 100).to(dtype).view(bits)
    infinite = torch.tensor([float("inf"), -float("inf"), float("nan")]).to(dtype).view(bits)
    special = torch.cat([torch.tensor([-1, 0, 1, torch.iinfo(bits).min], dtype=bits), infinite])
    chosen = special[torch.randint(0, len(special), (count,), generator=generator)]
    anything = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator).to(bits)
    kind = torch.randint(0, 8, (count,), generator=generator)
    return torch.where(kind == 0, chosen, torch.where(kind == 1, anything, values)).view(dtype)


def raw(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor of any dtype of up to 4 bytes, as integers."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.itemsize])


def expected_sum(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bits that every rank must hold: summed in float32, in rank order, rounded once."""
    total = reduce_in_rank_order(inputs, ReduceOperation.SUM)
    bits = raw(total).clone()
    # The kernels write every NaN like this.
    bits[total.isnan()] = _FLOAT32_NAN if total.dtype is torch.float32 else _HALF_NAN
    return bits


def expect_equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise `WrongResultError`, with the first difference, unless both tensors have the same bits."""
    found, expected = raw(found.view(-1)), raw(expected.view(-1))
    if torch.equal(found, expected):
        return
    places = (found != expected).nonzero().view(-1)
    first = int(places[0])
    raise WrongResultError(
        f"{what}, {len(expected)} elements: {len(places)} differ, the first at {first}: "
        f"{found[first]:#x}, not {expected[first]:#x}"
    )
