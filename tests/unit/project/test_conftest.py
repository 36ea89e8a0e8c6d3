"""tests/conftest.py enforces its rules on every test."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.probes import requires

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

PLANTED = """
import os, subprocess, sys, tempfile, threading, warnings
import pytest
from tests.leaks import TEMP_PREFIX
from tests.probes import requires, requires_gpus

kept = []

def test_good(): pass

def test_skips(): pytest.skip("no mood")

def test_imports(): pytest.importorskip("no_such_module")

@pytest.mark.skip
def test_marked(): pass

@requires_gpus(99)
def test_gpus(): pass

@pytest.mark.xfail
def test_expected(): assert False

@pytest.mark.xfail
def test_unexpected(): pass

def test_descriptor(): kept.append(os.open(os.devnull, os.O_RDONLY))

def test_child(): kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_thread():
    stop = threading.Event()
    kept.append(stop)
    threading.Thread(target=stop.wait, name=TEMP_PREFIX + "thread", daemon=True).start()

def test_directory(): kept.append(tempfile.mkdtemp(prefix=TEMP_PREFIX))

def test_compile():
    import torch
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))

def test_warning(): warnings.warn("a warning is an error")

def test_environment():
    assert "GROUP_COORDINATOR_TIMEOUT_S" not in os.environ
    assert "RANK" not in os.environ
"""


SKIPPED_MODULE = """
import pytest
pytest.importorskip("no_such_module")
def test_good_in_skipped_module(): pass
"""

# To count the GPUs takes an import of torch, which the tests of `PLANTED` make.
WITHOUT_GPUS = """
import tests.conftest
from tests.probes import requires_gpus

tests.conftest.missing_gpus = lambda count: f"needs {count} GPUs"

@requires_gpus(99)
def test_gpus(): pass
"""


def outcomes(tmp_path: Path, sources: Sequence[str], *options: str) -> tuple[dict[str, str], str]:
    """Run `sources` as test files of this repository; return each test's outcome and the whole output."""
    paths = [tmp_path / f"test_planted_{number}.py" for number in range(len(sources))]
    for path, source in zip(paths, sources, strict=True):
        path.write_text(source)
    pytest_options = ["-c", "pyproject.toml", "--rootdir=.", "-p", "tests.conftest", "-rA", "--no-header"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *pytest_options, *options, *map(str, paths)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "GROUP_COORDINATOR_TIMEOUT_S": "3", "RANK": "0"},
    )
    found: dict[str, str] = {}
    for line in run.stdout.splitlines():
        outcome, _, rest = line.partition(" ")
        if outcome in ("PASSED", "FAILED", "ERROR", "XFAIL", "SKIPPED"):
            name = rest.partition("::")[2].split(" ")[0] or rest
            found[name] = outcome if found.get(name) != "ERROR" else "ERROR"
    return found, run.stdout + run.stderr


def test_what_is_against_the_rules_fails(tmp_path: Path) -> None:
    """A leak, an unlisted skip or the skip of a whole module fails; a listed skip and an expected failure do not."""
    options = ["--continue-on-collection-errors"]
    found, output = outcomes(tmp_path, [PLANTED, SKIPPED_MODULE], *options)
    failed = {name for name, outcome in found.items() if outcome in ("FAILED", "ERROR")}
    modules = {name for name in failed if "a whole module is skipped" in name}
    assert len(modules) == 1, output
    assert failed - modules == {
        "test_skips",
        "test_imports",
        "test_marked",
        "test_unexpected",
        "test_descriptor",
        "test_child",
        "test_thread",
        "test_directory",
        "test_compile",
        "test_warning",
    }, output
    assert "torch.compile has run" in output
    assert found["test_good"] == found["test_environment"] == "PASSED"
    assert found["test_expected"] == "XFAIL"
    assert "needs 99 GPUs" in output
    assert "no mood" in output
    assert "test_good_in_skipped_module" not in found


@pytest.mark.parametrize("option", ["--require-gpu", "--require-all"])
def test_a_skip_can_be_forbidden(tmp_path: Path, option: str) -> None:
    """With the option, a test that lacks its GPUs fails."""
    found, output = outcomes(tmp_path, [WITHOUT_GPUS], option)
    assert found["test_gpus"] in ("FAILED", "ERROR"), output
    assert "needs 99 GPUs" in output


def test_an_unknown_probe_is_refused() -> None:
    """A test cannot name a probe that does not exist."""
    with pytest.raises(ValueError, match="there are"):
        requires("luck")


def test_the_thorough_run_takes_the_whole_of_what_it_is_for() -> None:
    """`make test-thorough` leaves out no cell of the failure matrix, life, changed message or cycle, sampled or not."""
    text = (ROOT / "Makefile").read_text()
    (chosen,) = re.findall(r"^test-thorough:.*\n\t.* -m \"([^\"]+)\" tests$", text, re.MULTILINE)
    files = ["crash/test_matrix.py", "stress/test_stress.py", "fuzz/test_fuzz.py", "crash/test_leaks.py"]
    files += ["multiproc/coordinator/test_rebuild_cycles.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", chosen]
    paths = [str(ROOT / "tests" / file) for file in files]
    run = subprocess.run([*command, *paths], check=False, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "deselected" not in run.stdout, run.stdout
    assert run.stdout.count("/test_matrix.py::") == 8 * 3 * 3 * 4 + 1  # and the test of the table itself
