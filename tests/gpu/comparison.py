"""Two variants measured in turns: what their times say about which one is faster.

The clock of a GPU, its temperature and its neighbours change during a session. Two series one after the other would
contain those changes, so the variants take turns, and only differences within a turn count. The interval of the median
difference comes from the sign test (order statistics; Conover, Practical Nonparametric Statistics, section 3.2): it
assumes nothing about the shape of the noise.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["ROW_HEAD", "Comparison", "compare", "row_of", "take_turns"]

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Times of two variants, in microseconds.

    Attributes:
        shipped: Name of the variant that the product uses.
        changed: Name of the other one.
        shipped_us, changed_us: The median of each.
        difference_us: The median of changed - shipped within a turn: positive if the product's variant is faster.
        low_us, high_us: The interval that holds the true median difference with a probability of at least 95 %.
        turns: How many turns were measured.
    """

    shipped: str
    changed: str
    shipped_us: float
    changed_us: float
    difference_us: float
    low_us: float
    high_us: float
    turns: int

    @property
    def faster(self) -> str:
        """Return the name of the faster variant, or that the difference may be noise."""
        if self.low_us > 0:
            return self.shipped
        return self.changed if self.high_us < 0 else "no difference seen"


def take_turns(
    first: Callable[[], float], second: Callable[[], float], turns: int
) -> list[tuple[float, float]]:
    """Return the times of both in every turn. Which one begins changes, so that neither always runs on warm caches."""
    pairs = []
    for turn in range(turns):
        if turn % 2 == 0:
            early = first()
            pairs.append((early, second()))
        else:
            late = second()
            pairs.append((first(), late))
    return pairs


def compare(shipped: str, changed: str, pairs: Sequence[tuple[float, float]]) -> Comparison:
    """Compare the times (shipped, changed) of every turn.

    Raises:
        ValueError: There are fewer than 6 turns: no interval of 95 % exists.
    """
    differences = sorted(late - early for early, late in pairs)
    skipped = _outside(len(differences))
    return Comparison(
        shipped,
        changed,
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(differences),
        differences[skipped],
        differences[-1 - skipped],
        len(differences),
    )


def _outside(count: int) -> int:
    """Return how many differences at each end lie outside of the interval.

    Without the k smallest and the k largest the rest misses the true median with a probability of 2 P(X <= k), where X
    is binomial with 1/2: the number of differences below that median. The result is the largest k with at most 5 %.
    """
    missed, outside = 0.0, -1
    for each in range(count // 2):
        missed += 2 * math.comb(count, each) / 2**count
        if missed > 1 - CONFIDENCE:
            break
        outside = each
    if outside < 0:
        raise ValueError(f"{count} turns are too few for an interval of {CONFIDENCE:.0%}")
    return outside


ROW_HEAD = ("compared", "as shipped, us", "changed, us", "difference, us", "95 %", "turns", "faster")


def row_of(name: str, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a comparison that was written to a report."""
    found = Comparison(**content)
    return (
        f"{name}: {found.shipped}, against {found.changed}",
        f"{found.shipped_us:.2f}",
        f"{found.changed_us:.2f}",
        f"{found.difference_us:+.2f} ({found.difference_us / found.shipped_us:+.1%})",
        f"{found.low_us:+.2f} to {found.high_us:+.2f}",
        str(found.turns),
        found.faster,
    )
