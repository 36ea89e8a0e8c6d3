"""Run the command of `top` that a demo prints for those who want to watch it."""

import itertools
import re
import shlex
import subprocess
import time
from pathlib import Path

__all__ = ["pids_shown_by"]

REPOSITORY = Path(__file__).parents[1]


def pids_shown_by(text: str, deadline_s: float = 30.0) -> set[int]:
    """Run the command in `text`, as printed, until it shows that each rank makes calls.

    Returns:
        The processes that the command names.

    Raises:
        AssertionError: There is no command, it failed, or it did not show all of them in time.
    """
    found = re.search(r"watch it from another terminal: (.*)", text)
    assert found, text
    words = shlex.split(found[1])
    named = {int(word) for before, word in itertools.pairwise(words) if before == "--pid"}
    shown: set[int] = set()
    lines: list[str] = []
    end_s = time.monotonic() + deadline_s
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        pid, rate = slice(0), slice(0)
        for line in top.stdout:
            lines.append(line)
            if line.startswith("group and plane"):
                pid, rate = _column(line, "    pid"), _column(line, "calls/s")
            elif line[pid].strip().isdecimal() and re.fullmatch(r" *[1-9][\d.]*[kM]?", line[rate]):
                shown.add(int(line[pid]))
            if shown >= named or time.monotonic() > end_s:
                break
        top.stdout.close()  # as `head` does
        assert top.wait(30) == 0
    assert shown >= named, f"{sorted(named - shown)} made no calls, or were not shown:\n{''.join(lines)}"
    return named


def _column(head: str, title: str) -> slice:
    start = head.index(title)
    return slice(start, start + len(title))
