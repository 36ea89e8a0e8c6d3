"""`python -m coordinator stragglers`: name the ranks that are late all the time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from coordinator.cli.output import write_out
from coordinator.diagnosis.pages import Found, find_pages
from coordinator.diagnosis.stragglers import FEWEST_CALLS, Straggler, StragglerWatch

__all__ = ["watch_stragglers"]

# The exit status if somebody is named.
_NAMED = 3


def watch_stragglers(window_s: float, pids: Sequence[int], *, logs: bool) -> int:
    """Watch the ranks on this host; return the exit status, 3 if one was a straggler.

    Args:
        window_s: Length of a window in seconds.
        pids: Watch these processes only; empty for all.
        logs: Whether to write a line for each window until Ctrl-C, or until nobody reads them, also while no rank runs,
            instead of the result of two windows.
    """
    if not logs and not _pages(pids):
        sys.stderr.write("coordinator: error: this host has no process with a group and a status page\n")
        return 1
    windows = _windows(window_s, pids)
    status = 0
    try:
        if not logs:
            next(windows)  # nobody can be named after one window
            found, text = next(windows)
            write_out("".join(f"{straggler}\n" for straggler in found) or f"{text}\n")
            return _NAMED if found else 0
        for found, text in windows:
            status = _NAMED if found else status
            at = datetime.now(UTC).isoformat(timespec="seconds")
            lines = [str(straggler) for straggler in found] or [text]
            level = "WARNING" if found else "INFO"
            if not write_out("".join(f"{at} {level} {line}\n" for line in lines)):
                break
    except KeyboardInterrupt:
        pass  # the way to end it
    return status


def _windows(window_s: float, pids: Sequence[int]) -> Iterator[tuple[tuple[Straggler, ...], str]]:
    """Yield the stragglers at the end of each window, and what to say if there are none."""
    watch = StragglerWatch()
    watch.look(_pages(pids), time.monotonic_ns())
    while True:
        time.sleep(window_s)
        pages = _pages(pids)
        found = watch.look(pages, time.monotonic_ns())
        text = f"no straggler among {len(pages)} processes; "
        text += (
            f"in the last {window_s:g} s, {watch.judged} of their planes made at least {FEWEST_CALLS} calls"
        )
        yield found, text


def _pages(pids: Sequence[int]) -> list[Found]:
    return [found for found in find_pages(pids or None, records=False).found if found.page.groups]
