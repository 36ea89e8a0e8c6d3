"""The demo's decoder computes what the reference implementation of its architecture computes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.tiny_llm.attention import Batch, KVCache, Span, head_range
from examples.tiny_llm.checkpoint import Checkpoint, Shard, write_checkpoint
from examples.tiny_llm.config import ModelConfig, RopeConfig
from examples.tiny_llm.errors import DemoError
from examples.tiny_llm.group import ModelGroups
from examples.tiny_llm.layers import even_shard
from examples.tiny_llm.model import LlamaStage, load_weights, stage_layers
from tests.alone import Alone

LENGTH = 48
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one KV head": {"num_key_value_heads": 1},
    "tied embeddings": {"tie_word_embeddings": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.5}},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "own head size": {"head_dim": 12},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def open_stage(directory: Path) -> tuple[LlamaStage, list[KVCache]]:
    """Load a whole model with room for three requests."""
    alone = Alone()
    stage = LlamaStage(ModelConfig.from_directory(directory), ModelGroups(alone, alone, alone), LENGTH)
    with Checkpoint(directory) as checkpoint:
        load_weights(stage, checkpoint)
    return stage, stage.make_caches(3)


def score(stage: LlamaStage, caches: list[KVCache], *parts: tuple[Span, list[int]]) -> torch.Tensor:
    """Run one batch and return the logits of all its tokens."""
    tokens = [token for _, part in parts for token in part]
    outputs = stage(Batch([span for span, _ in parts]), caches, torch.tensor(tokens), None)
    logits = stage.logits(outputs, range(len(tokens)))
    assert logits is not None
    return logits


@pytest.fixture(scope="module")
def reference() -> Callable[..., Any]:
    """Create a random reference model and write it as a checkpoint directory."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes 3 s, in each process that collects tests

    def make(directory: Path, changes: Mapping[str, Any], max_shard_size: str = "1GB") -> Any:
        torch.manual_seed(7)
        fields = {
            "vocab_size": 101,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": LENGTH,
            "initializer_range": 0.2,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        }
        model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).eval()
        for parameter in model.parameters():  # biases and norms too, which start as zeros and ones
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        return model

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_of_prompts_scores_as_the_reference(
    variant: str, reference: Callable[..., Any], tmp_path: Path
) -> None:
    """Two prompts of different lengths, batched without padding, get the reference's logits."""
    model = reference(tmp_path, VARIANTS[variant])
    stage, caches = open_stage(tmp_path)
    prompts = torch.randint(101, (40,)).tolist(), torch.randint(101, (7,)).tolist()
    with torch.inference_mode():
        ours = score(stage, caches, (Span(2, 0, 40), prompts[0]), (Span(0, 0, 7), prompts[1]))
        theirs = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_with_the_cache_scores_as_the_reference(
    variant: str, reference: Callable[..., Any], tmp_path: Path
) -> None:
    """Logits match for a prompt in two pieces and then token by token, mixed with another request."""
    model = reference(tmp_path, VARIANTS[variant])
    stage, caches = open_stage(tmp_path)
    first, second = torch.randint(101, (30,)).tolist(), torch.randint(101, (12,)).tolist()
    with torch.inference_mode():
        pieces = [score(stage, caches, (Span(1, 0, 9), first[:9]))]
        mixed = score(stage, caches, (Span(1, 9, 11), first[9:20]), (Span(0, 0, 11), second[:11]))
        pieces.append(mixed[:11])
        mixed_decode = score(stage, caches, (Span(1, 20, 1), first[20:21]), (Span(0, 11, 1), second[11:]))
        pieces.append(mixed_decode[:1])
        pieces += [
            score(stage, caches, (Span(1, place, 1), [token]))
            for place, token in enumerate(first[21:], start=21)
        ]
        theirs = [model(torch.tensor([prompt])).logits[0] for prompt in (first, second)]
    torch.testing.assert_close(torch.cat(pieces), theirs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([mixed[11:], mixed_decode[1:]]), theirs[1], rtol=1e-4, atol=1e-4)


def test_several_weight_files_load_as_one(reference: Callable[..., Any], tmp_path: Path) -> None:
    """A split checkpoint with an index loads the same weights as a single file."""
    reference(tmp_path / "one", {})
    reference(tmp_path / "many", {}, max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, _ = open_stage(tmp_path / "one")
    many, _ = open_stage(tmp_path / "many")
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, many.state_dict()[name]), name


def test_our_own_checkpoint_is_one_that_the_reference_loads(
    reference: Callable[..., Any], tmp_path: Path
) -> None:
    """The reference loads what `write_checkpoint` writes, in one file or several."""
    reference(tmp_path / "theirs", {"rope_parameters": LLAMA3_ROPE})
    theirs, _ = open_stage(tmp_path / "theirs")
    for files in (1, 3):
        directory = tmp_path / str(files)
        write_checkpoint(directory, theirs.config, theirs.state_dict(), files)
        ours, _ = open_stage(directory)
        assert ours.config == theirs.config
        assert all(
            torch.equal(weight, ours.state_dict()[name]) for name, weight in theirs.state_dict().items()
        )


