"""How long an all-reduce between two hosts takes by the rate of the line: fitted at two rates, checked at a third.

An all-reduce of n bytes between two hosts sends n bytes in each direction. Its time is taken to be alpha + n / (e B):
B is the rate of the line, e the part of it that we use, alpha what a call takes besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.results import BenchmarkError

__all__ = ["LineModel", "Measured", "fitted", "off"]


class Measured(NamedTuple):
    """One figure: the rate of the line in bytes per second, the bytes of the tensor, and the median time in seconds."""

    rate: float
    nbytes: int
    seconds: float


class LineModel(NamedTuple):
    """Alpha in seconds, and the part of the line that is used."""

    alpha_s: float
    used: float

    def seconds(self, rate: float, nbytes: int) -> float:
        """Return how long an all-reduce of `nbytes` takes over a line that carries `rate` bytes per second."""
        return self.alpha_s + nbytes / (self.used * rate)


def fitted(figures: Sequence[Measured]) -> LineModel:
    """Return the model with the least squares of relative errors.

    Raises:
        BenchmarkError: The figures do not tell alpha from the rate.
    """
    # Of each figure the equation alpha / t + (n / B) (1 / e) / t = 1.
    rows = [(1 / each.seconds, each.nbytes / each.rate / each.seconds) for each in figures]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb or (inverse := (aa * b - ab * a) / determinant) <= 0:
        raise BenchmarkError("the figures do not tell what a call takes from what the line takes")
    return LineModel((bb * a - ab * b) / determinant, 1 / inverse)


def off(model: LineModel, figures: Sequence[Measured]) -> list[float]:
    """Return by which part of the measured time each prediction is off: 0.1 if it is 10 % too long."""
    return [model.seconds(each.rate, each.nbytes) / each.seconds - 1 for each in figures]
