"""Snapshots of the descriptors, threads, children and files that a process holds, to find leaks."""

import gc
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from shm_broadcast.stacks.offered import NAME
from shm_broadcast.status.page import own_page
from shm_broadcast.status.record_file import PAGE_SUFFIX

__all__ = ["GRACE_S", "TEMP_PREFIX", "Snapshot", "children_of", "leaked_since"]

TEMP_PREFIX = "group-coordinator-"
"""The prefix of the name of every temporary directory and every thread of the product."""

STACKS = f"/memfd:{NAME}-"
"""The memory for its stacks, which a process keeps for its life from its first group on: one, a second is a leak."""

AUTOGRAD = "pt_autograd_"
"""The names of the threads of torch's autograd, which a process keeps for its life, begin with this."""

GRACE_S = 1.0
"""How long a descriptor, thread or child may outlive its test, because threads and processes end asynchronously."""

SHM = Path("/dev/shm")
WAIT_ALL = 0x40000000
"""The kernel's flag __WALL, with which `waitpid` also finds children that send no SIGCHLD when they end."""


@dataclass(frozen=True)
class Snapshot:
    """The resources that a process holds at one moment.

    Attributes:
        descriptors: Target of each open descriptor.
        threads: Python threads that are alive.
        natives: Names of the threads of Gloo, ZeroMQ and torch's stores, which Python does not know.
        processes: Ids of all processes of the machine, or nothing if this process has no children.
        shm: Names in /dev/shm.
        directories: Temporary directories of the product.
    """

    descriptors: dict[int, str]
    threads: frozenset[threading.Thread]
    natives: dict[int, str]
    processes: frozenset[int]
    shm: frozenset[str]
    directories: frozenset[str]

    @classmethod
    def take(cls) -> "Snapshot":
        """Return a snapshot of this process, which keeps its status page for its life."""
        own_page()
        return cls(
            descriptors=_descriptors(),
            threads=frozenset(threading.enumerate()),
            natives=_natives(),
            processes=frozenset(_processes() if _has_children() else ()),
            shm=frozenset(_names(SHM)),
            directories=frozenset(
                name for name in _names(Path(tempfile.gettempdir())) if name.startswith(TEMP_PREFIX)
            ),
        )

    def gpu_files(self) -> list[str]:
        """Return the open descriptors of files of the GPU driver."""
        return sorted(target for target in self.descriptors.values() if target.startswith("/dev/nvidia"))


def leaked_since(
    before: Snapshot,
    *,
    ignored_descriptors: Callable[[], Collection[int]] = tuple,
    ignored_children: Callable[[], Collection[int]] = tuple,
) -> list[str]:
    """Return one line for each resource that this process holds now and did not hold `before`.

    Waits up to `GRACE_S` for them to go away. A daemon thread counts only if its name starts with `TEMP_PREFIX`. A
    name in /dev/shm counts only if no process outside of our descendants maps it.
    """
    deadline = time.monotonic() + GRACE_S
    while True:
        leaks = _compare(before, Snapshot.take(), set(ignored_descriptors()), set(ignored_children()))
        if not leaks or time.monotonic() > deadline:
            return leaks
        gc.collect()
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Return the children of `pid` that exist. A zombie counts, because its parent has not waited for it."""
    return [each for each in _processes() if _parent_of(each) == pid]


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _has_children() -> bool:
    """Return whether this process has children. The kernel tells that in 1 us; listing all processes takes 0.2 ms."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | WAIT_ALL)
    except ChildProcessError:
        return False
    return True


def _compare(before: Snapshot, now: Snapshot, descriptors: set[int], children: set[int]) -> list[str]:
    leaks = []
    # The CUDA driver opens dozens of descriptors when it starts, and keeps them: leaks look no different then.
    if before.gpu_files() == now.gpu_files():
        leaks = [
            f"descriptor {fd} -> {target}"
            for fd, target in sorted(now.descriptors.items())
            if fd not in descriptors and before.descriptors.get(fd) != target
        ]
    leaks += [
        f"thread {thread.name!r}{_stack_of(thread)}"
        for thread in sorted(now.threads - before.threads, key=lambda thread: thread.name)
        if not thread.daemon or thread.name.startswith(TEMP_PREFIX)
    ]
    leaks += [
        f"native thread {number} {name!r}"
        for number, name in sorted(now.natives.items())
        if before.natives.get(number) is None
    ]
    # Only new processes are asked for their parent: to ask all of them took 2 ms, twice for every test.
    new = sorted(now.processes - before.processes - children)
    leaks += [f"child {pid}: {_command(pid)}" for pid in new if _parent_of(pid) == os.getpid()]
    leaks += [f"/dev/shm/{name}" for name in sorted(now.shm - before.shm) if not _held_by_others(name)]
    leaks += [f"directory {name}" for name in sorted(now.directories - before.directories)]
    return leaks


def _stack_of(thread: threading.Thread) -> str:
    """Return where a thread is, which tells why it has not ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return (
        ", at\n" + "".join(traceback.format_stack(frame)) if frame is not None else ", which has just ended"
    )


def _natives() -> dict[int, str]:
    """Return the names of the threads that Python does not know and that their library has named.

    Those of Gloo, of torch and of ZeroMQ have names, and the product starts none of its own. What is left has the name
    of the process: the pools of OpenMP and BLAS, which start with the first large operation, or an import, and stay.
    So does the pool of torch's autograd, which starts with the first backward pass.
    """
    found = {}
    known = {thread.native_id for thread in threading.enumerate()}
    for number in {int(entry) for entry in os.listdir("/proc/self/task")} - known:
        name = _name_of(number)
        if name not in ("", _name_of(os.getpid())) and not name.startswith(AUTOGRAD):
            found[number] = name
    return found


def _name_of(number: int) -> str:
    """Return the name of one of our threads; nothing if it has just ended."""
    try:
        with open(f"/proc/self/task/{number}/comm") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _descriptors() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue  # this was the descriptor that read the directory
    stacks = [number for number, target in found.items() if target.startswith(STACKS)]
    # A process that records takes a page in a file in place of the one that it had; its mapping has a descriptor too.
    pages = [number for number, target in found.items() if target.endswith(PAGE_SUFFIX)]
    own = {*stacks[:1], *pages[:2]}
    return {number: target for number, target in found.items() if number not in own}


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _parent_of(pid: int) -> int:
    try:
        # This uses plain strings, because with hundreds of processes Path objects would double the time.
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(stat.rpartition(b")")[2].split()[1])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def _held_by_others(name: str) -> bool:
    """Return whether a process outside of our descendants maps /dev/shm/`name`; if one does, it is not our leak."""
    try:
        # Compare inodes, because glibc creates a semaphore under another name, which its mapping still shows.
        inode = str((SHM / name).stat().st_ino)
    except FileNotFoundError:
        return True
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or _descends_from_us(int(entry)):
            continue
        try:
            maps = Path(f"/proc/{entry}/maps").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if any(f"{SHM}/" in line and line.split()[4] == inode for line in maps.splitlines()):
            return True
    return False


def _descends_from_us(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = _parent_of(pid)
    return False
