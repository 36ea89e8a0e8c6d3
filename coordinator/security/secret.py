"""Read the secret of a job, which never appears in a text, the environment, an argument or a message."""

from __future__ import annotations

import os
import select
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from coordinator.security.hkdf import expand, extract
from shm_broadcast.errors import UsageError
from shm_broadcast.threads import Aside

__all__ = ["LEAST_BYTES", "MOST_BYTES", "Secret", "from_descriptor", "from_file"]

LEAST_BYTES: Final = 32
MOST_BYTES: Final = 4096

# Fewer different bytes than this are no random ones: 32 random bytes, or 64 random hexadecimal digits, have more, but
# for a chance below 1e-9.
_LEAST_DIFFERENT: Final = 8
_SALT: Final = b"group-coordinator secret, version 1"

# Whoever hands a descriptor over has this many seconds to write the secret into it and to close its end.
_WRITING_S: Final = 10.0

# A descriptor can be read once, and a process may join several worlds: what was read, by descriptor.
_taken: Final[dict[int, Secret]] = {}
_lock: Final = threading.Lock()
# The thread that holds it while this process is forked is missing in the child.
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined] # noqa: SLF001 - as threading does


class Secret:
    """A secret that all ranks of a job share. Neither its repr nor any error shows it, and it cannot be copied.

    It keeps what HKDF extracts, not the bytes that were read.
    """

    __slots__ = ("_extracted",)

    def __init__(self, value: bytes, where: str = "the secret") -> None:
        """Hold `value`; `where` begins an error's text.

        Raises:
            UsageError: It is too short, too long, or not random.
        """
        if not LEAST_BYTES <= len(value) <= MOST_BYTES:
            raise UsageError(
                f"{where} must have {LEAST_BYTES} to {MOST_BYTES} bytes, and has "
                f"{'fewer' if len(value) < LEAST_BYTES else 'more'}: make one with `head -c 32 /dev/urandom`"
            )
        if len(set(value)) < _LEAST_DIFFERENT:
            raise UsageError(f"{where} is not random: make one with `head -c 32 /dev/urandom`")
        self._extracted = extract(_SALT, value)

    def derive(self, role: str, run: str, rank: int) -> bytes:
        """Return 32 bytes for a rank in a role of a run. Those of one tell nothing of those of another."""
        parts = (role.encode(), run.encode(), str(rank).encode())
        # With their lengths, so that no two triples have the same bytes.
        return expand(self._extracted, b"".join(len(part).to_bytes(4, "big") + part for part in parts), 32)

    def __repr__(self) -> str:
        """Show nothing of it."""
        return "<Secret>"

    def __reduce_ex__(self, protocol: object) -> str:
        """Refuse copying and pickling."""
        raise UsageError("a secret stays in the process that has read it")


def from_file(path: str) -> Secret:
    """Return the secret in a file, whose bytes count as they are, a line's end included.

    Raises:
        UsageError: The file cannot be read, is not a regular one, is accessible to others than its owner, belongs
            neither to this user nor to root, or holds no secret. A symbolic link counts as what it points to.
        CapabilityError: This process can have no further thread.
    """
    return _read_aside(partial(_open_and_read, path))


def _open_and_read(path: str) -> Secret:
    where = f"the secret file {path}"
    try:
        # O_NONBLOCK: a pipe of that name would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {os.strerror(error.errno or 0)}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{where} is not a regular file")
        _check_private(status, where)
        return Secret(_read(descriptor, where), where)
    finally:
        os.close(descriptor)


def from_descriptor(descriptor: int) -> Secret:
    """Return the secret in an inherited descriptor of a pipe, of a memory file, or of a file as `from_file` takes it.

    It is read to its end once in this process, and closed, so that no program which this process starts inherits it.
    Waits up to 10 s for the end of a pipe. Threads and signal handlers may call it at once. What a handler raises ends
    the wait, and the next call gets the secret.

    Raises:
        UsageError: The descriptor is not open, of another kind, accessible to other users, or holds no secret.
        CapabilityError: This process can have no further thread.
    """
    taken = _taken.get(descriptor)
    return _read_aside(partial(_take, descriptor)) if taken is None else taken


def _read_aside(read: Callable[[], Secret]) -> Secret:
    """Return what `read` returns on a thread of its own.

    On the caller's thread, a signal handler could strike after a system call whose descriptor nobody has
    stored yet; or it could ask for the same secret, and wait for a lock that the interrupted call holds.
    """
    outcome: list[Secret] = []
    Aside("to read the secret of this job").run(lambda: outcome.append(read()))
    return outcome[0]


def _take(descriptor: int) -> Secret:
    """Read the secret, unless another thread has."""
    where = f"the secret's descriptor {descriptor}"
    with _lock:
        if descriptor in _taken:
            return _taken[descriptor]
        try:
            status = os.fstat(descriptor)
        except OSError:
            raise UsageError(f"{where} is not open: let the launcher pass it on") from None
        if stat.S_ISREG(status.st_mode):
            if status.st_nlink:
                _check_private(status, where)
        elif not stat.S_ISFIFO(status.st_mode):
            raise UsageError(f"{where} is neither a pipe nor a regular file")
        try:
            secret = Secret(_read(descriptor, where), where)
        finally:
            os.close(descriptor)
        _taken[descriptor] = secret
        return secret


def _check_private(status: os.stat_result, where: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise UsageError(f"{where} has mode {mode:04o}, so others than its owner can access it: chmod 600 it")
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"{where} belongs to user {status.st_uid}, and must belong to this one or to root")


def _read(descriptor: int, where: str) -> bytes:
    """Read to the end, or one byte more than a secret may have."""
    content = b""
    end = time.monotonic() + _WRITING_S
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(content) <= MOST_BYTES:
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise UsageError(f"{where}: its writer has not closed its end within {_WRITING_S:.0f} s")
        try:
            piece = os.read(descriptor, MOST_BYTES + 1 - len(content))
        except OSError as error:
            raise UsageError(f"{where} cannot be read: {os.strerror(error.errno or 0)}") from None
        if not piece:
            break
        content += piece
    return content
