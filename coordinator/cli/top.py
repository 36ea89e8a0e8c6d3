"""`python -m coordinator top`: what the ranks on this host do, again and again, without asking them."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from coordinator.cli.output import write_out
from coordinator.diagnosis.top.late_ranks import LateRanks
from coordinator.diagnosis.top.rows import Row, rows_of
from coordinator.diagnosis.top.sampling import Sample, Sampler, of_processes
from coordinator.diagnosis.top.screen import text_screen

__all__ = ["show_top"]


def show_top(*, once: bool, pids: Sequence[int], interval_s: float) -> int:
    """Show what the ranks on this host do; return the exit status.

    A terminal gets a screen that changes in place, if rich is installed; `q` or Ctrl-C ends it. All else gets text.

    Args:
        once: Print one look, for which `interval_s` passes between two samples, and end.
        pids: Show these processes alone; empty for all.
        interval_s: Seconds from one look to the next.
    """
    sampler = Sampler()
    try:
        if once:
            return _print_once(sampler, pids, interval_s)
        if sys.stdout.isatty() and find_spec("rich") is not None:
            _show_live(sampler, pids, interval_s)
        else:
            _print_on(sampler, pids, interval_s)
    except KeyboardInterrupt:
        pass
    finally:
        sampler.close()
    return 0


def _print_once(sampler: Sampler, pids: Sequence[int], interval_s: float) -> int:
    before = sampler.sample()
    if before.seen:
        time.sleep(interval_s)
    now = sampler.sample()
    rows = rows_of(before, now, pids)
    if not rows:
        sys.stderr.write(_nothing(now, pids) + "\n")
        return 1
    write_out(text_screen(_shown(now, pids), rows))
    return 0


def _shown(sample: Sample, pids: Sequence[int]) -> Sample:
    return of_processes(sample, pids) if pids else sample


def _nothing(sample: Sample, pids: Sequence[int]) -> str:
    """Return why there is nothing to show."""
    if pids:
        return "\n".join(_why_not(sample, pid) for pid in pids)
    text = "no process on this host has a status page"
    if sample.refused:
        text += f"; processes that may not be read: {len(sample.refused)}"
    return text


def _why_not(sample: Sample, pid: int) -> str:
    """Return why a process cannot be shown."""
    if pid in sample.refused:
        return (
            f"process {pid} may not be read: its user must be that of this command, and the kernel must allow this "
            "command to trace it (ptrace(2), PTRACE_MODE_READ_FSCREDS)"
        )
    if pid in sample.faults:
        return f"process {pid}: {sample.faults[pid]}"
    if not Path(f"/proc/{pid}").exists():
        return f"process {pid} does not exist"
    return f"process {pid} has no status page: it has created no group"


def _print_on(sampler: Sampler, pids: Sequence[int], interval_s: float) -> None:
    """Print a look every `interval_s`, until an exception ends this or nobody reads it."""
    before, late = None, LateRanks()
    while True:
        now = sampler.sample()
        rows = rows_of(before, now, pids, late.look(now))
        at = time.strftime("%H:%M:%S")
        if not write_out(f"{at}  {text_screen(_shown(now, pids), rows)}\n"):
            return
        before = now
        time.sleep(interval_s)


def _show_live(sampler: Sampler, pids: Sequence[int], interval_s: float) -> None:
    """Show a screen until `q` is pressed."""
    from rich.console import Console
    from rich.live import Live

    from coordinator.diagnosis.top.rich_adapter import rich_screen

    console = Console()
    hint = f"every {interval_s:g} s, q ends"

    def screen(now: Sample, rows: tuple[Row, ...]) -> None:
        live.update(rich_screen(_shown(now, pids), rows, console.height, hint), refresh=True)

    before, late = None, LateRanks()
    with _keys() as has_keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = sampler.sample()
            screen(now, rows_of(before, now, pids, late.look(now)))
            # The first look has no rates yet: the second one follows soon.
            until_s = time.monotonic() + (interval_s if before is not None else min(interval_s, 0.5))
            before = now
            if _is_ended(has_keys, until_s):
                return


def _is_ended(has_keys: bool, until_s: float) -> bool:
    """Wait until `until_s`; return early, with True, if `q` is pressed."""
    while (left_s := until_s - time.monotonic()) > 0:
        if not has_keys:
            time.sleep(left_s)
        elif select.select([sys.stdin], [], [], left_s)[0]:
            keys = os.read(sys.stdin.fileno(), 64)
            if b"q" in keys.lower():
                return True
            if not keys:
                has_keys = False  # the terminal has gone
    return False


@contextmanager
def _keys() -> Iterator[bool]:
    """Get each key at once and do not show it; yield whether there is a keyboard."""
    if not sys.stdin.isatty():
        yield False
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield True
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
