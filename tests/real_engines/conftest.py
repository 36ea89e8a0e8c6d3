"""Where the real engines are."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vllm() -> Path:
    """Return the interpreter of an environment that holds vLLM and this project's wheel."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.fail("VLLM_PYTHON names no interpreter: `make test-engines` makes an environment and sets it")
    return Path(python)
