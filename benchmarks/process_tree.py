"""The processes that a process has started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["Process", "process_tree", "title_of"]


class Process(NamedTuple):
    """One process."""

    pid: int
    processor_s: float  # user and system time that it has used so far


def process_tree(root: int) -> list[Process]:
    """Return the process `root`, if it exists, and its descendants."""
    found: dict[int, Process] = {}
    children: dict[int, list[int]] = {}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # the process has ended meanwhile
                continue
            pid = int(entry.name)
            found[pid] = Process(pid, (int(fields[11]) + int(fields[12])) * tick_s)
            children.setdefault(int(fields[1]), []).append(pid)
    pids = [root]
    for pid in pids:
        pids += children.get(pid, [])
    return [found[pid] for pid in pids if pid in found]


def title_of(pid: int) -> str:
    """Return the title that vLLM gives a process of its engine, as in `VLLM::Worker_TP0`, or "" for any other process.

    Raises:
        OSError: The process has ended.
    """
    title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    return title.split()[0] if title.startswith("VLLM::") else ""
