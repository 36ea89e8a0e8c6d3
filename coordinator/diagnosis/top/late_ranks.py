"""Name the ranks that are late all the time, in windows that pass while `top` looks."""

from __future__ import annotations

from typing import Final

from coordinator.diagnosis.stragglers import Straggler, StragglerWatch
from coordinator.diagnosis.top.sampling import Sample

__all__ = ["WINDOW_S", "LateRanks"]

WINDOW_S: Final = 10.0
"""Length of a window. A rank is named if it was late in two of them, one after the other."""


class LateRanks:
    """Judges samples. One thread uses it."""

    def __init__(self) -> None:
        """Start before the first sample."""
        self._watch = StragglerWatch()
        self._judged_ns: int | None = None
        self._named: tuple[Straggler, ...] = ()

    def look(self, sample: Sample) -> tuple[Straggler, ...]:
        """Return the ranks that were late in the last two windows."""
        if self._judged_ns is None or sample.at_ns - self._judged_ns >= WINDOW_S * 1e9:
            self._judged_ns = sample.at_ns
            self._named = self._watch.look(sample.seen, sample.at_ns)
        return self._named
