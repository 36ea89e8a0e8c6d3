"""Expert parallelism: bring tokens to the ranks of their experts, and give each rank the sum for its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

import torch

from coordinator.host.plane import HostPlane
from coordinator.planes import GroupPlanes
from device_comm import all2all, checks
from device_comm.all2all import Choice, DispatchForm, ExpertPlacement, RoutedTokens
from device_comm.base import DeviceCommunicator
from shm_broadcast.errors import UsageError


class TokenRouting:
    """What `dispatch` and `combine` of one group do, and the token counts that they share."""

    def __init__(self, communicator: DeviceCommunicator, host: HostPlane) -> None:
        """Know no counts yet.

        Args:
            communicator: Moves the rows.
            host: Exchanges token counts that nobody stated.
        """
        self._communicator = communicator
        self._host = host
        self._device = communicator.device
        self._rank_in_group = communicator.rank_in_group
        self._world_size = communicator.world_size
        self._stated: tuple[int, ...] | None = None
        self._dispatched: tuple[int, ...] | None = None

    @contextmanager
    def stating(self, counts: Sequence[int]) -> Iterator[None]:
        """Take `counts` for the ranks' tokens inside of the block."""
        stated = checks.check_sizes(counts, self._world_size)
        before, self._stated = self._stated, stated
        try:
            yield
        finally:
            self._stated = before

    def place(self, experts: int | Sequence[int]) -> ExpertPlacement:
        """Say which rank has which expert; see `ExpertParallel.place_experts`."""
        if isinstance(experts, int):
            if isinstance(experts, bool) or experts < 1:
                raise UsageError(f"there must be at least 1 expert, not {experts!r}")
            experts = all2all.contiguous_ranks(experts, self._world_size)
        return ExpertPlacement(experts, self._rank_in_group, self._world_size, self._device)

    def dispatch_to_all(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        extra_tensors: Sequence[torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Bring all tokens to all ranks."""
        tensors = [hidden_states, router_logits, *(extra_tensors or ())]
        for tensor in tensors:
            checks.check_tensor(tensor, self._device, "dispatch")
            if tensor.dim() == 0 or tensor.shape[0] != hidden_states.shape[0]:
                raise UsageError(
                    f"dispatch: every tensor needs one row for each of the {hidden_states.shape[0]} tokens, "
                    f"got shape {tuple(tensor.shape)}"
                )
        counts = self._counts(hidden_states.shape[0])
        gathered = self._communicator.all_gatherv(tensors, 0, counts)
        self._dispatched = counts
        if extra_tensors is None:
            return gathered[0], gathered[1]
        return gathered[0], gathered[1], gathered[2:]

    def combine(self, hidden_states: torch.Tensor, routed: RoutedTokens | None) -> torch.Tensor:
        """Sum over ranks, and return the rows of this rank's tokens."""
        if routed is not None:
            if not isinstance(routed, RoutedTokens):
                raise UsageError(
                    f"combine: routed must be what dispatch returned, not {type(routed).__name__}"
                )
            return all2all.combine(self._communicator, hidden_states, routed)
        checks.check_tensor(hidden_states, self._device, "combine")
        counts = self._stated or self._dispatched
        if counts is None:
            raise UsageError(
                "combine: call dispatch first, or state the tokens of each rank with token_counts"
            )
        return self._communicator.reduce_scatterv(hidden_states, 0, counts)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        extra_tensors: list[torch.Tensor],
        experts: int | ExpertPlacement,
        capacity: int | None,
        form: DispatchForm | None,
    ) -> RoutedTokens:
        """Bring each token to the ranks of its experts."""
        placement = experts if isinstance(experts, ExpertPlacement) else self.place(experts)
        if (placement.rank_in_group, placement.world_size) != (self._rank_in_group, self._world_size):
            raise UsageError(f"dispatch: {placement!r} belongs to another group")
        if capacity is not None and (
            isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1
        ):
            raise UsageError(f"dispatch: capacity must be a number of rows, at least 1, not {capacity!r}")
        if form is not None and not isinstance(form, DispatchForm):
            raise UsageError(f"dispatch: form must be a DispatchForm, not {form!r}")
        is_captured = _is_capturing(self._device)
        is_static = is_captured or capacity is not None
        all2all.check_routing(
            hidden_states, topk_ids, topk_weights, extra_tensors, placement, is_static=is_static
        )
        if form is DispatchForm.ALL_TO_ALL and is_captured and capacity is None:
            raise UsageError("dispatch: an all-to-all can be captured with a stated capacity only")
        counts = self._counts(hidden_states.shape[0])
        choice = (
            all2all.choose_form(counts, topk_ids.shape[1], capacity, is_static=is_static)
            if form is None
            else Choice(form, "the caller's")
        )
        return all2all.dispatch(
            self._communicator,
            hidden_states,
            topk_ids,
            topk_weights,
            extra_tensors,
            placement,
            counts,
            choice,
            capacity,
            is_static=is_static,
        )

    def _counts(self, own: int) -> tuple[int, ...]:
        if self._stated is None:
            if self._world_size > 1 and _is_capturing(self._device):
                raise UsageError(
                    "dispatch: while a graph is captured the tokens of each rank must be stated "
                    "with token_counts: the exchange on the host would not be replayed"
                )
            return tuple(self._host.all_gather_integers(own))
        if self._stated[self._rank_in_group] != own:
            raise UsageError(
                f"dispatch: token_counts states {self._stated[self._rank_in_group]} tokens for this rank, "
                f"which holds {own}"
            )
        return self._stated


class ExpertParallel(GroupPlanes):
    """`dispatch` and `combine`, in two forms.

    Without routing every rank gets every token, for experts that every rank has a part of, or a router that runs
    behind it:

        x, logits = group.dispatch(x, logits)
        x = group.combine(experts(x, logits))

    With `topk_ids` tokens go to the ranks of their experts, by an all-to-all where that saves bytes:

        routed = group.dispatch(x, topk_ids=ids, topk_weights=weights, experts=256)
        x = group.combine(experts(routed.hidden_states, routed.local_ids, routed.topk_weights), routed=routed)

    Ranks may hold different numbers of tokens. `token_counts` states them; otherwise `dispatch` exchanges
    them on the host plane, and `combine` uses those of the latest `dispatch` without routing, or those in `routed`.
    """

    _routing: TokenRouting

    @contextmanager
    def token_counts(self, counts: Sequence[int]) -> Iterator[None]:
        """State how many tokens each rank holds, in rank order, for the calls inside.

        Equal on all ranks. Saves an exchange on the host plane, which a graph capture cannot hold.
        """
        with self._routing.stating(counts):
            yield

    def place_experts(self, experts: int | Sequence[int]) -> ExpertPlacement:
        """Say which rank has which expert, for `dispatch`. Not collective, but equal on all ranks.

        Args:
            experts: How many there are: then each rank has a block of them, in rank order, the first ranks one more
                where they are uneven. Or for each expert the rank in the group that has it.

        Raises:
            UsageError: There is no expert, or an entry is no rank in the group.
        """
        return self._routing.place(experts)

    @overload
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]: ...

    @overload
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        router_logits: None = None,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
        *,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        experts: int | ExpertPlacement,
        capacity: int | None = None,
        form: DispatchForm | None = None,
    ) -> RoutedTokens: ...

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
        *,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        experts: int | ExpertPlacement | None = None,
        capacity: int | None = None,
        form: DispatchForm | None = None,
    ) -> (
        tuple[torch.Tensor, torch.Tensor]
        | tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]
        | RoutedTokens
    ):
        """Bring tokens to experts: all tokens to all ranks, or with `topk_ids` each to the ranks of its experts.

        Collective: all ranks, with equal arguments but for the tensors and their numbers of rows.
        Blocks until this rank's rows are there (CPU), or are queued on the current stream. Where the counts of tokens
        or of rows are not stated, the host waits for all ranks.
        Capture: allowed where `token_counts` states how many tokens each rank has. Without `capacity` a captured
        routed dispatch takes the all-gather form, as a later replay may send every token anywhere.
        Aliasing: new tensors; in a group of one the inputs themselves.

        Args:
            hidden_states: [tokens, hidden]; the number of tokens may differ between ranks, and may be 0.
            router_logits: [tokens, experts]; without routing only.
            is_sequence_parallel: Whether this rank's tokens are its shard of a longer sequence. The tokens
                of all ranks of this group take part in either case; the flag is there for call sites
                that choose the group by it.
            extra_tensors: More tensors with one row for each token, moved alike.
            topk_ids: [tokens, k] signed integers: the experts of each token; -1 is none.
            topk_weights: [tokens, k] floating: moved along, unless it is None.
            experts: How many experts there are, or which rank has which (`place_experts`; to be made before a capture).
            capacity: How many rows each rank sends to each other in the all-to-all form: no count is exchanged and the
                host waits for nothing, but the rows are padded to it. Tokens that find no room are `lost`.
            form: The form to take; by default `device_comm.all2all.choose_form` decides by the numbers of tokens, of
                ranks and of experts of a token.

        Returns:
            (hidden_states, router_logits), or with extra tensors a third element, the list of them; each
            with the rows of all ranks, in rank order. With `topk_ids` a `RoutedTokens`: its rows come in the order of
            the ranks that they belong to, and of the tokens there, and a token comes once however many of its experts
            are here.

        Raises:
            UsageError: Shapes or dtypes do not fit, an id is no expert, or `token_counts` states another number.
                Nothing was sent. On an accelerator, where the host does not wait for it (a capture, or `capacity`),
                a token with an id that is no expert is `lost` instead.
        """
        del is_sequence_parallel
        with self._calls.call("dispatch"):
            if topk_ids is None:
                if router_logits is None or any(
                    each is not None for each in (topk_weights, experts, capacity, form)
                ):
                    raise UsageError(
                        "dispatch: pass router_logits alone, or topk_ids with experts and what belongs to them"
                    )
                return self._routing.dispatch_to_all(hidden_states, router_logits, extra_tensors)
            if router_logits is not None or experts is None:
                raise UsageError("dispatch: topk_ids needs experts, and goes without router_logits")
            extra = list(extra_tensors or ())
            return self._routing.dispatch(
                hidden_states, topk_ids, topk_weights, extra, experts, capacity, form
            )

    def combine(
        self,
        hidden_states: torch.Tensor,
        is_sequence_parallel: bool = False,
        *,
        routed: RoutedTokens | None = None,
    ) -> torch.Tensor:
        """Sum over ranks, and give each rank the rows of its own tokens.

        Collective: all ranks, with equal hidden sizes and dtypes.
        Blocks until this rank's result is there (CPU), or is queued on the current stream.
        Capture: allowed, as for the `dispatch` that it belongs to.
        Aliasing: a new tensor; without routing in a group of one: the input itself.
        The ranks' parts are added in rank order, narrow floats in float32 with one rounding (several hosts:
        `DESIGN.md`, D2), so repeated runs have the same bits, and on one host also both forms of routing.

        Args:
            hidden_states: Without routing [tokens of all ranks, hidden]: this rank's part of every token's result.
                With it [rows, hidden]: for each of `routed`'s rows the weighted sum of its experts here; or
                [rows, k, hidden]: the result of each expert, weighted here by `topk_weights`. What stands where no
                expert is here (`local_ids` are -1) does not count.
            is_sequence_parallel: As in `dispatch`.
            routed: What the routed `dispatch` returned. Several may be open at a time, and be combined in any order
                that is the same on all ranks.

        Returns:
            [tokens of this rank, hidden]. With routing 0 for a token without experts, and NaN for one that was lost.

        Raises:
            UsageError: The token counts are neither stated nor known from a `dispatch`, or do not add up; or the shape
                is not that of `routed`.
        """
        del is_sequence_parallel
        with self._calls.call("combine"):
            return self._routing.combine(hidden_states, routed)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
