"""What a step writes down while it runs: checks, figures and goals, on disk after each of them.

A step may hang or take its process with it; what it had found out by then is in the file, and the check that was
running says so.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Notes", "SkipCheckError"]

_MOST_TEXT = 3000


class SkipCheckError(Exception):
    """This machine cannot show what the check is about; the text says why."""


class Notes:
    """The record of one step.

    Attributes:
        checks: Each with name, status ("passed", "failed", "skipped", "running"), reason and seconds.
        figures: What was measured: name -> {"value", "unit"}.
        goals: What had to be reached: name, target, what was found, and whether that holds.
        facts: What the machine is.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.checks: list[dict[str, Any]] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self.goals: list[dict[str, Any]] = []
        self.facts: dict[str, str] = {}
        self._end = time.monotonic() + seconds
        self._write()

    def left(self) -> float:
        """Return how many seconds the step still has."""
        return self._end - time.monotonic()

    def need(self, seconds: float, what: str) -> None:
        """Skip the check that is running unless so many seconds are left."""
        if self.left() < seconds:
            raise SkipCheckError(f"no time left for {what}")

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Run the body as one check; what it raises is its result, and the next check goes on."""
        entry: dict[str, Any] = {"name": name, "status": "running", "reason": "", "seconds": 0.0}
        self.checks.append(entry)
        self._write()
        start = time.monotonic()
        try:
            yield
            entry["status"] = "passed"
        except SkipCheckError as skip:
            entry["status"], entry["reason"] = "skipped", str(skip)
        except Exception as error:
            lines = traceback.format_exc().strip().splitlines()
            entry["status"] = "failed"
            text = f"{type(error).__name__}: {error}\n" + "\n".join(lines[-8:])
            entry["reason"] = text[:_MOST_TEXT]
        finally:
            # A KeyboardInterrupt goes on, and leaves "running" behind.
            entry["seconds"] = round(time.monotonic() - start, 3)
            self._write()

    def figure(self, name: str, value: float, unit: str) -> float:
        """Write down what was measured, and return it."""
        self.figures[name] = {"value": round(float(value), 4), "unit": unit}
        self._write()
        return value

    def goal(self, name: str, target: str, found: str, holds: bool) -> None:
        """Write down whether something was reached that had to be."""
        self.goals.append({"name": name, "target": target, "found": found, "holds": holds})
        self._write()

    def fact(self, name: str, value: object) -> None:
        """Write down something about the machine."""
        self.facts[name] = str(value)
        self._write()

    def _write(self) -> None:
        content = {name: getattr(self, name) for name in ("checks", "figures", "goals", "facts")}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content))
        part.replace(self.path)
