"""Expert parallelism: send tokens to the ranks of their experts, and return the sum of the results to each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, overload

import torch

from coordinator.calls import Plane
from coordinator.gradients import refuse_lost_gradient
from coordinator.host.plane import HostPlane
from coordinator.planes import GroupPlanes
from device_comm import all2all, checks
from device_comm.all2all import Choice, DispatchForm, ExpertPlacement, RoutedTokens
from device_comm.base import DeviceCommunicator
from device_comm.health import Operation
from device_comm.stages import in_parts
from shm_broadcast.errors import UsageError

# What a signal handler ends between the exchange of the counts and the last row.
_DISPATCH: Final = Operation("device", "dispatch", 0)


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

    def dispatch_to_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the rows of all ranks to all ranks; return each tensor with these rows."""
        hidden_states = tensors[0]
        for tensor in tensors:
            checks.check_tensor(tensor, self._device, "dispatch")
            if tensor.dim() == 0 or tensor.shape[0] != hidden_states.shape[0]:
                raise UsageError(
                    f"dispatch: every tensor needs one row for each of the {hidden_states.shape[:1].numel()} tokens, "
                    f"got shape {tuple(tensor.shape)}"
                )
        if self._world_size > 1:
            refuse_lost_gradient("dispatch", tensors, self._world_size)

        def stages() -> list[torch.Tensor]:
            counts = self._counts(hidden_states.shape[0])
            gathered = self._communicator.all_gatherv(tensors, 0, counts)
            self._dispatched = counts
            return gathered

        return in_parts(self._communicator.context.health, _DISPATCH, stages)

    def combine(
        self,
        hidden_states: torch.Tensor,
        routed: RoutedTokens | None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum the results of all ranks, and return the rows of this rank's tokens, in `output` if there is one."""
        checks.check_tensor(hidden_states, self._device, "combine")
        if self._world_size > 1 or routed is not None or output is not None:
            refuse_lost_gradient("combine", (hidden_states, output), self._world_size)
        if routed is not None:
            if not isinstance(routed, RoutedTokens):
                raise UsageError(
                    f"combine: routed must be what dispatch returned, not {type(routed).__name__}"
                )
            return all2all.combine(self._communicator, hidden_states, routed)
        counts = self.stated or self._dispatched
        if self._world_size == 1:
            # Nobody else has a part of the results, so none needs to be known of the tokens.
            counts = (hidden_states.shape[0] if hidden_states.dim() else 1,)
        if counts is None:
            raise UsageError(
                "combine: call dispatch first, or state the tokens of each rank with token_counts"
            )
        if output is None:
            return self._communicator.reduce_scatterv(hidden_states, 0, counts)
        return self._communicator.reduce_scatterv_into_output(hidden_states, output, 0, counts)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Return memory for the input of `combine`; see `ExpertParallel.allocate_combine_input`."""
        size, dtype, where = checks.check_shape(shape), checks.check_dtype(dtype), torch.device(device)
        if where.type != self._device.type or where.index not in (None, self._device.index):
            raise UsageError(f"allocate_combine_input: this group's device is {self._device}, not {where}")
        return self._communicator.allocate(size, dtype)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        extra_tensors: list[torch.Tensor],
        experts: int | ExpertPlacement,
        capacity: int | None,
        form: DispatchForm | None,
        max_rows: int | None,
    ) -> RoutedTokens:
        """Send each token to the ranks of its experts."""
        placement = experts if isinstance(experts, ExpertPlacement) else self.place(experts)
        if (placement.rank_in_group, placement.world_size) != (self._rank_in_group, self._world_size):
            raise UsageError(f"dispatch: {placement!r} belongs to another group")
        for name, rows in (("capacity", capacity), ("max_rows", max_rows)):
            if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
                raise UsageError(f"dispatch: {name} must be a number of rows, at least 1, not {rows!r}")
        if max_rows is not None and (capacity is not None or form is DispatchForm.ALL_GATHER):
            raise UsageError("dispatch: max_rows belongs to the all-to-all form, and goes without capacity")
        if form is not None and not isinstance(form, DispatchForm):
            raise UsageError(f"dispatch: form must be a DispatchForm, not {form!r}")
        is_captured = _is_capturing(self._device)
        is_static = is_captured or capacity is not None or max_rows is not None
        refuse_lost_gradient("dispatch", [hidden_states, topk_weights, extra_tensors], self._world_size)
        tensors = hidden_states, topk_ids, topk_weights, extra_tensors
        all2all.check_routing(*tensors, placement, is_static=is_static)
        if form is DispatchForm.ALL_TO_ALL and is_captured and capacity is None and max_rows is None:
            raise UsageError(
                "dispatch: an all-to-all can be captured with a stated capacity or max_rows only"
            )

        def stages() -> RoutedTokens:
            return self._moved(*tensors, placement, capacity, form, max_rows, is_captured=is_captured)

        return in_parts(self._communicator.context.health, _DISPATCH, stages)

    def _moved(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        extra_tensors: list[torch.Tensor],
        placement: ExpertPlacement,
        capacity: int | None,
        form: DispatchForm | None,
        max_rows: int | None,
        *,
        is_captured: bool,
    ) -> RoutedTokens:
        """Exchange the counts of tokens unless they are stated, choose a form, and move the rows."""
        is_static = is_captured or capacity is not None or max_rows is not None
        counts = self._counts(hidden_states.shape[0])
        if max_rows is not None:
            choice = Choice(DispatchForm.ALL_TO_ALL, f"at most {max_rows} rows for a rank, without gaps")
        elif form is not None:
            choice = Choice(form, "the caller's")
        else:
            moved = [hidden_states, *([] if topk_weights is None else [topk_weights]), *extra_tensors]
            is_carried = capacity is not None and all2all.is_carried(
                self._communicator, moved, topk_ids, placement, capacity, is_captured=is_captured
            )
            choice = all2all.choose_form(
                counts, topk_ids.shape[1], capacity, is_static=is_static, is_carried=is_carried
            )
        tensors = hidden_states, topk_ids, topk_weights, extra_tensors
        return all2all.dispatch(
            *(self._communicator, *tensors, placement, counts, choice, capacity, max_rows),
            is_static=is_static,
            is_captured=is_captured,
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

        x, weights, ids = group.dispatch(x, weights, ids)
        x = group.combine(experts(x, weights, ids))

    With `experts` tokens go to the ranks of their experts only, by an all-to-all where that saves bytes:

        routed = group.dispatch(x, topk_ids=ids, topk_weights=weights, experts=256)
        x = group.combine(experts(routed.hidden_states, routed.local_ids, routed.topk_weights), routed=routed)

    Ranks may hold different numbers of tokens. `token_counts` states them; otherwise `dispatch` exchanges them over
    the host plane, and `combine` uses those of the latest `dispatch` without routing, or those in `routed`. No gradient
    flows through these calls, so an input that requires grad is refused while grad mode is on.

    Attributes:
        token_group: The group whose ranks hold different tokens as long as these are not sharded: it makes the calls
            with `is_sequence_parallel=False`. An engine with tensor parallelism sets the data-parallel group here,
            since the ranks of a tensor-parallel group hold the same tokens. None means this group.
    """

    token_group: ExpertParallel | None = None
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
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> (
        tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        | tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]
    ): ...

    @overload
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        topk_ids: bool | None = None,
        is_sequence_parallel: bool | Sequence[torch.Tensor] | None = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
        *,
        router_logits: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]: ...

    @overload
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
        *,
        experts: int | ExpertPlacement,
        capacity: int | None = None,
        form: DispatchForm | None = None,
        max_rows: int | None = None,
    ) -> RoutedTokens: ...

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        topk_ids: torch.Tensor | bool | None = None,
        is_sequence_parallel: bool | Sequence[torch.Tensor] | None = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
        *,
        router_logits: torch.Tensor | None = None,
        experts: int | ExpertPlacement | None = None,
        capacity: int | None = None,
        form: DispatchForm | None = None,
        max_rows: int | None = None,
    ) -> Any:
        """Send tokens to experts: all tokens to all ranks, or with `experts` each one to the ranks of its experts.

        Without `experts` this takes the arguments of vLLM's method in either order that it has had: `(hidden_states,
        topk_weights, topk_ids, …)`, or in older versions `(hidden_states, router_logits, is_sequence_parallel,
        extra_tensors)`, which is `dispatch_router_logits`. A tensor as third argument makes the difference.

        Collective: all ranks call it with equal arguments, except for the tensors and their numbers of rows.
        Blocks until this rank's rows have arrived (CPU), or are queued on the current stream. If the numbers of tokens
        or of rows are not stated, the host waits for all ranks.
        Capture: allowed if `token_counts` states how many tokens each rank has. Without `capacity` a captured routed
        dispatch takes the all-gather form, because a later replay may send every token anywhere.
        Aliasing: the results are new tensors; in a group of one they are the inputs themselves.

        Args:
            hidden_states: [tokens, hidden]; the number of tokens may differ between ranks, and may be 0.
            topk_weights: [tokens, k] floating; with `experts` sent along unless it is None.
            topk_ids: [tokens, k] signed integers: the experts of each token; -1 means no expert.
            is_sequence_parallel: Whether this rank's tokens are its shard of a longer sequence. If not, `token_group`
                makes the call if it is set. Otherwise the tokens of all ranks of this group take part in either case.
            extra_tensors: Further tensors with one row for each token, which are sent along.
            router_logits: [tokens, experts]; instead of weights and ids.
            experts: The number of experts, or their placement. Call `place_experts` before a capture.
            capacity: How many rows each rank sends to each other rank in the all-to-all form. No count is exchanged and
                the host does not wait, but the rows are padded to this number. Tokens that do not fit are `lost`.
            form: The form to use; by default `device_comm.all2all.choose_form` decides by the numbers of tokens, of
                ranks and of experts per token.
            max_rows: Rows of the result in the all-to-all form, without `capacity`: those that come are the first,
                without gaps, and `received` says on the device how many they are. Where our kernels carry the call
                (`choice.reason` says why not), no count reaches the host; else the host waits for all ranks.

        Returns:
            (hidden_states, topk_weights, topk_ids) or (hidden_states, router_logits), with the rows of all ranks in
            rank order; with extra tensors also the list of these. With `experts` a `RoutedTokens`: its rows are ordered
            by the ranks from which they come and by their tokens there. A token comes once, even if several of its
            experts are on this rank.

        Raises:
            UsageError: Shapes or dtypes do not fit, an id is not an expert, or `token_counts` states another number.
                Nothing was sent. On an accelerator, if the host does not wait (a capture, `capacity` or `max_rows`), a
                token with an id that is not an expert is `lost` instead. More than `max_rows` rows go to a rank: all
                ranks raise this and the group is intact, or where our kernels carry the call, the next call of that
                rank raises it, and the group is broken.
        """
        # In the older order the flag and the extra tensors stand one place further to the left.
        if isinstance(topk_ids, bool):
            if not isinstance(is_sequence_parallel, bool):
                if extra_tensors is not None and is_sequence_parallel is not None:
                    refusal = UsageError("dispatch: extra_tensors is given twice, by position and by name")
                    self._refuse_experts("dispatch", topk_ids, refusal)
                extra_tensors = is_sequence_parallel if extra_tensors is None else extra_tensors
            is_sequence_parallel, topk_ids = topk_ids, None
        there = self._chosen("dispatch", is_sequence_parallel)
        if there is not self:
            given = (hidden_states, topk_weights, topk_ids, True, extra_tensors)
            return there.dispatch(  # type: ignore[call-overload,misc]
                *given,
                router_logits=router_logits,
                experts=experts,
                capacity=capacity,
                form=form,
                max_rows=max_rows,
            )
        with self._calls.call("dispatch", plane=self._plane("dispatch")):
            extra = _extra(extra_tensors)
            if experts is not None:
                if topk_ids is None or router_logits is not None:
                    raise UsageError("dispatch: experts needs topk_ids, and goes without router_logits")
                return self._routing.dispatch(
                    hidden_states, topk_ids, topk_weights, extra or [], experts, capacity, form, max_rows
                )
            beside = _beside(topk_weights, topk_ids, router_logits)
            if capacity is not None or form is not None or max_rows is not None:
                raise UsageError(
                    "dispatch: capacity, form and max_rows belong to the form with topk_ids and experts"
                )
            moved = self._routing.dispatch_to_all([hidden_states, *beside, *(extra or [])])
            count = 1 + len(beside)
            return tuple(moved[:count]) if extra is None else (*moved[:count], moved[count:])

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Send all tokens and their router logits to all ranks, as `dispatch` with `router_logits`. Collective."""
        return self.dispatch(
            hidden_states,
            is_sequence_parallel=is_sequence_parallel,
            extra_tensors=extra_tensors,
            router_logits=router_logits,
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
        there = self._chosen("combine", is_sequence_parallel)
        with there._calls.call("combine", plane="device"):  # noqa: SLF001 - a group of this class
            return there._routing.combine(hidden_states, routed)  # noqa: SLF001

    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """Do `combine` without routing into `output`, [tokens of this rank, hidden], and return `output`. Collective.

        In a group of one the input is copied into it. See `reduce_scatterv_into_output` for what the output may be.
        """
        there = self._chosen("combine", is_sequence_parallel)
        with there._calls.call("combine", plane="device"):  # noqa: SLF001 - a group of this class
            checks.check_tensor(output, self.device, "combine_into_output")
            return there._routing.combine(hidden_states, None, output)  # noqa: SLF001

    def allocate_combine_input(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        is_sequence_parallel: bool = False,
    ) -> torch.Tensor:
        """Return a tensor of any content for the experts' results, in memory that suits `combine`. Not collective.

        Large tensors of the CPU reuse the memory of earlier ones that nobody holds any more. Every call returns a
        tensor of its own.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            device: The group's device.
            is_sequence_parallel: As in `combine`.

        Raises:
            UsageError: The device is another one.
        """
        there = self._chosen("allocate_combine_input", is_sequence_parallel)
        with there._calls.call("allocate_combine_input", in_line=False):  # noqa: SLF001 - a group of this class
            return there._routing.allocate(shape, dtype, device)  # noqa: SLF001

    def _serving(self, is_sequence_parallel: bool) -> ExpertParallel:
        """Return the group that makes a call: this one, or `token_group`."""
        return self if is_sequence_parallel or self.token_group is None else self.token_group

    def _chosen(self, name: str, is_sequence_parallel: object) -> ExpertParallel:
        """Return the group that makes the call `name`; refuse the call if the argument is no bool."""
        if not isinstance(is_sequence_parallel, bool):
            refusal = UsageError(
                f"is_sequence_parallel must be a bool, not {type(is_sequence_parallel).__name__}; the arguments of "
                "dispatch are (hidden_states, topk_weights, topk_ids, is_sequence_parallel, extra_tensors)"
            )
            self._refuse_experts(name, is_sequence_parallel, refusal)
        return self._serving(is_sequence_parallel)

    def _refuse_experts(self, name: str, is_sequence_parallel: object, refusal: UsageError) -> NoReturn:
        """Refuse the call `name`, and tell the other ranks of the group that makes it."""
        # Which group the others mean can only be guessed: a number counts as true or false, the rest as the default.
        there = self._serving(isinstance(is_sequence_parallel, int) and is_sequence_parallel != 0)
        plane = there._plane(name)  # noqa: SLF001 - a group of this class
        with there._calls.call(name, in_line=plane is not None, plane=plane):  # noqa: SLF001 - as above
            raise refusal

    def _plane(self, name: str) -> Plane | None:
        """Return the plane of which the call `name` takes a number."""
        if name == "combine":
            return "device"
        # Where the tokens of each rank are not stated, the ranks first tell each other.
        plane: Plane = "host" if self._routing.stated is None else "device"
        return plane if name == "dispatch" else None


def _extra(extra_tensors: object) -> list[torch.Tensor] | None:
    if extra_tensors is None:
        return None
    if not isinstance(extra_tensors, (list, tuple)):
        raise UsageError(
            f"dispatch: extra_tensors must be a list of tensors or None, not {type(extra_tensors).__name__}"
        )
    return list(extra_tensors)


def _beside(
    topk_weights: torch.Tensor | None, topk_ids: torch.Tensor | None, router_logits: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return what goes with the hidden states to all ranks: the router logits, or the weights and ids."""
    if topk_ids is None and (router_logits is None) != (topk_weights is None):
        # In the older order the router logits are the second argument.
        return [each for each in (router_logits, topk_weights) if each is not None]
    if topk_ids is not None and topk_weights is not None and router_logits is None:
        return [topk_weights, topk_ids]
    raise UsageError(
        "dispatch: pass topk_weights and topk_ids, or router_logits alone; topk_ids without topk_weights needs experts"
    )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
