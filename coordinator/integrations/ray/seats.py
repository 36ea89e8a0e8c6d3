"""Which rank sits where: the ranks of a world in the bundles of a placement group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from coordinator.integrations.ray.library import import_ray
from shm_broadcast.errors import UsageError

__all__ = ["Seat", "assign", "plan"]


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one rank.

    Attributes:
        rank: Its number in the world.
        bundle: Index of its bundle in the placement group.
        node_id: Ray's name of the node, hexadecimal.
        address: The node's address, at which other nodes reach it.
        local_rank: Its place among the ranks of the node, from 0.
        local_world_size: The number of ranks on the node.
    """

    rank: int
    bundle: int
    node_id: str
    address: str
    local_rank: int
    local_world_size: int

    def strategy(self, placement_group: Any) -> Any:
        """Return what the actor's option `scheduling_strategy` takes, so that it sits here."""
        import_ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=placement_group, placement_group_bundle_index=self.bundle
        )


def assign(
    nodes: Mapping[int, str], addresses: Mapping[str, str], first_node: str | None = None
) -> list[Seat]:
    """Return a seat for each bundle, by rank. Arithmetic; asks nobody.

    The ranks of a node follow each other. `first_node` comes first if it has a bundle, then the other nodes in the
    order of their lowest bundles; on a node the order is that of the bundles. So groups of neighbouring ranks, as those
    of tensor parallelism, stay on one node where its number of bundles allows it.

    Args:
        nodes: Id of each bundle's node, by index of the bundle; empty if it is not placed.
        addresses: Address of each node that is alive, by id.
        first_node: The node on which rank 0 shall be.

    Raises:
        UsageError: There are no bundles, one is not placed, or the node of one is not alive.
    """
    if sorted(nodes) != list(range(len(nodes))) or not nodes:
        raise UsageError(f"a placement group has bundles from 0 on, not {sorted(nodes)}")
    unplaced = [bundle for bundle, node in sorted(nodes.items()) if not node]
    if unplaced:
        raise UsageError(f"bundles {unplaced} of the placement group are not placed: wait for `ready()`")
    lost = {node: bundle for bundle, node in sorted(nodes.items(), reverse=True) if node not in addresses}
    if lost:
        named = ", ".join(f"{node} (bundle {bundle})" for node, bundle in lost.items())
        raise UsageError(f"the placement group has bundles on nodes that are not alive: {named}")
    bundles: dict[str, list[int]] = {}
    for bundle, node in sorted(nodes.items()):
        bundles.setdefault(node, []).append(bundle)
    seats = list[Seat]()
    # Sorting is stable: all but the first node keep the order of their lowest bundles.
    for node in sorted(bundles, key=lambda each: each != first_node):
        for local_rank, bundle in enumerate(bundles[node]):
            seat = Seat(
                rank=len(seats),
                bundle=bundle,
                node_id=node,
                address=addresses[node],
                local_rank=local_rank,
                local_world_size=len(bundles[node]),
            )
            seats.append(seat)
    return seats


def plan(placement_group: Any) -> list[Seat]:
    """Return a seat for each bundle of a placement group, by rank: the driver's node first. The driver calls this.

    Waits until the group is placed for as long as Ray does; ask `placement_group.wait(seconds)` before for a deadline.

    Raises:
        UsageError: A node of the group is not alive any more.
        CapabilityError: Ray is not installed.
    """
    ray = import_ray()
    from ray.util import placement_group_table

    ray.get(placement_group.ready())
    table = placement_group_table(placement_group)
    nodes = {int(bundle): str(node) for bundle, node in table["bundles_to_node_id"].items()}
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return assign(nodes, addresses, ray.get_runtime_context().get_node_id())
