"""How the tests of `tests/gpu` are run and reported, shown without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.report import GOALS, GROUPS, NOT_SHOWN, short_reason
from tests.gpu.running import allot
from tests.waiting import has_ended, wait_until

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "gpu" / "run.sh"

BODIES = """
import os, subprocess, sys, time, warnings
from tests.gpu.notes import gpu_body

@gpu_body
def finds(me, text):
    me.fact("GPU", "Planted H200")
    me.figure("time", 1.5, "us")
    me.goal("a killed rank", "1 s", "2 | s", False)
    return f"{me.rank} of {me.world_size} {text}"

@gpu_body
def raises(me):
    me.figure("before the error", 2, "us")
    raise ValueError("so it is")

@gpu_body
def dies(me):
    os._exit(7)

@gpu_body
def hangs(me):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    me.fact("child", child.pid)
    time.sleep(60)

@gpu_body
def warns(me):
    warnings.warn("careful")
    me.figure("after the warning", 3, "us")
"""
STREAMS = """
import pytest
import planted_bodies
import tests.conftest
from tests.gpu.running import on_gpu

tests.conftest.missing_gpus = lambda count: None

@on_gpu(1000, 2000)
def test_is_too_long(gpu): pass

@on_gpu(1, 20)
def test_finds(gpu): assert gpu.run(planted_bodies.finds, "x", ranks=2) == ["0 of 2 x", "1 of 2 x"]

@pytest.mark.parametrize("name", ["raises", "dies", "warns"])
@on_gpu(1, 20)
def test_fails(gpu, name): gpu.run(getattr(planted_bodies, name))

@on_gpu(1, 3)
def test_hangs(gpu): gpu.run(planted_bodies.hangs)

@on_gpu(1, 20)
def test_lacks(gpu): gpu.skip("no such tool")
"""
FIGURES = """
from tests.gpu.running import on_gpu

@on_gpu(1, 20)
def test_goes_on(gpu): gpu.figure("here", 4, "us")
"""


@pytest.mark.slow
def test_a_session_reports_every_test_whatever_happens_to_its_body(tmp_path: Path) -> None:
    """A body that raises, dies, hangs or warns fails its own test; what it had found before is in the report.

    A test that finds no time, or that this machine cannot show, is skipped. The groups run in their order.
    """
    for name, text in (("planted_bodies", BODIES), ("test_streams", STREAMS), ("test_figures", FIGURES)):
        (tmp_path / f"{name}.py").write_text(text)
    plugins = ["-p", "tests.conftest", "-p", "tests.gpu.conftest", "-p", "no:cacheprovider"]
    options = ["--gpu-seconds", "100", "--gpu-report", str(tmp_path / "out"), str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir=.", *plugins, *options],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
    )
    output = run.stdout + run.stderr
    assert run.returncode == 1, output
    report = json.loads((tmp_path / "out" / "gpu-report.json").read_text())
    found: dict[str, Any] = {each["name"]: each for each in report["tests"]}
    assert {name: each["outcome"] for name, each in found.items()} == {
        "is_too_long": "skipped",
        "finds": "passed",
        "fails[raises]": "failed",
        "fails[dies]": "failed",
        "fails[warns]": "failed",
        "hangs": "failed",
        "lacks": "skipped",
        "goes_on": "passed",
    }, output
    assert [each["group"] for each in report["tests"]] == ["streams"] * 7 + ["figures"]
    assert "no time is left" in found["is_too_long"]["reason"]
    assert "no such tool" in found["lacks"]["reason"]
    assert found["finds"]["figures"] == {"time": {"value": 1.5, "unit": "us"}}
    assert list(report["goals"]) == list(GOALS)
    assert report["goals"]["a killed rank"]["reached"] is False
    assert report["goals"][GOALS[0]] == {"target": "", "found": "not measured", "reached": None}
    assert short_reason(found["fails[raises]"]["reason"]) == "ValueError: so it is"
    assert "before the error" in found["fails[raises]"]["figures"]
    assert "with exit status 7" in short_reason(found["fails[dies]"]["reason"])
    assert "warnings: careful" in short_reason(found["fails[warns]"]["reason"])
    assert "after the warning" in found["fails[warns]"]["figures"]
    assert "no answer within" in short_reason(found["hangs"]["reason"])
    assert_ended(int(found["hangs"]["facts"]["child"]))
    check_page((tmp_path / "out" / "gpu-report.md").read_text())


def check_page(text: str) -> None:
    """The page names the machine, what each test came to, and what one GPU cannot show; no word of NCCL's speed."""
    assert text.startswith("# What one GPU showed: Planted H200\n")
    assert ": 2 passed, 4 failed, 2 skipped." in text
    assert "| a killed rank | 1 s | 2 \\| s | **no** |" in text
    assert "| finds | passed |" in text
    assert "| ValueError: so it is |" in text
    assert "| time | 1.5 | us |" in text
    assert f"Verified on one Planted H200: {GROUPS['figures']}. Not verified:" in text
    assert all(each in text for each in NOT_SHOWN)
    assert "NCCL" not in text


def assert_ended(pid: int) -> None:
    """A process that was killed may take a moment to end."""
    wait_until(lambda: has_ended(pid), f"the end of process {pid}, which a test started", 20.0, 0.01)


def test_later_tests_keep_the_least_that_they_need() -> None:
    """A test takes what is free, up to its most; where time is short the earlier test runs."""
    assert allot(10.0, 50.0, 20.0, 200.0) == 50.0
    assert allot(10.0, 50.0, 20.0, 45.0) == 25.0
    assert allot(10.0, 50.0, 20.0, 15.0) == 10.0
    assert allot(10.0, 50.0, 20.0, 9.0) == 0.0
    assert allot(10.0, 50.0, 0.0, 12.0) == 12.0


def marked_seconds() -> Iterator[tuple[float, float]]:
    """Yield the least and the most of every test of every group."""
    for group in GROUPS:
        module = importlib.import_module(f"tests.gpu.test_{group}")
        for name, test in vars(module).items():
            if name.startswith("test_"):
                marks = {mark.name: mark.args for mark in test.pytestmark}
                assert marks["requires_gpus"] == (1,)
                for _ in marks.get("parametrize", ("", [""]))[1]:
                    yield marks["gpu_seconds"]


def test_all_groups_fit_into_the_time() -> None:
    """Every test needs a GPU and has its time; all of them fit into what run.sh gives them, the build aside."""
    seconds = list(marked_seconds())
    assert len(seconds) > 30
    assert all(least <= most for least, most in seconds)
    assert sum(least for least, _ in seconds) <= 300.0


def test_the_script_is_valid_shell() -> None:
    """Bash reads it, it can be executed, and it refuses what it does not know."""
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=10)
    assert SCRIPT.stat().st_mode & 0o111
    for arguments in (["--nonsense"], ["--only", "probe,nonsense"]):
        refused = subprocess.run(
            [str(SCRIPT), *arguments], capture_output=True, text=True, check=False, timeout=10
        )
        assert refused.returncode == 2
        assert "nonsense" in refused.stderr
        assert "--wheels DIR" in refused.stdout
