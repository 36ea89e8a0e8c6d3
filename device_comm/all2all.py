"""Expert-parallel exchange: send each token to the ranks of its experts, and sum the experts' results on its rank.

Two forms have the same contract. In the *all-gather* form every rank gets every token, and the results are
reduce-scattered. In the *all-to-all* form a token is sent once to each rank that has one of its experts. `choose_form`
decides from facts that all ranks share. See `DESIGN.md`, *Expert parallel*.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Final

import torch

from device_comm import checks
from device_comm.base import DeviceCommunicator
from device_comm.experts.exchange import ExchangedRows, ExchangeRequest, ExpertExchange
from device_comm.reduction import accumulation_dtype
from shm_broadcast.errors import UsageError

# Up to this many tokens of all ranks together, all-gather is chosen because it makes fewer calls. Measured for
# dispatch and combine over shared memory with 4 ranks on 2 busy cores, 4096 bytes per token, 2 of 16 experts each,
# all-gather against all-to-all: 64 tokens 4.9 and 7.8 ms, 256 tokens 8.6 and 11.5 ms, 512 tokens 19.1 and 19.0 ms,
# 1024 tokens 35 and 30 ms.
FEW_TOKENS: Final = 256
# All-to-all is chosen if it moves less than this share of the rows: it makes more calls and sorts rows by rank.
MOST_ROWS: Final = 0.75

_SIGNED_INTEGERS: Final = (torch.int8, torch.int16, torch.int32, torch.int64)


class DispatchForm(enum.Enum):
    """The collective that carries tokens to their experts."""

    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A form and the reason for it."""

    form: DispatchForm
    reason: str


def choose_form(
    tokens: Sequence[int], topk: int, capacity: int | None, *, is_static: bool, is_carried: bool = False
) -> Choice:
    """Choose the form of a dispatch: a pure function of facts that all ranks share.

    Args:
        tokens: Number of tokens on each rank.
        topk: Number of experts per token.
        capacity: Largest number of rows that a rank sends to each other rank; None if not stated.
        is_static: Whether shapes must not depend on the routing, as in a graph.
        is_carried: Whether the communicator's kernels carry an all-to-all of this capacity, in one launch each way.
    """
    gather, exchange = DispatchForm.ALL_GATHER, DispatchForm.ALL_TO_ALL
    ranks, total = len(tokens), sum(tokens)
    if ranks == 1:
        return Choice(gather, "a group of one has every expert")
    if is_carried and capacity is not None and ranks * capacity <= total:
        # Fewer calls than all-gather makes, and neither more rows sent nor more in the result.
        return Choice(
            exchange, f"kernels carry {ranks} times the capacity of {capacity} rows, of {total} tokens"
        )
    if total <= FEW_TOKENS:
        return Choice(gather, f"{total} tokens are at most {FEW_TOKENS}")
    if capacity is not None:
        rows = f"{ranks} times the capacity of {capacity} rows"
        if ranks * capacity >= MOST_ROWS * total:
            return Choice(gather, f"{rows} saves little of {total} tokens")
        return Choice(exchange, f"{rows}, of {total} tokens")
    if is_static:
        return Choice(gather, "without a stated capacity a graph must have room for every token")
    share = 1 - (1 - 1 / ranks) ** topk
    routed = f"tokens have one of {topk} experts on a rank of {ranks}"
    if share >= MOST_ROWS:
        return Choice(gather, f"{share:.0%} of all {routed}")
    return Choice(exchange, f"only {share:.0%} of {total} {routed}")


