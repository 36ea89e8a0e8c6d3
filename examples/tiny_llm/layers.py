"""The parallel layers of a transformer: which piece of a weight each rank holds, and which collective it calls.

Each layer states its piece in `shards`, so that loading reads nothing else. The parameters have the names of a
Hugging Face checkpoint.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from .checkpoint import Shard
from .group import Group

__all__ = [
    "ColumnParallelLinear",
    "RMSNorm",
    "RowParallelLinear",
    "ShardedModule",
    "VocabParallelEmbedding",
    "VocabParallelLogits",
    "even_shard",
]


def even_shard(size: int, group: Group, dim: int = 0) -> Shard:
    """Split a dimension evenly; the last pieces extend beyond `size` if it is not divisible.

    Args:
        size: Length of the whole dimension.
        group: The ranks that share it.
        dim: Index of the dimension in the weight.

    Returns:
        This rank's piece.
    """
    piece = -(-size // group.world_size)
    start = piece * group.rank_in_group
    return Shard(dim, start, start + piece, size)


class ShardedModule(nn.Module):
    """A module whose own parameters may be pieces of those in the checkpoint.

    Attributes:
        shards: The piece of each split parameter, by its name in this module; other parameters are whole.
    """

    def __init__(self, shards: Mapping[str, Shard] | None = None) -> None:
        """Store the pieces.

        Args:
            shards: The piece of each split parameter.
        """
        super().__init__()
        self.shards = dict(shards or {})


class RMSNorm(ShardedModule):
    """Root-mean-square norm, fused with the residual addition. Every rank holds all of it."""

    def __init__(self, size: int, eps: float) -> None:
        """Allocate the scale.

        Args:
            size: Channels.
            eps: Added to the mean square.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block's output to the residual stream, and normalize the sum for the next block.

        Args:
            hidden: The block's output, shape `[tokens, size]`.
            residual: The stream so far, same shape; None before the first block.

        Returns:
            The normalized sum, and the sum itself.
        """
        stream = hidden if residual is None else hidden + residual
        mean_square = stream.pow(2).mean(dim=-1, keepdim=True)
        return self.weight * (stream * torch.rsqrt(mean_square + self.eps)), stream


class ColumnParallelLinear(ShardedModule):
    """A linear layer whose outputs are split over the ranks. It needs no communication."""

    def __init__(self, inputs: int, rows: Shard, *, bias: bool) -> None:
        """Allocate this rank's rows.

        Args:
            inputs: Input channels; every rank has all of them.
            rows: This rank's output channels.
            bias: Whether there is a bias; it is split like the outputs.
        """
        super().__init__({"weight": rows, "bias": rows})
        outputs = rows.stop - rows.start
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[tokens, inputs]` to this rank's outputs, `[tokens, outputs / ranks]`."""
        return functional.linear(hidden, self.weight, self.bias)


class RowParallelLinear(ShardedModule):
    """A linear layer whose inputs are split over the ranks. It ends with an all-reduce."""

    def __init__(self, outputs: int, columns: Shard, group: Group, *, bias: bool) -> None:
        """Allocate this rank's columns.

        Args:
            outputs: Output channels; every rank gets all of them.
            columns: This rank's input channels; `dim` is 1.
            group: The ranks that share the layer.
            bias: Whether there is a bias; every rank holds all of it.
        """
        super().__init__({"weight": columns})
        inputs = columns.stop - columns.start
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self.group = group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map this rank's `[tokens, inputs / ranks]` to the whole `[tokens, outputs]`."""
        total = self.group.all_reduce(functional.linear(hidden, self.weight))
        # Add the bias after the sum; before it, the bias would count once per rank.
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(ShardedModule):
    """Token vectors, each held by one rank. The other ranks contribute zeros to an all-reduce."""

    def __init__(self, vocab_size: int, size: int, group: Group) -> None:
        """Allocate this rank's tokens.

        Args:
            vocab_size: Number of tokens; need not be divisible by the number of ranks.
            size: Channels of a vector.
            group: The ranks that share the table.
        """
        self.rows = even_shard(vocab_size, group)
        super().__init__({"weight": self.rows})
        self.weight = nn.Parameter(torch.empty(self.rows.stop - self.rows.start, size), requires_grad=False)
        self.group = group

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token ids, int64 `[tokens]`, to vectors `[tokens, size]`."""
        mine = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        local = torch.where(mine, tokens - self.rows.start, 0)
        vectors = functional.embedding(local, self.weight) * mine.unsqueeze(-1)
        return self.group.all_reduce(vectors)


class VocabParallelLogits(ShardedModule):
    """The output layer: each rank scores its own tokens, and the first rank gathers the scores."""

    def __init__(self, vocab_size: int, size: int, group: Group) -> None:
        """Allocate this rank's tokens.

        Args:
            vocab_size: Number of tokens; need not be divisible by the number of ranks.
            size: Input channels.
            group: The ranks that share the table.
        """
        rows = even_shard(vocab_size, group)
        super().__init__({"weight": rows})
        self.weight = nn.Parameter(torch.empty(rows.stop - rows.start, size), requires_grad=False)
        self.vocab_size = vocab_size
        self.group = group

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Map `[tokens, size]` to logits `[tokens, vocab_size]` on the group's first rank, None elsewhere."""
        logits = self.group.gather(functional.linear(hidden, self.weight), dst=0, dim=-1)
        return None if logits is None else logits[:, : self.vocab_size]
