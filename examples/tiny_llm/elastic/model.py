"""The model of the elastic demo, and the answers that one process gives which nobody disturbs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.tiny_llm.checkpoint import Checkpoint
from examples.tiny_llm.config import ModelConfig
from examples.tiny_llm.group import ModelGroups
from examples.tiny_llm.lessons import LESSONS
from examples.tiny_llm.model import LlamaStage, load_weights
from examples.tiny_llm.sampling import Sampler
from examples.tiny_llm.scheduler import Request, Scheduler
from examples.tiny_llm.seeded import write_seeded_checkpoint
from examples.tiny_llm.tokenizer import open_tokenizer
from examples.tiny_llm.worker import StageWorker, serve

from .options import ElasticOptions

__all__ = ["beginnings", "make_model"]


def make_model(
    options: ElasticOptions,
    directory: Path,
    alone: ModelGroups,
    on_step: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Train the model unless there is one, and answer all prompts with it.

    Args:
        options: The user's options.
        directory: For the checkpoint that is trained.
        alone: Groups of this process only.
        on_step: Called with the loss after each step of the training.

    Returns:
        A message: the directory, the length of the longest sequence, and each prompt with its answer.
    """
    if options.model is None:
        write_seeded_checkpoint(directory, alone, seed=options.seed, on_step=on_step)
    else:
        directory = options.model
    config = ModelConfig.from_directory(directory)
    tokenizer = open_tokenizer(directory, config)
    texts = beginnings(options.prompts)
    requests = [
        Request(number, tuple(tokenizer.encode(text)), options.max_tokens)
        for number, text in enumerate(texts)
    ]
    longest = max(len(request.prompt) for request in requests) + options.max_tokens
    max_length = min(longest, config.max_position_embeddings)
    stage = LlamaStage(config, alone, max_length)
    with Checkpoint(directory) as checkpoint:
        load_weights(stage, checkpoint)
    scheduler = Scheduler(
        requests, slots=1, tokens_per_step=max_length, max_length=max_length, eos_tokens=config.eos_token_ids
    )
    serve(StageWorker(stage, 1, Sampler()), scheduler)
    prompts = [
        [text, request.prompt, scheduler.generated[request.number]]
        for text, request in zip(texts, requests, strict=True)
    ]
    eos = list(config.eos_token_ids)
    return {"directory": str(directory), "max_length": max_length, "eos_tokens": eos, "prompts": prompts}


def beginnings(count: int) -> list[str]:
    """Return different beginnings of the sentences that the model knows, those that leave most to be said first.

    Args:
        count: How many; fewer if there are no more.
    """
    begun = []
    for prompt, rest in LESSONS:
        words = rest.split(" ")[1:]
        begun += [
            (more, " ".join([prompt, *words[:more]])) for more in range(len(words)) if words[more].strip(".")
        ]
    return [text for _, text in sorted(begun, key=lambda each: each[0])[:count]]