class ExpertPlacement:
    """The rank of each expert; created by `GroupCoordinator.place_experts`, equal on all ranks.

    Attributes:
        num_experts: Number of experts on all ranks.
        ranks: For each expert, the rank in the group that has it.
        local_experts: The experts of this rank, ascending. `local_ids` are indices into it.
    """

    def __init__(
        self, ranks: Sequence[int], rank_in_group: int, world_size: int, device: torch.device
    ) -> None:
        """Place expert e on rank `ranks[e]`.

        Raises:
            UsageError: `ranks` is empty, or an entry is not a rank in the group.
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
        # Expert -1 means "no expert" and selects the last entry, which belongs to no rank.
        self.owners: torch.Tensor = torch.tensor([*self.ranks, world_size], device=device)
        self.local: torch.Tensor = torch.tensor(local, device=device)

    def __repr__(self) -> str:
        """Return the number of experts, and how many are on this rank."""
        return f"<ExpertPlacement of {self.num_experts} experts, {len(self.local_experts)} on this rank>"


def contiguous_ranks(num_experts: int, world_size: int) -> list[int]:
    """Return each expert's rank: contiguous blocks in rank order. The first ranks get one more if uneven."""
    size, longer = divmod(num_experts, world_size)
    return [rank for rank in range(world_size) for _ in range(size + (rank < longer))]


@dataclasses.dataclass(frozen=True, eq=False)
class RoutedTokens:
    """The rows that `dispatch` brought to this rank, for its experts.

    A row is a token of some rank. The all-gather form, and padding up to a stated capacity, also bring rows that need
    no work: all their `local_ids` are -1, and `combine` ignores their results.

    Attributes:
        hidden_states: [rows, hidden].
        topk_ids: [rows, k]: the experts of each row, numbered as in the call; -1 means no expert.
        topk_weights: [rows, k] as passed to the call, or None.
        extra_tensors: Further tensors with the same rows, in the order of the call.
        local_ids: [rows, k] int64: indices into `placement.local_experts`, -1 for experts on other ranks.
        placement: The rank of each expert.
        choice: The form that was used, and why.
        lost: [tokens of this rank] bool: tokens that did not reach all of their experts, whose results are NaN. None
            unless a capacity or `max_rows` was stated or a graph is captured.
        received: [ranks] int32 on the device: how many rows came from each rank; they are the first of each rank's
            `capacity` rows, or with `max_rows` follow each other. None if neither was stated, or if a capacity was
            but all rows were gathered.
    """

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    extra_tensors: list[torch.Tensor]
    local_ids: torch.Tensor
    placement: ExpertPlacement
    choice: Choice
    lost: torch.Tensor | None
    received: torch.Tensor | None
    _route: _Route


@dataclasses.dataclass(frozen=True, eq=False)
class _Route:
    """How results return: `source` holds the token of each row sent; one past the last token means padding."""

    counts: tuple[int, ...]
    tokens: int
    source: torch.Tensor | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    is_padded: bool = False
    is_everywhere: torch.Tensor | None = None
    exchanged: ExchangedRows | None = None


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
    """Raise unless the arguments of a routed dispatch are consistent.

    On accelerators, checking the ids makes the host wait for the device, so they are not checked if `is_static`.

    Raises:
        UsageError: They are not. Nothing was sent, the group is intact.
    """
    device = placement.device
    weights = [] if topk_weights is None else [topk_weights]
    for tensor in (hidden_states, topk_ids, *extra_tensors, *weights):
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
    max_rows: int | None = None,
    *,
    is_static: bool,
    is_captured: bool = False,
) -> RoutedTokens:
    """Send tokens to the ranks of their experts. Collective; the caller has checked the arguments.

    With a capacity or `max_rows`, the all-to-all form goes through the communicator's `expert_exchange` if it carries
    the call. All ranks know alike whether it does.

    Args:
        communicator: The communicator that moves the rows.
        hidden_states: [tokens, hidden].
        topk_ids: [tokens, k].
        topk_weights: [tokens, k], or None.
        extra_tensors: Further tensors with one row per token.
        placement: The rank of each expert.
        counts: Number of tokens of each rank.
        choice: The result of `choose_form`, or the caller's choice; equal on all ranks.
        capacity: Rows, with padding, that a rank sends to each other rank in the all-to-all form. None sends no
            padding.
        max_rows: Rows of the result in the all-to-all form without a capacity; those that came are the first.
        is_static: Whether the host must not wait for the device.
        is_captured: Whether a graph is captured.

    Raises:
        UsageError: More than `max_rows` rows go to a rank. All ranks raise it and the group is intact, unless an
            `expert_exchange` carries the call: then the receiver finds it, and its next call raises it and the group
            is broken. Or `max_rows` cannot be captured here, as no `expert_exchange` carries the call or no call before
            the capture has built one; then nothing was sent.
    """
    weights = [] if topk_weights is None else [topk_weights]
    tensors = [hidden_states, *weights, *extra_tensors]
    if choice.form is DispatchForm.ALL_TO_ALL and (capacity is not None or max_rows is not None):
        request = _request(tensors, topk_ids, placement, counts, capacity, max_rows)
        exchange, obstacle = _kernels_for(communicator, request, may_build=not is_captured)
        if exchange is not None:
            choice = Choice(choice.form, f"{choice.reason}; by kernels")
            moved = exchange.dispatch(request, tensors, topk_ids, placement.owners, placement.local)
            return _exchanged(moved, bool(weights), placement, choice, counts)
        if max_rows is not None and is_captured:
            raise UsageError(f"dispatch: max_rows cannot be captured here: {obstacle}")
        choice = Choice(choice.form, f"{choice.reason}; without kernels: {obstacle}")
    return _by_collectives(
        *(communicator, tensors, topk_ids, placement, counts, choice, capacity, max_rows),
        is_weighted=bool(weights),
        is_static=is_static,
    )


