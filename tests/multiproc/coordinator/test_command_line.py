"""`python -m coordinator` prints what it should, ends with the right status and leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.cli import CHECKED, main
from coordinator.testing import PARTS
from tests.printed_command import pids_shown_by
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]


def test_info_names_versions_devices_and_paths(capfd: pytest.CaptureFixture[str]) -> None:
    """`info --json` prints one JSON object. It starts two ranks to measure how long that takes."""
    assert main(["info", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["versions"]["torch"].startswith("2.")
    assert found["all_reduce on the CPU, all ranks on one host"]["4 ranks"]["8 KiB"].startswith("one-shot: ")
    assert "NCCL" in found
    assert any("agreement" in line for line in found["trial start of two ranks"])


def test_info_survives_a_setting_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bug report must be possible with the settings that cause the bug. The output is text for people."""
    monkeypatch.setenv("GROUP_COORDINATOR_TIMEOUTS", "3")
    assert main(["info", "--no-start"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("versions\n")
    assert "SettingsError" in text
    assert "GROUP_COORDINATOR_TIMEOUT_S" in text


def test_every_part_of_the_contract_can_be_checked_alone() -> None:
    """`check --only` offers each part of the conformance suite: it lists them itself, to answer without torch."""
    assert CHECKED[: len(PARTS)] == tuple(PARTS)


def test_demo_shows_every_call_with_its_algorithm(capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks run, one table is printed, and calls are made for as long as the user asks."""
    assert main(["demo", "--hold", "0.3"]) == 0
    text = capfd.readouterr().out
    for word in ("1 KiB", "16 MiB", "one-shot", "broadcast_object", "barrier", "making calls for 0.3 s"):
        assert word in text


@pytest.mark.thorough
def test_a_demo_that_holds_prints_the_command_that_watches_it(tmp_path: Path) -> None:
    """The command, run as printed while the demo makes calls, shows both ranks."""
    command = [sys.executable, "-m", "coordinator", "demo", "--hold", "120"]
    printed = tmp_path / "printed"
    with printed.open("w") as file, subprocess.Popen(command, stdout=file, cwd=ROOT) as demo:
        try:
            wait_until(lambda: "--pid" in printed.read_text(), "the command")
            assert len(pids_shown_by(printed.read_text())) == 2
        finally:
            demo.send_signal(signal.SIGINT)
        assert demo.wait(30) == 128 + signal.SIGINT


def test_check_verifies_a_part_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """It checks one part of the contract for tensors, and one part for objects."""
    assert main(["check", "-n", "2", "--only", "all_gather", "--only", "queue"]) == 0
    text = capfd.readouterr().out
    assert "all_gather" in text
    assert "queue" in text
    assert "all parts are correct" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "-n", "0"],
        ["check", "-n", "65"],
        ["demo", "--timeout", "-1"],
        ["demo", "--hold", "0"],
        ["check", "--hold", "1"],
        ["check", "--only", "x"],
        [],
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The error is printed before any rank is started."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: " in capfd.readouterr().err


def test_a_deadline_that_passes_names_the_ranks_and_ends_them(capfd: pytest.CaptureFixture[str]) -> None:
    """The command ends in time, with status 1."""
    assert main(["check", "--timeout", "0.05"]) == 1
    assert "not finished within 0.05 s (--timeout); still running: ranks 0, 1" in capfd.readouterr().err


def test_ctrl_c_ends_the_ranks_too() -> None:
    """Ctrl-C ends the launcher in time, and its ranks with it."""
    command = [sys.executable, "-m", "coordinator", "check", "--only", "all_reduce"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert process.wait(30) == 128 + signal.SIGINT
        assert time.monotonic() - started < 20
