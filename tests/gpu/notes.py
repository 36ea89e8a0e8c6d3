"""What a GPU test finds out, and the processes that its body runs in.

Notes go to a file at once, so a body that hangs, or takes its process down, loses nothing that it had found by then.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.comparison import Comparison

__all__ = ["KINDS", "GpuRank", "Notes", "gpu_body", "read_notes"]

KINDS = ("figures", "goals", "facts", "comparisons")


class Notes:
    """Figures, goals, comparisons and facts of one test, each appended to the file `path` as a line of JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def figure(self, name: str, value: float, unit: str) -> float:
        """Record a measurement and return it."""
        self._append("figures", name, {"value": round(float(value), 4), "unit": unit})
        return value

    def goal(self, name: str, target: str, found: str, reached: bool) -> None:
        """Record whether a goal was reached; the last record of a name counts. A missed goal fails no test."""
        self._append("goals", name, {"target": target, "found": found, "reached": reached})

    def comparison(self, name: str, found: Comparison) -> None:
        """Record two variants that were measured in turns."""
        content = dataclasses.asdict(found)
        self._append(
            "comparisons",
            name,
            {key: round(value, 4) if isinstance(value, float) else value for key, value in content.items()},
        )

    def fact(self, name: str, value: object) -> None:
        """Record a fact about the machine."""
        self._append("facts", name, str(value))

    def _append(self, kind: str, name: str, content: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([kind, name, content]) + "\n")


def read_notes(path: Path) -> dict[str, dict[str, Any]]:
    """Return what was written to `path`, by kind and name."""
    found: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for line in path.read_text().splitlines() if path.exists() else ():
        kind, name, content = json.loads(line)
        found[kind][name] = content
    return found


class GpuRank(Notes):
    """The process that a body runs in.

    Attributes:
        rank: Its number, from 0.
        world_size: Number of processes that run the body.
        directory: New for each run, and the same for all its ranks.
        cache: Compiled kernels, kept for the whole session.
    """

    def __init__(
        self, rank: int, world_size: int, directory: Path, notes: Path, cache: Path, seconds: float
    ) -> None:
        super().__init__(notes)
        self.rank, self.world_size, self.directory, self.cache = rank, world_size, directory, cache
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds until the deadline of the test."""
        return self._end - time.monotonic()


def gpu_body(body: Callable[..., Any]) -> Callable[..., Any]:
    """Turn `body(me: GpuRank, ...)` into a function that `tests.harness.run_ranks` runs on every rank.

    A warning is an error here too, but only once the body has ended: on a machine that is lent for minutes it must not
    hide the results.
    """

    @functools.wraps(body)
    def run(
        rank: int, world_size: int, directory: Path, notes: str, cache: str, seconds: float, *args: Any
    ) -> Any:
        me = GpuRank(rank, world_size, directory, Path(notes), Path(cache), seconds)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            value = body(me, *args)
        if caught:
            raise AssertionError("warnings: " + "; ".join(str(each.message) for each in caught))
        return value

    return run
