"""Sample tokens from logits, on one rank."""

from dataclasses import dataclass

import torch

__all__ = ["Sampler"]


@dataclass(frozen=True)
class Sampler:
    """Chooses the next token.

    A token depends only on the logits, the seed, the request and the position, not on the other requests of the batch
    or on the number of ranks.

    Attributes:
        temperature: 0 takes the likeliest token; larger values make the choice more random.
        seed: Seed of the random numbers.
    """

    temperature: float = 0.0
    seed: int = 0

    def choose(self, logits: torch.Tensor, request: int, position: int) -> int:
        """Choose one token.

        Args:
            logits: Shape `[vocab_size]`.
            request: The request's number.
            position: Position of the new token in its sequence.
        """
        if self.temperature == 0.0:
            return int(logits.argmax())
        generator = torch.Generator().manual_seed(hash((self.seed, request, position)) & 0x7FFFFFFF)
        draw = torch.rand((), generator=generator, dtype=torch.float64)
        # In float64, another summation order hardly moves the boundaries between tokens.
        shares = torch.softmax(logits.double() / self.temperature, dim=-1).cumsum(dim=-1)
        return min(int(torch.searchsorted(shares, draw * shares[-1], right=True)), logits.shape[-1] - 1)
