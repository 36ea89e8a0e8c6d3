"""Say once in each process that it uses the groups and queues of this project.

vLLM forks workers where it can. A forked worker inherits the replaced classes, and vLLM loads no plugin in it again.
And where vLLM loads its plugins before it configures its log, a line of this level would be lost. Therefore a process
that has not spoken yet does so when it makes its first group or opens its first queue.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import version
from typing import Final

__all__ = ["announce", "logger", "replaced"]

# vLLM configures the logger "vllm" and its children when `vllm.logger` is imported, so our lines appear beside its own.
logger: logging.Logger = logging.getLogger("vllm.plugins.group_coordinator")


class _Announcement:
    """What is said, and which process said it last.

    Attributes:
        release: The version of vLLM whose classes were replaced, or None.
        pid: The process that has spoken; another number than that of a process that was forked afterwards.
    """

    def __init__(self) -> None:
        self.release: str | None = None
        self.pid: int | None = None


_said: Final = _Announcement()


def replaced(release: str) -> None:
    """Remember that the classes of vLLM `release` are replaced, and let this process say so."""
    _said.release = release
    _said.pid = None
    announce()


def announce() -> None:
    """Log that this process uses the groups and queues, if they were replaced; once, and not before the log is open."""
    if _said.release is None or _said.pid == os.getpid() or not logger.isEnabledFor(logging.INFO):
        return
    _said.pid = os.getpid()
    logger.info(
        "group_coordinator %s: process %d of vLLM %s uses its groups and queues",
        version("group-coordinator"),
        _said.pid,
        _said.release,
    )
