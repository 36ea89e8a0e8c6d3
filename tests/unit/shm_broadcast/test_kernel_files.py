"""Files of the kernel, which are read as a whole or not at all."""

import os
import signal
import time
import warnings
from pathlib import Path

import pytest

from shm_broadcast.descriptors import read_text
from tests.handlers import uncollected


class StruckError(Exception):
    """What the handler raises."""


def test_a_file_without_a_size_is_read_whole(tmp_path: Path) -> None:
    """The kernel says that its files have no bytes; others may be larger than one buffer, or hold any byte."""
    assert int(read_text(Path("/proc/self/stat")).split()[0]) == os.getpid()
    content = bytes(range(256)) * 1000
    (tmp_path / "file").write_bytes(content)
    assert read_text(tmp_path / "file") == content.decode(errors="replace")
    (tmp_path / "file").write_bytes(b"")
    assert read_text(tmp_path / "file") == ""


def test_what_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    """As with `open`."""
    with pytest.raises(FileNotFoundError, match="nothing") as caught:
        read_text(tmp_path / "nothing")
    assert caught.value.filename == str(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)
    with pytest.raises(ValueError, match="null"):
        read_text(Path("a\0b"))


@uncollected()
def test_a_read_that_is_interrupted_leaves_no_open_file() -> None:
    """A signal handler raises again and again; each file is closed by then, and none by the garbage collector."""

    def strike(number: int, frame: object) -> None:
        raise StruckError

    strikes = 0
    before = signal.signal(signal.SIGALRM, strike)
    descriptors = len(os.listdir("/proc/self/fd"))
    end = time.monotonic() + 20.0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            while strikes < 2000 and time.monotonic() < end:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 30e-6 + (strikes % 50) * 1e-6)
                    while True:
                        read_text(Path("/proc/self/stat"))
                except StruckError:
                    strikes += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
    assert strikes >= 2000
    assert [str(each.message) for each in warned] == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
