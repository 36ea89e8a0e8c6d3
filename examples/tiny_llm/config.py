"""The shape of a Llama from a Hugging Face `config.json`, checked once and frozen. Does not import torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DemoError

__all__ = ["ModelConfig", "RopeConfig"]

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling of its frequencies.

    Attributes:
        theta: Base of the frequencies.
        rope_type: `"default"`, `"linear"` or `"llama3"`.
        factor: Scaling factor of the positions; 1 for `"default"`.
        low_freq_factor: llama3: wavelengths above `original_length / low_freq_factor` are scaled fully.
        high_freq_factor: llama3: wavelengths below `original_length / high_freq_factor` are not scaled.
        original_length: llama3: context length of the training, in tokens.
    """

    theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Read `rope_parameters`, or the older form: `rope_theta` and `rope_scaling`.

        Args:
            config: The content of `config.json`.

        Raises:
            DemoError: The scaling type is not supported, or a field is missing.
        """
        fields = dict(config.get("rope_scaling") or {})
        fields.update(config.get("rope_parameters") or {})
        theta = float(fields.get("rope_theta", config.get("rope_theta", cls.theta)))
        rope_type = str(fields.get("rope_type", fields.get("type", "default")))
        if rope_type not in ROPE_TYPES:
            raise DemoError(f"rope type {rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}")
        if rope_type == "default":
            return cls(theta)
        try:
            factor = float(fields["factor"])
            if rope_type == "linear":
                return cls(theta, rope_type, factor)
            return cls(
                theta,
                rope_type,
                factor,
                low_freq_factor=float(fields["low_freq_factor"]),
                high_freq_factor=float(fields["high_freq_factor"]),
                original_length=int(fields["original_max_position_embeddings"]),
            )
        except KeyError as error:
            raise DemoError(f"config.json: rope type {rope_type!r} needs the field {error}") from None


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-architecture decoder; the names are those of `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    rope: RopeConfig = RopeConfig()

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            DemoError: A size is not positive, or the number of KV heads does not divide that of query heads.
        """
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                raise DemoError(f"config.json: {name} is {getattr(self, name)}, but must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise DemoError(
                f"config.json: {self.num_attention_heads} attention heads are not a multiple of "
                f"{self.num_key_value_heads} KV heads"
            )

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read `config.json`, and the end-of-text tokens of `generation_config.json` if it exists.

        Args:
            directory: A Hugging Face checkpoint directory.

        Raises:
            DemoError: A file is missing or malformed, or the model is not a Llama.
        """
        config = read_json(directory / "config.json")
        if config.get("model_type", "llama") != "llama":
            raise DemoError(
                f"{directory}: model_type {config['model_type']!r} is not supported, only 'llama'"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise DemoError(f"{directory}: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
        eos = token_ids(config.get("eos_token_id"))
        if (directory / "generation_config.json").is_file():
            eos += token_ids(read_json(directory / "generation_config.json").get("eos_token_id"))
        try:
            heads = int(config["num_attention_heads"])
            return cls(
                vocab_size=int(config["vocab_size"]),
                hidden_size=int(config["hidden_size"]),
                intermediate_size=int(config["intermediate_size"]),
                num_hidden_layers=int(config["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                rms_norm_eps=float(config.get("rms_norm_eps", cls.rms_norm_eps)),
                max_position_embeddings=int(
                    config.get("max_position_embeddings", cls.max_position_embeddings)
                ),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                bos_token_id=next(iter(token_ids(config.get("bos_token_id"))), None),
                eos_token_ids=tuple(dict.fromkeys(eos)),
                rope=RopeConfig.from_mapping(config),
            )
        except KeyError as error:
            raise DemoError(f"{directory / 'config.json'}: the field {error} is missing") from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise DemoError(f"{directory / 'config.json'}: {error}") from None

    def to_mapping(self) -> dict[str, Any]:
        """Return the content of a `config.json` that other Llama implementations can read, too."""
        rope: dict[str, Any] = {"rope_type": self.rope.rope_type, "rope_theta": self.rope.theta}
        if self.rope.rope_type != "default":
            rope["factor"] = self.rope.factor
        if self.rope.rope_type == "llama3":
            rope["low_freq_factor"] = self.rope.low_freq_factor
            rope["high_freq_factor"] = self.rope.high_freq_factor
            rope["original_max_position_embeddings"] = self.rope.original_length
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
            "rope_parameters": rope,
            "torch_dtype": "float32",
        }

    def check_layout(self, tensor: int, pipeline: int) -> None:
        """Check that the model can be split over `tensor` ranks and `pipeline` stages.

        Args:
            tensor: Ranks that share every layer.
            pipeline: Stages that share the list of layers.

        Raises:
            DemoError: It cannot; the text names the size that does not fit.
        """
        if tensor < 1 or pipeline < 1:
            raise DemoError(f"--tp and --pp must be at least 1, not {tensor} and {pipeline}")
        if pipeline > self.num_hidden_layers:
            raise DemoError(f"{self.num_hidden_layers} layers cannot fill {pipeline} pipeline stages (--pp)")
        if self.num_attention_heads % tensor:
            raise DemoError(
                f"{self.num_attention_heads} attention heads cannot be split over {tensor} ranks (--tp)"
            )
        kv_heads = self.num_key_value_heads
        if kv_heads % tensor and tensor % kv_heads:
            raise DemoError(
                f"{kv_heads} KV heads cannot be split over {tensor} ranks (--tp): one number must divide the other"
            )
        if self.intermediate_size % tensor:
            raise DemoError(
                f"intermediate_size {self.intermediate_size} cannot be split over {tensor} ranks (--tp)"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Args:
        path: The file.

    Raises:
        DemoError: The file is missing, unreadable, or not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DemoError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise DemoError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DemoError(f"{path} does not hold a JSON object")
    return content


def token_ids(value: Any) -> list[int]:
    """Return no token, one token or a list of tokens as a list."""
    if value is None:
        return []
    return [int(item) for item in (value if isinstance(value, list) else [value])]
