"""The contract of kernels that dispatch and combine with counts on the device; `all2all.py` asks for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["ExchangeRequest", "ExchangedRows", "ExpertExchange"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeRequest:
    """The facts about a dispatch that all ranks share.

    Attributes:
        row_bytes: Bytes of a row of each tensor beside the ids, the hidden states first.
        topk: Number of experts per token.
        id_dtype: The dtype of the ids.
        experts: Number of experts.
        capacity: Most rows that a rank sends to each other rank.
        max_rows: Rows of the compact output; None for `capacity` rows from each rank.
    """

    row_bytes: tuple[int, ...]
    topk: int
    id_dtype: torch.dtype
    experts: int
    capacity: int
    max_rows: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExchangedRows:
    """What an `ExpertExchange` has brought to this rank, and what its combine needs.

    Attributes:
        request: The facts of the dispatch.
        tensors: Each tensor's rows; 0 in rows that are no token.
        topk_ids: [rows, k]: as in `RoutedTokens`.
        local_ids: [rows, k] int64: as in `RoutedTokens`.
        received: [ranks + 1] int32: the rows that came from each rank, and their number.
        places: [tokens, ranks] int32: the number of each token's row among those for that rank, or -1.
        lost: [tokens] bool: as in `RoutedTokens`.
    """

    request: ExchangeRequest
    tensors: list[torch.Tensor]
    topk_ids: torch.Tensor
    local_ids: torch.Tensor
    received: torch.Tensor
    places: torch.Tensor
    lost: torch.Tensor


class ExpertExchange(Protocol):
    """Kernels that dispatch and combine with counts on the device; the all-to-all form's contract, but for NaN bits."""

    def why_not(self, request: ExchangeRequest) -> str:
        """Return why a dispatch is not carried, or "". A pure function; not collective."""

    def dispatch(
        self,
        request: ExchangeRequest,
        tensors: Sequence[torch.Tensor],
        ids: torch.Tensor,
        owners: torch.Tensor,
        local: torch.Tensor,
    ) -> ExchangedRows:
        """Send rows to the ranks of their experts, queued on the current stream. Collective.

        Args:
            request: One that `why_not` finds no fault with.
            tensors: [tokens, ...]: the hidden states, then the others.
            ids: [tokens, k].
            owners: [experts] int64: the rank of each expert.
            local: [experts] int64: its index on this rank, or -1.
        """

    def combine(
        self, results: torch.Tensor, weights: torch.Tensor | None, rows: ExchangedRows
    ) -> torch.Tensor:
        """Sum results of [rows, hidden], or with weights of [rows, k, hidden], on the tokens' ranks. Collective."""
