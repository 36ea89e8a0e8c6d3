"""Waits for a condition that another thread or process brings about, with a deadline, and says what did not come."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["PATIENCE_S", "has_ended", "wait_until"]

PATIENCE_S = 60.0
"""Far longer than anything takes on a busy machine: only a defect lets it pass."""


def wait_until(
    condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S, poll_s: float = 0.005
) -> None:
    """Ask for `condition` every `poll_s` seconds until it is true.

    Raises:
        AssertionError: It was not true within `timeout_s`; the text names `what` was awaited.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(poll_s)


def has_ended(pid: int) -> bool:
    """Tell whether a process is gone, or dead and not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True
