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
        slot: Where the request's keys and values are kept.
        start: Position of the first token in the request's sequence: tokens that the cache holds already.
        count: Number of tokens.
    """

    slot: int
    start: int
    count: int


class Batch:
    """Tokens of several requests side by side, prefill and decode alike, without padding.

    Attributes:
        spans: Whose tokens they are, in order.
        positions: Position of each token in its own sequence, int64, `[tokens]`.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        """Give each token its position.

        Args:
            spans: At least one.
        """
        self.spans = list(spans)
        self.positions = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])


class KVCache:
    """Keys and values of one layer for a fixed number of requests.

    A slot is not cleared between two requests: a request reads only positions that it wrote itself.
    """

    def __init__(self, slots: int, heads: int, length: int, head_dim: int) -> None:
        """Reserve the memory.

        Args:
            slots: Requests at a time.
            heads: KV heads of this rank.
            length: Tokens of the longest sequence.
            head_dim: Channels of one head.
        """
        self.keys = torch.zeros(slots, heads, length, head_dim)
        self.values = torch.zeros(slots, heads, length, head_dim)

    def extend(
        self, span: Span, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a span's keys and values and return its request's whole past.

        Args:
            span: Whose they are.
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
    """Self-attention. Column-parallel in, heads apart, row-parallel out: one all-reduce.

    A rank holds `heads / ranks` query heads. It holds the KV heads that those read: its share where there are
    enough of them, and otherwise a copy of one, which several neighbouring ranks then hold alike.
    """

    def __init__(self, config: ModelConfig, group: Group, rotary: RotaryEmbedding) -> None:
        """Make room for this rank's heads.

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
            slots: Requests at a time.
            length: Tokens of the longest sequence.
        """
        return KVCache(slots, self.kv_heads.stop - self.kv_heads.start, length, self.head_dim)

    def forward(self, hidden: torch.Tensor, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Let each token attend to its own request's past.

        Args:
            hidden: Shape `[tokens, hidden_size]`.
            batch: Whose tokens they are.
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
        heads: Heads of the layer: a multiple of the ranks, or a divisor of them.
        group: The ranks that share the layer.

    Returns:
        The heads: an equal share, or the one head that this rank holds with its neighbours.
    """
    if heads >= group.world_size:
        share = heads // group.world_size
        return Shard(0, share * group.rank_in_group, share * (group.rank_in_group + 1), heads)
    head = group.rank_in_group // (group.world_size // heads)
    return Shard(0, head, head + 1, heads)


def scaled(heads: Shard, head_dim: int) -> Shard:
    """Turn a range of heads into the range of their channels."""
    return Shard(heads.dim, heads.start * head_dim, heads.stop * head_dim, heads.size * head_dim)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span) -> torch.Tensor:
    """Attend causally.

    Args:
        queries: The span's, `[query heads, span.count, head_dim]`.
        keys: The whole past, `[KV heads, span.start + span.count, head_dim]`.
        values: Same shape as the keys.
        span: Where the queries stand in the past.

    Returns:
        Shape of `queries`.
    """
    mask = None
    if span.start and span.count > 1:
        # Query i stands at position start + i and sees itself and everything before.
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
