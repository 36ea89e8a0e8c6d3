"""Wait for a condition until a deadline, and name the condition if it was not met."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["PATIENCE_S", "has_ended", "wait_until"]

PATIENCE_S = 60.0
"""A wait budget that is longer than any awaited event takes, even on a busy machine."""


def wait_until(
    condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S, poll_s: float = 0.005
) -> None:
    """Evaluate `condition` every `poll_s` seconds until it is true.

    Raises:
        AssertionError: The condition was not true within `timeout_s`; the message contains `what`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(poll_s)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True
