"""What a rank prints while it checks: each step as it begins, and what to look at where it stops."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final, TextIO

from coordinator.diagnosis.hosts_check.records import Finding

__all__ = ["STEPS", "WIDTH", "Narrator", "Stopped", "printable", "stop"]

WIDTH: Final = 120
"""Columns of all output."""

STEPS: Final = {
    1: "what the launcher says",
    2: "this host, and the way to the store",
    3: "all ranks meet in the store",
    4: "each pair of hosts",
    5: "verdict",
}


class Stopped(Exception):  # noqa: N818 - it is where the check ends, which may be with a warning to others only
    """This rank cannot go on.

    Attributes:
        findings: Why, and what to look at.
    """

    def __init__(self, *findings: Finding) -> None:
        """Stop for these reasons."""
        super().__init__("; ".join(finding.text for finding in findings))
        self.findings = findings


def stop(text: str, look_at: str) -> Stopped:
    """Return what to raise where the check cannot go on."""
    return Stopped(Finding("error", text, look_at))


def printable(text: str) -> str:
    """Return the text without control characters: names of hosts may come from a store that anybody can write to."""
    return "".join(each if each.isprintable() else "?" for each in text)


class Narrator:
    """Prints the steps of one rank. A quiet one prints only where it stops: its host has another one that is loud."""

    def __init__(self, out: TextIO) -> None:
        """Print to `out`, as soon as it is known which rank this is."""
        self._out = out
        self._is_loud: bool | None = None
        self._prefix = ""
        self._kept: list[str] = []
        self._step = 0

    def name_host(self, hostname: str) -> None:
        """Begin each line with the host alone, while the rank is unknown."""
        self._prefix = f"[{hostname}] "

    def name(self, rank: int, hostname: str, is_loud: bool) -> None:
        """Begin each line with the rank and its host from now on, and be loud or quiet."""
        self._prefix = f"[rank {rank} {hostname}] "
        self._is_loud = is_loud
        self._flush()

    @property
    def title(self) -> str:
        """Return the number and title of the step that goes on."""
        return f"{self._step}. {STEPS.get(self._step, 'start')}"

    def begin(self, step: int, detail: str = "") -> None:
        """Say that a step begins."""
        self._step = step
        self.say(f"{self.title}{detail and ': '}{detail}", indent="")

    def say(self, text: str, indent: str = "   ") -> None:
        """Say something about the step."""
        width = max(WIDTH - len(self._prefix), 40)
        self._kept += textwrap.wrap(
            printable(text),
            width,
            initial_indent=indent,
            subsequent_indent=indent + "   ",
            break_on_hyphens=False,
            break_long_words=True,
        )
        if self._is_loud is not None:
            self._flush()

    def fail(self, findings: Sequence[Finding]) -> None:
        """Say why this rank stops at the step that goes on, and what to look at."""
        self._is_loud = True
        self.say(f"STOPPED at step {self.title}", indent="")
        for finding in findings:
            self.say(f"{finding.level}: {finding.text}")
            self.say(f"look at: {finding.look_at}")

    def _flush(self) -> None:
        lines, self._kept = self._kept, []
        if not self._is_loud:
            return
        # One write for all of them: those of other ranks may go to the same terminal.
        self._out.write("".join(f"{self._prefix}{line}\n" for line in lines))
        self._out.flush()
