"""The account of a run: what happened when, and what came of it, as text and as JSON. Does not import torch."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from .requests import Answer, Requests

__all__ = ["Account", "Figures"]


@dataclass
class Figures:
    """What was measured, in seconds.

    Attributes:
        first_step_s: From the kill to the end of the first step that gave tokens in the next epoch.
        prepare_s: How long the longest preparation of the new groups took, beside the steps.
        blocked_s: How long the longest commit took, in which a rank made no step.
        epochs: The epochs in which replicas served.
        steps_beside: Steps with tokens from the start of the new workers until they served.
    """

    first_step_s: float = 0.0
    prepare_s: float = 0.0
    blocked_s: float = 0.0
    epochs: list[int] = field(default_factory=list)
    steps_beside: int = 0


class Account:
    """Prints what happens, with the time since the start.

    Attributes:
        figures: See `Figures`.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        """Start the clock.

        Args:
            is_quiet: Whether to print nothing but the JSON at the end.
        """
        self.figures = Figures()
        self._is_quiet = is_quiet
        self._start_s = time.monotonic()
        self._events: list[str] = []

    def tell(self, text: str, at_s: float | None = None) -> None:
        """Print one event.

        Args:
            text: What has happened.
            at_s: When, on the monotonic clock, which all processes of a host share; None is now.
        """
        line = f"{(time.monotonic() if at_s is None else at_s) - self._start_s:7.2f} s  {text}"
        self._events.append(line)
        if not self._is_quiet:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def close(self, requests: Requests, newcomers: Sequence[int]) -> bool:
        """Print the outcome.

        Args:
            requests: All requests.
            newcomers: The workers that were started later.

        Returns:
            Whether all answers are right.
        """
        answers = list(requests.answers.values())
        wrong = [answer for answer in answers if not answer.is_right]
        tokens = sum(len(answer.tokens) for answer in answers)
        lost = sum(answer.times_lost > 0 for answer in answers)
        late = sum(answer.by in newcomers for answer in answers)
        if wrong:
            verdict = f"FAILED: {len(wrong)} of {len(answers)} answers are wrong; {_difference(wrong[0])}"
        else:
            verdict = (
                f"OK: all {len(answers)} answers are right: their {tokens:,} tokens are those of one process that "
                "nobody disturbed"
            )
        if self._is_quiet:
            outcome = {
                "right": not wrong,
                "answers": len(answers),
                "tokens": tokens,
                "asked_again": lost,
                "by_newcomers": late,
                "events": self._events,
                **asdict(self.figures),
            }
            sys.stdout.write(json.dumps(outcome) + "\n")
            return not wrong
        figures = self.figures
        rows = (
            ("epochs", ", ".join(map(str, figures.epochs))),
            ("from the kill to the first good step", f"{figures.first_step_s * 1e3:,.0f} ms"),
            ("new groups prepared, beside the steps", f"{figures.prepare_s * 1e3:,.0f} ms"),
            ("steps blocked by the longest commit", f"{figures.blocked_s * 1e3:,.1f} ms"),
            ("steps served while new workers started", f"{figures.steps_beside}"),
            ("answers", f"{len(answers)}"),
            ("  asked again, as their replica was lost", f"{lost}"),
            ("  by the new replica", f"{late}"),
        )
        text = "\n".join(f"{name:<42}{value}" for name, value in rows)
        sys.stdout.write(f"\n{text}\n{verdict}\n")
        return not wrong


def _difference(answer: Answer) -> str:
    """Say how a wrong answer differs."""
    expected = answer.prompt.answer
    if not answer.is_finished:
        return f"number {answer.number} has no end"
    pairs = zip(answer.tokens, expected, strict=False)
    place = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    where = "in length" if place is None else f"from token {place} on"
    return f"number {answer.number} ({answer.prompt.text!r}) differs {where}"
