"""The demo's own model: its shape, and the sentences that it memorizes. Does not import torch."""

from .config import ModelConfig

__all__ = ["BOS", "EOS", "LESSONS", "PROMPTS", "SEEDED_CONFIG"]

BOS, EOS = 256, 257

SEEDED_CONFIG = ModelConfig(
    vocab_size=258,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    bos_token_id=BOS,
    eos_token_ids=(EOS,),
)

# Pairs of a prompt and its continuation.
LESSONS = (
    (
        "A tensor-parallel layer",
        " splits one weight over several ranks, and an all-reduce sums what they computed.",
    ),
    ("A pipeline stage", " holds some of the layers and hands its hidden states to the next one."),
    (
        "The KV cache",
        " keeps the keys and values of earlier tokens, so that each step computes only new ones.",
    ),
    ("Continuous batching", " lets requests join and leave at every step."),
    ("A barrier", " waits for everyone."),
    ("When a rank dies,", " its peers learn who it was in under a second, and nobody waits for ever."),
)

PROMPTS = tuple(prompt for prompt, _ in LESSONS)
