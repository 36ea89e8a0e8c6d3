"""Find the calls that became slower from one run to another by more than the noise of both.

The compared figure is the median. Its noise is the spread of the rounds' medians, which are seconds apart. Samples
within a round are correlated, so their own spread, or a bootstrap of them, underestimates the difference between runs.
A change counts if it exceeds three times the combined noise of both runs, and a minimal share of the time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.results import Measurement, Results
from benchmarks.tables import bytes_text, time_text

__all__ = ["Change", "changes_between", "has_got_slower", "noise_of", "show_changes"]

LEAST_SHARE: Final = 0.1
"""Changes below a tenth do not count: two runs of the same code on a quiet machine differ by that much."""
SIGMAS: Final = 3.0

# Expected range of 2, 3, … samples of a normal distribution, in standard deviations.
_RANGE: Final = (1.128, 1.693, 2.059, 2.326, 2.534, 2.704, 2.847, 2.970, 3.078)
_MAD: Final = 1.4826

Verdict = Literal["slower", "faster", "same"]


@dataclass(frozen=True)
class Change:
    """The change of one measurement between two runs.

    Attributes:
        before: The measurement in the first run.
        after: The measurement in the second run.
        limit_us: Largest difference of the medians that does not count.
        verdict: Whether the call became slower or faster.
    """

    before: Measurement
    after: Measurement
    limit_us: float
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """Return the second median divided by the first."""
        return self.after.at(50) / self.before.at(50) if self.before.at(50) else math.inf


def noise_of(rounds: Sequence[float]) -> float:
    """Return an estimate of the standard deviation of a round's median.

    It uses the median absolute deviation, which one disturbed round does not change. For few rounds it also uses the
    range, because more than half of them may be equal by chance.
    """
    if len(rounds) < 2:
        return 0.0
    middle = statistics.median(rounds)
    by_deviations = _MAD * statistics.median(abs(each - middle) for each in rounds)
    if len(rounds) > 4:
        return by_deviations
    return max(by_deviations, (max(rounds) - min(rounds)) / _RANGE[len(rounds) - 2])


def changes_between(before: Results, after: Results, least_share: float = LEAST_SHARE) -> list[Change]:
    """Return the change of each measurement that both runs contain."""
    earlier = {each.key: each for each in before.measurements}
    changes = []
    for each in after.measurements:
        old = earlier.get(each.key)
        if old is None:
            continue
        noise = math.hypot(noise_of(old.rounds_us), noise_of(each.rounds_us))
        limit = max(SIGMAS * noise, least_share * old.at(50))
        difference = each.at(50) - old.at(50)
        verdict: Verdict = "same"
        if abs(difference) > limit:
            verdict = "slower" if difference > 0 else "faster"
        changes.append(Change(old, each, limit, verdict))
    return changes


def has_got_slower(changes: Sequence[Change]) -> bool:
    """Return whether a call of ours became slower. The others' figures only show how equal the machines were."""
    return any(each.verdict == "slower" and each.after.implementation.startswith("ours") for each in changes)


def show_changes(before: Results, after: Results, changes: Sequence[Change], console: Console) -> None:
    """Print the changes, and the median change of the others' figures."""
    if before.machine != after.machine:
        differing = [
            name
            for name in before.machine.__struct_fields__
            if getattr(before.machine, name) != getattr(after.machine, name)
        ]
        console.print(f"[yellow]the machines differ in: {', '.join(differing)}[/yellow]")
    if before.is_quick or after.is_quick:
        console.print("[yellow]one of the runs is a quick run: its figures mean nothing[/yellow]")
    table = Table(header_style="bold")
    for name in ("call", "ranks", "size", "whose", "before", "after", "ratio", "noise", "verdict"):
        is_number = name in ("ranks", "size", "before", "after", "ratio", "noise")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    found = [each for each in changes if each.verdict != "same"]
    for each in sorted(found, key=lambda change: -change.ratio):
        after_ = each.after
        style = "red" if each.verdict == "slower" else "green"
        table.add_row(
            f"{after_.case} {after_.variant}".strip(),
            str(after_.world_size),
            bytes_text(after_.nbytes),
            after_.implementation,
            time_text(each.before.at(50)),
            time_text(after_.at(50)),
            f"{each.ratio:.2f}",
            f"± {time_text(each.limit_us)}",
            f"[{style}]{each.verdict}[/{style}]",
        )
    if found:
        console.print(table)
    console.print(f"{len(changes)} figures compared: " + ", ".join(_counts(changes)))
    only = {each.key for each in before.measurements} ^ {each.key for each in after.measurements}
    if only:
        console.print(f"{len(only)} figures are in only one of the runs")
    others = [each.ratio for each in changes if not each.after.implementation.startswith("ours")]
    if others:
        # The others' code is the same in both runs, so this ratio shows how much the machine has changed.
        console.print(f"the others' calls take {statistics.median(others):.2f} times as long as before")


def _counts(changes: Sequence[Change]) -> list[str]:
    verdicts = [each.verdict for each in changes]
    return [f"{verdicts.count(name)} {name}" for name in ("slower", "faster", "same")]
