"""How much memory a process may still take: what the machine has left, and what each cgroup around the process allows.

A page that exceeds the limit of a cgroup does not raise an error: the kernel kills a process of the cgroup. Therefore
shared memory is allocated only after this module was asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from shm_broadcast.descriptors import read_text
from shm_broadcast.interruption import raised_by_handler

__all__ = ["free_memory_bytes"]


class _Files(NamedTuple):
    """The files in which a version of cgroups tells a group's limit, its use, and the counter of clean page cache.

    The cache of files that nobody has used lately counts as used, but the kernel drops it before it refuses a page.
    Kubernetes subtracts the same counter to get what a container really uses.
    """

    limit: str
    usage: str
    cache: str


_VERSION_1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2: Final = _Files("memory.max", "memory.current", "inactive_file")


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes this process may still allocate.

    Args:
        root: The folder that holds `proc` and `sys`.

    Raises:
        CapabilityError: No descriptor is free with which to ask.
    """
    lines = dict(line.split(":", 1) for line in read_text(root / "proc/meminfo").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for folder, files in _cgroups(root):
        try:
            # Without a limit, version 2 says "max", and version 1 gives a number that no machine reaches.
            limit = int(read_text(folder / files.limit))
            usage = int(read_text(folder / files.usage))
        except (OSError, ValueError) as error:
            if raised_by_handler(error):
                raise
            continue
        free = min(free, limit - usage + _cache_bytes(folder / "memory.stat", files.cache))
    return max(free, 0)


def _cache_bytes(statistics: Path, counter: str) -> int:
    try:
        lines = read_text(statistics).splitlines()
    except OSError as error:
        if raised_by_handler(error):
            raise
        return 0  # some sandboxes show the limit without the counters
    return int(dict(line.split() for line in lines).get(counter, 0))


def _cgroups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folder of each cgroup that may limit this process: its own, and those around it that are visible."""
    try:
        members = read_text(root / "proc/self/cgroup").splitlines()
        mounts = read_text(root / "proc/self/mountinfo").splitlines()
    except OSError as error:
        if raised_by_handler(error):
            raise
        return  # a kernel without cgroups
    own: dict[_Files, str] = {}
    for line in members:
        hierarchy, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            own[_VERSION_1] = path
        elif hierarchy == "0":
            own[_VERSION_2] = path
    for line in mounts:
        # "31 23 0:28 <root> <mount point> <options> - <type> <source> <super options>"; more fields may precede "-".
        place, _, kind = line.partition(" - ")
        top, mount_point = place.split()[3:5]
        file_system, _, *options = kind.split()
        files = _VERSION_2 if file_system == "cgroup2" else _VERSION_1
        is_memory = file_system == "cgroup2" or (
            file_system == "cgroup" and "memory" in options[-1].split(",")
        )
        if not is_memory or files not in own:
            continue
        # In a container the mount may begin at the process's own cgroup, or at one around it.
        inner = Path(own[files])
        below = inner.relative_to(top) if inner.is_relative_to(top) else Path()
        folder = root / mount_point.lstrip("/") / below
        for _ in range(1 + len(below.parts)):
            yield folder, files
            folder = folder.parent
