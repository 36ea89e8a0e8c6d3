"""Norms with an output of 8 or 4 bits and sums of experts, of all ranks in one launch, against torch on the CPU."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from functools import partial

import torch

from device_comm.cuda import kernel_layout
from device_comm.fused.finalize import finalized
from device_comm.fused.fp4 import blocks_quantised
from device_comm.fused.fp8 import quantised_rows
from device_comm.fused.rms_norm import add_rms_norm
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from tests.gpu.device import Gpu, u32, u64
from tests.gpu.emulation import FUSED, Cubin, Emulation
from tests.gpu.values import WrongResultError, expect_equal, expected_sum, random_words

__all__ = ["FUSED_EMULATED", "check_finalize", "check_quantised", "fused_of_one_variant"]

OUTPUTS = ("fp8", "nvfp4")
FINALIZE = ("push_moe_finalize", "moe_finalize")
FUSED_EMULATED = (
    *(f"{kernel}_{output}" for kernel in (*FUSED, "add_rms_norm") for output in OUTPUTS),
    *FINALIZE,
)
"""The kernels that this module runs."""
# Rows and hidden size; one row of a group is all zeros.
NORMS = ((1, 64), (5, 144), (2, 2560), (3, 8192), (64, 4096))
# Tokens, hidden size, experts of a token. Without experts a token's sum is what the shared expert gives, or 0.
SUMS_OF_EXPERTS = ((1, 8, 1), (3, 64, 2), (5, 40, 8), (33, 1024, 6), (4, 16, 0))
_EPS = 1e-5
_GARBAGE = 0x5A5A5A5A


@dataclasses.dataclass(frozen=True)
class Rows:
    """The tensors of one norm: an input of each rank, and what is equal on all ranks."""

    inputs: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, emulation: Emulation, rows: int, hidden: int) -> Rows:
        """Return random rows, the last of several all zeros."""
        dtype, made = emulation.dtype, torch.Generator().manual_seed(hidden + rows)
        *inputs, residual = [
            torch.randn(rows, hidden, generator=made).to(dtype) for _ in range(emulation.world_size + 1)
        ]
        if rows > 1:
            for each in (*inputs, residual):
                each[-1] = 0.0
        return cls(inputs, residual, torch.randn(hidden, generator=made).to(dtype))


def check_quantised(emulation: Emulation, kernel: str, given: Rows, scale: torch.Tensor | None) -> None:
    """Compare the output, its scales and the sum with the residual of one norm on all ranks.

    Args:
        emulation: The ranks.
        kernel: A norm of `FUSED_EMULATED`. One without "push" gets the sum of the inputs as its input.
        given: Its tensors.
        scale: One float32 for the tensor; None for one of each row, which only 8 bits have.

    Raises:
        WrongResultError: A result has other bits.
    """
    world, (rows, hidden) = emulation.world_size, given.residual.shape
    reduced = reduce_in_rank_order(given.inputs, ReduceOperation.SUM)
    normed, total = add_rms_norm(reduced, given.residual, given.weight, _EPS)
    if kernel.endswith("fp8"):
        quantised, scales = quantised_rows(normed, scale)
        # A scale that is given is not written.
        written = torch.full((rows, 1), _GARBAGE, dtype=torch.int32) if scale is not None else scales
    else:
        assert scale is not None
        quantised, written = blocks_quantised(normed, scale)
    memory = emulation.memory
    emulation.begin()
    inputs = given.inputs if kernel.startswith("push") else [reduced] * world
    first = [memory.put(each) for each in inputs]
    shared = [[memory.put(each)] * world for each in (given.residual, given.weight)]
    outputs, totals, scales_out = (
        [_garbage(emulation, right.nbytes) for _ in range(world)] for right in (quantised, total, written)
    )
    of_tensor = [0 if scale is None else memory.put(scale)] * world
    tables = [first, *shared, outputs, totals]
    arguments = [u64(memory.table(each)) for each in tables]
    arguments += [u32(rows), u32(hidden), struct.pack("<f", _EPS)]
    arguments += [u64(memory.table(each)) for each in (of_tensor, scales_out)]
    lanes = kernel_layout.GROUP_LANES
    emulation.launch(kernel, rows * lanes, arguments, fewest=lanes)
    what = f"{kernel} of {rows} x {hidden}, {'one scale' if scale is not None else 'a scale per row'}"
    for name, places, right in (
        ("sums", totals, total),
        ("scales", scales_out, written),
        ("output", outputs, quantised),
    ):
        for rank, place in enumerate(places):
            expect_equal(
                memory.get(place, right.numel(), right.dtype), right, f"{what}: {name} of rank {rank}"
            )


def check_finalize(emulation: Emulation, tokens: int, hidden: int, k: int, *, has_shared: bool) -> None:
    """Compare the sums of experts of each rank, and those of all ranks, with torch.

    Raises:
        WrongResultError: A sum has other bits.
    """
    dtype, world, memory = emulation.dtype, emulation.world_size, emulation.memory
    made = torch.Generator().manual_seed(hidden + k)
    count = 1 + hidden % 7
    ranks, sums = [], []
    for rank in range(world):
        outputs = random_words(count * hidden, dtype, hidden + rank).view(count, hidden)
        rows = torch.randint(-1, count, (tokens, k), generator=made, dtype=torch.int32)
        weights = torch.rand(tokens, k, generator=made)
        shared = torch.randn(tokens, hidden, generator=made).to(dtype) if has_shared else None
        ranks.append((outputs, rows, weights, shared))
        sums.append(finalized(outputs, rows, weights, shared))
    for kernel in FINALIZE:
        emulation.begin()
        tables = [
            [0 if each is None else memory.put(each) for each in column]
            for column in zip(*ranks, strict=True)
        ]
        found = [_garbage(emulation, sums[0].nbytes) for _ in range(world)]
        arguments = [u64(memory.table(each)) for each in (*tables, found)]
        arguments += [u32(each) for each in (tokens, hidden, k, count)]
        emulation.launch(kernel, tokens * hidden * dtype.itemsize // kernel_layout.VECTOR_BYTES, arguments)
        for rank, place in enumerate(found):
            right = expected_sum(sums if kernel.startswith("push") else sums[rank : rank + 1])
            what = f"{kernel} of {tokens} x {hidden}, {k} experts, rank {rank}"
            expect_equal(memory.get(place, right.numel(), dtype), right, what)


def _garbage(emulation: Emulation, nbytes: int) -> int:
    """Return memory that holds no result of an earlier call."""
    words = -(-nbytes // 4)
    address = emulation.memory.room(4 * words)
    emulation.driver.memset_d32(address, _GARBAGE, words, emulation.stream)
    return address


def check_all(
    emulation: Emulation, norms: Sequence[tuple[int, int]], sums: Sequence[tuple[int, int, int]]
) -> int:
    """Compare every kernel of `FUSED_EMULATED` with every shape that it serves; return the number of calls."""
    calls = 0
    for rows, hidden in norms:
        given = Rows.of(emulation, rows, hidden)
        for kernel in (*FUSED, "add_rms_norm"):
            if kernel in FUSED and not emulation.serves(kernel, rows, hidden):
                continue
            check_quantised(emulation, f"{kernel}_fp8", given, torch.tensor([0.0123]))
            check_quantised(emulation, f"{kernel}_fp8", given, None)
            check_quantised(emulation, f"{kernel}_nvfp4", given, torch.tensor([300.0]))
            calls += 3
    for tokens, hidden, k in sums:
        for has_shared in (True, False):
            check_finalize(emulation, tokens, hidden, k, has_shared=has_shared)
            calls += len(FINALIZE)
    if any(emulation.failures()):
        raise AssertionError(f"error records: {emulation.failures()}")
    return calls


def fused_of_one_variant(
    driver: Gpu,
    world: int,
    dtype: str,
    cubin: Cubin,
    *,
    norms: Sequence[tuple[int, int]] = NORMS,
    sums: Sequence[tuple[int, int, int]] = SUMS_OF_EXPERTS,
    deadline_s: float = 2.0,
) -> int:
    """Compare all calls for one world size and dtype; return how many there were."""
    largest = max(rows * hidden for rows, hidden in norms)
    emulation = Emulation(
        driver, world, dtype, partial(cubin, world, dtype), largest=largest, deadline_s=deadline_s
    )
    try:
        return check_all(emulation, norms, sums)
    except WrongResultError as error:
        error.add_note(f"error records: {emulation.failures()}")
        raise
    finally:
        emulation.close()
