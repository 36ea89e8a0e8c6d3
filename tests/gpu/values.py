"""What the ranks bring, and what has to come out: made and summed on the CPU by torch alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from device_comm.reduction import ReduceOperation, reduce_in_rank_order

__all__ = ["DTYPES", "SIZES", "canonical", "expected_sum", "random_words", "raw"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Around vectors of 16 bytes, shards of up to 8 ranks, blocks and grids; then what engines send.
SIZES = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129),
    *(255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 2048, 4097, 8192),
    *(16384, 16411, 32768, 65536, 131072, 262147),
)
_FLOAT32_NAN, _HALF_NAN = 0x7FFFFFFF, 0x7FFF


def random_words(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of which a quarter is special: NaN, the sentinel, -0, infinities, denormals, any bits."""
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
    """Return the bits as they are."""
    return values.view(torch.int32 if values.dtype is torch.float32 else torch.int16)


def canonical(values: torch.Tensor) -> torch.Tensor:
    """Return the bits, every NaN as the kernels write it."""
    bits = raw(values).clone()
    bits[values.isnan()] = _FLOAT32_NAN if values.dtype is torch.float32 else _HALF_NAN
    return bits


def expected_sum(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bits that every rank must hold: float32, in rank order, rounded once."""
    return canonical(reduce_in_rank_order(inputs, ReduceOperation.SUM))
