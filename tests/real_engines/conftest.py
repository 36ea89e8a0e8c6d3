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


@pytest.fixture(scope="session")
def sglang() -> Path:
    """Return the folder that holds SGLang's unpacked wheel and the packages that its distributed layer imports."""
    folder = os.environ.get("SGLANG_WHEEL")
    if not folder:
        pytest.fail("SGLANG_WHEEL names no folder: `make test-engines` fills one and sets it")
    return Path(folder)
