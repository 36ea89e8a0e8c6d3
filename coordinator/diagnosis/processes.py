"""What the kernel tells of a process in `/proc`: whether it runs, computes, reads, or sleeps and where."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["Process", "look_at"]

_TICK_NS: Final = 10**9 // os.sysconf("SC_CLK_TCK")
_DEAD: Final = ("Z", "X")


class Process(msgspec.Struct, frozen=True):
    """A process at one moment. What this process may not read is None, or empty for a text.

    Attributes:
        pid: As this process sees it.
        start_ticks: Its start, in clock ticks since boot.
        state: Letter of its main thread: R running, S sleeping, D in a wait that nothing interrupts, T stopped, t
            stopped by a debugger, Z ended and not waited for.
        command: Its name, up to 15 bytes.
        threads: How many it has.
        cpu_ns: Processor time of all threads.
        read_bytes: That it has asked the kernel to read, from files in memory too.
        stored_bytes: That came from storage for it, also through mappings.
        written_bytes: That it has asked the kernel to write.
        waits_in: Function of the kernel in which the main thread sleeps.
    """

    pid: int
    start_ticks: int
    state: str
    command: str
    threads: int
    cpu_ns: int
    read_bytes: int | None
    stored_bytes: int | None
    written_bytes: int | None
    waits_in: str

    @property
    def has_ended(self) -> bool:
        """Return whether it is a zombie: only its entry is left, until its parent waits for it."""
        return self.state in _DEAD

    @property
    def is_stopped(self) -> bool:
        """Return whether it is stopped, by a signal or by a debugger."""
        return self.state in ("T", "t")


def look_at(pid: int) -> Process | None:
    """Return what a process does now; None if there is none with this id."""
    stat = _read(pid, "stat")
    if stat is None:
        return None
    # The name stands in parentheses and may hold any byte, so the last parenthesis ends it.
    head, _, tail = stat.rpartition(")")
    words = tail.split()
    if len(words) < 20:
        return None
    counted = dict(line.partition(":")[::2] for line in (_read(pid, "io") or "").splitlines())
    waits_in = _read(pid, "wchan") or ""
    return Process(
        pid=pid,
        start_ticks=int(words[19]),
        state=words[0],
        command=head.partition("(")[2],
        threads=int(words[17]),
        cpu_ns=(int(words[11]) + int(words[12])) * _TICK_NS,
        read_bytes=_number(counted.get("rchar")),
        stored_bytes=_number(counted.get("read_bytes")),
        written_bytes=_number(counted.get("wchar")),
        # The kernel writes 0 for a thread that runs, and where it tells this to nobody.
        waits_in="" if waits_in == "0" else waits_in,
    )


def _read(pid: int, name: str) -> str | None:
    """Return a file of /proc/PID; None if the process has ended, or does not let this one read it."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