def is_carried(
    communicator: DeviceCommunicator,
    tensors: Sequence[torch.Tensor],
    topk_ids: torch.Tensor,
    placement: ExpertPlacement,
    capacity: int,
    *,
    is_captured: bool,
) -> bool:
    """Return whether kernels carry an all-to-all of `capacity`; equal on all ranks.

    Collective at the first call of a group. During a capture nothing is built, so there are kernels only if a call
    before it has built them.

    Args:
        communicator: The communicator that moves the rows.
        tensors: All that move beside the ids, the hidden states first.
        topk_ids: [tokens, k].
        placement: The rank of each expert.
        capacity: Rows that a rank sends to each other rank.
        is_captured: Whether a graph is captured.
    """
    request = _request(tensors, topk_ids, placement, (), capacity, None)
    return _kernels_for(communicator, request, may_build=not is_captured)[0] is not None


def _kernels_for(
    communicator: DeviceCommunicator, request: ExchangeRequest, *, may_build: bool = True
) -> tuple[ExpertExchange | None, str]:
    """Return the kernels that carry a dispatch, or None and why; equal on all ranks."""
    exchange = communicator.expert_exchange(may_build=may_build)
    if exchange is None and not may_build:
        return None, "there were no kernels for it before the capture"
    if exchange is None:
        return None, "this communicator has no kernels for it"
    obstacle = exchange.why_not(request)
    return (None, obstacle) if obstacle else (exchange, "")


def _by_collectives(
    communicator: DeviceCommunicator,
    tensors: Sequence[torch.Tensor],
    topk_ids: torch.Tensor,
    placement: ExpertPlacement,
    counts: tuple[int, ...],
    choice: Choice,
    capacity: int | None,
    max_rows: int | None,
    *,
    is_weighted: bool,
    is_static: bool,
) -> RoutedTokens:
    """Dispatch by all-gathers or all-to-alls of the communicator.

    `tensors` are all that move beside the ids; the second holds the weights if `is_weighted`.
    """
    lost = None
    ids = topk_ids
    if is_static:
        wrong = _out_of_range(topk_ids, placement)
        ids, lost = topk_ids.masked_fill(wrong, -1), wrong.any(1)
    tensors = [tensors[0], ids, *tensors[1:]]
    if choice.form is DispatchForm.ALL_GATHER:
        route = _Route(counts, counts[placement.rank_in_group])
        moved = communicator.all_gatherv(tensors, 0, counts)
    else:
        route, overflow = _plan(communicator, ids, placement, counts, capacity, max_rows)
        if overflow is not None:
            lost = overflow if lost is None else lost | overflow
        moved = [
            communicator.all_to_all(_picked(tensor, route, filler), 0, route.sent, route.received)
            # A padding row has no expert.
            for tensor, filler in zip(tensors, (0, -1, *[0] * (len(tensors) - 2)), strict=True)
        ]
    if max_rows is not None:
        moved = [
            _lengthened(each, max_rows, filler)
            for each, filler in zip(moved, (0, -1, *[0] * (len(moved) - 2)), strict=True)
        ]
    hidden, ids, *rest = moved
    local_ids = placement.local[ids.long()]
    return RoutedTokens(
        hidden_states=hidden,
        topk_ids=ids,
        topk_weights=rest.pop(0) if is_weighted else None,
        extra_tensors=rest,
        local_ids=local_ids,
        placement=placement,
        choice=choice,
        lost=lost,
        received=_received(route, local_ids, max_rows),
        _route=route,
    )


