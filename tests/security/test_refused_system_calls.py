"""What happens where a system call filter, or an older kernel, refuses a call that the queue uses."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OPEN_QUEUE = """
import sys
from shm_broadcast.errors import CapabilityError
from shm_broadcast.queue import QueueReader, QueueWriter
from tests.seccomp import refuse_calls

call, number, both = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "both"
if both:
    refuse_calls(call, number)
try:
    writer = QueueWriter.create("steps", [0])
    refuse_calls(call, number)
    QueueReader.open(writer.handle.to_bytes(writer.key), writer.key, 0, timeout_s=5)
except CapabilityError as error:
    print(error.requirement, "|", error)
"""

MANY_QUEUES = """
import sys, threading, time
from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from tests.seccomp import refuse_calls

writers = [QueueWriter.create(f"q{i}", [0]) for i in range(64)]
readers = [QueueReader.open(each.handle.to_bytes(each.key), each.key, 0) for each in writers]
if int(sys.argv[1]):
    refuse_calls("futex_waitv", int(sys.argv[1]))
threading.Timer(0.3, lambda: writers[40].enqueue("found")).start()
print(dequeue_any(readers, 20.0))
start, used = time.monotonic(), time.process_time()
try:
    dequeue_any(readers, 2.0)
except CommTimeoutError:
    print((time.process_time() - used) / (time.monotonic() - start))
"""


def run(code: str, *arguments: str) -> list[str]:
    """Return the lines that a program of its own prints; it must end cleanly."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("who", ["both", "reader"])
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_a_refused_pidfd_is_told_by_its_name(number: int, who: str) -> None:
    """The error of either end names the call that the filter must allow, and why the kernel refused it."""
    (line,) = run(OPEN_QUEUE, "pidfd_open", str(number), who)
    requirement, _, text = line.partition(" | ")
    assert requirement == "the system call pidfd_open"
    assert f"pidfd_open failed: {os.strerror(number)}" in text
    assert "seccomp" in text


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_refused_memfd_is_told_by_its_name(number: int) -> None:
    """Shared memory cannot be had without it."""
    (line,) = run(OPEN_QUEUE, "memfd_create", str(number), "both")
    assert line.startswith("the system call memfd_create | memfd_create failed: " + os.strerror(number))


@pytest.mark.parametrize("number", [0, errno.ENOSYS, errno.EPERM])
def test_several_queues_are_waited_for_cheaply_without_futex_waitv(number: int) -> None:
    """Kernels before 5.16 lack the call, and old filters refuse it. With 64 idle queues a wait takes 0.2 to 0.5 %."""
    message, share = run(MANY_QUEUES, str(number))
    assert message == "(40, 'found')"
    assert float(share) < 0.02
