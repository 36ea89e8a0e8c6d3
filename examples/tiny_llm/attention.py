"""Grouped-query attention over a slotted KV cache, with the heads split over the tensor-parallel ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from .checkpoint import Shard
from .config import ModelConfig
from .group import Group
from .layers import ColumnParallelLinear, RowParallelLinear
from .rope import RotaryEmbedding

__all__ = ["Attention", "Batch", "KVCache", "Span"]


@dataclass(frozen=True)
class Span:
    """One request's tokens in a batch: a whole prompt, a piece of it, or a single new token.

    Attributes:
        slot: Cache slot of the request's keys and values.
        start: Position of the first token in the request's sequence; the cache holds the tokens before it.
        count: Number of tokens.
    """

    slot: int
    start: int
    count: int


class Batch:
    """Tokens of several requests, prefill and decode mixed, without padding.

    Attributes:
        spans: The requests' spans, in the order of their tokens.
        positions: Position of each token in its own sequence, int64, `[tokens]`.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        """Compute the position of each token.

        Args:
            spans: At least one span.
        """
        self.spans = list(spans)
        self.positions = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])


class KVCache:
    """Keys and values of one layer for a fixed number of requests.

    A slot is not cleared between requests, because a request reads only positions that it has written.
    """

    def __init__(self, slots: int, heads: int, length: int, head_dim: int) -> None:
        """Reserve the memory.

        Args:
            slots: Number of requests at the same time.
            heads: KV heads of this rank.
            length: Tokens of the longest sequence.
            head_dim: Channels of one head.
        """
        self.keys = torch.zeros(slots, heads, length, head_dim)
        self.values = torch.zeros(slots, heads, length, head_dim)

    def extend(
        self, span: Span, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a span's keys and values, and return all of its request's so far.

        Args:
            span: The span.
            keys: Shape `[heads, span.count, head_dim]`.
            values: Same shape.

        Returns:
            Keys and values of positions 0 to the span's end, `[heads, positions, head_dim]` each.
        """
        stop = span.start + span.count
        self.keys[span.slot, :, span.start : stop] = keys.detach()
        self.values[span.slot, :, span.start : stop] = values.detach()
        if span.start == 0:
            return keys, values
        return self.keys[span.slot, :, :stop], self.values[span.slot, :, :stop]


class Attention(nn.Module):
    """Self-attention: column-parallel input, separate heads, row-parallel output, one all-reduce.

    A rank holds `heads / ranks` query heads and the KV heads that they read. If there are fewer KV heads than ranks,
    several neighbouring ranks hold a copy of the same KV head.
    """

    def __init__(self, config: ModelConfig, group: Group, rotary: RotaryEmbedding) -> None:
        """Allocate this rank's heads.

        Args:
            config: The model's shape, checked against the layout.
            group: The ranks that share the layer.
            rotary: Position tables.
        """
        super().__init__()
        self.head_dim = config.head_dim
        self.rotary = rotary
        self.query_heads = head_range(config.num_attention_heads, group)
        self.kv_heads = head_range(config.num_key_value_heads, group)
        size, bias = config.hidden_size, config.attention_bias
        queries = scaled(self.query_heads, self.head_dim)
        keys = scaled(self.kv_heads, self.head_dim)
        self.q_proj = ColumnParallelLinear(size, queries, bias=bias)
        self.k_proj = ColumnParallelLinear(size, keys, bias=bias)
        self.v_proj = ColumnParallelLinear(size, keys, bias=bias)
        columns = Shard(1, queries.start, queries.stop, queries.size)
        self.o_proj = RowParallelLinear(size, columns, group, bias=bias)

    def make_cache(self, slots: int, length: int) -> KVCache:
        """Reserve this layer's KV cache for this rank's KV heads.

        Args:
            slots: Number of requests at the same time.
            length: Tokens of the longest sequence.
        """
        return KVCache(slots, self.kv_heads.stop - self.kv_heads.start, length, self.head_dim)

    def forward(self, hidden: torch.Tensor, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Let each token attend to its request's earlier tokens.

        Args:
            hidden: Shape `[tokens, hidden_size]`.
            batch: The requests and positions of the tokens.
            cache: This layer's cache; the batch's keys and values are added.

        Returns:
            Shape `[tokens, hidden_size]`, equal on all ranks.
        """
        queries = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))
        keys = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))
        values = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        queries = self.rotary.rotate(queries, batch.positions).transpose(0, 1)
        keys = self.rotary.rotate(keys, batch.positions).transpose(0, 1)
        outputs = []
        offset = 0
        for span in batch.spans:
            piece = slice(offset, offset + span.count)
            past_keys, past_values = cache.extend(span, keys[:, piece], values[:, piece])
            outputs.append(attend(queries[:, piece], past_keys, past_values, span))
            offset += span.count
        merged = torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)
        result: torch.Tensor = self.o_proj(merged)
        return result


def head_range(heads: int, group: Group) -> Shard:
    """Choose this rank's heads.

    Args:
        heads: Heads of the layer: a multiple or a divisor of the number of ranks.
        group: The ranks that share the layer.

    Returns:
        The heads: an equal share, or one head that this rank shares with its neighbours.
    """
    if heads >= group.world_size:
        share = heads // group.world_size
        return Shard(0, share * group.rank_in_group, share * (group.rank_in_group + 1), heads)
    head = group.rank_in_group // (group.world_size // heads)
    return Shard(0, head, head + 1, heads)


def scaled(heads: Shard, head_dim: int) -> Shard:
    """Convert a range of heads to the range of their channels."""
    return Shard(heads.dim, heads.start * head_dim, heads.stop * head_dim, heads.size * head_dim)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span) -> torch.Tensor:
    """Attend causally.

    Args:
        queries: Queries of the span, `[query heads, span.count, head_dim]`.
        keys: Keys of the request so far, `[KV heads, span.start + span.count, head_dim]`.
        values: Same shape as the keys.
        span: Position of the queries in the sequence.

    Returns:
        Shape of `queries`.
    """
    mask = None
    if span.start and span.count > 1:
        # Query i is at position start + i and sees itself and all positions before.
        mask = torch.ones(span.count, span.start + span.count, dtype=torch.bool).tril(span.start)
    result = functional.scaled_dot_product_attention(
        queries.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=span.start == 0 and span.count > 1,
        enable_gqa=queries.shape[0] != keys.shape[0],
    )
    return result.squeeze(0)
