"""The progress line: redrawn on a terminal, and otherwise a new line at least every two seconds."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

__all__ = ["Progress", "restore_terminal"]

PLAIN_INTERVAL_S = 2.0


class Progress:
    """The progress line on standard error. As a context manager, it removes the line at the end."""

    def __init__(self) -> None:
        """Check whether standard error is a terminal."""
        console = Console(stderr=True)
        self._status = console.status("") if console.is_terminal else None
        self._phase = ""
        self._shown_s = 0.0

    def __enter__(self) -> Self:
        """Show the line."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the line."""
        if self._status is not None:
            self._status.stop()

    def show(self, phase: str, detail: str = "") -> None:
        """Update the line.

        Args:
            phase: Current activity; a new phase is always shown.
            detail: Progress within the phase; without a terminal it is shown at most every two seconds.
        """
        line = f"{phase}: {detail}" if detail else phase
        if self._status is not None:
            self._status.update(line)
            return
        now_s = time.monotonic()
        if phase != self._phase or now_s - self._shown_s >= PLAIN_INTERVAL_S:
            self._phase, self._shown_s = phase, now_s
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def restore_terminal() -> None:
    """Remove the progress line of a killed process, and show the cursor; without a terminal, do nothing."""
    Console(stderr=True).control(
        Control(ControlType.SHOW_CURSOR, ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
    )
