"""All-reduce, add and RMSNorm in one call give the bits of the three calls one after the other."""

from pathlib import Path

import pytest
import torch

from coordinator import GroupCoordinator, rms_norm
from device_comm.fused.finalize import finalized
from device_comm.fused.fp8 import quantised_rows
from device_comm.fused.rms_norm import DTYPES
from tests.harness import RankPool
from tests.worlds import ApartPool, HostsPool, world

EPS = 1e-5


def compare(group: GroupCoordinator, tokens: int, hidden: int, dtype: torch.dtype) -> list[float]:
    everyone = torch.Generator().manual_seed(hidden)
    own = torch.Generator().manual_seed(hidden + group.rank + 1)
    residual = torch.randn(tokens, hidden, generator=everyone).to(dtype)
    weight = torch.randn(hidden, generator=everyone).to(dtype)
    x = torch.randn(tokens, hidden, generator=own).to(dtype)
    normed, total = group.all_reduce_add_rms_norm(x, residual, weight, EPS)
    expected = group.all_reduce(x) + residual
    assert torch.equal(total, expected)
    assert torch.equal(normed, rms_norm(expected, weight, EPS))
    # This tensor has the same elements and is not contiguous.
    pairs = torch.stack([x, x], 2)[..., 0]
    again = group.all_reduce_add_rms_norm(pairs, residual, weight, EPS, timeout_s=20)
    assert torch.equal(again[0], normed)
    for scale in (None, torch.tensor([0.02])):
        quantised, scales, kept = group.all_reduce_add_rms_norm_fp8(pairs, residual, weight, EPS, scale)
        wanted, wanted_scales = quantised_rows(normed, scale)
        assert torch.equal(kept, total)
        assert torch.equal(quantised.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scales, wanted_scales)
    # Each rank has some of the tokens' rows, and some of them twice.
    rows = torch.randint(-1, max(tokens, 1), (tokens, 2), generator=own, dtype=torch.int32)
    factors = torch.rand(tokens, 2, generator=own)
    summed = group.moe_finalize_all_reduce(pairs, rows, factors, residual)
    assert torch.equal(summed, group.all_reduce(finalized(x, rows, factors, residual)))
    return [normed.double().sum().item(), total.double().sum().item(), summed.double().sum().item()]


def fused(rank: int, world_size: int, directory: Path) -> list[float]:
    sums = []
    with world(rank, world_size, directory) as group:
        for dtype in DTYPES:
            for tokens, hidden in ((1, 64), (0, 8), (3, 1003), (17, 4096), (40, 2048)):
                sums += compare(group, tokens, hidden, dtype)
    return sums


@pytest.mark.guarantee("D17")
@pytest.mark.parametrize("size", [2, 4])
def test_fused_is_bit_equal_to_unfused(ranks2: RankPool, ranks4: RankPool, size: int) -> None:
    """This holds for three dtypes, with the same result on every rank."""
    results = (ranks2 if size == 2 else ranks4).run(fused)
    assert all(each == results[0] for each in results)


def test_fused_is_bit_equal_to_unfused_over_several_hosts(ranks2: RankPool, ranks4: RankPool) -> None:
    """This holds over Gloo and in two levels."""
    for pool in (ApartPool(ranks2), HostsPool(ranks4, ["a", "a", "b", "b"])):
        results = pool.run(fused)
        assert all(each == results[0] for each in results)
