"""Make file descriptors. Where the kernel refuses one, the error says what it is for, and what to allow."""

from __future__ import annotations

import errno
import os
import select
import socket
from pathlib import Path
from typing import Final

from shm_broadcast import _core
from shm_broadcast.errors import CapabilityError

# The process, or the whole system, has reached its limit of open descriptors.
_FULL: Final = (errno.EMFILE, errno.ENFILE)


def refusal(
    call: str, purpose: str, error: OSError, needs: str = "a free file descriptor"
) -> CapabilityError:
    """Return the error for a system call that the kernel refuses.

    Args:
        call: The name of the call.
        purpose: What the call does here; the rest of a sentence.
        error: What the kernel says.
        needs: What it needs besides a filter that allows it.
    """
    return CapabilityError(
        f"{call} failed: {error.strerror}. It {purpose}; it needs {needs}, and a system call filter (seccomp) that "
        "allows it",
        requirement=f"the system call {call}",
    )


def refuse_if_full(call: str, purpose: str, error: OSError) -> None:
    """Raise `CapabilityError` if `error` says that no descriptor is free."""
    if error.errno in _FULL:
        raise refusal(call, purpose, error) from error


def read_text(path: Path) -> str:
    """Return the content of a file of the kernel. Names of processes in it may hold any byte.

    Raises:
        CapabilityError: No descriptor is free.
        OSError: The file cannot be read.
    """
    try:
        # `open` in Python leaves the file to the garbage collector if a handler raises before `with` has it.
        return _core.read_file(str(path)).decode(errors="replace")
    except OSError as error:
        refuse_if_full("openat", f"reads {path}", error)
        raise


def new_eventfd(value: int = 0) -> int:
    """Return a new eventfd with the counter `value`, which the caller owns.

    Raises:
        CapabilityError: The kernel refuses.
    """
    try:
        return os.eventfd(value, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise refusal("eventfd2", "wakes threads and event loops", error) from error


def new_socket() -> socket.socket:
    """Return a socket over which processes of this host hand over memory.

    Raises:
        CapabilityError: The kernel refuses.
    """
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise refusal("socket", "connects processes that share memory", error) from error


def check_spare(count: int, purpose: str) -> None:
    """Look whether this process may make `count` more descriptors; arguments and errors as of `keep_spare`."""
    keep_spare(count, purpose)


def keep_spare(count: int, purpose: str) -> list[select.epoll]:
    """Return what keeps `count` descriptors for the caller, until it lets go of it; `purpose` says what for.

    Raises:
        CapabilityError: This process may not make as many more.
    """
    try:
        # Each is closed when it is let go, whatever a signal handler raises meanwhile.
        return [select.epoll() for _ in range(count)]
    except OSError as error:
        raise refusal("epoll_create1", purpose, error, f"{count} free file descriptors") from error
