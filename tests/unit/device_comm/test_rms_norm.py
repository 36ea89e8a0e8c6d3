"""RMSNorm: bit for bit equal to a plain float32 loop, and equal to torch within rounding."""

from typing import Any

import pytest
import torch

from coordinator import UsageError, rms_norm
from coordinator.testing import FakeGroupCoordinator
from device_comm.fused.rms_norm import DTYPES, GROUP_LANES, GROUPS, sum_of_squares

np = pytest.importorskip("numpy")

EPS = 1e-6


def slow_sum_of_squares(row: Any, vector: int) -> Any:
    """Sum the squares of a float32 row one operation at a time, in the order of `DESIGN.md`."""
    lanes = [np.float32(0)] * (GROUPS * GROUP_LANES)
    for start in range(0, len(row), vector):
        lane = start // vector % len(lanes)
        for x in row[start : start + vector]:
            lanes[lane] = lanes[lane] + x * x
    sums = []
    for first in range(0, len(lanes), GROUP_LANES):
        group = lanes[first : first + GROUP_LANES]
        step = GROUP_LANES // 2
        while step:
            for lane in range(step):
                group[lane] = group[lane] + group[lane + step]
            step //= 2
        sums.append(group[0])
    return (sums[0] + sums[2]) + (sums[1] + sums[3])


def slow_rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the rows one IEEE operation at a time."""
    results = []
    scales = weight.float().numpy()
    with np.errstate(all="ignore"):
        for row in rows.float().numpy():
            total = slow_sum_of_squares(row, 16 // rows.itemsize)
            mean = total / np.float32(len(row)) + np.float32(eps)
            scale = np.float32(1) / np.sqrt(mean)
            results.append(torch.from_numpy(row * scale * scales))
    return torch.stack(results).to(rows.dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits, with all NaNs made equal."""
    whole = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return whole.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def filled(tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random rows that span many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, hidden, generator=generator)
    return (rows * torch.exp2(torch.randint(-6, 7, rows.shape, generator=generator))).to(dtype)


@pytest.mark.guarantee("D17")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_is_that_of_a_plain_loop(dtype: torch.dtype) -> None:
    """Rows of any length match, whether or not the lanes divide them, with signed zeros, inf and NaN."""
    for hidden in (1, 7, 64, 1000, 1024, 2048, 2056, 5003):
        rows, weight = filled(3, hidden, dtype, hidden), filled(1, hidden, dtype, 1)[0]
        assert torch.equal(bits(rms_norm(rows, weight, EPS)), bits(slow_rms_norm(rows, weight, EPS))), hidden
    special = filled(5, 300, dtype, 9)
    special[0] = -0.0
    special[1, ::3] = -0.0
    special[2, 5] = torch.nan
    special[3, 299] = torch.inf
    special[4] = torch.finfo(dtype).tiny
    for eps in (EPS, 0.0):
        weight = filled(1, 300, dtype, 2)[0]
        assert torch.equal(bits(rms_norm(special, weight, eps)), bits(slow_rms_norm(special, weight, eps)))


def test_the_order_of_the_sum_can_be_seen() -> None:
    """Another summation order gives other bits, so the test above would notice it."""
    rows = filled(16, 5003, torch.float32, 4)
    ours = sum_of_squares(rows, 4)
    assert not torch.equal(ours, sum_of_squares(rows, 8))
    assert not torch.equal(ours, (rows * rows).sum(1))
    torch.testing.assert_close(ours, (rows * rows).sum(1))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """A row's result does not depend on how many rows are normalised, across block boundaries."""
    rows, weight = filled(150, 4096, torch.bfloat16, 5), filled(1, 4096, torch.bfloat16, 6)[0]
    whole = rms_norm(rows, weight, EPS)
    for row in (0, 63, 64, 149):
        assert torch.equal(rms_norm(rows[row : row + 1], weight, EPS)[0], whole[row])
    assert torch.equal(rms_norm(rows.t().contiguous().t(), weight, EPS), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_differs_by_rounding(dtype: torch.dtype) -> None:
    """The result equals torch's within rounding."""
    rows, weight = filled(8, 1536, dtype, 7), filled(1, 1536, dtype, 8)[0]
    theirs = torch.nn.functional.rms_norm(rows, (1536,), weight, EPS)
    torch.testing.assert_close(rms_norm(rows, weight, EPS), theirs)


def test_what_cannot_be_normalised_is_refused() -> None:
    """The error names the argument that does not fit."""
    x, w = torch.ones(2, 8), torch.ones(8)
    with FakeGroupCoordinator(0, 2) as group:
        for text, call in {
            "expected a tensor": lambda: rms_norm([1], w, EPS),  # type: ignore[arg-type]
            "[tokens, hidden]": lambda: rms_norm(w, w, EPS),
            "not (2, 0)": lambda: rms_norm(x[:, :0], w[:0], EPS),
            "must be of torch.float32": lambda: rms_norm(x.double(), w.double(), EPS),
            "the weight must have shape [8]": lambda: rms_norm(x, w[:4], EPS),
            "dtype torch.float16": lambda: rms_norm(x, w.half(), EPS),
            "eps must be": lambda: rms_norm(x, w, -1.0),
            "not nan": lambda: rms_norm(x, w, torch.nan),
            "not True": lambda: rms_norm(x, w, True),
            "the residual has shape (1, 8)": lambda: group.all_reduce_add_rms_norm(x, x[:1], w, EPS),
            "residual has shape (2, 8) and dtype torch.float16": lambda: group.all_reduce_add_rms_norm(
                x, x.half(), w, EPS
            ),
            "timeout_s": lambda: group.all_reduce_add_rms_norm(x, x, w, EPS, timeout_s=0),
        }.items():
            with pytest.raises(UsageError) as refusal:
                call()
            assert text in str(refusal.value), refusal.value


def test_results_are_new_also_in_a_group_of_one() -> None:
    """Results are new memory in a group of one too; arguments stay unchanged."""
    for size in (1, 2):
        with FakeGroupCoordinator(0, size) as group, torch.no_grad():
            x, w = filled(4, 48, torch.float32, 1).requires_grad_(), torch.ones(48)
            residual = filled(4, 48, torch.float32, 2)
            before = x.detach().clone(), residual.clone()
            normed, total = group.all_reduce_add_rms_norm(x, residual, w, EPS)
            assert not normed.requires_grad
            assert torch.equal(total, x.detach() * size + residual)
            assert torch.equal(normed, rms_norm(total, w, EPS))
            normed.zero_()
            total.zero_()
            assert torch.equal(x, before[0])
            assert torch.equal(residual, before[1])
            empty = group.all_reduce_add_rms_norm(x[:0], residual[:0], w, EPS)
            assert [each.shape for each in empty] == [(0, 48), (0, 48)]
