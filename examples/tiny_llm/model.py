"""One pipeline stage of a Llama-architecture decoder, and the loading of its weights."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from .attention import Attention, Batch, KVCache
from .checkpoint import Checkpoint, Shard
from .config import ModelConfig
from .group import Group, ModelGroups
from .layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    ShardedModule,
    VocabParallelEmbedding,
    VocabParallelLogits,
    even_shard,
)
from .rope import RotaryEmbedding

__all__ = ["LlamaStage", "load_weights", "stage_layers"]

EMBEDDING_NAME = "model.embed_tokens.weight"
LOGITS_NAME = "lm_head.weight"


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """Choose the layers of a pipeline stage: a contiguous range; the sizes of two stages differ by at most one.

    Args:
        layers: Number of layers of the model.
        stage: Index of the stage.
        stages: Number of stages.
    """
    return range(layers * stage // stages, layers * (stage + 1) // stages)


class FeedForward(nn.Module):
    """The gated feed-forward block: column-parallel up, row-parallel down, one all-reduce."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        """Allocate this rank's share of the inner channels.

        Args:
            config: The model's shape.
            group: The ranks that share the layer.
        """
        super().__init__()
        rows = even_shard(config.intermediate_size, group)
        columns = Shard(1, rows.start, rows.stop, rows.size)
        self.gate_proj = ColumnParallelLinear(config.hidden_size, rows, bias=config.mlp_bias)
        self.up_proj = ColumnParallelLinear(config.hidden_size, rows, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(config.hidden_size, columns, group, bias=config.mlp_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[tokens, hidden_size]` to the same shape, equal on all ranks."""
        result: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each preceded by a norm that also adds the residual stream."""

    def __init__(self, config: ModelConfig, group: Group, rotary: RotaryEmbedding) -> None:
        """Create the blocks.

        Args:
            config: The model's shape.
            group: The ranks that share the layer.
            rotary: Position tables.
        """
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, group, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config, group)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: Batch, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer.

        Args:
            hidden: Output of the previous layer, `[tokens, hidden_size]`.
            residual: The residual stream, same shape; None in the model's first layer.
            batch: The requests and positions of the tokens.
            cache: This layer's KV cache.

        Returns:
            This layer's output, and the residual stream to which the next layer adds it.
        """
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, batch, cache)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(nn.Module):
    """The layers of a stage, with the checkpoint's names; the first stage embeds, the last one has the last norm."""

    def __init__(self, config: ModelConfig, groups: ModelGroups, rotary: RotaryEmbedding) -> None:
        """Create the layers of this rank's stage.

        Args:
            config: The model's shape.
            groups: The groups of this rank.
            rotary: Position tables.
        """
        super().__init__()
        stage = groups.pipeline
        if stage.is_first_rank:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, groups.tensor)
        numbers = stage_layers(config.num_hidden_layers, stage.rank_in_group, stage.world_size)
        self.layers = nn.ModuleDict({str(n): DecoderLayer(config, groups.tensor, rotary) for n in numbers})
        if stage.is_last_rank:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LlamaStage(nn.Module):
    """One rank's share of the layers of its pipeline stage, in float32."""

    def __init__(self, config: ModelConfig, groups: ModelGroups, max_length: int) -> None:
        """Create the stage with uninitialized weights.

        Args:
            config: The model's shape.
            groups: The groups of this rank.
            max_length: Tokens of the longest sequence.

        Raises:
            DemoError: The model cannot be split over these groups.
        """
        super().__init__()
        config.check_layout(groups.tensor.world_size, groups.pipeline.world_size)
        self.config = config
        self.groups = groups
        self.max_length = max_length
        self.model = Decoder(config, groups, RotaryEmbedding(config.rope, config.head_dim, max_length))
        if groups.pipeline.is_last_rank:
            self.lm_head = VocabParallelLogits(config.vocab_size, config.hidden_size, groups.tensor)

    def make_caches(self, slots: int) -> list[KVCache]:
        """Reserve a KV cache for each layer of this stage.

        Args:
            slots: Number of requests at the same time.
        """
        return [
            layer.self_attn.make_cache(slots, self.max_length)
            for layer in self.model.layers.values()
            if isinstance(layer, DecoderLayer)
        ]

    def forward(
        self,
        batch: Batch,
        caches: Sequence[KVCache],
        tokens: torch.Tensor | None,
        received: Mapping[str, torch.Tensor] | None,
    ) -> dict[str, torch.Tensor]:
        """Run the stage's layers.

        Args:
            batch: The requests and positions of the tokens.
            caches: One per layer of this stage.
            tokens: Token ids, int64 `[tokens]`; used by the first stage.
            received: The previous stage's result; used by all other stages.

        Returns:
            `hidden_states` and `residual`, `[tokens, hidden_size]` each, equal on all tensor-parallel ranks.
        """
        if self.groups.pipeline.is_first_rank:
            hidden, residual = self.model.embed_tokens(tokens), None
        else:
            assert received is not None
            hidden, residual = received["hidden_states"], received["residual"]
        for layer, cache in zip(self.model.layers.values(), caches, strict=True):
            hidden, residual = layer(hidden, residual, batch, cache)
        assert residual is not None
        return {"hidden_states": hidden, "residual": residual}

    def logits(self, outputs: Mapping[str, torch.Tensor], rows: Sequence[int]) -> torch.Tensor | None:
        """Compute the logits of the next token for some rows. All ranks of the last stage call this.

        Args:
            outputs: Result of `forward`.
            rows: Indices of the batch's tokens.

        Returns:
            Shape `[rows, vocab_size]` on the stage's first rank, None on its others.
        """
        chosen = torch.tensor(rows, dtype=torch.int64)
        hidden, _ = self.model.norm(outputs["hidden_states"][chosen], outputs["residual"][chosen])
        result: torch.Tensor | None = self.lm_head(hidden)
        return result


def load_weights(stage: LlamaStage, checkpoint: Checkpoint) -> None:
    """Fill a stage with its pieces of the weights, reading no others.

    Args:
        stage: The stage to fill.
        checkpoint: The weights.

    Raises:
        DemoError: A weight is missing or has another shape.
    """
    for path, module in stage.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own_name}"
            if name == LOGITS_NAME and stage.config.tie_word_embeddings:
                name = EMBEDDING_NAME
            shard = module.shards.get(own_name) if isinstance(module, ShardedModule) else None
            checkpoint.read_into(parameter, name, shard)
