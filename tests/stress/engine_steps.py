"""Steps of a stress life in which the ranks make what engines call: fused reductions, calls of experts, sub-groups."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from coordinator import DispatchForm, GroupCoordinator, ReduceOperation, RoutedTokens, rms_norm
from device_comm.fused.finalize import finalized
from device_comm.fused.fp4 import blocks_quantised
from device_comm.fused.fp8 import quantised_rows
from tests.stress.collective_steps import MAKERS
from tests.stress.model import MismatchError, Model, check_same, combined, joined

__all__ = ["CREATES", "STEPS"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-6


def _tokens(model: Model) -> int:
    return model.plan.choice((0, 1, 7, 60))


def norms(group: GroupCoordinator, model: Model) -> None:
    """Sum, add a residual and normalise each row, in 16 or 32 bits, in 8-bit or in 4-bit floats."""
    me, n, plan = group.rank_in_group, model.world_size, model.plan
    shape, dtype = (_tokens(model), plan.choice((16, 48, 1024))), plan.choice(FLOATS)
    inputs = [model.tensor(shape, dtype, rank) for rank in range(n)]
    residual, weight = model.tensor(shape, dtype, "residual"), model.tensor(shape[1:], dtype, "weight")
    total = model.reduced(ReduceOperation.SUM, inputs) + residual
    normed = rms_norm(total, weight, EPS)
    scale = torch.tensor([plan.uniform(0.01, 2.0)])
    given = (inputs[me], residual, weight, EPS)
    match plan.randrange(4):
        case 0:
            found: Any = group.all_reduce_add_rms_norm(*given)
            expected: tuple[torch.Tensor, ...] = (normed, total)
        case 1:
            found = group.all_reduce_add_rms_norm_fp8(*given)
            expected = (*quantised_rows(normed), total)
        case 2:
            found = group.all_reduce_add_rms_norm_fp8(*given, scale)
            expected = (*quantised_rows(normed, scale), total)
        case _:
            found = group.all_reduce_add_rms_norm_nvfp4(*given, scale)
            expected = (*blocks_quantised(normed, scale), total)
    check_same(found, expected, "all_reduce_add_rms_norm")


def finalize(group: GroupCoordinator, model: Model) -> None:
    """Sum what each rank's experts returned for each token, and that over the ranks."""
    me, n, plan = group.rank_in_group, model.world_size, model.plan
    tokens, hidden, dtype = _tokens(model), plan.choice((8, 300)), plan.choice(FLOATS)
    given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    for rank in range(n):
        count, k = plan.choice((0, 1, 40)), plan.randrange(1, 5)
        source = model.private(f"rows of rank {rank}")
        rows = [[source.randrange(-1, count) for _ in range(k)] for _ in range(tokens)]
        shared = model.tensor((tokens, hidden), dtype, "shared", rank) if plan.random() < 0.5 else None
        places = torch.tensor(rows, dtype=torch.int32).view(tokens, k)
        weights = model.tensor((tokens, k), torch.float32, "weights", rank)
        given.append((model.tensor((count, hidden), dtype, "experts", rank), places, weights, shared))
    expected = model.reduced(ReduceOperation.SUM, [finalized(*each) for each in given])
    check_same(group.moe_finalize_all_reduce(*given[me]), expected, "moe_finalize_all_reduce")


def to_all(group: GroupCoordinator, model: Model) -> None:
    """Send all tokens to all ranks, and give each rank the sum of what all have made of its own."""
    me, n, plan = group.rank_in_group, model.world_size, model.plan
    counts, hidden, dtype = [_tokens(model) for _ in range(n)], plan.choice((8, 300)), plan.choice(FLOATS)
    states = [model.tensor((count, hidden), dtype, "states", rank) for rank, count in enumerate(counts)]
    kind = model.dtype()
    extra = [model.tensor((count, 3), kind, "extra", rank) for rank, count in enumerate(counts)]
    parts = [model.tensor((sum(counts), hidden), dtype, "part", rank) for rank in range(n)]
    weights = [model.tensor((count, 2), torch.float32, "weights", rank) for rank, count in enumerate(counts)]
    ids = [model.tensor((count, 2), torch.int64, "ids", rank) for rank, count in enumerate(counts)]
    has_logits, is_stated, has_output = (plan.random() < 0.5 for _ in range(3))

    def call() -> None:
        if has_logits:
            found: Any = group.dispatch_router_logits(states[me], weights[me])
            check_same(found, (joined(states), joined(weights)), "dispatch of router logits")
        else:
            found = group.dispatch(states[me], weights[me], ids[me], False, [extra[me]])
            check_same(found[:3], (joined(states), joined(weights), joined(ids)), "dispatch")
            check_same(found[3], [joined(extra)], "extra tensors of dispatch")
        expected = model.reduced(ReduceOperation.SUM, parts).split(counts)[me]
        if has_output:
            output = torch.empty_like(expected)
            group.combine_into_output(parts[me], output)
            check_same(output, expected, "combine_into_output")
        else:
            check_same(group.combine(parts[me]), expected, "combine")

    if is_stated:
        with group.token_counts(counts):
            call()
    else:
        call()


