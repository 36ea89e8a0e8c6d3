"""Signal handlers that raise at any place of an object collective: it is made, can be made again, or breaks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from coordinator import GroupBrokenError, GroupCoordinator, PeerLostError
from tests.handlers import Interrupt, raising_at
from tests.harness import RankPool
from tests.samples import sampled
from tests.worlds import ApartPool, FarPool, meet, new_group, world

RANKS = range(2)
# More than the places of any of the calls.
STEPS = 900
# The files in which such a call runs.
FILES = (
    *(f"coordinator/{name}.py" for name in ("calls", "planes")),
    "coordinator/collectives/object_collectives.py",
    *(f"coordinator/host/{name}.py" for name in ("gloo", "object_order", "shared")),
    "contextlib.py",
    *(f"device_comm/{name}.py" for name in ("handles", "health", "process_group", "works")),
    *(f"device_comm/cpu/{name}.py" for name in ("channels", "channel_receiver", "channel_sender")),
    *(f"coordinator/queues/{name}.py" for name in ("broadcast_order", "broadcaster")),
    *(f"shm_broadcast/{name}.py" for name in ("queue", "timeouts", "codec/__init__")),
    *(f"shm_broadcast/ring/{name}.py" for name in ("reader", "writer")),
)

Call = Callable[[GroupCoordinator, int], Any]

CALLS: dict[str, Call] = {
    "gather": lambda group, number: group.gather_object((group.rank_in_group, number), 0),
    "scatter": lambda group, number: group.scatter_object_list([None], [(0, number), (1, number)], 0),
    "broadcast": lambda group, number: group.broadcast_object((0, number), 0),
    "timed broadcast": lambda group, number: group.broadcast_object((0, number), 0, timeout_s=60.0),
}

BROADCASTS = ("broadcast", "timed broadcast")


def expected(name: str, rank: int, number: int) -> Any:
    """Return what the call with `number` gives to a rank."""
    if name == "scatter":
        return (rank, number)
    if name == "gather":
        return [(0, number), (1, number)] if rank == 0 else None
    return (0, number)


def group_of(everyone: GroupCoordinator, name: str, by_queue: bool) -> GroupCoordinator:
    """Return a group that broadcasts by a queue, or does not."""
    group = new_group(everyone, name)
    if by_queue:
        group.enable_broadcaster()
    return group


def made(group: GroupCoordinator) -> int:
    """Return how many calls this rank has counted."""
    return group._gathers.number + group._scatters.number + group._order._number()


def struck_by_queue(rank: int, world_size: int, directory: Path, name: str, victim: int) -> None:
    """As `struck`, through a queue."""
    struck(rank, world_size, directory, name, victim, by_queue=True)


def struck(
    rank: int, world_size: int, directory: Path, name: str, victim: int, *, by_queue: bool = False
) -> None:
    """Make a call for each place of it, at which a handler of the rank `victim` raises."""
    call = CALLS[name]
    with world(rank, world_size, directory) as everyone:
        group, is_over = group_of(everyone, "g", by_queue), False
        for step in count():
            assert step < STEPS, "the call has more places"
            before, results, is_broken = made(group), list[Any](), False

            def make() -> None:
                results.append(call(group, step))  # noqa: B023 - called within the same round

            if rank == victim:
                is_over = not raising_at(step, make, FILES)
                try:
                    # A queue counts a message that it has read; until it is handed out it is that of the next call.
                    is_kept = by_queue and rank != 0 and not results
                    if made(group) == before or is_kept:
                        make()
                    group._health.check_usable("the next call")
                except GroupBrokenError as error:
                    is_broken = isinstance(error.__cause__, Interrupt)
                    reason = repr(error.__cause__)
                    assert is_broken, reason
                else:
                    assert made(group) == before + 1
                    # What has been received is in no later call. The source of a broadcast has its object.
                    is_given = expected(name, rank, step) is None or (name in BROADCASTS and rank == 0)
                    assert results or is_given, step
            else:
                try:
                    make()
                except PeerLostError as error:
                    is_broken = "interrupted: rank" in str(error)
            assert is_broken or results in ([], [expected(name, rank, step)])
            meet(rank, RANKS, directory, f"made {step}")
            states = everyone.all_gather_object((is_broken, is_over))
            if any(broken for broken, _ in states):
                if rank != victim and not is_broken:
                    # It had what it needs, and learns of the failure in its next call.
                    with pytest.raises((PeerLostError, GroupBrokenError)):
                        group.barrier()
                group.destroy()
                group = group_of(everyone, f"g{step}", by_queue)
                # A rank whose creation still confirms the memory would find the group broken.
                everyone.barrier()
            if states[victim][1]:
                break
        group.destroy()


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize(("name", "victim"), sampled(3, product(CALLS, RANKS)))
def test_a_strike_at_any_place_of_an_object_collective_leaves_nothing_halfway(
    ranks2: RankPool, name: str, victim: int
) -> None:
    """The call counts on both ranks, or on neither, or the group is broken on both; no object is for another call."""
    ranks2.run(struck, name, victim, timeout_s=240.0)


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("name", BROADCASTS)
def test_a_strike_in_a_broadcast_through_a_queue_leaves_nothing_halfway(
    ranks2: RankPool, name: str, victim: int
) -> None:
    """As over the host plane."""
    ranks2.run(struck_by_queue, name, victim, timeout_s=240.0)


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize(("name", "victim"), sampled(3, product(BROADCASTS, RANKS)))
def test_a_strike_in_a_broadcast_through_a_queue_to_another_host_leaves_nothing_halfway(
    ranks2: RankPool, name: str, victim: int
) -> None:
    """Nor where the messages carry their numbers."""
    FarPool(ranks2, ["one", "another"]).run(struck_by_queue, name, victim, timeout_s=240.0)


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.thorough), 1])
@pytest.mark.parametrize(
    "name", [name if name == "gather" else pytest.param(name, marks=pytest.mark.thorough) for name in CALLS]
)
def test_a_strike_over_gloo_leaves_nothing_halfway(ranks2: RankPool, name: str, victim: int) -> None:
    """As where ranks share memory."""
    ApartPool(ranks2).run(struck, name, victim, timeout_s=240.0)
