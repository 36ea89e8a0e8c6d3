"""The benchmarks of single calls run with few of them, print and write a row for each form, and know their gate."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.status_calls import GATED, MOST_PERCENT, misses
from tests.probes import requires

ROOT = Path(__file__).parents[3]
SUMS = ("all_reduce_", "all_reduce_into_output", "all_reduce")
ROWS = {
    "nccl-calls": (
        "ncclAllReduce by ctypes, nothing converted",
        "torch.empty_like",
        *SUMS,
        *(f"{name}, with a StreamOrder" for name in SUMS),
    ),
    "kernel-calls": (
        "a prepared launch by the bindings",
        "torch.empty_like",
        "our kernels: all_reduce",
        "our kernels: fused norm",
        "communicator: all_reduce, with its result",
    ),
}


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def printed_by(*arguments: str) -> str:
    """Run a benchmark; return what it prints."""
    done = ran(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@requires("compiler")
@pytest.mark.parametrize("name", ["nccl-calls", pytest.param("kernel-calls", marks=pytest.mark.thorough)])
def test_a_benchmark_of_calls_prints_its_rows(name: str, tmp_path: Path) -> None:
    """Each form has a row with a median that is at least the least figure, and the file has the same rows."""
    if name == "kernel-calls":
        pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    file = tmp_path / "calls.json"
    few = ("--rounds", "3", "--calls", "5", "--json", str(file))
    printed = printed_by(name, *few)
    rows = re.findall(r"^(.+?) +median +([\d.]+) +least +([\d.]+)$", printed, re.MULTILINE)
    assert tuple(row[0] for row in rows) == ROWS[name]
    assert all(float(median) >= float(least) > 0 for _, median, least in rows)
    written = json.loads(file.read_text())
    assert tuple(written["calls"]) == ROWS[name]
    assert written["machine"]["python"] == platform.python_version()
    assert "torch" in written["machine"]["packages"]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_cost_of_showing_calls_is_measured_in_turn(tmp_path: Path) -> None:
    """Each call has its time with and without the status page, and the difference is in the file too."""
    file = tmp_path / "status.json"
    few = ("status-calls", "--rounds", "3", "--calls", "5")
    # So few calls tell nothing of the gate: no difference exceeds this one, and each the one below.
    printed = printed_by(*few, "--most-percent", "1e9", "--json", str(file))
    found = {
        name.strip()
        for name in re.findall(r"^(.+?) +shown +[\d.]+ +hidden +[\d.]+ +difference", printed, re.MULTILINE)
    }
    messages = {"a message of a queue and back"}
    assert found == {"all_reduce of 1 KB", "all_reduce of 1 KB into an output", "barrier"} | messages
    written = json.loads(file.read_text())["calls"]
    assert set(written) == found | {
        "showing a call over a process group",
        "showing a call of NCCL",
        "showing a wait for a transfer over a process group",
        "showing a wait in a channel",
    }
    assert all(isinstance(written[name]["difference_ns"], float) for name in found)
    missed = ran(*few, "--most-percent=-1e9")
    assert missed.returncode == 1
    assert "all_reduce of 1 KB: " in missed.stderr


@pytest.mark.parametrize("name", GATED)
def test_the_status_page_may_take_three_percent_of_a_small_all_reduce_and_of_a_message(name: str) -> None:
    """The other calls have no gate, and `make bench` ends with it."""
    barrier = {"shown_ns": 2000.0, "hidden_ns": 1000.0, "difference_ns": 1000.0}
    quick = {"shown_ns": 1000.0, "hidden_ns": 1000.0, "difference_ns": 0.0}
    for difference, said in ((30.0, ""), (31.0, f"{name}: 3.1 % slower")):
        gated = {"shown_ns": 1030.0, "hidden_ns": 1000.0, "difference_ns": difference}
        calls = {**dict.fromkeys(GATED, quick), name: gated, "barrier": barrier}
        missed = misses(calls, MOST_PERCENT)
        assert missed.startswith(said)
        assert bool(missed) == bool(said)
    commands = subprocess.run(
        ["make", "--no-print-directory", "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "benchmarks status-calls" in commands.splitlines()[-1]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_time_of_a_rebuild_is_measured(tmp_path: Path) -> None:
    """The ranks that are left notice the kill before they go on, and that before a new process has joined."""
    file = tmp_path / "rebuild.json"
    printed_by("rebuild", "--cycles", "2", "--ranks", "3", "--json", str(file))
    times = json.loads(file.read_text())["times"]
    noticed, good = times["the last rank's error"], times["its first good sum"]
    assert 0 < noticed["median_s"] < good["median_s"] < times["all ranks again"]["median_s"]
    assert 0 < times["blocked by the commit"]["median_s"] < times["all ranks again"]["median_s"]
    assert 0 < times["blocked as one leaves"]["median_s"] <= times["blocked as one leaves"]["most_s"]
    assert good["median_s"] <= good["p99_s"] <= good["most_s"]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_time_of_an_agreement_is_measured(tmp_path: Path) -> None:
    """It is counted from the coming of the last rank."""
    file = tmp_path / "agreement.json"
    printed = printed_by("agreement", "--ranks", "12", "--late-s", "0.5", "--json", str(file))
    found = json.loads(file.read_text())
    assert "12 ranks, the last one 0.5 s late" in printed
    assert 0 < found["median"] <= found["most"]


@pytest.mark.thorough
def test_a_start_is_simulated_with_costs_that_are_measured(tmp_path: Path) -> None:
    """More ranks take longer, and none asks for more."""
    file = tmp_path / "start.json"
    printed = printed_by("start-simulation", "--ranks", "64,640", "--checked", "8", "--json", str(file))
    found = json.loads(file.read_text())
    assert "8 processes here agree" in printed
    assert all(cost > 0 for cost in found["costs"].values())
    few, many = found["simulated"]
    assert few["requests"] == many["requests"]
    assert 0 < few["over_s"][0] < few["over_s"][1] < many["over_s"][1]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_share_of_top_is_that_of_the_command_itself(tmp_path: Path) -> None:
    """It draws on a terminal meanwhile, and takes more than nothing."""
    file = tmp_path / "top.json"
    printed = printed_by("top", "--seconds", "2", "--ranks", "2", "--json", str(file))
    found = json.loads(file.read_text())
    assert f"{found['share_of_a_core']:.2%} of a core" in printed
    assert found["share_of_a_core"] > 0
    assert found["bytes_per_s"] > 0
