"""A small model of random weights with a tokenizer of single bytes, as vLLM reads them from a folder."""

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["write_mixture", "write_model"]

# Byte tokens follow these three.
SPECIAL = ("<unk>", "<s>", "</s>")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: str) -> None:
    """Write the configuration and the tokenizer; the engine makes up the weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    Path(folder, "config.json").write_text(json.dumps(CONFIG))


def write_mixture(folder: str) -> None:
    """Write a mixture of experts with weights: those that the engine makes up are so small that no expert counts."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    write_model(folder)
    words = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
    words["vocab_size"] = len(SPECIAL) + 256
    torch.manual_seed(1)
    config = MixtralConfig(
        **words, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2, tie_word_embeddings=False
    )
    MixtralForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    options = parser.parse_args()
    (write_mixture if options.experts else write_model)(options.folder)
