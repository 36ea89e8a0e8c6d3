"""From logits to tokens, once, on one rank."""

from dataclasses import dataclass

import torch

__all__ = ["Sampler"]


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen.

    A token depends on the logits, the seed, the request and the position only: neither on the other requests
    of the batch nor on how many ranks computed it.

    Attributes:
        temperature: 0 takes the likeliest token; above it, the larger the wilder.
        seed: Of the random numbers.
    """

    temperature: float = 0.0
    seed: int = 0

    def choose(self, logits: torch.Tensor, request: int, position: int) -> int:
        """Choose one token.

        Args:
            logits: Shape `[vocab_size]`.
            request: Number of the request.
            position: Position of the new token in its sequence.
        """
        if self.temperature == 0.0:
            return int(logits.argmax())
        generator = torch.Generator().manual_seed(hash((self.seed, request, position)) & 0x7FFFFFFF)
        draw = torch.rand((), generator=generator, dtype=torch.float64)
        # In float64, so that sums in another order move the borders between tokens hardly at all.
        shares = torch.softmax(logits.double() / self.temperature, dim=-1).cumsum(dim=-1)
        return min(int(torch.searchsorted(shares, draw * shares[-1], right=True)), logits.shape[-1] - 1)
