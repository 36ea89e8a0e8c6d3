"""Processes that offer their Python stacks and hang somewhere, for tests that ask them."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shm_broadcast.liveness import ProcessIdentity, _stat_fields, this_process
from shm_broadcast.stacks.offered import DEFAULT_SIGNAL, HEADER_BYTES
from tests.strict import STRICT
from tests.waiting import wait_until

__all__ = ["HANGS", "PRELUDE", "hanging", "identity_of", "said_by", "write_once", "written_by"]

ROOT = Path(__file__).parents[1]

PRELUDE = f"""
import ctypes, faulthandler, os, re, signal, sys, threading, time
from shm_broadcast.stacks.offered import offer_stacks, offered_signal
from shm_broadcast.status.page import own_page
NUMBER = {DEFAULT_SIGNAL}
def ready():
    print("ready", flush=True)
"""

HANGS = {
    "sleep": "def hangs_here():\n    ready()\n    time.sleep(600)",
    "Python loop": "def hangs_here():\n    ready()\n    while True:\n        pass",
    "native code that holds the GIL": "def hangs_here():\n    ready()\n    ctypes.PyDLL(None).sleep(600)",
    "a regular expression": "def hangs_here():\n    ready()\n    re.match('(a+)+b', 'a' * 60)",
    "a lock": "def hangs_here():\n    ready()\n    lock = threading.Lock()\n    lock.acquire()\n    lock.acquire()",
}
"""Functions that never return, by what they do."""


@contextmanager
def hanging(code: str, offers: str = "offer_stacks(NUMBER)") -> Iterator["subprocess.Popen[str]"]:
    """Run `offers` and `code` in a new process, and yield it once it is ready; kill it at the end."""
    text = f"{PRELUDE}\n{offers}\n{code}\nhangs_here()\n"
    process = subprocess.Popen([*STRICT, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def said_by(code: str) -> str:
    """Run `code` in a new process, which must end well; return what it prints."""
    done = subprocess.run(
        [*STRICT, "-c", PRELUDE + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip()


def identity_of(pid: int, **changed: Any) -> ProcessIdentity:
    """Return the identity of a process of this machine, with some fields changed."""
    own = {field: getattr(this_process(), field) for field in ProcessIdentity.__struct_fields__}
    return ProcessIdentity(**{**own, "pid": pid, "start_ticks": _stat_fields(pid)[1], **changed})


def write_once(pid: int) -> None:
    """Send the signal to a process, and return when it has written its stacks."""
    before = written_by(pid)
    os.kill(pid, DEFAULT_SIGNAL)
    wait_until(lambda: written_by(pid) > before, "the stacks")


def written_by(pid: int) -> int:
    """Return how many bytes of stacks a process has written."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "group-coordinator-stacks-" in str(link.readlink()):
            info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
            return int(info.partition("pos:")[2].split()[0]) - HEADER_BYTES
    raise AssertionError(f"process {pid} has no memory for stacks")
