"""How a reader waits: what the pacer learns from the gaps between messages, on a clock of our own."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast.settings import WaitMode
from shm_broadcast.wait import LONGEST_WATCH_NS, POLLED_PART, RISE_NS, SHORT_SPIN_NS, SLICE_NS, Pacer

WAKE_UP_NS = 30_000
MS = 1_000_000


class Wait(NamedTuple):
    """How one wait went: time spent polling, stages, and whether the reader was polling when the message came."""

    polled_ns: int
    stages: int
    was_polling: bool


def play(gaps: list[int], mode: WaitMode = "adaptive", pacer: Pacer | None = None) -> list[Wait]:
    """Let messages come `gaps` nanoseconds apart to a reader that does nothing but wait."""
    pacer = pacer or Pacer(mode)
    now, due, waits = 1, 1, []
    for gap in gaps:
        due += gap
        polled = stages = 0
        was_polling = False
        while now < due:
            spin_ns, park_ns = pacer.next_stage(now)
            assert spin_ns + park_ns > 0
            assert 0 <= park_ns <= SLICE_NS
            stages += 1
            if now + spin_ns >= due:
                polled, now, was_polling = polled + due - now, due, True
            elif now + spin_ns + park_ns >= due:
                polled, now = polled + spin_ns, due + WAKE_UP_NS
            else:
                polled, now = polled + spin_ns, now + spin_ns + park_ns
        pacer.arrived(now)
        waits.append(Wait(polled, stages, was_polling))
    return waits


@pytest.mark.guarantee("B18")
@pytest.mark.parametrize("gap", [2 * MS, 10 * MS, 40 * MS, 350 * MS])
def test_regular_messages_find_the_reader_awake(gap: int) -> None:
    """After a few messages at equal distances each finds the reader polling, which takes a small part of the time."""
    for wait in play([gap] * 60)[30:]:
        assert wait.was_polling
        assert wait.polled_ns <= gap // POLLED_PART + RISE_NS


@pytest.mark.guarantee("B18")
def test_a_little_jitter_is_tolerated() -> None:
    """Decode steps that vary by a hundredth are still awaited awake, nine times in ten."""
    rng = random.Random(1)
    waits = play([20 * MS + rng.randint(-100_000, 100_000) for _ in range(300)])[30:]
    assert sum(wait.was_polling for wait in waits) > 0.9 * len(waits)


@pytest.mark.guarantee("B18")
def test_irregular_messages_are_not_polled_for() -> None:
    """Where nothing can be expected the reader polls for 15 us, then sleeps: under 1 % of the time."""
    rng = random.Random(2)
    gaps = [int(rng.expovariate(1 / (10 * MS))) + 1 for _ in range(500)]
    waits = play(gaps)
    assert sum(wait.polled_ns for wait in waits) < 0.01 * sum(gaps)


@pytest.mark.guarantee("B18")
def test_the_pacer_recovers_from_a_pause() -> None:
    """Ten idle seconds between two requests are forgotten within some dozen messages."""
    waits = play([10 * MS] * 30 + [10_000 * MS] + [10 * MS] * 100)
    assert waits[29].was_polling
    assert not waits[30].was_polling
    assert all(wait.was_polling for wait in waits[-20:])


@pytest.mark.guarantee("B18")
def test_an_idle_reader_wakes_ten_times_a_second() -> None:
    """A minute without a message costs one short spin and 600 slices of sleep."""
    for known in ([], [10 * MS] * 30):
        pacer = Pacer("adaptive")
        play(known, pacer=pacer)
        now, polled, stages = 1 + sum(known) + WAKE_UP_NS, 0, 0
        end = now + 60_000 * MS
        while now < end:
            spin_ns, park_ns = pacer.next_stage(now)
            polled, stages, now = polled + spin_ns, stages + 1, now + spin_ns + park_ns
        assert polled <= 2 * LONGEST_WATCH_NS + RISE_NS + SHORT_SPIN_NS
        assert stages <= 603


@pytest.mark.guarantee("B18")
@given(st.lists(st.integers(1, 2_000 * MS), max_size=60))
def test_polling_is_bounded_whatever_comes(gaps: list[int]) -> None:
    """For any gaps, one wait polls for no more than the longest watch; a parked mode never, a spinning one always."""
    for wait in play(gaps):
        assert wait.polled_ns <= 2 * LONGEST_WATCH_NS + RISE_NS + 2 * SHORT_SPIN_NS
    assert all(wait.polled_ns == 0 for wait in play(gaps, "park"))
    assert all(wait.was_polling for wait in play(gaps, "spin") if wait.stages)


def test_bursts_count_as_one_arrival() -> None:
    """Messages for which nobody waited say nothing about the gaps: only waits are noted."""
    pacer = Pacer("adaptive")
    waits = play([5 * MS] * 40, pacer=pacer)
    assert waits[-1].was_polling
    before = pacer.next_stage(40 * 5 * MS)
    assert before == pacer.next_stage(40 * 5 * MS)


def test_nothing_is_expected_of_a_new_pacer() -> None:
    """Before three gaps are known the reader polls shortly, once, and sleeps."""
    pacer = Pacer("adaptive")
    assert [pacer.next_stage(now) for now in (5, 100_000, 200_000)] == [
        (SHORT_SPIN_NS, SLICE_NS),
        (0, SLICE_NS),
        (0, SLICE_NS),
    ]
