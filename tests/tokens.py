"""What the tiny LLM generates on one host, with which every launcher on several hosts is compared."""

from pathlib import Path
from typing import Any

from tests.multiproc.project.test_tiny_llm_demo import (
    CONFIG,
    PROMPTS,
    prompts,
    random_checkpoint,
    report_of,
    run_demo,
)

__all__ = ["demo_arguments", "tokens_of_one_host"]


def demo_arguments(directory: Path) -> list[str]:
    """Write a model, always the same one, into `directory`; return the arguments that let the demo serve it."""
    model = random_checkpoint(directory / "model", CONFIG)
    return ["--model", str(model), "--json", "--max-tokens", "12", *prompts(PROMPTS)]


def tokens_of_one_host(arguments: list[str]) -> list[dict[str, Any]]:
    """Return the continuations of all prompts by two ranks on this host."""
    found: list[dict[str, Any]] = report_of(run_demo(*arguments, "--tp", "2", "--pp", "1"))["continuations"]
    assert len(found) == len(PROMPTS)
    return found