def routed(group: GroupCoordinator, model: Model) -> None:
    """Send each token to the ranks of its experts, and give each rank the sums for its own tokens."""
    me, n, plan = group.rank_in_group, model.world_size, model.plan
    counts, hidden, dtype = [_tokens(model) for _ in range(n)], plan.choice((8, 300)), plan.choice(FLOATS)
    owners, k = [plan.randrange(n) for _ in range(plan.randrange(1, 3 * n))], plan.randrange(1, 4)
    states = [model.tensor((count, hidden), dtype, "states", rank) for rank, count in enumerate(counts)]
    weights = [model.tensor((count, k), torch.float32, "weights", rank) for rank, count in enumerate(counts)]
    ids = [_chosen_experts(model, rank, count, k, len(owners)) for rank, count in enumerate(counts)]
    form = plan.choice((None, DispatchForm.ALL_GATHER, DispatchForm.ALL_TO_ALL))
    placement = group.place_experts(owners)
    got = group.dispatch(states[me], weights[me], ids[me], experts=placement, form=form)
    if form is not None and got.choice.form is not form:
        raise MismatchError(f"dispatch took the form {got.choice.form}, not {form}")
    # By rank: which rank has each expert of each token. The last entry stands for -1, no expert.
    places = torch.tensor([*owners, -1])
    at = [places[each] for each in ids]
    is_by_rows = got.choice.form is DispatchForm.ALL_TO_ALL
    came = [(each == me).any(1) if is_by_rows else torch.ones(len(each), dtype=torch.bool) for each in at]
    _check_rows(got, came, states, weights, ids, owners, me)
    parts = [
        [model.tensor((count, hidden), dtype, "part", rank, src) for src, count in enumerate(counts)]
        for rank in range(n)
    ]
    found = group.combine(
        joined([part[rows] for part, rows in zip(parts[me], came, strict=True)]), routed=got
    )
    here = [(at[me] == rank).any(1, keepdim=True) for rank in range(n)]
    mine = [torch.where(here[rank], parts[rank][me], torch.zeros((), dtype=dtype)) for rank in range(n)]
    # Rows that come back are added here, in rank order; sums over all ranks go by host.
    reduce: Callable[..., torch.Tensor] = combined if is_by_rows else model.reduced
    check_same(found, reduce(ReduceOperation.SUM, mine), f"combine of {got.choice.form.value}")


def _chosen_experts(model: Model, rank: int, count: int, k: int, experts: int) -> torch.Tensor:
    """Return ids for each token of a rank, of which some are -1."""
    source = model.private(f"experts of rank {rank}")
    rows = [[source.randrange(-1, experts) for _ in range(k)] for _ in range(count)]
    return torch.tensor(rows, dtype=torch.int64).view(count, k)


def _check_rows(
    got: RoutedTokens,
    came: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    ids: Sequence[torch.Tensor],
    owners: Sequence[int],
    me: int,
) -> None:
    def rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return joined([each[chosen] for each, chosen in zip(tensors, came, strict=True)])

    own = [expert for expert, owner in enumerate(owners) if owner == me]
    local = torch.tensor([own.index(at) if at in own else -1 for at in range(len(owners))] + [-1])
    check_same(got.hidden_states, rows(states), "hidden states of a routed dispatch")
    check_same(got.topk_weights, rows(weights), "weights of a routed dispatch")
    check_same(got.topk_ids, rows(ids), "ids of a routed dispatch")
    check_same(got.local_ids, local[rows(ids)], "local ids of a routed dispatch")


def subgroups(group: GroupCoordinator, model: Model) -> None:
    """Create a group of some ranks, or groups by lists or colours; call each, and destroy it."""
    me, n, plan = group.rank_in_group, model.world_size, model.plan
    order = plan.sample(range(n), n)
    cut = plan.randrange(1, n)
    match plan.randrange(3):
        case 0:
            lists = [order[:cut]]
            part = group.create_subgroup(order[:cut])
        case 1:
            lists = [order[:cut], order[cut:]] if plan.random() < 0.7 else [order[cut:]]
            part = group.split_group(lists)
        case _:
            lists = [order[:cut], order[cut:]]
            part = group.split_group(color=int(me in lists[1]), key=order.index(me))
    mine = next((each for each in lists if me in each), None)
    if part is None or mine is None:
        check_same(part, mine, "group of a rank that is in none")
        return
    check_same(part.ranks, [group.ranks[rank] for rank in mine], "ranks of a sub-group")
    with part:
        inner = model.inner(f"part of {mine}", "".join(model.places[rank] for rank in mine))
        for _ in range(inner.plan.randrange(1, 4)):
            start, check = inner.plan.choice(MAKERS)(part, inner)
            check(start())
        part.barrier()  # a rank that leaves would end the calls of the others


STEPS = {
    "norms": (norms, 4),
    "finalize": (finalize, 3),
    "to_all": (to_all, 4),
    "routed": (routed, 5),
    "subgroups": (subgroups, 2),
}
"""By name: the step, and how often it is chosen in relation to others."""
CREATES = {"subgroups"}
"""The steps that create groups."""
