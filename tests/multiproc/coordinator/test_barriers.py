"""Barriers name every late rank, and other calls during a barrier do not change its number."""

from pathlib import Path
from typing import Any

from tests.harness import RankPool
from tests.worlds import ApartPool, meet, new_group, outcome_of, world


def late(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as first, new_group(first) as group:
        outcome = outcome_of(lambda: group.monitored_barrier(0.3)) if rank in (0, 1) else {}
        meet(rank, range(world_size), directory, "told")
        return [outcome.get("kind"), outcome.get("missing")]


def test_a_monitored_barrier_names_all_late_ranks(ranks4: RankPool) -> None:
    """Every rank that came gets the names of all late ranks."""
    assert ranks4.run(late)[:2] == [["CommTimeoutError", [2, 3]]] * 2


def uncounted(rank: int, world_size: int, directory: Path) -> Any:
    with world(rank, world_size, directory) as group:
        first = group._health.begin("host", "barrier").number
        under_way = group.barrier(async_op=True)
        assert group.broadcast_object("x", 0) == "x"
        under_way.wait()
        return group._health.begin("host", "barrier").number - first


def test_an_object_that_is_broadcast_beside_a_barrier_is_not_counted(ranks2: RankPool) -> None:
    """Between hosts the order of the two calls differs between ranks, while errors compare the calls' numbers."""
    assert ApartPool(ranks2).run(uncounted) == [2, 2]
