"""The model of an all-reduce between two hosts: what it finds in exact figures, and which figures it refuses."""

import pytest

from benchmarks.line_model import LineModel, Measured, fitted, off
from benchmarks.results import BenchmarkError

GBIT = 125e6
MIB = 1 << 20


def exact(rate: float, nbytes: int) -> Measured:
    """Return what a call takes that needs 2 ms and uses 0.9 of the line."""
    return Measured(rate, nbytes, 0.002 + nbytes / (0.9 * rate))


def test_it_finds_what_a_call_takes_besides_the_line() -> None:
    """From figures at two rates; at a third one it predicts them."""
    model = fitted([exact(rate, size * MIB) for rate in (GBIT / 4, GBIT) for size in (1, 4, 16)])
    assert model == pytest.approx((0.002, 0.9))
    assert off(model, [exact(GBIT / 2, size * MIB) for size in (1, 4, 16)]) == pytest.approx([0, 0, 0])


def test_it_says_by_how_much_it_is_off() -> None:
    """A prediction of 1.1 s for a call of 1 s is off by 10 %."""
    assert off(LineModel(0.1, 1.0), [Measured(1.0, 1, 1.0)]) == pytest.approx([0.1])


def test_figures_of_one_size_and_rate_are_refused() -> None:
    """They do not tell the two apart, and nothing is guessed."""
    with pytest.raises(BenchmarkError, match="do not tell"):
        fitted([exact(GBIT, MIB)] * 3)
    with pytest.raises(BenchmarkError, match="do not tell"):
        fitted([Measured(GBIT, MIB, 2.0), Measured(GBIT, 16 * MIB, 1.0)])
