"""Expert parallelism: gather the tokens of all ranks, and give each rank the sum for its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from coordinator.planes import GroupPlanes
from device_comm import checks
from shm_broadcast.errors import UsageError


class ExpertParallel(GroupPlanes):
    """`dispatch` and `combine`.

    Ranks may hold different numbers of tokens. `token_counts` states them; otherwise `dispatch` exchanges
    them on the host plane, and `combine` uses those of the latest `dispatch`.
    """

    _stated_counts: tuple[int, ...] | None
    _dispatched_counts: tuple[int, ...] | None

    @contextmanager
    def token_counts(self, counts: Sequence[int]) -> Iterator[None]:
        """State how many tokens each rank holds, in rank order, for the calls inside.

        Equal on all ranks. Saves an exchange on the host plane, which a graph capture cannot hold.
        """
        stated = checks.check_sizes(counts, self.world_size)
        before, self._stated_counts = self._stated_counts, stated
        try:
            yield
        finally:
            self._stated_counts = before

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Gather the tokens of all ranks, in rank order. Collective.

        Args:
            hidden_states: [tokens, hidden]; the number of tokens may differ between ranks.
            router_logits: [tokens, experts].
            is_sequence_parallel: Whether this rank's tokens are its shard of a longer sequence. The tokens
                of all ranks of this group are gathered in either case; the flag is there for call sites
                that choose the group by it.
            extra_tensors: More tensors with one row for each token, gathered alike.

        Returns:
            (hidden_states, router_logits), or with extra tensors a third element, the list of them; each
            with the rows of all ranks. In a group of one: the inputs themselves.
        """
        del is_sequence_parallel
        self._health.check_usable("dispatch")
        tensors = [hidden_states, router_logits, *(extra_tensors or ())]
        for tensor in tensors:
            checks.check_tensor(tensor, self.device, "dispatch")
            if tensor.dim() == 0 or tensor.shape[0] != hidden_states.shape[0]:
                raise UsageError(
                    f"dispatch: every tensor needs one row for each of the {hidden_states.shape[0]} tokens, "
                    f"got shape {tuple(tensor.shape)}"
                )
        counts = self._counts(hidden_states.shape[0])
        gathered = self.device_communicator.all_gatherv(tensors, 0, counts)
        self._dispatched_counts = counts
        if extra_tensors is None:
            return gathered[0], gathered[1]
        return gathered[0], gathered[1], gathered[2:]

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """Sum over ranks, and give each rank the rows of its own tokens. Collective.

        Args:
            hidden_states: [tokens of all ranks, hidden]: this rank's part of every token's result.
            is_sequence_parallel: As in `dispatch`.

        Returns:
            [tokens of this rank, hidden]. In a group of one: the input itself.

        Raises:
            UsageError: The token counts are neither stated nor known from a `dispatch`, or do not add up.
        """
        del is_sequence_parallel
        self._health.check_usable("combine")
        checks.check_tensor(hidden_states, self.device, "combine")
        counts = self._stated_counts or self._dispatched_counts
        if counts is None:
            raise UsageError(
                "combine: call dispatch first, or state the tokens of each rank with token_counts"
            )
        return self.device_communicator.reduce_scatterv(hidden_states, 0, counts)

    def _counts(self, own: int) -> tuple[int, ...]:
        if self._stated_counts is None:
            if self.world_size > 1 and _is_capturing(self.device):
                raise UsageError(
                    "dispatch: while a graph is captured the tokens of each rank must be stated "
                    "with token_counts: the exchange on the host would not be replayed"
                )
            return tuple(self._host.all_gather_integers(own))
        if self._stated_counts[self.rank_in_group] != own:
            raise UsageError(
                f"dispatch: token_counts states {self._stated_counts[self.rank_in_group]} tokens for this rank, "
                f"which holds {own}"
            )
        return self._stated_counts


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
