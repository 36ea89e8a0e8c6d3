"""Where the real engines are, and a model for them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def remove_what_vllm_leaves() -> Iterator[None]:
    """Remove the shared memory of vLLM's own groups on the CPU, which vLLM leaves behind. Ours use none."""
    folder, pattern = Path("/dev/shm"), "vllm_dist_*-cpushm_*"
    before = set(folder.glob(pattern))
    yield
    for path in set(folder.glob(pattern)) - before:
        path.unlink()


@pytest.fixture(scope="session")
def vllm() -> Path:
    """Return the interpreter of an environment that holds vLLM and this project's wheel."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.fail("VLLM_PYTHON names no interpreter: `make test-engines` makes an environment and sets it")
    return Path(python)


@pytest.fixture(scope="session")
def model(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model, whose weights an engine makes itself."""
    return write(vllm, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def mixture(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small mixture of experts and its weights."""
    return write(vllm, tmp_path_factory.mktemp("mixture"), "--experts")


def write(vllm: Path, folder: Path, *options: str) -> Path:
    """Write a model with vLLM's interpreter, and return its folder."""
    command = [str(vllm), "-m", "benchmarks.engine_model", str(folder), *options]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    return folder


@pytest.fixture(scope="session")
def sglang() -> Path:
    """Return the folder that holds SGLang's unpacked wheel and the packages that its distributed layer imports."""
    folder = os.environ.get("SGLANG_WHEEL")
    if not folder:
        pytest.fail("SGLANG_WHEEL names no folder: `make test-engines` fills one and sets it")
    return Path(folder)
