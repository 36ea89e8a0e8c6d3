"""What /proc tells of a process, also of one that ends during the look."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from coordinator.diagnosis.processes import look_at
from shm_broadcast.liveness import this_process
from tests.waiting import wait_until


def test_this_process_is_described() -> None:
    """Its start is the one by which pages name it; processor time and bytes grow."""
    before = look_at(os.getpid())
    assert before is not None
    assert before.start_ticks == this_process().start_ticks
    assert before.threads >= 1
    assert before.cpu_ns > 0
    assert before.read_bytes is not None
    Path(__file__).read_bytes()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = look_at(os.getpid())
    assert after is not None
    assert after.cpu_ns > before.cpu_ns
    assert after.read_bytes is not None
    assert after.read_bytes >= before.read_bytes + Path(__file__).stat().st_size
    assert not after.has_ended


def test_a_stopped_and_an_ended_process_are_told_apart() -> None:
    """A child sleeps, is stopped, then ends and is not waited for, then is gone."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        try:
            wait_until(lambda: (its := look_at(child.pid)) is not None and its.state == "S", "the sleep")
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: (its := look_at(child.pid)) is not None and its.is_stopped, "the stop")
        finally:
            child.kill()
        wait_until(lambda: (its := look_at(child.pid)) is not None and its.has_ended, "the end")
    assert look_at(child.pid) is None


def test_a_name_with_parentheses_and_spaces_is_read_whole() -> None:
    """The kernel writes the name as it is, and a process chooses its own."""
    rename = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a) R (b', 0, 0, 0)"
    program = f"{rename}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        its = look_at(child.pid)
        child.kill()
    assert its is not None
    assert its.command == "a) R (b"
    assert its.threads == 1


def test_a_number_that_no_process_has_gives_nothing() -> None:
    """As for a process that has ended between the search and the look."""
    assert look_at(1 << 22) is None
