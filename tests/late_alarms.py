"""Alarms that arrive when the block that has set them is over."""

import signal
from types import FrameType

__all__ = ["take_late_alarms"]


def take_late_alarms() -> None:
    """Let this process take an alarm for which no test has a handler.

    The kernel tells any thread of an alarm, and another one than the main thread may run late. With the default handler
    back in its place by then, Python says that it ignored a signal, or the process ends.
    """
    signal.signal(signal.SIGALRM, _take)


def _take(_number: int, _frame: FrameType | None) -> None:
    """Do nothing."""
