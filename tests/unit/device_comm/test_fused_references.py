"""The references of the fused calls: bit for bit equal to plain loops, and new memory in a group of one too."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from coordinator import rms_norm
from coordinator.testing import FakeGroupCoordinator
from device_comm.fused.finalize import finalized
from device_comm.fused.fp4 import blocks_quantised
from device_comm.fused.fp8 import SMALLEST_SCALE, quantised_rows

np = pytest.importorskip("numpy")

# All numbers of the format that are not negative, by their bits 0 to 0x7E: IEEE's rules with a bias of 7, but with
# finite numbers in the last exponent.
NUMBERS = [math.ldexp(bits, -9) for bits in range(8)] + [
    math.ldexp(8 + bits % 8, bits // 8 - 10) for bits in range(8, 127)
]


def slow_fp8(value: float) -> int:
    """Return the bits of the nearest number of the format; of two, those that are even."""
    if math.isnan(value):
        return 0x7F
    size = min(abs(value), 448.0)
    nearest = min(range(len(NUMBERS)), key=lambda bits: (abs(NUMBERS[bits] - size), bits % 2))
    return nearest | (0x80 if math.copysign(1.0, value) < 0 else 0)


def test_each_number_becomes_the_nearest_one() -> None:
    """Numbers of the format, the middles between them, their neighbours and what lies outside round as defined."""
    assert NUMBERS[-1] == 448.0
    assert sorted(set(NUMBERS)) == NUMBERS
    middles = [(one + other) / 2 for one, other in itertools.pairwise(NUMBERS)]
    sizes = torch.tensor([*NUMBERS, *middles, 449.0, 464.0, 500.0, 1e30, math.inf, 1e-30, 2.0**-149])
    near = torch.cat([sizes, torch.nextafter(sizes, sizes + 1), torch.nextafter(sizes, sizes - 1)])
    values = torch.cat([near, -near, torch.tensor([math.nan, -math.nan])])
    found, scale = quantised_rows(values.view(1, -1), torch.ones(()))
    assert scale.shape == ()
    assert found.view(torch.uint8)[0].tolist() == [slow_fp8(each) for each in values.tolist()]


def test_each_row_gets_the_scale_of_its_largest_element() -> None:
    """Scale and quotient are float32; zeros get the smallest scale, and NaN and infinities spread as defined."""
    rows = torch.randn(7, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows[1] = 0.0
    rows[2, 3] = -1000.0
    rows[3, 4] = math.nan
    rows[4, 5] = -math.inf
    rows[5] *= 1e-6
    found, scales = quantised_rows(rows)
    assert (scales.shape, scales.dtype) == ((7, 1), torch.float32)
    assert found.dtype is torch.float8_e4m3fn
    smallest = np.float32(SMALLEST_SCALE)
    for row in (0, 1, 2, 5, 6):
        wide = rows[row].float().numpy()
        scale = max(np.abs(wide).max() / np.float32(448), smallest)
        assert scales[row].item() == float(scale)
        assert found[row].view(torch.uint8).tolist() == [slow_fp8(float(each)) for each in wide / scale]
    assert scales[1].item() == scales[5].item() == float(smallest)
    assert found[2, 3].item() == -448.0
    assert scales[3].isnan().all()
    assert found[3].view(torch.uint8).tolist() == [0x7F] * 50
    assert scales[4].item() == math.inf
    assert found[4, 5].isnan()
    assert (found[4].float() == 0).sum() == 49


FOURS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def slow_fp4(value: float) -> int:
    """Return the code of the nearest number, of two that is even."""
    if math.isnan(value):
        return 7
    size = min(abs(value), 6.0)
    nearest = min(range(8), key=lambda code: (abs(FOURS[code] - size), code % 2))
    return nearest | (8 if math.copysign(1.0, value) < 0 else 0)


def test_blocks_of_sixteen_share_a_scale() -> None:
    """Scales and codes are those of a plain loop: with middles between two numbers, NaN, infinities and tiny blocks."""
    made = torch.Generator().manual_seed(1)
    rows = torch.randn(8, 64, generator=made)
    # Quarters meet every middle: a block whose largest size is 6 has the factor 1 under this scale.
    rows[1] = torch.randint(-24, 25, (64,), generator=made) / 4
    rows[1, ::16] = 6.0
    rows[2, :16] = 0.0
    rows[2, 16:32] = -0.0
    rows[3, 5] = math.nan
    rows[4, 6] = -math.inf
    rows[5] *= 1e-9
    rows[6] *= 1e9
    for unit in (1.0, 448.0, 0.37):
        packed, scales = blocks_quantised(rows, torch.tensor([unit]))
        assert (packed.shape, packed.dtype) == ((8, 32), torch.uint8)
        assert (scales.shape, scales.dtype) == ((8, 4), torch.float8_e4m3fn)
        codes = torch.stack([packed & 15, packed >> 4], 2).view(8, 4, 16).tolist()
        for row, line in enumerate(rows.view(8, 4, 16).numpy()):
            for block, values in enumerate(line):
                largest = np.abs(values).max()
                scale = slow_fp8(float(largest / np.float32(6) * np.float32(unit)))
                assert scales.view(torch.uint8)[row, block].item() == scale
                divisor = np.float32(math.nan if scale == 0x7F else NUMBERS[scale])
                with np.errstate(invalid="ignore"):
                    factor = np.float32(unit) / divisor if divisor != 0 else np.float32(0)
                    assert codes[row][block] == [slow_fp4(float(each)) for each in values * factor]
    assert scales.view(torch.uint8)[3].tolist()[0] == 0x7F


def slow_finalize(
    outputs: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
) -> list[list[float]]:
    """Add each token's experts one operation at a time."""
    wide, factors, results = outputs.float().numpy(), weights.numpy(), []
    with np.errstate(all="ignore"):
        for token, places in enumerate(rows.tolist()):
            total = np.zeros(outputs.shape[1], dtype=np.float32)
            for k, row in enumerate(places):
                if row >= 0:
                    total = total + factors[token, k] * (
                        wide[row] if row < len(wide) else np.float32(math.nan)
                    )
            results.append(total if shared is None else total + shared[token].float().numpy())
    return [[float(each) for each in row] for row in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_shared", [True, False])
def test_the_sums_of_experts_are_those_of_a_plain_loop(dtype: torch.dtype, has_shared: bool) -> None:
    """Missing experts, rows behind the last one, special numbers and empty tensors give the bits of the loop."""
    made = torch.Generator().manual_seed(3)
    for count, tokens, k in ((5, 9, 4), (1, 3, 1), (0, 3, 2), (4, 0, 2), (4, 3, 0)):
        outputs = torch.randn(count, 40, generator=made).to(dtype)
        outputs[count // 2 :, 3] = -0.0
        outputs[:1, 4] = torch.inf
        rows = torch.randint(-2, count + 1, (tokens, k), generator=made, dtype=torch.int32)
        weights = torch.randn(tokens, k, generator=made)
        shared = torch.randn(tokens, 40, generator=made).to(dtype) if has_shared else None
        found = finalized(outputs, rows, weights, shared)
        wanted = torch.tensor(slow_finalize(outputs, rows, weights, shared)).reshape(tokens, 40).to(dtype)
        assert (found.dtype, found.shape) == (dtype, (tokens, 40))
        assert torch.equal(found.isnan(), wanted.isnan())
        number = torch.int32 if dtype is torch.float32 else torch.int16
        assert torch.equal(found.nan_to_num().view(number), wanted.nan_to_num().view(number))


@pytest.mark.parametrize("size", [1, 2])
def test_results_are_new_also_in_a_group_of_one(size: int) -> None:
    """Only a scale that is given is returned itself; arguments that require grad give results that do not."""
    with FakeGroupCoordinator(0, size) as group, torch.no_grad():
        x, w = torch.randn(4, 48).requires_grad_(), torch.ones(48)
        residual = torch.randn(4, 48)
        total = x.detach() * size + residual
        scale = torch.tensor(0.25)
        for given in (None, scale):
            quantised, scales, kept = group.all_reduce_add_rms_norm_fp8(x, residual, w, 1e-6, given)
            wanted = quantised_rows(rms_norm(total, w, 1e-6), given)
            assert torch.equal(kept, total)
            assert torch.equal(quantised.view(torch.uint8), wanted[0].view(torch.uint8))
            assert scales is scale if given is not None else torch.equal(scales, wanted[1])
            assert not any(each.requires_grad for each in (quantised, scales, kept))
            kept.zero_()
        assert torch.equal(total, x.detach() * size + residual)
        empty = group.all_reduce_add_rms_norm_fp8(x[:0], residual[:0], w, 1e-6)
        assert [tuple(each.shape) for each in empty] == [(0, 48), (0, 1), (0, 48)]
        packed, scales, kept = group.all_reduce_add_rms_norm_nvfp4(x, residual, w, 1e-6, scale)
        blocks = blocks_quantised(rms_norm(total, w, 1e-6), scale)
        assert torch.equal(kept, total)
        assert torch.equal(packed, blocks[0])
        assert torch.equal(scales.view(torch.uint8), blocks[1].view(torch.uint8))
        empty = group.all_reduce_add_rms_norm_nvfp4(x[:0], residual[:0], w, 1e-6, scale)
        assert [tuple(each.shape) for each in empty] == [(0, 24), (0, 3), (0, 48)]
        rows = torch.arange(4, dtype=torch.int32).view(4, 1)
        summed = group.moe_finalize_all_reduce(x, rows, torch.ones(4, 1))
        assert torch.equal(summed, x.detach() * size)
        assert summed.data_ptr() != x.data_ptr()
        assert not summed.requires_grad
