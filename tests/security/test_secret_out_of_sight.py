"""A secret that a launcher passes by a descriptor: its processes, their output and their end show nothing of it."""

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts import ROOT
from tests.ports import free_port
from tests.secured import HERE
from tests.waiting import wait_until

SECRET = bytes(range(60, 124))
SHORT = SECRET[:31]

LAUNCHER = """
import os, subprocess, sys

content, ranks = sys.stdin.buffer.read(), []
for rank in range(2):
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_COORDINATOR_SECRET_DESCRIPTOR": str(reading)}
    command = [sys.executable, "-X", "faulthandler", os.environ["RANK_SCRIPT"]]
    ranks.append(subprocess.Popen(command, env={**os.environ, **variables}, pass_fds=[reading]))
    os.close(reading)
for each in ranks:
    each.wait()
"""

RANK = """
import logging, os, sys, traceback
from pathlib import Path

logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(message)s %(args)s")

from coordinator.bootstrap.membership import world_store
from coordinator.bootstrap.secured import place_of
from coordinator.errors import CommError
from coordinator.parallel_state import get_world_group, init_distributed_environment
from coordinator.security.store import secured
from coordinator.settings import CoordinatorSettings

here = Path(os.environ["RESULTS"])
settings = CoordinatorSettings.resolve(security="required")
try:
    init_distributed_environment(backend="gloo", settings=settings)
    store = secured(world_store())
    print(repr(settings), repr(store), vars(store), place_of(settings, "run", 0, 2), flush=True)
    (here / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    get_world_group().recv_object(1 - get_world_group().rank)
except CommError as error:
    traceback.print_exc()
    print(repr(error), vars(error), flush=True)
"""


def parts_of(secret: bytes) -> list[bytes]:
    """Return how a part of the secret may look like in a text."""
    some = secret[8:24]
    return [some[:8], some[:8].hex().encode(), repr(some[:8])[2:-1].encode(), base64.b64encode(some[1:])[:12]]


@contextmanager
def launched(directory: Path, secret: bytes) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a launcher of two ranks, which gets the secret by its input; all of them write to the file `said`."""
    script = directory / "rank.py"
    script.write_text(RANK)
    told = {
        "PYTHONPATH": str(ROOT),
        "RESULTS": str(directory),
        "RANK_SCRIPT": str(script),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": HERE,
        "MASTER_PORT": str(free_port()),
    }
    with (directory / "said").open("wb") as said:
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            env={**os.environ, **told},
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            assert launcher.stdin is not None
            launcher.stdin.write(secret)
            launcher.stdin.close()
            yield launcher
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def shown_by(pid: int) -> bytes:
    """Return what every process of this user can read of another one."""
    read = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline", "comm", "maps")]
    return b"".join([*read, *(os.readlink(each).encode() for each in Path(f"/proc/{pid}/fd").iterdir())])


@pytest.mark.guarantee("K3")
@pytest.mark.slow
def test_a_secret_from_a_descriptor_is_nowhere_to_be_read(tmp_path: Path) -> None:
    """Not in /proc of the launcher and the ranks, a log at its lowest level, a repr, or an error.

    Nor is it in what a fatal signal makes Python write, which ends rank 1; rank 0 then raises, and prints all of it.
    """
    with launched(tmp_path, SECRET) as launcher:
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        wait_until(
            lambda: launcher.poll() is not None or all(each.exists() and each.read_text() for each in files),
            "the ranks have started",
        )
        assert launcher.poll() is None, (tmp_path / "said").read_text()
        pids = [int(each.read_text()) for each in files]
        shown = b"".join(shown_by(pid) for pid in (launcher.pid, *pids))
        os.kill(pids[1], signal.SIGSEGV)
        launcher.wait(60.0)
    said = (tmp_path / "said").read_bytes()
    for word in (b"<Secret>", b"PeerLostError", b"Fatal Python error: Segmentation fault", b"recv_object"):
        assert word in said, said.decode(errors="replace")
    assert b"GROUP_COORDINATOR_SECRET_DESCRIPTOR" in shown
    for part in parts_of(SECRET):
        assert part not in shown + said


@pytest.mark.guarantee("K1")
@pytest.mark.slow
def test_an_error_about_a_secret_from_a_descriptor_shows_nothing_of_it(tmp_path: Path) -> None:
    """It is too short, and each rank raises."""
    with launched(tmp_path, SHORT) as launcher:
        launcher.wait(60.0)
    said = (tmp_path / "said").read_bytes()
    assert said.count(b"must have 32 to ") >= 2, said.decode(errors="replace")
    for part in parts_of(SHORT):
        assert part not in said
