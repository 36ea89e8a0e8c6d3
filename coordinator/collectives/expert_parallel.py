"""Expert parallelism: send tokens to the ranks of their experts, and return the sum of the results to each rank."""

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
    """The work of `dispatch` and `combine` in one group, and the token counts that they share.

    Attributes:
        stated: The number of tokens of each rank, inside of `ExpertParallel.token_counts`.
    """

    def __init__(self, communicator: DeviceCommunicator, host: HostPlane) -> None:
        """Start without token counts.

        Args:
            communicator: The communicator that moves the rows.
            host: The host plane, which exchanges the token counts unless they are stated.
        """
        self._communicator = communicator
        self._host = host
        self._device = communicator.device
        self._rank_in_group = communicator.rank_in_group
        self._world_size = communicator.world_size
        self.stated: tuple[int, ...] | None = None
        self._dispatched: tuple[int, ...] | None = None

    def place(self, experts: int | Sequence[int]) -> ExpertPlacement:
        """Return the rank of each expert; see `ExpertParallel.place_experts`."""
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
        """Send all tokens to all ranks."""
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
        """Sum the results of all ranks, and return the rows of this rank's tokens."""
        if routed is not None:
            if not isinstance(routed, RoutedTokens):
                raise UsageError(
                    f"combine: routed must be what dispatch returned, not {type(routed).__name__}"
                )
            return all2all.combine(self._communicator, hidden_states, routed)
        checks.check_tensor(hidden_states, self._device, "combine")
        counts = self.stated or self._dispatched
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
        """Send each token to the ranks of its experts."""
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
        tensors = hidden_states, topk_ids, topk_weights, extra_tensors
        all2all.check_routing(*tensors, placement, is_static=is_static)
        if form is DispatchForm.ALL_TO_ALL and is_captured and capacity is None:
            raise UsageError("dispatch: an all-to-all can be captured with a stated capacity only")
        counts = self._counts(hidden_states.shape[0])
        choice = (
            all2all.choose_form(counts, topk_ids.shape[1], capacity, is_static=is_static)
            if form is None
            else Choice(form, "the caller's")
        )
        return all2all.dispatch(
            self._communicator, *tensors, placement, counts, choice, capacity, is_static=is_static
        )

    def _counts(self, own: int) -> tuple[int, ...]:
        if self.stated is None:
            if self._world_size > 1 and _is_capturing(self._device):
                raise UsageError(
                    "dispatch: while a graph is captured the tokens of each rank must be stated "
                    "with token_counts: the exchange on the host would not be replayed"
                )
            return tuple(self._host.all_gather_integers(own))
        if self.stated[self._rank_in_group] != own:
            raise UsageError(
                f"dispatch: token_counts states {self.stated[self._rank_in_group]} tokens for this rank, "
                f"which holds {own}"
            )
        return self.stated


