"""Rotary position embedding: frequencies for every supported scaling, and the rotation itself."""

import math

import torch

from .config import RopeConfig

__all__ = ["RotaryEmbedding", "rotary_frequencies"]


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair of channels.

    `linear` divides every frequency by the factor. `llama3` divides only low frequencies, whose wavelength exceeds the
    original context, and interpolates between the two thresholds.

    Args:
        rope: The parameters.
        head_dim: Channels of one head, even.

    Returns:
        Radians per position, float32, shape `[head_dim / 2]`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        waves_in_context = rope.original_length * frequencies / (2 * math.pi)
        kept = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / rope.factor)
    return frequencies


class RotaryEmbedding:
    """Cosines and sines of every position up to a maximum, computed once and shared by all layers."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_length: int) -> None:
        """Fill the tables.

        Args:
            rope: The parameters.
            head_dim: Channels of one head, even.
            max_length: Positions in the tables, in tokens.
        """
        positions = torch.arange(max_length, dtype=torch.float32)
        angles = torch.outer(positions, rotary_frequencies(rope, head_dim))
        # Channel i is paired with channel i + head_dim / 2, so each angle appears twice.
        self.cosines = torch.cat((angles, angles), dim=-1).cos()
        self.sines = torch.cat((angles, angles), dim=-1).sin()

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate each head by the angle of its token's position.

        Args:
            heads: Queries or keys, shape `[tokens, heads, head_dim]`.
            positions: Position of each token in its own sequence, int64, shape `[tokens]`.

        Returns:
            A new tensor of the shape of `heads`.
        """
        cosines = self.cosines[positions].unsqueeze(1)
        sines = self.sines[positions].unsqueeze(1)
        first, second = heads.chunk(2, dim=-1)
        return heads * cosines + torch.cat((-second, first), dim=-1) * sines
