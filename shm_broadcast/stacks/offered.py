"""Offer this process's Python stacks: on a real-time signal a thread writes its own into memory that others read.

The main thread handles the signal. Other threads that have created groups are named in the memory, so that they can be
sent it too.

`faulthandler` writes them in the signal handler, in C and without the GIL, so that a process that sleeps, loops or
holds the GIL in native code answers too. It writes names of files and functions and numbers of lines, and no value.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import signal
import threading
from pathlib import Path
from typing import Final

from shm_broadcast import _core
from shm_broadcast.descriptors import read_text, refusal
from shm_broadcast.errors import UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.liveness import fork_count
from shm_broadcast.segment import seal
from shm_broadcast.status.page import own_page

__all__ = ["DEFAULT_SIGNAL", "HEADER_BYTES", "NAME", "NBYTES", "handles", "offer_stacks", "offered_signal"]

DEFAULT_SIGNAL: Final = int(signal.SIGRTMIN) + 12
"""Few programs use it: glibc keeps the first real-time signals, and others count from these or down from the last."""

NAME: Final = "group-coordinator-stacks"
"""The memfd's name is this, a hyphen, and the number of the signal."""

NBYTES: Final = 1 << 20
"""Size of the memory. Pages that were never written take none. A stack of 100 frames takes about 10 KB."""

HEADER_BYTES: Final = 256
"""The memory begins with the ids of the threads besides the main thread, separated by blanks."""

# At most this many ids stand there, those of the newest threads.
_MOST_THREADS: Final = 24

_SIG_DFL: Final = 0
_SIG_IGN: Final = 1


class _Own:
    """What this process offers. A lock orders threads; a signal handler that creates a group may interrupt one."""

    lock = threading.RLock()
    number = 0
    descriptor = -1
    threads: tuple[int, ...] = ()


def offered_signal() -> int:
    """Return the signal on which this process writes its stacks, or 0."""
    return _Own.number


def offer_stacks(number: int) -> None:
    """Write this process's stacks on a signal from now on, until the process ends. Each new group calls this.

    If the process does so already, a further call names the calling thread to those that ask, and empties the
    memory, which earlier stacks may have filled. This also holds for a call with 0.

    Args:
        number: A real-time signal; 0 for a group that asks for no stacks.

    Raises:
        UsageError: The process has another handler for the signal, or writes its stacks on another signal already.
        CapabilityError: The kernel refuses a memfd.
    """
    forks = fork_count()  # before the look at what a forked child has no more
    with _Own.lock:
        if not number and not _Own.number:
            return
        if _Own.number:
            if number not in (0, _Own.number):
                raise UsageError(
                    f"stack_signal is {number}, but this process writes its stacks on signal {_Own.number}, which its "
                    "first group has named: give all groups of a process the same one"
                )
            try:
                _name_thread(_Own.descriptor)
                _empty(_Own.descriptor)
            except (OSError, ValueError) as error:
                # A child that a signal handler has forked here has closed its descriptor, and nobody asks it.
                if forks == fork_count() or raised_by_handler(error):
                    raise
            return
        if handles(os.getpid(), number):
            raise UsageError(
                f"stack_signal is {number}, but this process has a handler for that signal: set another real-time "
                f"signal ({int(signal.SIGRTMIN)} to {int(signal.SIGRTMAX)}), or 0 for no stacks "
                "(GROUP_COORDINATOR_STACK_SIGNAL)"
            )
        page, descriptor = own_page(), _new_memory(f"{NAME}-{number}")
        try:
            _name_thread(descriptor)
            os.lseek(descriptor, HEADER_BYTES, os.SEEK_SET)
            # faulthandler restores this when the interpreter ends: a late signal must not kill the process.
            _set_action(number, _SIG_IGN)
            # A thread writes its own frames only: the list of all threads may change while it is walked.
            faulthandler.register(number, file=descriptor, all_threads=False, chain=False)
            # The handler changes `errno` (Python 3.11), which code interrupted after a failed call reads.
            _core.keep_errno(number)
        except BaseException:
            faulthandler.unregister(number)
            _set_action(number, _SIG_DFL)
            os.close(descriptor)
            raise
        _Own.number, _Own.descriptor = number, descriptor
        page.set_stack_signal(number)


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, in Python or in C.

    Raises:
        OSError: There is no such process, or this one may not see it.
        CapabilityError: No descriptor is free.
    """
    for line in read_text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> number - 1 & 1)
    return False


def _new_memory(name: str) -> int:
    """Return a memfd that nobody can make longer or shorter: what does not fit is not written."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise refusal("memfd_create", "holds the stacks of this process", error) from error
    try:
        os.ftruncate(descriptor, NBYTES)
        seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _name_thread(descriptor: int) -> None:
    """Name the calling thread to those that ask, unless it is the main thread, which is always asked."""
    thread = threading.get_native_id()
    if thread in _Own.threads or thread == os.getpid():
        return
    alive = {each.native_id for each in threading.enumerate()}
    kept = [each for each in _Own.threads if each in alive]
    _Own.threads = (*kept, thread)[-_MOST_THREADS:]
    os.pwrite(descriptor, " ".join(map(str, _Own.threads)).encode().ljust(HEADER_BYTES), 0)


def _empty(descriptor: int) -> None:
    """Write the next stacks at the beginning again, unless somebody reads now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # somebody does
        return
    try:
        os.lseek(descriptor, HEADER_BYTES, os.SEEK_SET)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _set_action(number: int, action: int) -> None:
    """Let the kernel ignore a signal, or do its default; `signal.signal` could do so in the main thread only."""
    function = ctypes.CDLL(None, use_errno=True).signal
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    if function(number, action) == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"signal({number}) failed: {os.strerror(code)}")


def _forget_inherited() -> None:
    # The memory is the parent's, and a child that nobody asks needs no handler.
    _Own.lock = threading.RLock()
    _Own.threads = ()
    if _Own.number:
        faulthandler.unregister(_Own.number)
        _set_action(_Own.number, _SIG_DFL)
        os.close(_Own.descriptor)
        _Own.number, _Own.descriptor = 0, -1


os.register_at_fork(after_in_child=_forget_inherited)
