"""How the tests of `tests/gpu` are run and reported, shown without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.page import short_reason
from tests.gpu.report import GOALS, NOT_SHOWN
from tests.gpu.steps import IN_EVERY_PART, PARTS, STEPS, seconds_of
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
    assert "are used up" in found["is_too_long"]["reason"]
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
    assert f"Verified on one Planted H200: {STEPS['figures'].title}. Not verified:" in text
    assert all(each in text for each in NOT_SHOWN)
    assert "NCCL" not in text.partition("## Goals")[2]


def assert_ended(pid: int) -> None:
    """A process that was killed may take a moment to end."""
    wait_until(lambda: has_ended(pid), f"the end of process {pid}, which a test started", 20.0, 0.01)


def test_the_script_is_valid_shell() -> None:
    """Bash reads it, it can be executed, and it refuses what it does not know."""
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=10)
    assert SCRIPT.stat().st_mode & 0o111
    for arguments in (["--nonsense"], ["--only", "probe,nonsense"], ["--part", "nonsense"]):
        refused = subprocess.run(
            [str(SCRIPT), *arguments], capture_output=True, text=True, check=False, timeout=10
        )
        assert refused.returncode == 2
        assert "nonsense" in refused.stderr
        assert "--wheels DIR" in refused.stdout


# Sessions of pytest in forks of one interpreter, since torch's import and its end take most of the time of each.
LIST_PARTS = """
import os, sys
import pytest
import coordinator
for part in sys.argv[1:]:
    print("part", part, flush=True)
    child = os.fork()
    if child == 0:
        options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--gpu-part", part]
        status = pytest.main([*options, "tests/gpu"])
        sys.stdout.flush()
        os._exit(status)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(1)
"""


@pytest.mark.slow
def test_a_part_is_its_groups_and_the_facts() -> None:
    """In the order of the steps; of the first group every part has the facts about the machine."""
    parts = [str(part) for part in PARTS]
    listed = subprocess.run(
        [sys.executable, "-c", LIST_PARTS, *parts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    _, *lists = listed.stdout.split("part ")
    assert [each.split("\n")[0] for each in lists] == parts
    for part, text in zip(PARTS, lists, strict=True):
        names = [line for line in text.splitlines() if line.startswith("tests/gpu/test_")]
        groups = [line.removeprefix("tests/gpu/test_").partition(".py::")[0] for line in names]
        assert list(dict.fromkeys(groups)) == [
            group for group, step in STEPS.items() if step.part == part or group == "probe"
        ]
        facts = [name for name in names if IN_EVERY_PART in name]
        assert len(facts) == 4
        assert names[:4] == facts
        assert groups.count("probe") == (7 if part == 1 else 4)


FAKE_PYTHON = """#!/bin/bash
# Stands for a machine's Python: notes how it is called, and builds an empty core.
echo "$*" >> "$LOG"
case "$*" in
    "-m tests.gpu.steps"*) exec "$REAL_PYTHON" "$@" ;;
    "setup.py"*) touch device_comm/_core.abi3.so ;;
    "-m pytest"*) ls device_comm/*.so >> "$LOG"; exit 5 ;;
esac
"""


def test_the_script_builds_once_for_all_parts(tmp_path: Path) -> None:
    """Each part gets its time and its number; the second finds the cores of the first; the tree stays as it is."""
    fake, log = tmp_path / "python", tmp_path / "log"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(fake), "LOG": str(log), "REAL_PYTHON": sys.executable}
    calls = []
    for part in (1, 2):
        log.write_text("")
        done = subprocess.run(
            [SCRIPT, "--part", str(part), "--build", tmp_path / "build", "--out", tmp_path / "out"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=environ,
            cwd=tmp_path,
        )
        assert done.returncode == 5, done.stderr
        calls.append(log.read_text())
    for part, said in zip((1, 2), calls, strict=True):
        assert f"-m tests.gpu.steps {part}\n" in said
        asked = next(line for line in said.splitlines() if line.startswith("-m pytest"))
        assert f"--gpu-part {part} " in asked
        given = float(asked.split("--gpu-seconds ")[1].split()[0])
        assert seconds_of(part) - 30 < given <= seconds_of(part)
        assert "device_comm/_core.abi3.so" in said
    assert ["setup.py" in said for said in calls] == [True, False]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["build", "log", "out", "python"]