class ExpertParallel(GroupPlanes):
    """`dispatch` and `combine`, in two forms.

    Without routing every rank gets every token. This serves experts of which every rank has a part, and routers that
    run after `dispatch`:

        x, logits = group.dispatch(x, logits)
        x = group.combine(experts(x, logits))

    With `topk_ids` tokens go to the ranks of their experts only, by an all-to-all where that saves bytes:

        routed = group.dispatch(x, topk_ids=ids, topk_weights=weights, experts=256)
        x = group.combine(experts(routed.hidden_states, routed.local_ids, routed.topk_weights), routed=routed)

    Ranks may hold different numbers of tokens. `token_counts` states them; otherwise `dispatch` exchanges them over
    the host plane, and `combine` uses those of the latest `dispatch` without routing, or those in `routed`.
    """

    _routing: TokenRouting

    @contextmanager
    def token_counts(self, counts: Sequence[int]) -> Iterator[None]:
        """State how many tokens each rank holds, in rank order, for the calls within the context.

        All ranks state the same. This saves an exchange over the host plane, which a graph cannot capture.
        """
        routing = self._routing
        before, routing.stated = routing.stated, checks.check_sizes(counts, self.world_size)
        try:
            yield
        finally:
            routing.stated = before

    def place_experts(self, experts: int | Sequence[int]) -> ExpertPlacement:
        """Return the rank of each expert, for `dispatch`. Not collective, but all ranks must pass the same.

        Args:
            experts: The number of experts, of which each rank then has a block, in rank order; if they do not divide
                evenly, the first ranks have one more. Or for each expert the rank in the group that has it.

        Raises:
            UsageError: There is no expert, or an entry is not a rank in the group.
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
        """Send tokens to experts: all tokens to all ranks, or with `topk_ids` each one to the ranks of its experts.

        Collective: all ranks call it with equal arguments, except for the tensors and their numbers of rows.
        Blocks until this rank's rows have arrived (CPU), or are queued on the current stream. If the numbers of tokens
        or of rows are not stated, the host waits for all ranks.
        Capture: allowed if `token_counts` states how many tokens each rank has. Without `capacity` a captured routed
        dispatch takes the all-gather form, because a later replay may send every token anywhere.
        Aliasing: the results are new tensors; in a group of one they are the inputs themselves.

        Args:
            hidden_states: [tokens, hidden]; the number of tokens may differ between ranks, and may be 0.
            router_logits: [tokens, experts]; only without routing.
            is_sequence_parallel: Whether this rank's tokens are its shard of a longer sequence. The flag changes
                nothing: the tokens of all ranks take part in either case. Some callers choose the group by it.
            extra_tensors: Further tensors with one row for each token, which are sent along.
            topk_ids: [tokens, k] signed integers: the experts of each token; -1 means no expert.
            topk_weights: [tokens, k] floating; sent along unless it is None.
            experts: The number of experts, or their placement. Call `place_experts` before a capture.
            capacity: How many rows each rank sends to each other rank in the all-to-all form. No count is exchanged and
                the host does not wait, but the rows are padded to this number. Tokens that do not fit are `lost`.
            form: The form to use; by default `device_comm.all2all.choose_form` decides by the numbers of tokens, of
                ranks and of experts per token.

        Returns:
            (hidden_states, router_logits), with the rows of all ranks in rank order; with extra tensors also the list
            of these. With `topk_ids` a `RoutedTokens`: its rows are ordered by the ranks from which they come and by
            their tokens there. A token comes once, even if several of its experts are on this rank.

        Raises:
            UsageError: Shapes or dtypes do not fit, an id is not an expert, or `token_counts` states another number.
                Nothing was sent. On an accelerator, if the host does not wait (a capture, or `capacity`), a token with
                an id that is not an expert is `lost` instead.
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
        """Sum the results of all ranks, and return to each rank the rows of its own tokens.

        Collective: all ranks call it, with equal hidden sizes and dtypes.
        Blocks until this rank's result has arrived (CPU), or is queued on the current stream.
        Capture: allowed, as for its `dispatch`.
        Aliasing: the result is a new tensor; without routing a group of one returns the input itself.
        The ranks' parts are added in rank order, and narrow floats in float32 with one rounding (for several hosts see
        `DESIGN.md`, D2). Repeated runs therefore have the same bits, and on one host both forms of routing do.

        Args:
            hidden_states: Without routing [tokens of all ranks, hidden]: this rank's part of every token's result.
                With routing [rows, hidden]: for each row of `routed` the weighted sum of the results of this rank's
                experts; or [rows, k, hidden]: the result of each expert, which is weighted here by `topk_weights`.
                Values without an expert on this rank (`local_ids` is -1) are ignored.
            is_sequence_parallel: As in `dispatch`.
            routed: The result of the routed `dispatch`. Several may be open at a time; all ranks must combine them in
                the same order.

        Returns:
            [tokens of this rank, hidden]. With routing 0 for a token without experts, and NaN for one that was lost.

        Raises:
            UsageError: The token counts are neither stated nor known from a `dispatch`, or do not add up; or the shape
                does not fit `routed`.
        """
        del is_sequence_parallel
        with self._calls.call("combine"):
            return self._routing.combine(hidden_states, routed)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
