"""The offset between clocks is found from calls in which ranks meet, with an error that holds."""

import random
from typing import Any

import msgspec
import pytest

from coordinator.diagnosis.clock_offsets import Meeting, align, find_offsets
from coordinator.diagnosis.model import Clock
from tests.trace_pages import call, group, page

RANKS = (0, 1)


def meetings(
    generator: random.Random, offsets: list[int], number: int, drift: float = 0.0
) -> list[dict[int, Meeting]]:
    """Return calls a millisecond apart, as clocks see them that show `offsets` less than the first."""
    found = []
    for at in range(0, number * 1_000_000, 1_000_000):
        begins = [at + generator.randrange(200_000) for _ in offsets]
        ends = [max(begins) + generator.randrange(1_000, 50_000) for _ in offsets]
        found.append(
            {
                clock: Meeting(
                    int(begin * (1 + drift * clock)) - offset, int(end * (1 + drift * clock)) - offset
                )
                for clock, (begin, end, offset) in enumerate(zip(begins, ends, offsets, strict=True))
            }
        )
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_offset_is_right_within_the_error_that_is_told(seed: int) -> None:
    """The clocks of four hosts differ by up to days, and calls show the offsets to the latency of the best of them."""
    generator = random.Random(seed)
    offsets = [0, *(generator.randrange(-(10**14), 10**14) for _ in range(3))]
    found = find_offsets(meetings(generator, offsets, 200), 4)
    for told, offset in zip(found, offsets, strict=True):
        assert told.error_ns is not None
        assert abs(told.offset_ns - offset) <= told.error_ns
        # Each rank is last to a quarter of the calls, and one such call of 50 ends within 2 us of its coming.
        assert told.error_ns < 10_000
        assert told.contradiction_ns == 0


def test_a_clock_is_tied_through_another_one() -> None:
    """Clocks 0 and 2 share no call, and each shares one with clock 1: the errors add up."""
    found = find_offsets(
        [
            {0: Meeting(1000, 1100), 1: Meeting(5000, 5100)},
            {1: Meeting(7000, 7300), 2: Meeting(100, 400)},
        ],
        3,
    )
    assert [(each.offset_ns, each.error_ns) for each in found] == [(0, 0), (-4000, 100), (2900, 400)]


def test_clocks_that_drift_apart_are_said_to_contradict() -> None:
    """In a minute of calls of at most 50 us, 100 parts in a million are 6 ms: the bounds must give half of it."""
    generator = random.Random(1)
    _, found = find_offsets(meetings(generator, [0, 10**9], 60_000, drift=1e-4), 2)
    assert found.error_ns is not None
    assert 1_000_000 < found.contradiction_ns < 4_000_000
    assert found.contradiction_ns <= found.error_ns
    assert abs(found.offset_ns - 10**9) < 6_100_000


def test_a_clock_without_a_common_call_has_an_unknown_error() -> None:
    """What counts is then the guess, which is the difference of the realtime clocks."""
    _, found = find_offsets([{0: Meeting(1, 2)}, {1: Meeting(1, 2)}], 2, [0, 77])
    assert (found.offset_ns, found.error_ns, found.calls) == (77, None, 0)


def test_only_calls_in_which_all_meet_bound_a_clock() -> None:
    """A queued or failed call, a broadcast, or one of no elements ends without the others, and ties nothing."""
    loose: list[dict[str, Any]] = [
        {"call": "broadcast", "plane": "shared", "algorithm": "shared memory", "count": 8},
        {"call": "all_reduce", "plane": "device", "count": 8},
        {"call": "all_reduce", "plane": "nccl", "algorithm": "nccl", "count": 8},
        {"outcome": "failed"},
        {"call": "all_gather_object", "count": 0},
        {"call": "recv", "number": 0, "count": 8},
    ]
    for words in loose:
        pages = [
            page(rank, [group(rank, RANKS)], [call(1000 * rank, 1000 * rank + 10, **words)], f"host{rank}")
            for rank in RANKS
        ]
        assert align(pages).offsets[1].error_ns is None, words
    tied = [page(rank, [group(rank, RANKS)], [call(5, 15)], f"host{rank}") for rank in RANKS]
    assert align(tied).offsets[1].error_ns == 10


def test_pages_of_one_host_need_no_offset_and_count_the_same_ticks() -> None:
    """Two processes have measured rates that differ by 10 parts in a million: after an hour that would be 36 ms."""
    hour = 3600 * 10**9
    exact, fast = Clock(1, 0, 0, 1 << 31), Clock(1, 0, 0, int((1 << 31) * 1.00001))
    pages = [page(rank, [], [], clock=clock) for rank, clock in enumerate((exact, fast))]
    aligned = align(pages)
    assert aligned.clocks == (0, 0)
    ticks = hour * 2
    shown = [ticks * clock.rate >> 32 for clock in (exact, fast)]
    assert shown[1] - shown[0] > 30_000_000
    assert abs(aligned.times[0](shown[0]) - aligned.times[1](shown[1])) <= 2


def test_containers_with_clocks_of_their_own_are_tied_by_their_calls() -> None:
    """Two time namespaces of one boot show different times, and a sum in shared memory ties them."""
    words: dict[str, Any] = {"plane": "shared", "algorithm": "one-shot", "call": "all_reduce", "count": 4}
    one = page(0, [group(0, RANKS)], [call(1000, 1100, **words)])
    other = page(1, [group(1, RANKS)], [call(51_000, 51_100, **words)])
    inside = msgspec.structs.replace(other, time_namespace=2)
    found = align([one, inside])
    assert found.clocks == (0, 1)
    assert (found.offsets[1].offset_ns, found.offsets[1].error_ns) == (-50_000, 100)
