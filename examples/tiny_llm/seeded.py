"""The demo's own checkpoint: a small seeded Llama that memorizes a few sentences.

The tokens of a random model could be compared, too, but its output is unreadable and its logits are close together.
This model trains in seconds, and its best token leads clearly on every byte of the sentences.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from .attention import Batch, Span
from .checkpoint import write_checkpoint
from .group import ModelGroups
from .layers import RMSNorm
from .lessons import BOS, EOS, LESSONS, PROMPTS, SEEDED_CONFIG
from .model import LlamaStage
from .tokenizer import ByteTokenizer

__all__ = ["write_seeded_checkpoint"]


def write_seeded_checkpoint(
    directory: Path, groups: ModelGroups, *, seed: int = 0, on_step: Callable[[float], None] | None = None
) -> None:
    """Train the small model and write it as a checkpoint directory.

    Args:
        directory: Target directory; it is created.
        groups: Groups of one rank: the training runs on this rank only.
        seed: Seed of the initial weights.
        on_step: Called with the loss after each training step.
    """
    stage = LlamaStage(SEEDED_CONFIG, groups, SEEDED_CONFIG.max_position_embeddings)
    generator = torch.Generator().manual_seed(seed)
    for module in stage.modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(module, RMSNorm):
                torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    stage.requires_grad_(requires_grad=True)
    _train(stage, on_step)
    write_checkpoint(directory, SEEDED_CONFIG, {name: w.detach() for name, w in stage.state_dict().items()})


def _train(
    stage: LlamaStage, on_step: Callable[[float], None] | None, *, most_steps: int = 300, sure: float = 6.0
) -> None:
    """Train on all lessons at once until every byte of the continuations leads the second best logit by `sure`."""
    tokenizer = ByteTokenizer(BOS)
    texts = [[*tokenizer.encode(prompt + rest), EOS] for prompt, rest in LESSONS]
    batch = Batch([Span(slot, 0, len(text) - 1) for slot, text in enumerate(texts)])
    tokens = torch.tensor([token for text in texts for token in text[:-1]])
    targets = torch.tensor([token for text in texts for token in text[1:]])
    # The token at position p predicts byte p of the text, because one special token precedes the text.
    asked = torch.cat(
        [torch.arange(len(text) - 1) >= len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)]
    )
    caches = stage.make_caches(len(texts))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(most_steps):
        outputs = stage(batch, caches, tokens, None)
        logits = stage.logits(outputs, range(len(tokens)))
        assert logits is not None
        loss = functional.cross_entropy(logits[asked], targets[asked])
        if on_step is not None:
            on_step(loss.item())
        if _margins(logits.detach(), targets)[asked].min() > sure:
            return
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()


def _margins(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return by how much each target's logit leads that of the best other token; negative if it does not lead."""
    right = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    return right - logits.scatter(1, targets.unsqueeze(1), float("-inf")).amax(dim=1)
