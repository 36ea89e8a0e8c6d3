"""The command that watches given processes, for programs that start ranks to print."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

__all__ = ["top_command"]


def top_command(pids: Sequence[int]) -> str:
    """Return a shell's command line that shows these processes, and them alone.

    It names this process's Python, as another one may lack the package: relative to the current directory where that
    is shorter.

    Args:
        pids: Processes of this host.
    """
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    words = [word for pid in pids for word in ("--pid", str(pid))]
    return shlex.join([python, "-m", "coordinator", "top", *words])
