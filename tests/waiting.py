"""Wait for a condition until a deadline, and name the condition if it was not met."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["DEADLINE_S", "has_ended", "running", "sleep_until", "sleeping_in", "wait_in", "wait_until"]

DEADLINE_S = 60.0
"""A wait budget that is longer than any awaited event takes, even on a busy machine."""


def wait_until(
    condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S, poll_s: float = 0.005
) -> None:
    """Evaluate `condition` every `poll_s` seconds until it is true.

    Raises:
        AssertionError: The condition was not true within `timeout_s`; the message contains `what`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(poll_s)


class _Woken(BaseException):
    """Another thread wakes one that sleeps."""


def sleep_until(condition: Callable[[], Any], what: str) -> None:
    """Sleep in one call of the main thread until `condition`, which another thread evaluates, is true."""
    sleeper = threading.get_ident()

    def wake() -> None:
        wait_until(condition, what, poll_s=0.05)
        signal.pthread_kill(sleeper, signal.SIGUSR1)

    def woken(*_: object) -> None:
        raise _Woken

    before = signal.signal(signal.SIGUSR1, woken)
    waker = threading.Thread(target=wake)
    try:
        waker.start()
        time.sleep(2 * DEADLINE_S)
    except _Woken:
        waker.join()
    signal.signal(signal.SIGUSR1, before)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie without living threads.

    /proc calls it a zombie as soon as its first thread has ended. The others may need a processor to do so, and until
    then the kernel does not tell those who watch the process that it has ended.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return bool(ended.poll(0))
    finally:
        os.close(descriptor)


def running(name: str | None = None) -> list[threading.Thread]:
    """Return this process's threads, or those of a name, that have not ended.

    One whose `join` has returned is still in Python's list for a moment, and for longer if the machine is busy.
    """
    return [each for each in threading.enumerate() if each.is_alive() and name in (None, each.name)]


def sleeping_in(function: str, who: threading.Thread | None = None) -> int:
    """Return how many other threads of this process sleep in the kernel in a call of a Python function of that name.

    Args:
        function: The name.
        who: Look at this thread alone.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a cycle would keep the objects of all frames until the collector runs
    found = 0
    for thread in threading.enumerate() if who is None else [who]:
        frame = frames.get(thread.ident or 0)
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        found += frame is not None and _is_asleep(thread)
    return found


def wait_in(function: str, who: threading.Thread, is_over: Callable[[], bool] = lambda: False) -> None:
    """Wait until another thread sleeps in a call of a Python function of that name, or `is_over` holds.

    A thread that waits for Python's lock sleeps too, therefore two looks in a row must find it asleep.
    """
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks = looks + 1 if sleeping_in(function, who) else 0
        return looks == 2 or is_over()

    wait_until(look, f"the wait in {function}")


def _is_asleep(thread: threading.Thread) -> bool:
    # In a forked process the main thread still gives the number that it had in the parent.
    number = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        stat = Path(f"/proc/self/task/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2].startswith("S")
