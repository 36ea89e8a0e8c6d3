"""The table of the benchmark that runs engines in turn, from figures of our own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engines import ROOT, SHORT_REQUESTS, show, table

Rounds = dict[str, dict[str, list[float]]]


@pytest.fixture
def rounds() -> Rounds:
    """Return three rounds of steps and one of short requests, where the second round was slow for every engine."""
    short = [float(each) for each in range(SHORT_REQUESTS)]
    return {
        name: {
            "step_ms": [10.0 * factor, 20.0 * factor, 10.0 * factor],
            "silent_ms": [8.0, 16.0, 8.0],
            "meeting_ms": [8.5, 17.0, 8.5],
            "step_cpu_s": [1.0, 2.0, 1.0],
            "short_ms": [each * factor for each in short],
            "short_cores": [2.0 * factor],
        }
        for name, factor in (("stock", 1.0), ("ours", 0.9))
    }


def test_ratios_are_those_of_the_same_round(rounds: Rounds) -> None:
    """A slow round changes neither the median nor the ratio."""
    rows = table(rounds)
    assert rows["step_ms"]["stock"] == 10
    assert rows["step_ms"]["ours/stock"] == 0.9
    assert rows["step_ms"]["quarters"] == [0.9, 0.9]
    assert rows["short_cores"]["ours"] == 1.8
    assert rows["short_p50_ms"]["stock"] == 10
    assert rows["short_p90_ms"]["ours/stock"] == 0.9


def test_communication_is_what_a_step_takes_more_than_one_without_collectives(
    rounds: Rounds, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stock needs 2 ms of 10 for it, and ours 1 ms; ranks that only wait for each other lose half a millisecond."""
    show(table(rounds))
    printed = capsys.readouterr().out
    assert "communication: 20% of stock's step; ours takes 0.50 of that" in printed
    assert "only wait for each other lose 0.50 and 0.50 ms" in printed


@pytest.mark.slow
def test_figures_and_a_picture_are_written(rounds: Rounds, tmp_path: Path) -> None:
    """The file holds every round; a run beside a busy loop has files of its own. Matplotlib keeps fonts open."""
    rows = table(rounds)  # it adds the percentiles of the short requests to the rounds
    found = {"versions": {"vllm": "0"}, "options": [], "table": rows, "rounds": rounds}
    code = "import json, sys, pathlib; from benchmarks.engines import write\n"
    code += "for busy in (0, 1): write(pathlib.Path(sys.argv[1]), {**json.loads(sys.argv[2]), 'busy': busy})"
    subprocess.run([sys.executable, "-c", code, str(tmp_path), json.dumps(found)], cwd=ROOT, check=True)
    names = [
        f"{name}.{kind}" for name in ("engine_steps", "engine_steps_busy") for kind in ("json", "png", "svg")
    ]
    assert sorted(path.name for path in tmp_path.iterdir() if path.stat().st_size > 0) == names
    assert json.loads((tmp_path / "engine_steps.json").read_text())["rounds"]["ours"]["step_ms"] == [9, 18, 9]
