"""`python -m coordinator top` in a terminal, in a pipe and once: what it prints, and how it ends."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.diagnosis import pages
from shm_broadcast.status.page import own_page
from shm_broadcast.status.shown_calls import ShownCalls
from tests.harness import RankPool
from tests.waiting import wait_until
from tests.worlds import world

COMMAND = (sys.executable, "-m", "coordinator", "top")
# Hides rich from the interpreter that runs the command.
WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = None; sys.argv = ['coordinator', *sys.argv[1:]]; "
    "import importlib.util as util; found = util.find_spec; "
    "util.find_spec = lambda name, *more: None if name == 'rich' else found(name, *more); "
    "from coordinator.cli import main; sys.exit(main())"
)


@pytest.fixture
def shown() -> Iterator[ShownCalls]:
    """Let this process have a group in its page."""
    made = ShownCalls("watched:0", 0, [0])
    yield made
    made.status.leave()


# --- Once -----------------------------------------------------------------------------------------------------


def in_a_barrier(rank: int, world_size: int, directory: Path, done: str) -> None:
    with world(rank, world_size, directory) as group:
        (Path(done).parent / f"begins-{rank}").touch()
        if rank == 0:
            wait_until(Path(done).exists, "the end of the test", poll_s=0.05)
        group.barrier()


def rows_of(text: str, pids: Sequence[int]) -> list[str]:
    """Return the lines about some processes."""
    rows = [line for line in text.splitlines() if {str(pid) for pid in pids}.intersection(line.split())]
    assert len(rows) >= len(pids)
    return rows


def test_one_look_at_stopped_ranks_is_plain_text(
    ranks2: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks are stopped; the command answers, with a row for each, and no escape sequence."""
    done = tmp_path / "done"
    printed: list[str] = []
    stopped: list[int] = []

    def watch(pids: Sequence[int]) -> None:
        wait_until(lambda: all((tmp_path / f"begins-{rank}").exists() for rank in range(2)), "both ranks")
        time.sleep(0.5)
        stopped.extend(pids)
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            for more in ([], ["--pid", str(pids[1])], ["--pid", str(pids[0]), "--pid", str(pids[1])]):
                assert main(["top", "--once", "--interval", "0.2", *more]) == 0
                out, err = capsys.readouterr()
                assert err == ""
                printed.append(out)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        done.touch()

    ranks2.run(in_a_barrier, str(done), while_running=watch)
    for text in printed:
        assert "\x1b" not in text
        # The first look shows other jobs on the host, too, whose failures are told in whole sentences.
        own = text.splitlines() if text is not printed[0] else rows_of(text, stopped)
        assert max(map(len, own)) <= 120
    first, second = (str(pid) for pid in stopped)
    # Other jobs of this host may be shown too.
    rows = [line.split() for line in printed[0].splitlines() if "world:0 shared host" in line]
    found = {row[4]: row[3:] for row in rows}
    assert [found[pid][:3] for pid in (first, second)] == [["0", first, "stopped"], ["1", second, "stopped"]]
    assert found[second][3] == "barrier"
    alone = [line.split() for line in printed[1].splitlines() if "world:0" in line]
    assert [row[4] for row in alone] == [second]
    both = [line.split() for line in printed[2].splitlines() if "world:0" in line]
    assert [row[4] for row in both] == [first, second]


def test_a_process_that_cannot_be_shown_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The status is 1, and a line for each process says why: it has no page, or does not exist."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        pids = ["--pid", str(other.pid), "--pid", str(ended.pid)]
        assert main(["top", "--once", "--interval", "0.01", *pids]) == 1
        other.communicate(b"\n")
    assert capsys.readouterr().err.splitlines() == [
        f"process {other.pid} has no status page: it has created no group",
        f"process {ended.pid} does not exist",
    ]


