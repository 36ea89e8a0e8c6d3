"""A sample of the stress program, which `make stress` runs for as long as one likes."""

import dataclasses

import pytest

from tests.stress.lives import plan_of, run_life

pytestmark = pytest.mark.proof

MINUTES_LIVES = 60


@pytest.mark.parametrize("number", [0, 2, 3, 5])
def test_some_lives_of_mixed_calls_deliver_every_byte(number: int) -> None:
    """All operations, alarms and stops; ranks that are killed, interrupted or struck are blamed, and leave nothing.

    It takes 2 to 3 s a life: the ranks must have time to come to every operation.
    """
    plan = dataclasses.replace(plan_of(20, number, 4), seconds=2.0)
    assert run_life(plan) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_many_lives_of_mixed_calls_deliver_every_byte(seed: int) -> None:
    """The same with up to six ranks, for some minutes."""
    for number in range(MINUTES_LIVES // 4):
        run_life(plan_of(seed, number, 6))
