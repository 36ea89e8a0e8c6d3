"""Expert-parallel exchange of tokens: each token to the ranks of its experts, and the sum of their results back.

Two forms with the same contract: *all-gather*, where every rank gets every token and the results are
reduce-scattered, and *all-to-all*, where a token goes only to ranks that have one of its experts, once to each.
`choose_form` decides from facts that all ranks share. See `DESIGN.md`, *Expert parallel*.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

import torch

from device_comm import checks
from device_comm.base import DeviceCommunicator
from device_comm.reduction import accumulation_dtype
from shm_broadcast.errors import UsageError

# Up to so many tokens of all ranks together an all-gather is chosen: its calls are fewer. Shared memory, 4 ranks on
# 2 busy cores, 4096 bytes a token, 2 of 16 experts each, dispatch and combine, all-gather and all-to-all: 64 tokens
# 4.9 and 7.8 ms, 256 tokens 8.6 and 11.5 ms, 512 tokens 19.1 and 19.0 ms, 1024 tokens 35 and 30 ms.
FEW_TOKENS: Final = 256
# An all-to-all must save at least a quarter of the rows: it has more calls, and copies rows into the order of ranks.
MOST_ROWS: Final = 0.75

_SIGNED_INTEGERS: Final = (torch.int8, torch.int16, torch.int32, torch.int64)


class DispatchForm(enum.Enum):
    """How tokens come to their experts."""

    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A form, and why."""

    form: DispatchForm
    reason: str


def choose_form(tokens: Sequence[int], topk: int, capacity: int | None, *, is_static: bool) -> Choice:
    """Choose how tokens travel; a pure function of what all ranks know, so that all choose alike.

    Args:
        tokens: How many tokens each rank holds.
        topk: How many experts a token has.
        capacity: How many rows each rank can send to each other, if that is stated.
        is_static: Whether nothing may depend on where tokens go, as in a graph.
    """
    ranks, total = len(tokens), sum(tokens)
    if ranks == 1:
        return Choice(DispatchForm.ALL_GATHER, "a group of one has every expert")
    if total <= FEW_TOKENS:
        return Choice(DispatchForm.ALL_GATHER, f"{total} tokens are at most {FEW_TOKENS}")
    if capacity is not None:
        if ranks * capacity >= MOST_ROWS * total:
            return Choice(
                DispatchForm.ALL_GATHER,
                f"{ranks} times the capacity of {capacity} rows saves little of {total} tokens",
            )
        return Choice(
            DispatchForm.ALL_TO_ALL, f"{ranks} times the capacity of {capacity} rows, of {total} tokens"
        )
    if is_static:
        return Choice(
            DispatchForm.ALL_GATHER, "without a stated capacity a graph must have room for every token"
        )
    share = 1 - (1 - 1 / ranks) ** topk
    if share >= MOST_ROWS:
        return Choice(
            DispatchForm.ALL_GATHER,
            f"{share:.0%} of all tokens have one of {topk} experts on a rank of {ranks}",
        )
    return Choice(
        DispatchForm.ALL_TO_ALL,
        f"only {share:.0%} of {total} tokens have one of {topk} experts on a rank of {ranks}",
    )


class ExpertPlacement:
    """Which rank has which expert; made by `GroupCoordinator.place_experts`, equal on all ranks.

    Attributes:
        num_experts: How many experts there are on all ranks.
        ranks: For each expert the rank in the group that has it.
        local_experts: The experts of this rank, ascending: `local_ids` count in this order.
    """

    def __init__(
        self, ranks: Sequence[int], rank_in_group: int, world_size: int, device: torch.device
    ) -> None:
        """Place expert e on rank `ranks[e]`.

        Raises:
            UsageError: There is no expert, or an entry is no rank in the group.
        """
        if not isinstance(ranks, Sequence) or isinstance(ranks, (str, bytes)) or not ranks:
            raise UsageError(f"the experts' ranks must hold one rank for each expert, not {ranks!r}")
        self.ranks: tuple[int, ...] = tuple(
            checks.check_rank(rank, world_size, "an expert's rank") for rank in ranks
        )
        self.num_experts: int = len(self.ranks)
        self.world_size = world_size
        self.rank_in_group = rank_in_group
        self.device = device
        self.local_experts: tuple[int, ...] = tuple(
            each for each, rank in enumerate(self.ranks) if rank == rank_in_group
        )
        local = [-1] * (self.num_experts + 1)
        for index, expert in enumerate(self.local_experts):
            local[expert] = index
        # Expert -1, which is none, finds the entry behind the last: nobody's.
        self.owners: torch.Tensor = torch.tensor([*self.ranks, world_size], device=device)
        self.local: torch.Tensor = torch.tensor(local, device=device)

    def __repr__(self) -> str:
        """Say how many experts there are, and how many here."""
        return f"<ExpertPlacement of {self.num_experts} experts, {len(self.local_experts)} on this rank>"


