"""How many connections a group over several hosts opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import RankPool
from tests.ports import connections
from tests.waiting import wait_until
from tests.worlds import HostsPool, new_group, world


def count_those_of_a_group(rank: int, world_size: int, directory: Path, wires: list[int]) -> None:
    """Create and destroy a second group of the world's ranks, to whose hosts there are links already."""
    with world(rank, world_size, directory) as everyone:
        before = connections()
        with new_group(everyone) as group:
            group.barrier()
            opened = 2 * (world_size - 1) + wires[rank]
            # Gloo closes some that it has opened twice.
            wait_until(lambda: connections() == before + opened, f"{opened} more than {before} connections")
            everyone.barrier()
            kept = group, group.device_communicator
        # A user may keep a destroyed group, and its communicator.
        wait_until(lambda: connections() == before, f"{before} connections again")
        del kept
        everyone.barrier()


@pytest.mark.parametrize(("places", "wires"), [("AABB", [1, 1, 1, 1]), ("ABBB", [1, 1, 0, 0])])
def test_a_group_over_two_hosts_connects_each_pair_of_ranks_twice(
    ranks4: RankPool, places: str, wires: list[int]
) -> None:
    """One mesh for each plane, also inside of a host; leaders have a wire to each other host. No rank holds more."""
    HostsPool(ranks4, places).run(count_those_of_a_group, wires)
