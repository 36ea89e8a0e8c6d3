"""Which of many cases `make test` takes; the others are those of `make test-thorough`."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["sampled"]


def sampled(
    every: int, cases: Iterable[Any], others: pytest.MarkDecorator = pytest.mark.thorough
) -> list[Any]:
    """Return the parameters of all cases: the first of each `every` is in the sample, the others are marked.

    In a product of dimensions whose sizes have no divisor in common with `every`, each value of each dimension is in
    the sample.

    Args:
        every: How many cases the sample has one of.
        cases: The parameter of each case, or a tuple of its parameters.
        others: The mark of those that are not in the sample.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=others if place % every else (),
        )
        for place, case in enumerate(cases)
    ]
