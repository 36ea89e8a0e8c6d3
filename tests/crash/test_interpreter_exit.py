"""Interpreters that exit while daemon threads are busy in the native cores.

Python 3.11 to 3.13 end such a thread when it takes the GIL again, by unwinding its stack. Destructors of the native
cores must not run then: they would free memory without the GIL, and the process would crash instead of ending with its
own status.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

# An object that is deleted late sleeps then, so that the thread surely wakes while the interpreter is exiting.
PROGRAM = """
import mmap, sys, threading, time
from device_comm import _core
from shm_broadcast import codec
from shm_broadcast.queue import QueueReader, QueueWriter

STATUS = 37


class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)


class Slow:
    pass


def hook(_, sleep=time.sleep):
    entered.set()
    sleep(0.2)
    return {} if mode == "encode" else Slow()


def forever(call, *arguments):
    entered.set()
    while True:
        call(*arguments)


mode, entered, sys.late = sys.argv[1], threading.Event(), Late()
writer = QueueWriter.create("exit", [0])
reader = QueueReader.open(writer.handle, writer.key, 0)
long = {"a": [1] * 20, "b": bytes(200_000)}
if mode == "decode":
    codec.register_type(Slow, encode=lambda _: {}, decode=hook)
    writer.enqueue([{"a": [1]}, Slow()])
    bodies = [reader.dequeue]
elif mode == "encode":
    codec.register_type(Slow, encode=hook, decode=lambda _: Slow())
    bodies = [lambda: writer.enqueue([{"a": [1]}, Slow()])]
elif mode == "dequeue":
    bodies = [lambda: forever(reader.dequeue)]
elif mode == "enqueue":
    bodies = [lambda: forever(writer.enqueue, long)]
elif mode == "both":
    bodies = [lambda: forever(writer.enqueue, long), lambda: forever(reader.dequeue)]
else:
    memory = mmap.mmap(-1, _core.segment_bytes(2, 4096))
    _core.lay_out(memory, 2, 4096, 1)
    region = _core.SharedRegion(memory, 0)
    region.barrier()
    bodies = [lambda: forever(region.resume, 1_000_000)]
for body in bodies:
    threading.Thread(target=body, daemon=True).start()
entered.wait()
if mode == "both":
    # No thread is sure to be at any one place, so this sleeps for a while that differs from start to start.
    del sys.late
    time.sleep(float(sys.argv[2]))
sys.exit(STATUS)
"""
STATUS = 37


def start(mode: str, after_s: float = 0.0) -> int:
    """Return the exit status of a program whose daemon threads are busy as `mode` says."""
    command = [sys.executable, "-c", PROGRAM, mode, str(after_s)]
    return subprocess.run(command, timeout=60, capture_output=True, check=False).returncode


@pytest.mark.slow
@pytest.mark.guarantee("R13")
@pytest.mark.parametrize("mode", ["decode", "encode", "dequeue", "enqueue", "collective"])
def test_an_interpreter_exits_while_a_thread_is_inside_a_call(mode: str) -> None:
    """The thread wakes inside of the call, or of a hook that the call has called, while the interpreter is exiting."""
    with ThreadPoolExecutor(2) as starts:
        assert list(starts.map(start, [mode] * 2)) == [STATUS] * 2


@pytest.mark.thorough
@pytest.mark.guarantee("R13")
def test_many_interpreters_exit_while_threads_exchange_messages() -> None:
    """Wherever the threads are, the interpreter exits with its own status."""
    with ThreadPoolExecutor(2) as starts:
        statuses = list(starts.map(start, ["both"] * 200, [0.0005 * number for number in range(200)]))
    assert statuses == [STATUS] * 200
