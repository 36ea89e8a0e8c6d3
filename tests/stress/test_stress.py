"""A sample of the stress program, which `make stress` runs for as long as one likes."""

import contextlib
import dataclasses
import random
import time
from types import FrameType

import pytest

from tests.queues import background, queue
from tests.stress import queue_reads
from tests.stress.alarms import Alarms
from tests.stress.lives import plan_of, run_life

pytestmark = pytest.mark.proof

MINUTES_LIVES = 60
STRIKES = 20


@pytest.mark.parametrize("way", ["selected", "adequeue", "timed adequeue", "cancelled adequeue"])
def test_a_read_of_an_event_loop_is_struck_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A handler raises in reads through asyncio or a selector too, and every message still comes once, in order."""
    monkeypatch.setattr(queue_reads, "READS", {way: queue_reads.READS[way]})
    own = random.Random(way)
    with queue() as (writer, (reader,)), contextlib.ExitStack() as ends:
        alarms = Alarms(way, may_strike=True)
        ends.callback(alarms.end)
        while alarms.strikes < STRIKES:
            messages = [{"data": own.randbytes(own.choice((10, 3000, 40_000)))} for _ in range(20)]

            def write(messages: list[dict[str, bytes]] = messages) -> None:
                for each in messages:
                    writer.enqueue(each)

            with background(write):
                for number, expected in enumerate(messages):
                    queue_reads.read_next(reader, expected, alarms, own, f"message {number}")


def test_signals_that_come_faster_than_their_place_is_found_do_not_nest() -> None:
    """The look at a long stack may take longer than the time to the next signal; then its look went ever deeper."""
    depth = deepest = looks = 0

    def is_place(_frame: FrameType | None) -> bool:
        nonlocal depth, deepest, looks
        depth, looks = depth + 1, looks + 1
        deepest = max(deepest, depth)
        end = time.monotonic() + 0.005
        while depth < 10 and time.monotonic() < end:
            pass
        depth -= 1
        return looks > STRIKES

    def wait() -> None:
        while True:
            time.sleep(0.001)

    alarms = Alarms("nested", may_strike=True)
    with contextlib.ExitStack() as ends:
        ends.callback(alarms.end)
        while alarms._every_s != 0.0003:
            alarms.change()
        assert alarms.strike(wait, is_place)
    assert looks > STRIKES
    assert deepest == 1


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