@pytest.mark.parametrize(
    "arguments", [["--interval", "0"], ["--interval", "x"], ["--pid", "0"], ["--pid", "-3"], ["--pid", "x"]]
)
def test_a_wrong_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the status 2 and the reason."""
    with pytest.raises(SystemExit) as ended:
        main(["top", *arguments])
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


# --- In a pipe ------------------------------------------------------------------------------------------------


def test_in_a_pipe_it_prints_one_look_after_the_other(shown: ShownCalls) -> None:
    """As plain text; it ends with the status 0 when the reader has seen enough."""
    del shown
    with subprocess.Popen(
        [*COMMAND, "--interval", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout is not None
        assert top.stderr is not None
        heads = 0
        for line in top.stdout:
            assert "\x1b" not in line
            heads += "with a status page" in line
            if heads == 3:
                break
        top.stdout.close()
        assert top.stderr.read() == ""
        assert top.wait(30) == 0


@pytest.mark.thorough
def test_ctrl_c_ends_it_with_success(shown: ShownCalls) -> None:
    """SIGINT is how people end it, and no error."""
    del shown
    with subprocess.Popen(
        [*COMMAND, "--interval", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout is not None
        assert top.stderr is not None
        assert "with a status page" in top.stdout.readline()
        top.send_signal(signal.SIGINT)
        assert top.wait(30) == 0
        assert top.stderr.read() == ""


# --- In a terminal --------------------------------------------------------------------------------------------


@contextmanager
def terminal(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a command in a new terminal of 120 columns; yield it and the terminal's other end."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (30, 120))
    process = subprocess.Popen(
        command,
        stdin=its,
        stdout=its,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        os.close(its)
        os.close(ours)


def read_until(terminal_: int, is_enough: Callable[[str], bool]) -> str:
    """Return what a command has written to its terminal, as soon as that is enough."""
    text, end = "", time.monotonic() + 60
    while not is_enough(text):
        assert time.monotonic() < end, f"only {text[-2000:]!r} was written"
        if select.select([terminal_], [], [], 1.0)[0]:
            text += os.read(terminal_, 1 << 16).decode(errors="replace")
    return text


@pytest.mark.parametrize("key", [b"q", pytest.param(None, marks=pytest.mark.thorough)])
def test_in_a_terminal_it_has_a_screen_that_q_and_ctrl_c_end(shown: ShownCalls, key: bytes | None) -> None:
    """The terminal is as it was before: the other screen, the cursor and the echo of keys are back."""
    del shown
    with terminal([*COMMAND, "--interval", "0.2", "--pid", str(os.getpid())]) as (top, ours):
        before = termios.tcgetattr(ours)
        text = read_until(ours, lambda text: text.count("watched:0") >= 2 and "q ends" in text)
        assert "\x1b[?1049h" in text
        if key is None:
            top.send_signal(signal.SIGINT)
        else:
            os.write(ours, b"x")
            os.write(ours, key)
        text += read_until(ours, lambda text: "\x1b[?1049l" in text)
        assert top.wait(30) == 0
        assert termios.tcgetattr(ours) == before
        assert top.stderr is not None
        assert top.stderr.read() == b""


@pytest.mark.thorough
def test_without_rich_a_terminal_gets_plain_text(shown: ShownCalls) -> None:
    """Rich is an extra; without it one look follows the other."""
    del shown
    with terminal([sys.executable, "-c", WITHOUT_RICH, "top", "--interval", "0.1"]) as (top, ours):
        text = read_until(ours, lambda text: text.count("watched:0") >= 3)
        assert "\x1b" not in text
        top.send_signal(signal.SIGINT)
        assert top.wait(30) == 0


def test_the_page_of_a_process_that_has_ended_well_leaves_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left its groups, so nothing of it is of interest; one that was killed is shown as dead."""
    from coordinator.diagnosis.top.rows import rows_of
    from coordinator.diagnosis.top.sampling import Sampler

    own_page()
    program = (
        "import sys; from shm_broadcast.status.shown_calls import ShownCalls; "
        "made = ShownCalls('ended:0', 0, [0]); print(flush=True); "
        "sys.stdin.readline(); made.status.leave()"
    )
    sampler = Sampler()
    try:
        with (
            subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as well,
            subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as killed,
        ):
            for child in (well, killed):
                assert child.stdout is not None
                child.stdout.readline()
            pids = {well.pid, killed.pid}
            rows = [row for row in rows_of(None, sampler.sample()) if row.group == "ended:0"]
            assert {row.pid for row in rows} == pids
            killed.kill()
            well.communicate(b"\n")
        rows = [row for row in rows_of(None, sampler.sample()) if row.group == "ended:0"]
        assert [(row.pid, row.state) for row in rows] == [(killed.pid, "dead")]
    finally:
        sampler.close()
    # Who has not seen it alive does not see it at all: nobody has kept its page. Other tests that look at this host may
    # have it open, as they have all pages, so that only the processes of this test count.
    monkeypatch.setattr(pages, "processes", lambda: [os.getpid(), *pids])
    fresh = Sampler()
    try:
        assert [row for row in rows_of(None, fresh.sample()) if row.group == "ended:0"] == []
    finally:
        fresh.close()
