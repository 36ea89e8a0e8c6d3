"""Keep the signals that ask a launcher to end, until it looks for them between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["KeptSignals", "kept_signals"]

_ASKING: Final = (signal.SIGINT, signal.SIGTERM)


class KeptSignals:
    """The last signal that came.

    An exception of a handler could strike within `Popen.poll` between taking its lock and the `try` that releases it
    (Python 3.11: 782 of 4,000 alarms into a loop of polls left it locked). `Popen.wait` would then wait for ever.
    """

    def __init__(self) -> None:
        """No signal has come."""
        self._number = 0

    def keep(self, number: int, frame: object) -> None:
        """Be the handler."""
        del frame
        self._number = number

    def check(self) -> None:
        """Raise `SystemExit` with the status of a shell, 128 and the number, if a signal has come."""
        if self._number:
            raise SystemExit(128 + self._number)


@contextmanager
def kept_signals() -> Iterator[KeptSignals]:
    """Keep SIGINT and SIGTERM within the context, unless they are ignored. From the main thread only."""
    kept = KeptSignals()
    before = {
        number: signal.signal(number, kept.keep)
        for number in _ASKING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield kept
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
