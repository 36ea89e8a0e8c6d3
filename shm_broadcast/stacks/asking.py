"""Ask processes of this host for their Python stacks, which they write by `offered.py`.

A process is sent the signal only if its own status page announces that signal, and if the kernel says that it
has a handler: without one, the signal would end it. The asking process holds a lock on the other one's memory
meanwhile, so that two processes that ask at once both get whole texts.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from shm_broadcast.descriptors import read_text
from shm_broadcast.errors import CapabilityError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.liveness import ProcessIdentity, keep_pidfd, process_state, this_process
from shm_broadcast.stacks.offered import HEADER_BYTES, NAME, NBYTES, handles
from shm_broadcast.status import layout
from shm_broadcast.status.record_file import is_page, is_page_link

__all__ = ["TEXT_BYTES", "WITHIN_S", "ask"]

WITHIN_S: Final = 0.5
"""How long all asks together wait for the texts."""

TEXT_BYTES: Final = 32 << 10
"""How much of a process's text is read. The innermost frames come first."""

# A process with less free room than this is not asked, so that no write of its handler fails and no text is
# cut there. A stack of 100 frames takes about 10 KB.
_ROOM_BYTES: Final = 128 << 10

# How often it looks whether a text is complete. Most are written within a millisecond.
_LOOK_S: Final = 0.002

# If the main thread has a signal pending, the kernel gives this one to another thread. A thread that is not
# one of Python's writes nothing, so the signal is sent again after this time.
_AGAIN_S: Final = 0.1

_LINK: Final = "/memfd:"

# The kernel's own limit of the ids of threads.
_MOST_THREAD: Final = 1 << 22

# A pidfd of one thread, since Linux 6.9; a signal sent to it is that thread's.
_PIDFD_THREAD: Final = os.O_EXCL


class _NoAnswerError(Exception):
    """Says why a process is not asked, or has not answered."""


def ask(
    processes: Mapping[int, ProcessIdentity], within_s: float = WITHIN_S, most: int = NBYTES
) -> dict[int, str]:
    """Return the stacks of each process, or why there are none. It raises nothing but what a signal handler raises.

    Blocks until all have answered, at most about `within_s` seconds.

    Args:
        processes: By rank, in the order in which they are asked.
        within_s: Deadline in seconds.
        most: Do not ask a process whose memory holds this many bytes of earlier stacks.

    Returns:
        Texts by rank.
    """
    end, own = time.monotonic() + within_s, this_process()
    texts: dict[int, str] = {}
    asked: dict[int, _Question] = {}
    with ExitStack() as closing:
        for rank, process in processes.items():
            try:
                _check_time(end, within_s)
                question = closing.enter_context(_Question(own, process, most))
                text = question.look()
                if text is None:
                    asked[rank] = question
                else:
                    texts[rank] = text
                    question.close()
            except (_NoAnswerError, OSError, CapabilityError) as error:
                if raised_by_handler(error):
                    raise
                texts[rank] = _reason(process, error)
        while asked:
            is_last = time.monotonic() >= end
            for rank, question in list(asked.items()):
                try:
                    text = question.late(within_s) if is_last else question.look()
                except (_NoAnswerError, OSError, CapabilityError) as error:
                    if raised_by_handler(error):
                        raise
                    text = _reason(question.process, error)
                if text is not None:
                    texts[rank] = text
                    asked.pop(rank).close()
            if asked:
                time.sleep(_LOOK_S)
    return {rank: texts[rank] for rank in processes}


def _check_time(end: float, within_s: float) -> None:
    if time.monotonic() >= end:
        raise _NoAnswerError(f"finding the others took {within_s:.1f} s, so it was not asked")


def _reason(process: ProcessIdentity, error: Exception) -> str:
    if isinstance(error, ProcessLookupError):
        return f"no stacks of pid {process.pid}: it is dead"
    if isinstance(error, FileNotFoundError):
        # A process that dies closes its descriptors before the kernel calls it dead.
        return f"no stacks of pid {process.pid}: it is dead, or has closed the memory for them"
    if isinstance(error, PermissionError):
        return (
            f"no stacks of pid {process.pid}: the kernel lets this process not look or send a signal: "
            f"{error.strerror}"
        )
    return f"no stacks of pid {process.pid}: {error}"


