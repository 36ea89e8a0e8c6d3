"""The application's functions of the codec, marked while they run: a group refuses what they call of it."""

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

__all__ = ["RUNNING", "is_inside", "marked"]

RUNNING: Final[dict[object, int]] = {}
"""The functions that run, each with its thread. What a signal handler raises may leave one behind; see `is_inside`."""


def marked(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `function`, which is in `RUNNING` while it runs."""

    def hook(value: Any) -> Any:
        mark = object()
        try:
            RUNNING[mark] = threading.get_ident()
            result = function(value)
            del RUNNING[mark]
        except BaseException:
            RUNNING.pop(mark, None)
            raise
        return result

    return hook


# All functions that `marked` returns share their code.
_HOOK: Final[CodeType] = marked(bool).__code__


def is_inside(is_call: Callable[[FrameType], bool]) -> bool:
    """Return whether a function of the codec calls this, with a frame further out for which `is_call` holds.

    Marks of this thread that were left behind are removed.
    """
    thread = threading.get_ident()
    mine = [mark for mark, owner in RUNNING.copy().items() if owner == thread]
    if not mine:
        return False
    frame: FrameType | None = sys._getframe().f_back  # noqa: SLF001 - there is no public way to the calling frames
    is_hooked = False
    while frame is not None:
        if frame.f_code is _HOOK:
            is_hooked = True
        elif is_hooked and is_call(frame):
            return True
        frame = frame.f_back
    if not is_hooked:
        for mark in mine:
            RUNNING.pop(mark, None)
    return False
