"""`python -m coordinator`: what it prints, how it ends, and that it leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time

import pytest

from coordinator.cli import main


def test_info_names_versions_devices_and_paths(capfd: pytest.CaptureFixture[str]) -> None:
    """As one JSON object, with two ranks that were started to see how long that takes."""
    assert main(["info", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["versions"]["torch"].startswith("2.")
    assert found["all_reduce on the CPU, all ranks on one host"]["4 ranks"]["8 KiB"].startswith("one-shot: ")
    assert "NCCL" in found
    assert any("agreement" in line for line in found["trial start of two ranks"])


def test_info_survives_a_setting_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bug report must be possible with the very settings that are to blame; as text for people."""
    monkeypatch.setenv("GROUP_COORDINATOR_TIMEOUTS", "3")
    assert main(["info", "--no-start"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("versions\n")
    assert "SettingsError" in text
    assert "GROUP_COORDINATOR_TIMEOUT_S" in text


def test_demo_shows_every_call_with_its_way(capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks, one table."""
    assert main(["demo"]) == 0
    text = capfd.readouterr().out
    for word in ("1 KiB", "16 MiB", "one-shot", "broadcast_object", "barrier"):
        assert word in text


def test_check_verifies_a_part_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """A part of the contract, and one of what the host carries."""
    assert main(["check", "-n", "2", "--only", "all_gather", "--only", "queue"]) == 0
    text = capfd.readouterr().out
    assert "all_gather" in text
    assert "queue" in text
    assert "all parts are correct" in text


@pytest.mark.parametrize(
    "arguments",
    [["check", "-n", "0"], ["check", "-n", "65"], ["demo", "--timeout", "-1"], ["check", "--only", "x"], []],
)
def test_a_wrong_command_line_is_told_with_status_2(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: " in capfd.readouterr().err


def test_a_deadline_that_passes_names_the_ranks_and_ends_them(capfd: pytest.CaptureFixture[str]) -> None:
    """Status 1, in time."""
    assert main(["check", "--timeout", "0.05"]) == 1
    assert "not finished within 0.05 s (--timeout); still running: ranks 0, 1" in capfd.readouterr().err


def test_ctrl_c_ends_the_ranks_too() -> None:
    """The launcher answers it, and takes its ranks along."""
    command = [sys.executable, "-m", "coordinator", "check", "--only", "all_reduce"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert process.wait(30) == 128 + signal.SIGINT
        assert time.monotonic() - started < 20