class _Question:
    """One process that is asked."""

    def __init__(self, own: ProcessIdentity, process: ProcessIdentity, most: int) -> None:
        """Find what the process offers.

        Args:
            own: This process.
            process: The one to ask.
            most: See `ask`.

        Raises:
            _NoAnswerError: It is dead or stopped, it offers nothing, or it cannot be seen from here.
            OSError: The kernel refuses.
            CapabilityError: No descriptor is free.
        """
        self.process = process
        self._pidfd = self._thread = self._memory = -1
        if not own.on_same_host(process):
            raise _NoAnswerError(
                f"it is on host {process.hostname}, and only processes of this host can be asked"
            )
        if not own.sees(process):
            raise _NoAnswerError("it is in another PID namespace")
        self._folder = Path(f"/proc/{process.pid}")
        self._most = most
        self._start: int | None = None
        self._sent_s = 0.0
        self._blocked: frozenset[str] = frozenset()
        self._parts: list[str] = []
        self._threads: list[str] = []
        try:
            self._check_state()
            keep_pidfd(process.pid, vars(self), "_pidfd")
            # The pidfd is of this process, unless its number was used again before: then the start differs.
            self._check_state()
            self._number, self._place = self._find()
            self._memory = os.open(self._folder / "fd" / self._place, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close what is open."""
        self.close()

    def close(self) -> None:
        """Let others ask. Idempotent."""
        for name in ("_memory", "_thread", "_pidfd"):
            # Forgotten first, so that no number is closed twice.
            descriptor = getattr(self, name)
            setattr(self, name, -1)
            if descriptor < 0:
                continue
            try:
                if name == "_memory":
                    # A child that was forked meanwhile has the descriptor too, and would keep the lock for its life.
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                os.close(descriptor)

    def look(self) -> str | None:
        """Go on without waiting; return the text once it is complete. Raises as `__init__`."""
        if self._start is None and not self._send():
            return None
        self._check_state()
        if self._position() == self._start:
            if self._thread < 0 and time.monotonic() >= self._sent_s + _AGAIN_S and not self._is_pending():
                self._send_signal()
            return None
        if self._is_writing():
            return None
        self._parts.append(self._text())
        return None if self._send_to_thread() else "\n\n".join(self._parts)

    def late(self, within_s: float) -> str:
        """Return what is there at the deadline, and say that it is not all. Raises as `__init__`."""
        self._check_state()
        if self._start is None:
            raise _NoAnswerError(f"another process has asked it and was not done within {within_s:.1f} s")
        if self._position() > self._start:
            self._parts.append(self._text())
        if self._parts:
            return "\n\n".join([*self._parts, f"(not complete within {within_s:.1f} s)"])
        raise _NoAnswerError(
            f"it did not answer within {within_s:.1f} s: its threads block signal {self._number}, or are in a call of "
            "the kernel that no signal interrupts"
        )

    def _send(self) -> bool:
        """Send the signal; return False while another process is asking."""
        try:
            fcntl.flock(self._memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not handles(self.process.pid, self._number):
            raise _NoAnswerError(
                f"its page says that signal {self._number} asks for stacks, but nothing handles it"
            )
        start = self._position()
        if start >= min(self._most, NBYTES - _ROOM_BYTES):
            raise _NoAnswerError(
                f"earlier stacks fill {start} of {NBYTES} bytes; its next group empties that memory again"
            )
        names = os.pread(self._memory, HEADER_BYTES, 0).decode(errors="replace").split()
        self._threads = [
            name for name in names if name.isascii() and name.isdecimal() and int(name) <= _MOST_THREAD
        ]
        self._blocked = self._blocking()
        self._send_signal()
        self._start = start
        return True

    def _send_to_thread(self) -> bool:
        """Send the signal to the next thread that the process names; return False if there is none left."""
        while self._threads:
            name = self._threads.pop(0)
            descriptor, self._thread = self._thread, -1
            if descriptor >= 0:
                os.close(descriptor)
            try:
                self._thread = os.pidfd_open(int(name), _PIDFD_THREAD)
            except ProcessLookupError:
                continue  # it has ended
            except OSError as error:
                if raised_by_handler(error):
                    raise
                self._parts.append(
                    f"no stack of thread {name}: pidfd_open: {error.strerror} (it needs Linux 6.9)"
                )
                continue
            # The number may be another process's thread by now. The thread behind the pidfd stays the same.
            if not (self._folder / "task" / name).exists():
                continue
            self._start = self._position()
            self._blocked = self._blocking()
            self._send_signal()
            return True
        return False

    def _send_signal(self) -> None:
        signal.pidfd_send_signal(self._thread if self._thread >= 0 else self._pidfd, self._number)
        self._sent_s = time.monotonic()

    def _is_pending(self) -> bool:
        """Return whether no thread has taken the signal yet."""
        return bool(_mask(self._folder / "status", "ShdPnd:") >> self._number - 1 & 1)

    def _check_state(self) -> None:
        state = process_state(self.process)
        if state == "dead":
            raise _NoAnswerError("it is dead")
        if state == "stopped":
            raise _NoAnswerError("it is stopped, so it cannot write them")

    def _find(self) -> tuple[int, str]:
        """Return the signal that the process's page announces, and the number of the descriptor of the memory."""
        links = {name: self._target(name) for name in os.listdir(self._folder / "fd")}
        pages = [name for name, target in links.items() if is_page_link(target)]
        # A process may hold the pages of others too, and besides a page in a file the one that it had before.
        numbers = [number for number in map(self._announced, pages) if number is not None]
        if not numbers:
            raise _NoAnswerError("it has no status page")
        announced = max(numbers)
        if not announced:
            raise _NoAnswerError("its page announces no signal: stack_signal is 0, or it has no group")
        wanted = f"{_LINK}{NAME}-{announced}"
        places = [name for name, target in links.items() if target.startswith(wanted) and self._writes(name)]
        if not places:
            raise _NoAnswerError("it has closed the memory for them")
        return announced, places[0]

    def _target(self, name: str) -> str:
        try:
            return os.readlink(self._folder / "fd" / name)
        except FileNotFoundError:
            return ""  # closed meanwhile

    def _writes(self, name: str) -> bool:
        """Return whether the process may write to a descriptor; those opened to ask others are read-only."""
        try:
            text = read_text(self._folder / "fdinfo" / name)
        except FileNotFoundError:
            return False
        return int(text.partition("flags:")[2].split()[0], 8) & os.O_ACCMODE == os.O_RDWR

    def _announced(self, name: str) -> int | None:
        """Return the signal that a page announces; None if it is no page of this process."""
        try:
            # It may have become something else meanwhile, such as a pipe, whose opening would wait.
            descriptor = os.open(self._folder / "fd" / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            if not is_page(descriptor):
                return None
            form = layout.TABLES["header"].form
            data = os.pread(descriptor, form.size, 0)
        finally:
            os.close(descriptor)
        if len(data) != form.size:
            return None
        page = dict(zip(layout.TABLES["header"].fields, form.unpack(data), strict=True))
        is_own = (page["magic"], page["version"]) == (layout.MAGIC, layout.VERSION) and (
            page["pid"],
            page["start_ticks"],
        ) == (self.process.pid, self.process.start_ticks)
        number = page["stack_signal"]
        return number if is_own and (not number or _is_real_time(number)) else None

    def _position(self) -> int:
        """Return how much the process has written since its memory was empty."""
        text = read_text(self._folder / "fdinfo" / self._place)
        return int(text.partition("pos:")[2].split()[0])

    def _blocking(self) -> frozenset[str]:
        """Return the threads that block the signal; one that handles it blocks it until the handler ends."""
        found = set()
        for thread in os.listdir(self._folder / "task"):
            try:
                mask = _mask(self._folder / "task" / thread / "status", "SigBlk:")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if mask >> self._number - 1 & 1:
                found.add(thread)
        return frozenset(found)

    def _is_writing(self) -> bool:
        return bool(self._blocking() - self._blocked)

    def _text(self) -> str:
        start = self._start or 0
        written = self._position() - start
        data = os.pread(self._memory, min(written, TEXT_BYTES), start)
        cut = "\n(cut)" if written > len(data) else ""
        if start + written >= NBYTES:
            cut = "\n(cut: there was no room for more)"
        return data.decode(errors="replace").strip() + cut


def _mask(path: Path, name: str) -> int:
    for line in read_text(path).splitlines():
        if line.startswith(name):
            return int(line.split()[1], 16)
    return 0


def _is_real_time(number: int) -> bool:
    return signal.SIGRTMIN <= number <= signal.SIGRTMAX
