"""`python -m coordinator`: what it prints, how it ends, and that it leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time

import pytest

COMMAND = [sys.executable, "-m", "coordinator"]


def run(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_info_names_versions_devices_and_paths() -> None:
    """As text for people and as one JSON object; what is not there is said, not an error."""
    found = json.loads(run("info", "--json").stdout)
    assert found["versions"]["torch"].startswith("2.")
    assert found["all_reduce on the CPU, ranks of one host"]["4 ranks"]["8 KiB"].startswith("one-shot: ")
    assert "NCCL" in found
    text = run("info").stdout
    assert text.startswith("versions\n")
    assert "fingerprint: " in text


def test_info_survives_a_setting_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug report must be possible with the very settings that are to blame."""
    monkeypatch.setenv("GROUP_COORDINATOR_TIMEOUTS", "3")
    ended = run("info")
    assert ended.returncode == 0
    assert "SettingsError" in ended.stdout
    assert "GROUP_COORDINATOR_TIMEOUT_S" in ended.stdout


def test_demo_shows_every_call_with_its_way() -> None:
    """Two ranks, one table."""
    ended = run("demo")
    assert ended.returncode == 0, ended.stderr
    for word in ("1 KiB", "16 MiB", "one-shot", "broadcast_object", "barrier"):
        assert word in ended.stdout


def test_check_verifies_a_part_and_says_so() -> None:
    """The parts of the contract, and what the host carries."""
    ended = run("check", "-n", "2", "--only", "all_gather", "--only", "queue")
    assert ended.returncode == 0, ended.stderr
    assert "all_gather" in ended.stdout
    assert "queue" in ended.stdout
    assert "everything is right" in ended.stdout


@pytest.mark.parametrize(
    "arguments",
    [("check", "-n", "0"), ("check", "-n", "65"), ("demo", "--timeout", "-1"), ("check", "--only", "x"), ()],
)
def test_a_wrong_command_line_is_told_with_status_2(arguments: tuple[str, ...]) -> None:
    """Before anything is started."""
    ended = run(*arguments)
    assert ended.returncode == 2
    assert "usage: " in ended.stderr


def test_a_deadline_that_passes_names_the_ranks_and_ends_them() -> None:
    """Status 1, in time."""
    ended = run("check", "--timeout", "0.05")
    assert ended.returncode == 1
    assert "no end within 0.05 s (--timeout); still running: ranks 0, 1" in ended.stderr


def test_ctrl_c_ends_the_ranks_too() -> None:
    """The launcher answers it, and takes its ranks along."""
    with subprocess.Popen([*COMMAND, "check"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert process.wait(30) == 128 + signal.SIGINT
        assert time.monotonic() - started < 20