def test_a_rank_reads_only_its_share(reference: Callable[..., Any], tmp_path: Path) -> None:
    """Together, the ranks of TP 2 x PP 3 read little more than the checkpoint's size."""
    reference(tmp_path, {"num_key_value_heads": 4})
    config = ModelConfig.from_directory(tmp_path)
    read = []
    for stage in range(3):
        for rank in range(2):
            groups = ModelGroups(Alone(stage * 2 + rank, 6), Alone(rank, 2), Alone(stage, 3))
            with Checkpoint(tmp_path) as checkpoint:
                load_weights(LlamaStage(config, groups, LENGTH), checkpoint)
                read.append(checkpoint.bytes_read)
                total = checkpoint.total_bytes
    norms = 7 * 32 * 4  # the only weights that two ranks hold alike
    assert sum(read) <= total + norms
    assert max(read) < total / 3


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (4, 2, [(0, 2), (2, 4)]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_heads_are_split_or_replicated(heads: int, ranks: int, expected: list[tuple[int, int]]) -> None:
    """Each rank gets an equal share of the heads, or a copy of one if there are too few."""
    shards = [head_range(heads, Alone(rank, ranks)) for rank in range(ranks)]
    assert [(shard.start, shard.stop) for shard in shards] == expected


def test_a_vocabulary_that_does_not_divide_is_padded_at_its_end() -> None:
    """All pieces are equally long, and entries beyond the end are padding."""
    shards = [even_shard(10, Alone(rank, 4)) for rank in range(4)]
    assert [(shard.start, shard.stop) for shard in shards] == [(0, 3), (3, 6), (6, 9), (9, 12)]


def test_a_piece_beyond_the_end_reads_as_zeros(tmp_path: Path) -> None:
    """Padding reads as zeros, even if a rank's piece is nothing else."""
    weights = {"w": torch.arange(6.0).reshape(3, 2)}
    write_checkpoint(tmp_path, make_config(), weights)
    target = torch.full((2, 2), 7.0)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.read_into(target, "w", Shard(0, 2, 4, 3))
        assert target.tolist() == [[4.0, 5.0], [0.0, 0.0]]
        checkpoint.read_into(target, "w", Shard(0, 4, 6, 3))
        assert target.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("layers", [1, 2, 5, 8])
def test_stages_cover_the_layers_once(layers: int) -> None:
    """Every layer has one stage, and no stage is empty."""
    for stages in range(1, layers + 1):
        parts = [stage_layers(layers, stage, stages) for stage in range(stages)]
        assert [number for part in parts for number in part] == list(range(layers))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def make_config(**changes: Any) -> ModelConfig:
    """Create a small valid configuration."""
    return replace(ModelConfig(101, 32, 40, 3, 4, 2, 8), **changes)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "text"),
    [
        (2, 4, "3 layers cannot fill 4 pipeline stages"),
        (3, 1, "4 attention heads cannot be split over 3 ranks"),
        (0, 1, "must be at least 1"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(tensor: int, pipeline: int, text: str) -> None:
    """The text names the number that does not fit."""
    with pytest.raises(DemoError, match=text):
        make_config().check_layout(tensor, pipeline)


def test_uneven_kv_heads_and_channels_are_refused() -> None:
    """KV heads that neither divide nor are divided, and inner channels that do not divide, are refused."""
    with pytest.raises(DemoError, match="3 KV heads cannot be split over 2 ranks"):
        make_config(num_attention_heads=6, num_key_value_heads=3).check_layout(2, 1)
    with pytest.raises(DemoError, match="intermediate_size 41"):
        make_config(intermediate_size=41).check_layout(2, 1)
    with pytest.raises(DemoError, match="not a multiple of"):
        make_config(num_key_value_heads=3)


def test_the_old_spelling_of_rope_is_read() -> None:
    """`rope_theta` beside `rope_scaling` means the same as `rope_parameters`."""
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = RopeConfig.from_mapping({"rope_theta": 500.0, "rope_scaling": scaling})
    assert old == RopeConfig.from_mapping({"rope_parameters": LLAMA3_ROPE})
    linear = RopeConfig.from_mapping({"rope_theta": 3.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear == RopeConfig(3.0, "linear", 2.0)
    assert RopeConfig.from_mapping({"rope_theta": 3.0, "rope_scaling": None}) == RopeConfig(3.0)


def test_an_unknown_rope_is_refused() -> None:
    """An unsupported scaling raises instead of silently giving wrong text."""
    with pytest.raises(DemoError, match="'yarn' is not supported"):
        RopeConfig.from_mapping({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}})
    with pytest.raises(DemoError, match="needs the field 'factor'"):
        RopeConfig.from_mapping({"rope_scaling": {"type": "linear"}})


def test_a_broken_checkpoint_is_refused_with_its_path(tmp_path: Path) -> None:
    """Every fault of a directory raises a `DemoError` that names the file or the weight."""
    with pytest.raises(DemoError, match=r"cannot read .*config\.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DemoError, match="is not JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(DemoError, match="'gpt2' is not supported"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    with pytest.raises(DemoError, match="the field 'vocab_size' is missing"):
        ModelConfig.from_directory(tmp_path)
    with pytest.raises(DemoError, match="has neither"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(DemoError, match=r"cannot read .*model\.safetensors"):
        Checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "../elsewhere"}}')
    with pytest.raises(DemoError, match="outside the directory"):
        Checkpoint(tmp_path)
    index.write_text('{"weight_map": {"w": "missing.safetensors"}}')
    with pytest.raises(DemoError, match=r"cannot read .*missing\.safetensors"):
        Checkpoint(tmp_path)


def test_a_wrong_weight_is_refused_by_name(tmp_path: Path) -> None:
    """The error names a weight that is absent, misshapen or quantized."""
    write_checkpoint(
        tmp_path, make_config(), {"w": torch.ones(2, 2), "q": torch.ones(2, 2, dtype=torch.int8)}
    )
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(DemoError, match="there is no weight 'v'"):
            checkpoint.read_into(torch.empty(2, 2), "v")
        with pytest.raises(DemoError, match=r"'w' has shape \[2, 2\], not \[3, 2\]"):
            checkpoint.read_into(torch.empty(3, 2), "w")
        with pytest.raises(DemoError, match="quantized"):
            checkpoint.read_into(torch.empty(2, 2), "q")
