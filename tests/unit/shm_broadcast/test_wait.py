"""How a reader waits: what the pacer learns from the gaps between messages, on a clock of our own."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast import _core
from shm_broadcast.settings import WaitMode

WAKE_UP_NS = 30_000
SLEEP_COST_NS = 10_000
"""Processor time that going to sleep and waking up takes."""
MS = 1_000_000
# As `csrc/ring/pacer.hpp` has them.
READER_SLICE_NS = 400 * MS
SHORT_SPIN_NS = 15_000
RISE_NS = 80_000
WATCHED_PART = 3
LONGEST_WATCH_NS = MS


class Stage(NamedTuple):
    """One stage of a wait: poll for `spin_ns`, then sleep for at most `park_ns`."""

    spin_ns: int
    park_ns: int


class Pacer:
    """The native pacer, with its state."""

    def __init__(self, mode: WaitMode) -> None:
        """Know nothing yet."""
        self._state = bytearray(_core.PACER_BYTES)
        self._mode = mode

    def arrived(self, now_ns: int) -> None:
        """Note that a message came."""
        _core.pacer_step(self._state, self._mode, now_ns, True)

    def next_stage(self, now_ns: int) -> Stage:
        """Return what to do now."""
        return Stage(*_core.pacer_step(self._state, self._mode, now_ns, False))


class Wait(NamedTuple):
    """How one wait went: time spent polling, stages, sleeps, and whether the reader polled when the message came."""

    polled_ns: int
    stages: int
    sleeps: int
    was_polling: bool

    @property
    def cost_ns(self) -> int:
        """Processor time that the wait took."""
        return self.polled_ns + self.sleeps * SLEEP_COST_NS


def play(
    gaps: list[int], mode: WaitMode = "adaptive", pacer: Pacer | None = None, late_ns: int = 0
) -> list[Wait]:
    """Let messages come `gaps` nanoseconds apart to a reader that does nothing but wait, and gets up `late_ns` late."""
    pacer = pacer or Pacer(mode)
    now, due, waits = 1, 1, []
    for gap in gaps:
        due += gap
        polled = stages = sleeps = 0
        was_polling = False
        while now < due:
            spin_ns, park_ns = pacer.next_stage(now)
            assert spin_ns + park_ns > 0
            assert 0 <= park_ns <= READER_SLICE_NS
            stages += 1
            if now + spin_ns >= due:
                polled, now, was_polling = polled + due - now, due, True
                continue
            sleeps += 1
            if now + spin_ns + park_ns + late_ns >= due:
                polled, now = polled + spin_ns, due + WAKE_UP_NS
            else:
                polled, now = polled + spin_ns, now + spin_ns + park_ns + late_ns
        pacer.arrived(now)
        waits.append(Wait(polled, stages, sleeps, was_polling))
    return waits


@pytest.mark.guarantee("B18")
@pytest.mark.parametrize("gap", [2 * MS, 10 * MS, 40 * MS, 350 * MS])
def test_regular_messages_find_the_reader_awake(gap: int) -> None:
    """After a few messages at equal distances each finds the reader polling, which takes a small part of the time."""
    for wait in play([gap] * 60)[30:]:
        assert wait.was_polling
        assert wait.polled_ns <= min(gap // WATCHED_PART, LONGEST_WATCH_NS) + SHORT_SPIN_NS
        assert wait.sleeps == 1


@pytest.mark.guarantee("B18")
def test_a_little_jitter_is_tolerated() -> None:
    """Decode steps that vary by 50 us are still awaited awake, nine times in ten."""
    rng = random.Random(1)
    waits = play([20 * MS + rng.randint(-50_000, 50_000) for _ in range(300)])[30:]
    assert sum(wait.was_polling for wait in waits) > 0.9 * len(waits)


@pytest.mark.guarantee("B18")
@pytest.mark.parametrize("mean", [2 * MS, 10 * MS, 100 * MS])
def test_irregular_messages_are_not_polled_for(mean: int) -> None:
    """Where nothing can be expected the reader polls for 15 us, then sleeps: under 3 % of the time in all."""
    rng = random.Random(2)
    gaps = [int(rng.expovariate(1 / mean)) + 1 for _ in range(500)]
    waits = play(gaps)
    assert sum(wait.polled_ns for wait in waits) < 0.01 * sum(gaps)
    assert sum(wait.cost_ns for wait in waits) < 0.03 * sum(gaps)


@pytest.mark.guarantee("B18")
@pytest.mark.parametrize("gap", [2 * MS, 10 * MS, 40 * MS])
def test_a_single_pause_is_forgotten(gap: int) -> None:
    """Ten idle seconds between two requests are not expected again: three gaps later messages are awaited awake."""
    waits = play([gap] * 30 + [10_000 * MS] + [gap] * 100)
    assert waits[29].was_polling
    assert not waits[30].was_polling
    assert all(wait.was_polling for wait in waits[34:])


@pytest.mark.guarantee("B18")
def test_an_idle_reader_ends_up_asleep() -> None:
    """A minute without a message costs one watch, and then a wake-up every 400 ms."""
    for known in ([], [10 * MS] * 30):
        pacer = Pacer("adaptive")
        play(known, pacer=pacer)
        now = 1 + sum(known) + WAKE_UP_NS
        polled = stages = 0
        end = now + 60_000 * MS
        while now < end:
            stage = pacer.next_stage(now)
            polled, stages, now = polled + stage.spin_ns, stages + 1, now + sum(stage)
        assert stage == Stage(0, READER_SLICE_NS)
        assert polled <= LONGEST_WATCH_NS + SHORT_SPIN_NS
        assert stages <= 60_000 * MS // READER_SLICE_NS + 4


@pytest.mark.guarantee("B18")
@given(st.lists(st.integers(1, 2_000 * MS), max_size=60))
def test_polling_is_bounded_whatever_comes(gaps: list[int]) -> None:
    """For any gaps, one wait polls for no more than the longest watch; a parked mode never, a spinning one always."""
    for wait, gap in zip(play(gaps), gaps, strict=True):
        assert wait.polled_ns <= LONGEST_WATCH_NS + SHORT_SPIN_NS
        assert wait.sleeps <= gap // READER_SLICE_NS + 4
    assert all(wait.polled_ns == 0 for wait in play(gaps, "park"))
    assert all(wait.was_polling for wait in play(gaps, "spin") if wait.stages)


@pytest.mark.guarantee("B18")
def test_a_reader_gets_up_before_a_message_is_due() -> None:
    """It sleeps until shortly before, and then polls until the message is late."""
    pacer = Pacer("adaptive")
    play([10 * MS] * 30, pacer=pacer)
    last = 1 + 300 * MS
    assert pacer.next_stage(last).spin_ns == 0
    until = pacer.next_stage(last).park_ns
    assert 10 * MS - LONGEST_WATCH_NS <= until <= 10 * MS - RISE_NS
    spin_ns, park_ns = pacer.next_stage(last + until)
    assert RISE_NS < spin_ns <= LONGEST_WATCH_NS + SHORT_SPIN_NS
    assert park_ns == READER_SLICE_NS


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
        (SHORT_SPIN_NS, READER_SLICE_NS),
        (0, READER_SLICE_NS),
        (0, READER_SLICE_NS),
    ]