def contiguous_ranks(num_experts: int, world_size: int) -> list[int]:
    """Return each expert's rank: blocks in rank order, the first ranks with one more where they are uneven."""
    size, longer = divmod(num_experts, world_size)
    return [rank for rank in range(world_size) for _ in range(size + (rank < longer))]


@dataclasses.dataclass(frozen=True, eq=False)
class RoutedTokens:
    """What `dispatch` brought to this rank: rows for its experts, of which some may be no tokens of theirs.

    A row is a token of some rank; in the all-gather form, and as padding up to a stated capacity, there are rows that
    need no work: all of their `local_ids` are -1, and `combine` does not look at their results.

    Attributes:
        hidden_states: [rows, hidden].
        topk_ids: [rows, k]: the experts of each row, numbered as in the call; -1 is none.
        topk_weights: [rows, k], as they were given, or None.
        extra_tensors: More tensors with one row for each row, in the order of the call.
        local_ids: [rows, k] int64: the experts as indices into `placement.local_experts`, -1 for those elsewhere.
        placement: Which rank has which expert.
        choice: The form that was taken, and why.
        lost: [tokens of this rank] bool, where capacity was stated or a graph is captured, else None: tokens that did
            not reach all of their experts. Their results are NaN.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    extra_tensors: list[torch.Tensor]
    local_ids: torch.Tensor
    placement: ExpertPlacement
    choice: Choice
    lost: torch.Tensor | None
    _route: _Route


@dataclasses.dataclass(frozen=True, eq=False)
class _Route:
    """How rows find back: `source` holds for each row sent the token that it is; one past the last is padding."""

    counts: tuple[int, ...]
    tokens: int
    source: torch.Tensor | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    is_padded: bool = False
    is_everywhere: torch.Tensor | None = None


# --- dispatch ---------------------------------------------------------------------------------------------------


def check_routing(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    extra_tensors: Sequence[torch.Tensor],
    placement: ExpertPlacement,
    *,
    is_static: bool,
) -> None:
    """Raise unless the arguments of a routed dispatch fit each other. Nothing was sent.

    On accelerators ids are looked at only where the host may wait for the device, so not if `is_static`.

    Raises:
        UsageError: They do not.
    """
    device = placement.device
    for tensor in (
        hidden_states,
        topk_ids,
        *extra_tensors,
        *(() if topk_weights is None else (topk_weights,)),
    ):
        checks.check_tensor(tensor, device, "dispatch")
        if tensor.dim() == 0 or tensor.shape[0] != hidden_states.shape[0]:
            raise UsageError(
                f"dispatch: every tensor needs one row for each of the {hidden_states.shape[:1].numel()} tokens, "
                f"got shape {tuple(tensor.shape)}"
            )
    if topk_ids.dim() != 2 or topk_ids.shape[1] == 0 or topk_ids.dtype not in _SIGNED_INTEGERS:
        raise UsageError(
            f"dispatch: topk_ids must be signed integers of shape [tokens, k], not {topk_ids.dtype} of shape "
            f"{tuple(topk_ids.shape)}"
        )
    if topk_weights is not None and (
        topk_weights.shape != topk_ids.shape or not topk_weights.is_floating_point()
    ):
        raise UsageError(
            f"dispatch: topk_weights must be floating and of the shape of topk_ids, {tuple(topk_ids.shape)}, not "
            f"{topk_weights.dtype} of shape {tuple(topk_weights.shape)}"
        )
    if device.type == "cpu" or not is_static:
        wrong = _out_of_range(topk_ids, placement).nonzero()
        if len(wrong):
            token, slot = wrong[0].tolist()
            raise UsageError(
                f"dispatch: topk_ids[{token}, {slot}] is {topk_ids[token, slot].item()}, but experts go from 0 to "
                f"{placement.num_experts - 1}, and -1 is none"
            )


def _out_of_range(topk_ids: torch.Tensor, placement: ExpertPlacement) -> torch.Tensor:
    return (topk_ids < -1) | (topk_ids >= placement.num_experts)


def dispatch(
    communicator: DeviceCommunicator,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    extra_tensors: Sequence[torch.Tensor],
    placement: ExpertPlacement,
    counts: tuple[int, ...],
    choice: Choice,
    capacity: int | None,
    *,
    is_static: bool,
) -> RoutedTokens:
    """Bring tokens to the ranks of their experts. Collective; the arguments have been checked.

    Args:
        communicator: Moves the rows.
        hidden_states: [tokens, hidden].
        topk_ids: [tokens, k].
        topk_weights: [tokens, k], or None.
        extra_tensors: Moved alike.
        placement: Which rank has which expert.
        counts: Tokens of each rank.
        choice: Of `choose_form`, or the caller's; equal on all ranks.
        capacity: Rows that each rank sends to each other in the all-to-all form, padded; None sends what there is.
        is_static: Whether the host may not wait for the device.
    """
    weights = [] if topk_weights is None else [topk_weights]
    lost = None
    ids = topk_ids
    if is_static:
        wrong = _out_of_range(topk_ids, placement)
        ids, lost = topk_ids.masked_fill(wrong, -1), wrong.any(1)
    if choice.form is DispatchForm.ALL_GATHER:
        route = _Route(counts, counts[placement.rank_in_group])
        moved = communicator.all_gatherv([hidden_states, ids, *weights, *extra_tensors], 0, counts)
    else:
        route, overflow = _plan(communicator, ids, placement, counts, capacity)
        if overflow is not None:
            lost = overflow if lost is None else lost | overflow
        moved = [
            communicator.all_to_all(_picked(tensor, route, filler), 0, route.sent, route.received)
            for tensor, filler in zip(
                [hidden_states, ids, *weights, *extra_tensors],
                [0, -1, *([0] * (len(weights) + len(extra_tensors)))],
                strict=True,
            )
        ]
    hidden, ids, rest = moved[0], moved[1], moved[2:]
    return RoutedTokens(
        hidden_states=hidden,
        topk_ids=ids,
        topk_weights=rest.pop(0) if weights else None,
        extra_tensors=rest,
        local_ids=placement.local[ids.long()],
        placement=placement,
        choice=choice,
        lost=lost,
        _route=route,
    )


def _plan(
    communicator: DeviceCommunicator,
    ids: torch.Tensor,
    placement: ExpertPlacement,
    counts: tuple[int, ...],
    capacity: int | None,
) -> tuple[_Route, torch.Tensor | None]:
    """Return which rows go where, by rank and in the order of tokens, and which tokens found no room."""
    tokens, ranks = ids.shape[0], placement.world_size
    # One column more: for those that go nowhere.
    hits = torch.zeros((tokens, ranks + 1), dtype=torch.bool, device=ids.device)
    hits = hits.scatter_(1, placement.owners[ids.long()], value=True)[:, :ranks]
    is_everywhere = hits.all(1) if ids.shape[1] >= ranks else None
    if capacity is None:
        own = hits.sum(0).view(1, ranks)
        table = communicator.all_gather(own, 0).tolist()
        sent = tuple(table[placement.rank_in_group])
        received = tuple(row[placement.rank_in_group] for row in table)
        source = hits.t().nonzero()[:, 1]
        return _Route(counts, tokens, source, sent, received, is_everywhere=is_everywhere), None
    place = hits.cumsum(0) - 1
    fits = hits & (place < capacity)
    slots = (place + torch.arange(ranks, device=ids.device) * capacity).masked_fill(~fits, ranks * capacity)
    source = torch.full((ranks * capacity + 1,), tokens, device=ids.device)
    source.scatter_(0, slots.flatten(), torch.arange(tokens, device=ids.device).repeat_interleave(ranks))
    even = (capacity,) * ranks
    overflow = (hits & ~fits).any(1)
    return _Route(counts, tokens, source[:-1], even, even, True, is_everywhere), overflow


def _picked(tensor: torch.Tensor, route: _Route, filler: int) -> torch.Tensor:
    """Return the rows to send, those of padding filled with `filler`."""
    assert route.source is not None
    rows = tensor.detach()
    # What torch can only move is picked as bytes.
    is_byte_float = rows.itemsize == 1 and rows.is_floating_point()
    flat = rows.contiguous().view(torch.uint8) if is_byte_float else rows
    if route.is_padded:
        flat = torch.cat([flat, flat.new_full((1, *flat.shape[1:]), filler)])
    return flat.index_select(0, route.source).view(rows.dtype)


# --- combine ----------------------------------------------------------------------------------------------------


def combine(
    communicator: DeviceCommunicator, hidden_states: torch.Tensor, routed: RoutedTokens
) -> torch.Tensor:
    """Sum the results of each token's experts on its own rank. Collective.

    The ranks' parts are added in rank order, narrow floats in float32 with one rounding, in either form.

    Args:
        communicator: The one that dispatched.
        hidden_states: [rows, hidden]: for each row the sum of its experts here, weighted. Or [rows, k, hidden]: the
            result of each expert, which is weighted here, in float32, in the order of `topk_ids`, and rounded once.
        routed: What `dispatch` returned.

    Returns:
        [tokens of this rank, hidden], new; 0 for a token without experts.

    Raises:
        UsageError: The shape, the dtype or the group does not fit. Nothing was sent.
    """
    _check_results(communicator, hidden_states, routed)
    rows = hidden_states.detach()
    if rows.dim() == 3:
        rows = _weighted(rows, routed)
    route = routed._route  # noqa: SLF001 - a record of this module's own
    if route.source is None:
        # A rank may leave rows that are not for it as they are, of any content.
        is_here = (routed.local_ids >= 0).any(1, keepdim=True)
        total = communicator.reduce_scatterv(torch.where(is_here, rows, rows.new_zeros(())), 0, route.counts)
    else:
        back = communicator.all_to_all(rows.contiguous(), 0, route.received, route.sent)
        total = _sum(back, route)
    if routed.lost is not None:
        total = total.masked_fill(routed.lost.unsqueeze(1), torch.nan)
    return total


def _check_results(
    communicator: DeviceCommunicator, hidden_states: torch.Tensor, routed: RoutedTokens
) -> None:
    checks.check_tensor(hidden_states, communicator.device, "combine")
    placement, rows = routed.placement, routed.topk_ids.shape
    if (placement.rank_in_group, placement.world_size) != (
        communicator.rank_in_group,
        communicator.world_size,
    ):
        raise UsageError(f"combine: these tokens were dispatched in another group, with {placement!r}")
    shape = tuple(hidden_states.shape)
    if shape[:-1] not in ((rows[0],), tuple(rows)):
        raise UsageError(
            f"combine: expected the results of {rows[0]} rows as [rows, hidden], or of their {rows[1]} experts as "
            f"[rows, k, hidden], got shape {shape}"
        )
    if not hidden_states.is_floating_point() or hidden_states.itemsize == 1:
        raise UsageError(
            f"combine: results must be of 16 bits or more and floating, not {hidden_states.dtype}"
        )
    if hidden_states.dim() == 3 and routed.topk_weights is None:
        raise UsageError(
            "combine: results of single experts need the topk_weights that dispatch was not given"
        )


def _weighted(rows: torch.Tensor, routed: RoutedTokens) -> torch.Tensor:
    """Return for each row the weighted sum of its experts here, in the order of `topk_ids`."""
    assert routed.topk_weights is not None
    wide = accumulation_dtype(rows.dtype)
    total = torch.zeros((rows.shape[0], rows.shape[2]), dtype=wide, device=rows.device)
    for slot in range(rows.shape[1]):
        weight = routed.topk_weights[:, slot, None].to(wide)
        part = rows[:, slot].to(wide) * weight
        total += torch.where(routed.local_ids[:, slot, None] >= 0, part, part.new_zeros(()))
    return total.to(rows.dtype)


def _sum(back: torch.Tensor, route: _Route) -> torch.Tensor:
    """Return each token's sum over ranks, in rank order; a rank that did not get the token counts as 0."""
    assert route.source is not None
    # The last row takes what comes back as padding.
    total = back.new_zeros((route.tokens + 1, back.shape[1]), dtype=accumulation_dtype(back.dtype))
    start = 0
    for rank, count in enumerate(route.sent):
        index = route.source[start : start + count]
        rows = back[start : start + count].to(total.dtype)
        # No token is twice among the rows of one rank, so the order is that of the ranks also on a GPU.
        if rank == 0:
            total.index_copy_(0, index, rows)
        else:
            total.index_add_(0, index, rows)
        start += count
    total = total[:-1]
    # As the all-gather form gives it: a sum is -0 only where every rank has brought one.
    if route.is_everywhere is None:
        total += 0.0
    else:
        total += torch.where(route.is_everywhere, -0.0, 0.0).to(total.dtype).unsqueeze(1)
    return total.to(back.dtype)


__all__ = [
    "Choice",
    "DispatchForm",
    "ExpertPlacement",
    "RoutedTokens",
    "check_routing",
    "choose_form",
    "combine",
    "contiguous_ranks",
    "dispatch",
]
