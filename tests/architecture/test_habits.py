"""CI and the git hooks call targets of the Makefile and nothing else."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
HOOKS = ROOT / ".pre-commit-config.yaml"


def targets() -> set[str]:
    """Return the targets that `make help` lists."""
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def called(path: Path, pattern: str) -> list[str]:
    """Return the matches of a pattern in a file, in order."""
    return re.findall(pattern, path.read_text(), re.MULTILINE)


def test_ci_runs_the_same_targets_everywhere() -> None:
    """The hosted workflow and .ci/run call the same targets in the same order, with the same options."""
    ours = called(ROOT / ".ci" / "run", r"^make (.+)$")
    assert called(WORKFLOW, r"^\s*- run: (.+)$") == [f"make {words}" for words in ours]
    names = {word for words in ours for word in re.sub(r"-j \d+|--[a-z-]+", "", words).split()}
    assert {"setup", "check", "test"} <= names <= targets()


@pytest.mark.parametrize("target", ["check", "test-fast"])
def test_the_hooks_call_targets_of_the_makefile(target: str) -> None:
    """A hook that runs make names an existing target."""
    assert target in called(HOOKS, r"^\s*entry: make (.+)$")
    assert target in targets()


def test_the_hooks_fetch_nothing() -> None:
    """Every hook is local and runs what is installed."""
    assert set(called(HOOKS, r"^\s*- repo: (.+)$")) == {"local"}
    assert set(called(HOOKS, r"^\s*language: (.+)$")) == {"system"}
