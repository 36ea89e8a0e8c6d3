"""How long a message that a direct call has returned lives, and what may run when it goes."""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator import GroupCoordinator
from shm_broadcast.settings import BroadcastSettings
from tests.harness import RankPool
from tests.worlds import new_group, world

MESSAGES = 400
ATTEMPTS = 20
SPINNING = BroadcastSettings(wait="spin")
"""A reader that polls decodes ahead, unless it never runs beside the writer, as with many others on two cores."""


def step_of(number: int) -> dict[str, Any]:
    """Return a step that is long enough to be shown before it is sent."""
    return {"number": number, "reqs": [{"id": f"req-{each}"} for each in range(40)]}


@contextmanager
def spinning(rank: int, world_size: int, directory: Path) -> Iterator[GroupCoordinator]:
    """Yield a group whose first rank has a queue to the others, who poll."""
    with world(rank, world_size, directory) as group, new_group(group, broadcast=SPINNING) as it:
        it.enable_broadcaster()
        yield it


def previewed(group: GroupCoordinator) -> int:
    """Return how many messages a reader of `group` has decoded ahead."""
    call: Any = group.broadcast_object
    return int(call.__self__.previewed)


class Probe:
    """Something that an application puts into a message."""


def watch_steps(rank: int, world_size: int, directory: Path) -> int:
    """Send, or read and watch when what was put into a message goes; return how many were decoded ahead."""
    with spinning(rank, world_size, directory) as group:
        if rank == 0:
            for number in range(MESSAGES):
                time.sleep(0.0005)
                group.broadcast_object(step_of(number))
            group.barrier()
            return 0
        watched: list[tuple[weakref.ref[Probe], bool]] = []
        seen, message = 0, None
        for number in range(MESSAGES):
            # What is dropped early goes when the next call begins, or before.
            dropped = number % 3 == 0
            if dropped:
                message = None
            before = previewed(group)
            message = group.broadcast_object()
            alive = [probe() is not None for probe, _ in watched]
            assert alive == ([False, not dropped and watched[-1][1]] if len(watched) == 2 else alive)
            was_ahead = previewed(group) > before
            message["probe"] = Probe()
            watched = [*watched[-1:], (weakref.ref(message["probe"]), was_ahead)]
            seen += was_ahead
        message = None
        group.barrier()
    assert [probe() for probe, _ in watched] == [None, None]
    return seen


@pytest.mark.guarantee("B23")
def test_a_step_lives_until_the_call_after_the_next(ranks2: RankPool) -> None:
    """Who assigns the next one to the same name does not wait until it is freed; nor does it live any longer."""
    seen = [0]
    while len(seen) <= ATTEMPTS and seen[-1] == 0:
        seen.append(ranks2.run(watch_steps)[1])
    assert seen[-1] > 0, seen


class Thief:
    """Something in a message that does something when it goes."""

    def __init__(self, act: Callable[[], object]) -> None:
        """Do `act` at the end."""
        self._act = act

    def __del__(self) -> None:
        """Act."""
        self._act()


def read_with_thieves(rank: int, world_size: int, directory: Path) -> int:
    """Send, or read messages each of which reads another one when it goes; return how often that was within a call."""
    with spinning(rank, world_size, directory) as group:
        if rank == 0:
            for number in range(MESSAGES + 2):  # the last read may find that somebody was faster
                time.sleep(0.0003)
                group.broadcast_object(step_of(number))
            group.barrier()
            return 0
        got: list[int] = []
        is_reading, within = False, 0
        reader: Any = group.mq_broadcaster

        def steal() -> None:
            nonlocal within
            if len(got) < MESSAGES:
                found, message = reader.try_dequeue()
                got.extend([message["number"]] if found else [])
                within += is_reading

        message: Any = None
        while len(got) < MESSAGES:
            is_reading = True
            next_one = group.broadcast_object()
            is_reading = False
            got.append(next_one["number"])
            next_one["thief"] = Thief(steal)
            message = next_one  # frees the last one, if nobody else holds it; the number of this one is noted
            time.sleep(0.001 if len(got) % 5 == 0 else 0.0)  # some are there then when the next call begins
        group.barrier()
        del message, next_one
        assert got == list(range(len(got)))
    return within


@pytest.mark.guarantee("B1", "B23")
def test_what_goes_with_an_old_step_may_read_the_queue(ranks2: RankPool) -> None:
    """It runs within a later call, before anything is taken: every message comes once and in order."""
    within = [0]
    while len(within) <= ATTEMPTS and within[-1] == 0:
        within.append(ranks2.run(read_with_thieves)[1])
    assert within[-1] > 0, within
