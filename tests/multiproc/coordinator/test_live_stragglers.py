"""Of running ranks `stragglers` names one that is 2 ms late, and nobody if all are late in turn or cores are busy."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from coordinator import destroy_distributed_environment, get_world_group, init_distributed_environment
from coordinator.cli import main
from coordinator.diagnosis.pages import Found, find_pages
from coordinator.diagnosis.stragglers import StragglerWatch
from tests.harness import RankPool

DELAY_S = 0.002


def sums_until_told(rank: int, world_size: int, directory: Path, late: str, stop: str) -> int:
    """Make sums until there is a file `stop`, and be late: always ("rank 2"), in turn, or never; return how many."""
    init_distributed_environment(world_size, rank, f"file://{directory}/rendezvous", backend="gloo")
    group = get_world_group()
    calls, goes_on = 0, True
    while goes_on:
        if late == f"rank {rank}" or (late == "in turn" and calls % world_size == rank):
            time.sleep(DELAY_S)
        group.all_reduce(torch.ones(64))
        calls += 1
        # All ranks end with the same call.
        if calls % 50 == 0:
            goes_on = bool(group.all_reduce(torch.tensor([float(Path(stop).exists())])) == 0)
    destroy_distributed_environment()
    return calls


def while_summing(ranks4: RankPool, stop: Path, late: str, look: Callable[[Sequence[int]], None]) -> None:
    """Call `look(pids)` while four ranks make sums."""

    def look_and_stop(pids: Sequence[int]) -> None:
        try:
            look(pids)
        finally:
            stop.touch()

    calls = ranks4.run(sums_until_told, late, str(stop), while_running=look_and_stop, timeout_s=300)
    assert len(set(calls)) == 1


def pages_of(pids: Sequence[int]) -> list[Found]:
    """Return the pages of the ranks."""
    return list(find_pages(pids, records=False).found)


def window_of(pids: Sequence[int]) -> float:
    """Return in how many seconds the ranks make 400 calls, which is longer on a busy machine; at least half of one."""

    def calls() -> int:
        pages = pages_of(pids)
        return min((found.page.calls for found in pages), default=0) if len(pages) == len(pids) else 0

    while (first := calls()) < 100:
        time.sleep(0.02)
    began = time.monotonic()
    while (made := calls() - first) < 100:
        time.sleep(0.02)
    return max(0.5, 400 * (time.monotonic() - began) / made)


def windows_of(pids: Sequence[int], number: int) -> list[list[int]]:
    """Return who is named at the end of each window in which all ranks made enough calls; in others nobody may be."""
    watch, window_s = StragglerWatch(), window_of(pids)
    found: list[list[int]] = []
    watch.look(pages_of(pids), time.monotonic_ns())
    for _ in range(4 * number):
        if len(found) == number:
            break
        time.sleep(window_s)
        named = watch.look(pages_of(pids), time.monotonic_ns())
        if watch.judged >= 4:
            found.append([each.rank for each in named])
        else:
            assert not named
    assert len(found) == number
    return found


@contextlib.contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """Keep `number` processes busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_a_rank_that_is_2_ms_late_is_named_within_two_windows(
    ranks4: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command's exit status is 3, and it prints the rank, its process, the group and the cost."""
    status, named = [], []

    def look(pids: Sequence[int]) -> None:
        words = [word for pid in pids for word in ("--pid", str(pid))]
        status.append(main(["stragglers", "--window", str(window_of(pids)), *words]))
        named.append(f"rank 2 (pid {pids[2]}) is late in 'world:0' (shared): last to ")

    while_summing(ranks4, tmp_path / "stop", "rank 2", look)
    text = capsys.readouterr().out
    assert (status, text.count("\n")) == ([3], 1), text
    assert text.startswith(named[0])


@pytest.mark.parametrize(
    "windows", [pytest.param(30, marks=[pytest.mark.thorough, pytest.mark.proof]), 2], ids=str
)
@pytest.mark.parametrize(
    ("late", "busy"),
    [("in turn", 0), ("never", 2), pytest.param("in turn", 2, marks=pytest.mark.thorough)],
)
def test_nobody_is_named_where_no_rank_is_slower(
    ranks4: RankPool, tmp_path: Path, late: str, busy: int, windows: int
) -> None:
    """All ranks are late in turn, two busy processes take the cores from any of them, or both."""

    def look(pids: Sequence[int]) -> None:
        with busy_cores(busy):
            assert windows_of(pids, windows) == [[]] * windows

    while_summing(ranks4, tmp_path / "stop", late, look)


@pytest.mark.thorough
def test_the_log_has_a_line_for_each_window_and_ctrl_c_ends_it(ranks4: RankPool, tmp_path: Path) -> None:
    """It says the time, and who is late or that nobody is; the exit status is 3 if somebody was named."""

    def look(pids: Sequence[int]) -> None:
        words = [word for pid in pids for word in ("--pid", str(pid))]
        command = [
            sys.executable,
            "-m",
            "coordinator",
            "stragglers",
            "--log",
            "--window",
            str(window_of(pids)),
        ]
        with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True) as tool:
            assert tool.stdout is not None
            lines: list[str] = []
            while len(lines) < 10 and not any("WARNING" in line for line in lines):
                lines.append(tool.stdout.readline())
            tool.send_signal(2)
            assert tool.wait(20) == 3
        assert " INFO no straggler among " in lines[0]
        assert "+00:00 WARNING rank 1 " in lines[-1]

    while_summing(ranks4, tmp_path / "stop", "rank 1", look)


def test_without_ranks_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A result would say that nobody is late."""
    assert main(["stragglers", "--pid", "1"]) == 1
    assert "no process with a group and a status page" in capsys.readouterr().err
