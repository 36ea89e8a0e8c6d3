"""What happens where a system call filter, or an older kernel, refuses a call that the queue uses."""

import errno
import os
import re
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

LITTLE_ADDRESS_SPACE = """
import resource, sys
from shm_broadcast.errors import CapabilityError
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.settings import BroadcastSettings
from tests.queues import segments_of

def create():
    return QueueWriter.create("steps", [0], BroadcastSettings(ring_bytes=256 << 20))

def limit():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    # A thread and the status page fit, the ring does not.
    resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20),) * 2)

if sys.argv[1] == "create":
    limit()
    call = create
else:
    writer = create()
    handle = writer.handle.to_bytes(writer.key)
    limit()
    call = lambda: QueueReader.open(handle, writer.key, 0, 20.0)
before = segments_of()
try:
    call()
except CapabilityError as error:
    print(error.requirement, "|", error, "|", set(segments_of()) - set(before))
"""

MANY_QUEUES = """
import resource, sys, threading, time
from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from tests.seccomp import refuse_calls

writers = [QueueWriter.create(f"q{i}", [0]) for i in range(64)]
readers = [QueueReader.open(each.handle.to_bytes(each.key), each.key, 0) for each in writers]
if int(sys.argv[1]):
    refuse_calls("futex_waitv", int(sys.argv[1]))
threading.Timer(0.3, lambda: writers[40].enqueue("found")).start()
print(dequeue_any(readers, 20.0))
start, used, sleeps = time.monotonic(), time.process_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
try:
    dequeue_any(readers, 2.0)
except CommTimeoutError:
    print((time.process_time() - used) / (time.monotonic() - start))
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - sleeps)
"""

WRITE = """
import sys
from shm_broadcast.queue import QueueWriter

keys = [bytes.fromhex(each) for each in sys.argv[1:]]
far = {"remote_readers": dict(enumerate(keys)), "bind_address": "127.0.0.1"} if keys else {"readers": range(20)}
with QueueWriter.create("steps", **far) as writer:
    print(writer.handle.to_bytes(writer.key).hex(), writer.key.hex(), flush=True)
    sys.stdin.read()
"""

FEW_DESCRIPTORS = """
import asyncio, os, resource, subprocess, sys
from contextlib import nullcontext
import shm_broadcast.remote.reader, shm_broadcast.remote.writer
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import CapabilityError
from shm_broadcast.queue import QueueReader, QueueWriter

what, write, is_far = sys.argv[1], sys.argv[2], sys.argv[3] == "far"
keys = [RemoteKeys.generate() if is_far else None for _ in range(20)]

def create():
    far = {"remote_readers": {1: keys[0].public}, "bind_address": "127.0.0.1"} if is_far else {"readers": [1]}
    return QueueWriter.create("steps", **far)

def open_next():
    rank = next(ranks)
    return QueueReader.open(handle, key, rank, 20.0, remote_keys=keys[rank])

def begin():
    reader.fileno()
    return nullcontext()

def wait():
    try:
        if what == "dequeue":
            reader.dequeue(0.0)
        loop.run_until_complete(reader.adequeue(0.05))
    except TimeoutError:
        return nullcontext()

def open_files():
    # The status page is made once, and stays for the life of the process.
    links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    return sum("group-coordinator-status" not in os.readlink(each) for each in links if os.path.exists(each))

if what != "create":
    public = [each.public.hex() for each in keys if each is not None]
    popen = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen([sys.executable, "-c", write, *public], **popen)
    handle, key = map(bytes.fromhex, other.stdout.readline().split())
    ranks = iter(range(20))
if what in ("fileno", "adequeue", "dequeue"):
    reader = open_next()
if what == "adequeue":
    loop = asyncio.new_event_loop()
    reader.fileno()
call = {"create": create, "open": open_next, "fileno": begin, "adequeue": wait, "dequeue": wait}[what]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for free in range(20):
    before = open_files()
    last, filled = max(map(int, os.listdir("/proc/self/fd"))), []
    while (number := os.dup(0)) < last:
        filled.append(number)
    os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number + free, hard))
    try:
        with call():
            outcome = "made"
    except Exception as error:
        outcome = f"{type(error).__name__} {getattr(error, 'requirement', error)}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for each in filled:
        os.close(each)
    print(outcome, "|", open_files() - before)
    if outcome == "made":
        break
if what != "create":
    other.communicate(timeout=20)
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


@pytest.mark.guarantee("B15")
@pytest.mark.parametrize("what", ["create", "open"])
def test_too_little_address_space_is_told_with_its_numbers(what: str) -> None:
    """A reader that has too little blames neither the writer nor the handle; nothing is left open."""
    (line,) = run(LITTLE_ADDRESS_SPACE, what)
    requirement, text, left = line.split(" | ")
    assert re.fullmatch(r"\d+ bytes of address space", requirement)
    assert int(requirement.split()[0]) > 256 << 20
    assert re.search(
        r"needs \d+ bytes of address space.* \d+ bytes of memory are free: Cannot allocate", text
    )
    assert left == "set()"


@pytest.mark.slow
@pytest.mark.guarantee("B14")
@pytest.mark.parametrize("place", ["near", "far"])
@pytest.mark.parametrize("what", ["create", "open", "fileno", "adequeue", "dequeue"])
def test_too_few_descriptors_are_told_by_what_they_are_for(what: str, place: str) -> None:
    """However few are free, the error says which call failed, and nothing is left open. A read needs none."""
    lines = run(FEW_DESCRIPTORS, what, WRITE, place)
    *refused, (made, _) = [line.split(" | ") for line in lines]
    assert made == "made"
    assert bool(refused) == (what != "dequeue")
    for outcome, left in refused:
        assert outcome.startswith("CapabilityError the system call ")
        # The thread of a descriptor that was made in part keeps it until the reader is closed.
        assert int(left) <= (1 if what == "fileno" else 0)


@pytest.mark.parametrize("number", [0, errno.ENOSYS, pytest.param(errno.EPERM, marks=pytest.mark.thorough)])
def test_several_queues_are_waited_for_cheaply_without_futex_waitv(number: int) -> None:
    """Kernels before 5.16 lack the call, and old filters refuse it. With 64 idle queues a wait takes 0.2 to 0.6 %.

    Naps of an eighth of the wait, and of 16 ms at most, are 200 in 2 s.
    """
    message, share, sleeps = run(MANY_QUEUES, str(number))
    assert message == "(40, 'found')"
    assert float(share) < 0.02
    assert int(sleeps) < 300
