"""Conformance of the fused calls: each has the bits of its steps one after the other."""

from __future__ import annotations

import torch

from coordinator.testing.conformance import Checker
from coordinator.testing.conformance_inputs import LAYOUTS, Case, raw
from device_comm.fused.finalize import finalized
from device_comm.fused.fp4 import BLOCK, blocks_quantised
from device_comm.fused.fp8 import quantised_rows
from device_comm.fused.rms_norm import DTYPES, add_rms_norm

_EPS = 1e-5


def check_fused(check: Checker) -> None:
    """Check the fused calls with every dtype that they take: small, larger, empty and odd shapes, and layouts."""
    for dtype in (each for each in check.dtypes if each in DTYPES):
        for shape in ((3, 64), (2, 4096), (0, 8), (2, 37)):
            for layout in LAYOUTS if shape == (3, 64) else ("contiguous",):
                _norm(check, Case(shape, dtype, layout))
        for tokens, hidden, k in ((3, 64, 2), (5, 24, 6), (0, 8, 2), (2, 37, 1), (2, 8, 0)):
            _finalize(check, tokens, hidden, k, dtype)


def _norm(check: Checker, case: Case) -> None:
    it, device = check.communicator, check.communicator.device
    input_ = LAYOUTS[case.layout](check.inputs.own(case.shape, case.dtype))
    # The same on all ranks.
    residual = check.inputs.of(0, case.shape, case.dtype, 1).to(device)
    weight = check.inputs.of(0, case.shape[1:], case.dtype, 2).to(device)
    normed, total = add_rms_norm(it.all_reduce(input_), residual, weight, _EPS)
    before = raw(input_)
    for scale in (None, torch.full((1,), 0.37, device=device)):
        check.begin(f"all_reduce_add_rms_norm_fp8({'rows' if scale is None else 'tensor'}) of {case}")
        found = it.all_reduce_add_rms_norm_fp8(input_, residual, weight, _EPS, scale)
        quantised, scales = quantised_rows(normed, scale)
        check.check_result(found[0], quantised.cpu())
        check.check_result(found[2], total.cpu())
        if scale is None:
            check.check_result(found[1], scales.cpu())
        elif found[1] is not scale:
            check.fail("returns its argument", "another scale was returned")
        check.check_unchanged(input_, before)
    if not case.shape[1] % BLOCK:
        scale = torch.full((1,), 20.0, device=device)
        check.begin(f"all_reduce_add_rms_norm_nvfp4(blocks) of {case}")
        found = it.all_reduce_add_rms_norm_nvfp4(input_, residual, weight, _EPS, scale)
        for result, expected in zip(found, (*blocks_quantised(normed, scale), total), strict=True):
            check.check_result(result, expected.cpu())
        check.check_unchanged(input_, before)


def _finalize(check: Checker, tokens: int, hidden: int, k: int, dtype: torch.dtype) -> None:
    it, device = check.communicator, check.communicator.device
    # The ranks have different numbers of rows; one of them may have none.
    count = (check.rank * 3 + tokens) % 5
    expert_out = check.inputs.own((count, hidden), dtype)
    made = torch.Generator().manual_seed(check.rank if not check.alike else 0)
    rows = torch.randint(-1, max(count, 1), (tokens, k), generator=made, dtype=torch.int32).to(device)
    weights = torch.rand(tokens, k, generator=made).to(device)
    for shared in (None, check.inputs.own((tokens, hidden), dtype, 1)):
        own = finalized(expert_out, rows, weights, shared)
        expected = it.all_reduce(own)
        kind = "alone" if shared is None else "shared"
        check.begin(f"moe_finalize_all_reduce({kind}) of {dtype} {(tokens, hidden, k)}")
        before = [raw(each) for each in (expert_out, rows, weights)]
        found = it.moe_finalize_all_reduce(expert_out, rows, weights, shared)
        check.check_result(found, expected.cpu())
        for tensor, bits in zip((expert_out, rows, weights), before, strict=True):
            check.check_unchanged(tensor, bits)
