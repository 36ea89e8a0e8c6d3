"""Conformance of what a communicator refuses: each call must raise UsageError before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from coordinator.testing.conformance import Checker

# Calls that must be refused, by `METHOD(mistake)`.
Attempts: TypeAlias = dict[str, Callable[[], object]]


def check_refusals(check: Checker) -> None:
    """Check that bad arguments raise UsageError before anything is sent, and that the group stays usable."""
    t = check.inputs.own((2 * check.world_size, 3), torch.float32)
    overlapping = t[:1].expand(4, 3)
    attempts = _reductions(check, t, overlapping) | _moves(check, t, overlapping) | _exchanges(check, t)
    attempts |= _fused(check, t)
    if check.world_size > 1:
        attempts |= _between_ranks(check, t, overlapping)
    check.check_refusals(attempts)


def _wrong_ranks(method: str, size: int, call: Callable[[Any], object]) -> Attempts:
    """Return calls of `method` with values that are no rank in a group of `size`."""
    return {
        f"{method}(rank {rank!r})": lambda rank=rank: call(rank)  # type: ignore[misc]
        for rank in (size, -1, True, 0.0, "0")
    }


def _reductions(check: Checker, t: torch.Tensor, overlapping: torch.Tensor) -> Attempts:
    it: Any = check.communicator
    size, device = check.world_size, check.communicator.device
    whole, flat = t.int(), t.view(-1)
    into = it.reduce_scatterv_into_output
    negative = (2 * size + 1, -1, *(0,) * (size - 2))
    folded = torch.empty_like(t[:1]).expand(2, 3)
    return {
        "all_reduce(a list)": lambda: it.all_reduce([1.0]),
        "all_reduce(a sparse tensor)": lambda: it.all_reduce(torch.eye(2, device=device).to_sparse()),
        "all_reduce(a tensor elsewhere)": lambda: it.all_reduce(torch.empty(3, device="meta")),
        "all_reduce(an unknown op)": lambda: it.all_reduce(t, "xor"),
        "all_reduce(MEAN of integers)": lambda: it.all_reduce(whole, "mean"),
        "all_reduce(MIN of complex)": lambda: it.all_reduce(torch.complex(t, t), "min"),
        "all_reduce(timeout_s 0)": lambda: it.all_reduce(t, timeout_s=0),
        "all_reduce(timeout_s NaN)": lambda: it.all_reduce(t, timeout_s=float("nan")),
        "all_reduce_(a tensor that overlaps itself)": lambda: it.all_reduce_(overlapping),
        "reduce_scatter(dim 2 of 2)": lambda: it.reduce_scatter(t, 2),
        "reduce_scatter(dim -3 of 2)": lambda: it.reduce_scatter(t, -3),
        "reduce_scatter(dim True)": lambda: it.reduce_scatter(t, True),
        "reduce_scatter(dim 0.0)": lambda: it.reduce_scatter(t, 0.0),
        "reduce_scatterv(too few sizes)": lambda: it.reduce_scatterv(t, 0, (2,) * (size - 1)),
        "reduce_scatterv(a negative size)": lambda: it.reduce_scatterv(t, 0, negative),
        "reduce_scatterv(sizes that add up to more)": lambda: it.reduce_scatterv(t, 0, (3,) * size),
        "reduce_scatterv(sizes 2)": lambda: it.reduce_scatterv(t, 0, 2),
        "reduce_scatterv_into_output(another shape)": lambda: into(t, torch.empty_like(t[:1]), 0),
        "reduce_scatterv_into_output(another dtype)": lambda: into(t, torch.empty_like(whole[:2]), 0),
        "reduce_scatterv_into_output(an output in the input)": lambda: into(t, t[1:3], 0),
        "reduce_scatterv_into_output(an output that overlaps itself)": lambda: into(t, folded, 0),
        "reduce_scatterv_into_output(sizes that add up to more)": lambda: into(t, t.clone(), 0, (9,) * size),
        "all_reduce_into_output(another shape)": lambda: it.all_reduce_into_output(t, t[1:].clone()),
        "all_reduce_into_output(another dtype)": lambda: it.all_reduce_into_output(t, whole.clone()),
        "all_reduce_into_output(an output beside its input)": lambda: it.all_reduce_into_output(
            flat[1:], flat[:-1]
        ),
        "all_reduce_into_output(no tensor)": lambda: it.all_reduce_into_output(t, None),
        "all_reduce_into_output(an output elsewhere)": lambda: it.all_reduce_into_output(t, t.to("meta")),
        **_wrong_ranks("reduce", size, lambda rank: it.reduce(t, rank)),
        "reduce(an unknown op)": lambda: it.reduce(t, 0, "xor"),
        "reduce(MEAN of integers)": lambda: it.reduce(whole, 0, "mean"),
    }


def _fused(check: Checker, t: torch.Tensor) -> Attempts:
    it: Any = check.communicator
    norm, finalize = it.all_reduce_add_rms_norm_fp8, it.moe_finalize_all_reduce
    blocks, wide = it.all_reduce_add_rms_norm_nvfp4, t.new_ones((2, 16))
    weight, one = t[0].clone(), torch.ones((), device=t.device)
    rows, factors = torch.zeros((2, 2), dtype=torch.int32, device=t.device), t.new_ones((2, 2))
    return {
        "all_reduce_add_rms_norm_fp8(a row)": lambda: norm(weight, weight, weight, 1e-6),
        "all_reduce_add_rms_norm_fp8(float64)": lambda: norm(t.double(), t.double(), weight.double(), 1e-6),
        "all_reduce_add_rms_norm_fp8(another residual)": lambda: norm(t, t[:1], weight, 1e-6),
        "all_reduce_add_rms_norm_fp8(another weight)": lambda: norm(t, t, weight[:2], 1e-6),
        "all_reduce_add_rms_norm_fp8(a negative eps)": lambda: norm(t, t, weight, -1.0),
        "all_reduce_add_rms_norm_fp8(a scale of each row)": lambda: norm(t, t, weight, 1e-6, t[:, :1]),
        "all_reduce_add_rms_norm_fp8(a scale of float64)": lambda: norm(t, t, weight, 1e-6, one.double()),
        "all_reduce_add_rms_norm_fp8(a number)": lambda: norm(t, t, weight, 1e-6, 0.5),
        "all_reduce_add_rms_norm_fp8(a scale elsewhere)": lambda: norm(t, t, weight, 1e-6, one.to("meta")),
        "all_reduce_add_rms_norm_fp8(timeout_s 0)": lambda: norm(t, t, weight, 1e-6, timeout_s=0),
        "all_reduce_add_rms_norm_nvfp4(parts of a block)": lambda: blocks(t, t, weight, 1e-6, one),
        "all_reduce_add_rms_norm_nvfp4(no scale)": lambda: blocks(wide, wide, wide[0], 1e-6, None),
        "all_reduce_add_rms_norm_nvfp4(two scales)": lambda: blocks(wide, wide, wide[0], 1e-6, one.expand(2)),
        "all_reduce_add_rms_norm_nvfp4(another residual)": lambda: blocks(wide, wide[:1], wide[0], 1e-6, one),
        "moe_finalize_all_reduce(a row)": lambda: finalize(weight, rows, factors),
        "moe_finalize_all_reduce(float64)": lambda: finalize(t.double(), rows, factors),
        "moe_finalize_all_reduce(rows of int64)": lambda: finalize(t, rows.long(), factors),
        "moe_finalize_all_reduce(rows of one expert)": lambda: finalize(t, rows[0], factors[0]),
        "moe_finalize_all_reduce(other weights)": lambda: finalize(t, rows, factors[:1]),
        "moe_finalize_all_reduce(weights of float64)": lambda: finalize(t, rows, factors.double()),
        "moe_finalize_all_reduce(another addend)": lambda: finalize(t, rows, factors, t[:1]),
        "moe_finalize_all_reduce(an addend of float64)": lambda: finalize(t, rows, factors, t[:2].double()),
        "moe_finalize_all_reduce(no tensor)": lambda: finalize(t, rows, None),
        "moe_finalize_all_reduce(timeout_s NaN)": lambda: finalize(t, rows, factors, timeout_s=float("nan")),
    }


def _moves(check: Checker, t: torch.Tensor, overlapping: torch.Tensor) -> Attempts:
    it: Any = check.communicator
    size = check.world_size
    return {
        "all_gather(dim 2 of 2)": lambda: it.all_gather(t, 2),
        "all_gather(no tensor)": lambda: it.all_gather(None),
        "all_gatherv(other sizes than its own)": lambda: it.all_gatherv(t, 0, (2 * size + 1,) * size),
        "all_gatherv(too many sizes)": lambda: it.all_gatherv(t, 0, (2 * size,) * (size + 1)),
        "all_gatherv(numbers)": lambda: it.all_gatherv([1, 2]),
        "all_gatherv(nothing)": lambda: it.all_gatherv(None),
        **_outputs(it, t, size),
        **_wrong_ranks("gather", size, lambda rank: it.gather(t, rank)),
        **_wrong_ranks("broadcast", size, lambda rank: it.broadcast(t, rank)),
        "broadcast(a tensor that overlaps itself)": lambda: it.broadcast(overlapping),
    }


def _outputs(it: Any, t: torch.Tensor, size: int) -> Attempts:
    gather, exchange = it.all_gatherv_into_output, it.all_to_all_into_output
    whole = t.new_empty((size * len(t), 3))
    folded = t.new_empty((1, 3)).expand(size * len(t), 3)
    return {
        "all_gatherv_into_output(another shape)": lambda: gather(t, whole[1:]),
        "all_gatherv_into_output(another dtype)": lambda: gather(t, whole.int()),
        "all_gatherv_into_output(an output elsewhere)": lambda: gather(t, whole.to("meta")),
        "all_gatherv_into_output(an output that overlaps itself)": lambda: gather(t, folded),
        "all_gatherv_into_output(no output)": lambda: gather(t, None),
        "all_gatherv_into_output(an input across two parts)": lambda: gather(whole[1:3], whole[: 2 * size]),
        "all_gatherv_into_output(other sizes than its own)": lambda: gather(t, whole, 0, (1,) * size),
        "all_to_all_into_output(another shape)": lambda: exchange(t, t[1:].clone()),
        "all_to_all_into_output(another dtype)": lambda: exchange(t, t.int()),
        "all_to_all_into_output(its input)": lambda: exchange(t, t),
        "all_to_all_into_output(a list)": lambda: exchange([t], t.clone()),
    }


def _exchanges(check: Checker, t: torch.Tensor) -> Attempts:
    it: Any = check.communicator
    me, size = check.rank, check.world_size
    ones, twos, other = (1,) * size, (2,) * size, (me + 1) % size
    return {
        **_wrong_ranks("scatter", size, lambda rank: it.scatter(t.clone(), t, rank)),
        "scatter(no output)": lambda: it.scatter(None, t, me),
        "scatter(no input)": lambda: it.scatter(t, None, me),
        "scatter(an input of another shape)": lambda: it.scatter(t[:1].clone(), t, me),
        "scatter(an input of another dtype)": lambda: it.scatter(t[:2].int(), t, me),
        "scatter(an output in the input)": lambda: it.scatter(t[:2], t, me),
        "scatter(an output that overlaps itself)": lambda: it.scatter(t[:1].expand(2, 3), t, other),
        "scatter(other sizes than its own)": lambda: it.scatter(t.clone(), t, me, 0, (2 * size + 1,) * size),
        "scatter(too few sizes)": lambda: it.scatter(t.clone(), t, me, 0, (2 * size,) * (size - 1)),
        "scatter(dim 2 of 2)": lambda: it.scatter(t.clone(), t, me, 2),
        "all_to_all(no tensor)": lambda: it.all_to_all([t]),
        "all_to_all(dim 2 of 2)": lambda: it.all_to_all(t, 2),
        "all_to_all(sizes to send alone)": lambda: it.all_to_all(t, 0, twos),
        "all_to_all(sizes to receive alone)": lambda: it.all_to_all(t, 0, None, twos),
        "all_to_all(sizes that add up to less)": lambda: it.all_to_all(t, 0, ones, ones),
        "all_to_all(too many sizes)": lambda: it.all_to_all(t, 0, twos, (2,) * (size + 1)),
        "all_to_all(a negative size)": lambda: it.all_to_all(t, 0, twos, (-2,) * size),
        "all_to_all(another size to itself than from itself)": lambda: it.all_to_all(t, 0, twos, ones),
    }


def _between_ranks(check: Checker, t: torch.Tensor, overlapping: torch.Tensor) -> Attempts:
    """Return calls that must be refused where there are several ranks."""
    it: Any = check.communicator
    me, size = check.rank, check.world_size
    peer, odd = (me + 1) % size, torch.ones(size + 1, device=t.device)
    return {
        "reduce_scatter(an uneven split)": lambda: it.reduce_scatter(odd),
        "all_to_all(an uneven split)": lambda: it.all_to_all(odd),
        **_wrong_ranks("send", size, lambda rank: it.send(t, rank)),
        "send(itself)": lambda: it.send(t, me),
        "isend(no tensor)": lambda: it.isend(1, peer),
        "isend(timeout_s -1)": lambda: it.isend(t, peer, timeout_s=-1),
        **_wrong_ranks("recv", size, lambda rank: it.recv((2,), t.dtype, rank)),
        "recv(itself)": lambda: it.recv((2,), t.dtype, me),
        "recv(a negative size)": lambda: it.recv((-1,), t.dtype, peer),
        "recv(size 3)": lambda: it.recv(3, t.dtype, peer),
        "recv(no dtype)": lambda: it.recv((2,), "float32", peer),
        "irecv(a tensor that overlaps itself)": lambda: it.irecv(overlapping, peer),
    }