def _request(
    tensors: Sequence[torch.Tensor],
    ids: torch.Tensor,
    placement: ExpertPlacement,
    counts: tuple[int, ...],
    capacity: int | None,
    max_rows: int | None,
) -> ExchangeRequest:
    return ExchangeRequest(
        row_bytes=tuple(math.prod(each.shape[1:]) * each.itemsize for each in tensors),
        topk=ids.shape[1],
        id_dtype=ids.dtype,
        experts=placement.num_experts,
        # A rank sends another at most one row for each of its tokens.
        capacity=max(1, *counts) if capacity is None else capacity,
        max_rows=max_rows,
    )


def _exchanged(
    moved: ExchangedRows,
    is_weighted: bool,
    placement: ExpertPlacement,
    choice: Choice,
    counts: tuple[int, ...],
) -> RoutedTokens:
    hidden, *rest = moved.tensors
    return RoutedTokens(
        hidden_states=hidden,
        topk_ids=moved.topk_ids,
        topk_weights=rest.pop(0) if is_weighted else None,
        extra_tensors=rest,
        local_ids=moved.local_ids,
        placement=placement,
        choice=choice,
        lost=moved.lost,
        received=moved.received[:-1],
        _route=_Route(counts, counts[placement.rank_in_group], exchanged=moved),
    )


def _received(route: _Route, local_ids: torch.Tensor, max_rows: int | None) -> torch.Tensor | None:
    """Return how many rows came from each rank if `max_rows` was stated or rows are padded, else None."""
    if max_rows is not None:
        return torch.tensor(route.received, dtype=torch.int32, device=local_ids.device)
    if not route.is_padded:
        return None
    return (local_ids >= 0).any(1).view(len(route.received), -1).sum(1, dtype=torch.int32)


def _lengthened(tensor: torch.Tensor, rows: int, filler: int) -> torch.Tensor:
    """Return the tensor with rows of `filler` behind its own, which are at most `rows`."""
    # torch cannot fill all 8-bit floats, so they are filled as bytes.
    flat = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    longer = flat.new_full((rows, *flat.shape[1:]), filler)
    longer[: flat.shape[0]] = flat
    return longer.view(tensor.dtype)


