"""A command whose reader has gone, as `head` does, ends as it would have: with its exit status and no traceback."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.cli import blame, main
from coordinator.cli.output import write_out
from shm_broadcast.status.page import own_page

LONG = "x" * (1 << 17) + "\n"


@contextlib.contextmanager
def nobody_reads() -> Iterator[None]:
    """Let standard output be a pipe that nobody reads, in which nothing is left to be flushed at the end."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output, contextlib.redirect_stdout(output):
        yield
        output.flush()


@pytest.fixture
def shown() -> Iterator[list[str]]:
    """Show a group of this process; return the options that select it."""
    status = own_page().group("tp:0", 0, [0, 1])
    yield ["--pid", str(os.getpid())]
    status.leave()


@pytest.mark.parametrize("content", ["short\n", LONG, b"short\n", LONG.encode()])
def test_output_that_nobody_reads_is_dropped(content: str | bytes) -> None:
    """Whether it fits into a buffer or not, and all that follows it."""
    with nobody_reads():
        opened = len(os.listdir("/proc/self/fd"))
        assert not write_out(content)
        assert write_out("more\n")
        assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize("words", [["dump"], ["info"], ["info", "--json"]])
def test_what_is_printed_once_is_a_success(words: list[str], shown: list[str]) -> None:
    """As when somebody reads it."""
    with nobody_reads():
        assert main([*words, *shown]) == 0


def test_a_trace_is_written_though_nobody_reads_what_it_holds(tmp_path: Path, shown: list[str]) -> None:
    """The file is there."""
    with nobody_reads():
        assert main(["trace", str(tmp_path / "out.json"), *shown]) == 0
    assert (tmp_path / "out.json").stat().st_size > 0


@pytest.mark.parametrize("findings", [(), ("somebody",)])
def test_the_status_of_blame_is_that_of_its_verdict(
    monkeypatch: pytest.MonkeyPatch, findings: tuple[str, ...]
) -> None:
    """3 if somebody is named, whoever reads the text."""
    verdict = SimpleNamespace(findings=findings, text=lambda: LONG)
    monkeypatch.setattr(blame, "look_at_jobs", lambda *_: [None])
    monkeypatch.setattr(blame, "judge", lambda _: verdict)
    with nobody_reads():
        assert main(["blame", "--live"]) == (3 if findings else 0)


@pytest.mark.parametrize(("words", "windows"), [(["--log"], 1), ([], 2)])
def test_stragglers_end_with_the_first_line_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, shown: list[str], words: list[str], windows: int
) -> None:
    """With `--log` they would go on until Ctrl-C."""
    slept: list[float] = []
    monkeypatch.setattr("coordinator.cli.stragglers.time.sleep", slept.append)
    with nobody_reads():
        assert main(["stragglers", *words, *shown]) == 0
    assert len(slept) == windows


@pytest.mark.parametrize("words", [[], ["--once"]])
def test_top_ends_with_the_first_look_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, shown: list[str], words: list[str]
) -> None:
    """It would go on until Ctrl-C."""
    looked: list[str] = []

    def rows(*_: object) -> list[str]:
        looked.append("look")
        return looked

    monkeypatch.setattr("coordinator.cli.top.rows_of", rows)
    monkeypatch.setattr("coordinator.cli.top.text_screen", lambda *_: LONG)
    with nobody_reads():
        assert main(["top", "--interval", "0.001", *words, *shown]) == 0
    assert len(looked) == 1
