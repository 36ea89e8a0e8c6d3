"""The benchmark of meetings runs on a Ray of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.probes import requires
from tests.real_ray.cluster import ROOT

pytestmark = [pytest.mark.engine, requires("ray")]


def test_what_a_meeting_adds_is_measured(tmp_path: Path) -> None:
    """The first meeting takes longer than those that follow, and each adds far less than half a second."""
    file = tmp_path / "meeting.json"
    few = ["--starts", "1", "--meetings", "5", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "meeting", *few],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4 actors on this machine" in done.stdout
    times = json.loads(file.read_text())["times"]
    assert [times[kind]["count"] for kind in ("first", "again")] == [1, 5]
    for kind in ("first", "again"):
        found = times[kind]
        assert 0 < found["joining"]["median_s"] < found["meeting"]["median_s"]
        assert 0 < found["added"]["median_s"] < 0.5, "the promise"