def _plan(
    communicator: DeviceCommunicator,
    ids: torch.Tensor,
    placement: ExpertPlacement,
    counts: tuple[int, ...],
    capacity: int | None,
    max_rows: int | None,
) -> tuple[_Route, torch.Tensor | None]:
    """Return which rows go to which rank, in the order of tokens, and which tokens exceeded the capacity.

    Raises:
        UsageError: More than `max_rows` rows go to a rank. All ranks raise it, and only counts were sent.
    """
    tokens, ranks = ids.shape[0], placement.world_size
    # The extra column takes ids of -1, which go to no rank.
    hits = torch.zeros((tokens, ranks + 1), dtype=torch.bool, device=ids.device)
    hits = hits.scatter_(1, placement.owners[ids.long()], value=True)[:, :ranks]
    is_everywhere = hits.all(1) if ids.shape[1] >= ranks else None
    if capacity is None:
        own = hits.sum(0).view(1, ranks)
        table = communicator.all_gather(own, 0).tolist()
        totals = [sum(column) for column in zip(*table, strict=True)]
        if max_rows is not None and max(totals) > max_rows:
            raise UsageError(
                f"dispatch: {max(totals)} rows go to rank {totals.index(max(totals))} in the group, but max_rows is "
                f"{max_rows}"
            )
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
    """Return the rows to send; padding rows are filled with `filler`."""
    assert route.source is not None
    rows = tensor.detach()
    # torch cannot index or concatenate all 8-bit floats, so they are picked as bytes.
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

    Both forms add the ranks' parts in rank order; float16 and bfloat16 are summed in float32 and rounded once.

    Args:
        communicator: The communicator that dispatched.
        hidden_states: [rows, hidden]: for each row the weighted sum of its experts on this rank. Or [rows, k, hidden]:
            the result of each expert; then this function weights them in float32, in the order of `topk_ids`, and
            rounds once.
        routed: The result of `dispatch`.

    Returns:
        [tokens of this rank, hidden], a new tensor; 0 for a token without experts, NaN for a lost one.

    Raises:
        UsageError: The shape, the dtype or the group does not match. Nothing was sent, the group is intact.
    """
    _check_results(communicator, hidden_states, routed)
    moved = routed._route.exchanged  # noqa: SLF001 - a record of this module
    exchange = None if moved is None else communicator.expert_exchange()
    if moved is not None and exchange is not None:
        return exchange.combine(
            hidden_states, routed.topk_weights if hidden_states.dim() == 3 else None, moved
        )
    rows = hidden_states.detach()
    if rows.dim() == 3:
        rows = _weighted(rows, routed)
    route = routed._route  # noqa: SLF001 - a record of this module
    total = _back(communicator, rows, routed, route)
    if routed.lost is not None:
        total = total.masked_fill(routed.lost.unsqueeze(1), torch.nan)
    return total


def _back(
    communicator: DeviceCommunicator, rows: torch.Tensor, routed: RoutedTokens, route: _Route
) -> torch.Tensor:
    """Return results to the ranks of their tokens, and sum them there."""
    if route.source is None:
        # Rows without an expert on this rank may hold anything: they count as 0.
        is_here = (routed.local_ids >= 0).any(1, keepdim=True)
        return communicator.reduce_scatterv(torch.where(is_here, rows, rows.new_zeros(())), 0, route.counts)
    came = rows[: sum(route.received)].contiguous()
    return _sum(communicator.all_to_all(came, 0, route.received, route.sent), route)


def _check_results(
    communicator: DeviceCommunicator, hidden_states: torch.Tensor, routed: RoutedTokens
) -> None:
    checks.check_tensor(hidden_states, communicator.device, "combine")
    placement, rows = routed.placement, routed.topk_ids.shape
    own = (communicator.rank_in_group, communicator.world_size)
    if (placement.rank_in_group, placement.world_size) != own:
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
        raise UsageError("combine: results of single experts need topk_weights, which dispatch was not given")


def _weighted(rows: torch.Tensor, routed: RoutedTokens) -> torch.Tensor:
    """Return for each row the weighted sum of its experts on this rank, in the order of `topk_ids`."""
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
    # The last row collects the padding.
    total = back.new_zeros((route.tokens + 1, back.shape[1]), dtype=accumulation_dtype(back.dtype))
    sizes = list(route.sent)
    parts = zip(torch.split(route.source, sizes), torch.split(back, sizes), strict=True)
    for rank, (index, part) in enumerate(parts):
        rows = part.to(total.dtype)
        # A token occurs once among the rows of one rank, so index_add_ keeps the order of ranks on a GPU too.
        if rank == 0:
            total.index_copy_(0, index, rows)
        else:
            total.index_add_(0, index, rows)
    total = total[:-1]
    # Match the all-gather form, where a sum is -0 only if every rank contributed -0.
    if route.is_everywhere is None:
        total += 0.0
    else:
        total += torch.where(route.is_everywhere, -0.0, 0.0).to(total.dtype).unsqueeze(1)
    return total.to(back.dtype)
