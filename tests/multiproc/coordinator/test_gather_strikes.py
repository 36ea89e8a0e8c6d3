"""Signal handlers that raise at any place of an object gather or scatter: it is made, can be made again, or breaks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from coordinator import GroupBrokenError, GroupCoordinator, PeerLostError
from tests.handlers import Interrupt, raising_at
from tests.harness import RankPool
from tests.worlds import ApartPool, meet, new_group, world

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
)

Call = Callable[[GroupCoordinator, int], Any]

CALLS: dict[str, Call] = {
    "gather": lambda group, number: group.gather_object((group.rank_in_group, number), 0),
    "scatter": lambda group, number: group.scatter_object_list([None], [(0, number), (1, number)], 0),
}


def expected(name: str, rank: int, number: int) -> Any:
    """Return what the call with `number` gives to a rank."""
    if name == "scatter":
        return (rank, number)
    return [(0, number), (1, number)] if rank == 0 else None


def made(group: GroupCoordinator) -> int:
    """Return how many gathers and scatters this rank has counted."""
    return group._gathers.number + group._scatters.number


def struck(rank: int, world_size: int, directory: Path, name: str, victim: int) -> None:
    """Make a call for each place of it, at which a handler of the rank `victim` raises."""
    call = CALLS[name]
    with world(rank, world_size, directory) as everyone:
        group, is_over = new_group(everyone), False
        for step in count():
            assert step < STEPS, "the call has more places"
            before, results, is_broken = made(group), list[Any](), False

            def make() -> None:
                results.append(call(group, step))  # noqa: B023 - called within the same round

            if rank == victim:
                is_over = not raising_at(step, make, FILES)
                try:
                    if made(group) == before:
                        make()
                    group._health.check_usable("the next call")
                except GroupBrokenError as error:
                    assert isinstance(error.__cause__, Interrupt)
                    is_broken = True
                else:
                    assert made(group) == before + 1
                    # What has been received is in no later call.
                    assert results or expected(name, rank, step) is None, step
            else:
                try:
                    make()
                except PeerLostError as error:
                    assert "interrupted: rank" in str(error)
                    is_broken = True
            assert is_broken or results in ([], [expected(name, rank, step)])
            meet(rank, RANKS, directory, f"made {step}")
            states = everyone.all_gather_object((is_broken, is_over))
            if any(broken for broken, _ in states):
                if rank != victim and not is_broken:
                    # It had what it needs, and learns of the failure in its next call.
                    with pytest.raises((PeerLostError, GroupBrokenError)):
                        group.barrier()
                group.destroy()
                group = new_group(everyone, f"g{step}")
                # A rank whose creation still confirms the memory would find the group broken.
                everyone.barrier()
            if states[victim][1]:
                break
        group.destroy()


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("name", CALLS)
def test_a_strike_at_any_place_of_a_gather_or_scatter_leaves_nothing_halfway(
    ranks2: RankPool, name: str, victim: int
) -> None:
    """The call counts on both ranks, or on neither, or the group is broken on both; no object is for another call."""
    ranks2.run(struck, name, victim, timeout_s=240.0)


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("victim", RANKS)
@pytest.mark.parametrize("name", CALLS)
def test_a_strike_over_gloo_leaves_nothing_halfway(ranks2: RankPool, name: str, victim: int) -> None:
    """As where ranks share memory."""
    ApartPool(ranks2).run(struck, name, victim, timeout_s=240.0)
