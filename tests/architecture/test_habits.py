"""CI, the hooks of git and the Makefile agree: what they call are words of the Makefile."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
HOOKS = ROOT / ".pre-commit-config.yaml"


def words() -> set[str]:
    """Return the words of the Makefile that `make help` lists."""
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def called(path: Path, pattern: str) -> list[str]:
    """Return what a file gives to make, in its order."""
    return re.findall(pattern, path.read_text(), re.MULTILINE)


def test_ci_runs_the_same_words_everywhere() -> None:
    """The hosted workflow and .ci/run call the same words in the same order, and nothing besides."""
    ours = called(ROOT / ".ci" / "run", r"^make (.+)$")
    assert called(WORKFLOW, r"^\s*- run: (.+)$") == [f"make {word}" for word in ours]
    assert {"setup", "check", "test"} <= set(ours) <= words()


@pytest.mark.parametrize("word", ["check", "test-fast"])
def test_the_hooks_call_words_of_the_makefile(word: str) -> None:
    """A hook that runs make runs a word that there is."""
    assert word in called(HOOKS, r"^\s*entry: make (.+)$")
    assert word in words()


def test_the_hooks_fetch_nothing() -> None:
    """Every hook is local and runs what is installed."""
    assert set(called(HOOKS, r"^\s*- repo: (.+)$")) == {"local"}
    assert set(called(HOOKS, r"^\s*language: (.+)$")) == {"system"}
