"""Create groups the way training frameworks do: from a root group and a size, with hybrid sharding added later."""

from __future__ import annotations

from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups
from coordinator.layout import ParallelLayout
from shm_broadcast.errors import UsageError


def create_parallel_groups(
    root: GroupCoordinator, *, tp_size: int = 1, use_message_queue_broadcaster: bool = False
) -> ParallelGroups:
    """Create the tensor- and data-parallel groups of a world. Collective over `root`.

    Neighbouring ranks share a layer. With eight ranks and `tp_size=2`, the tensor-parallel groups are 0 1, 2 3, 4 5
    and 6 7, and the data-parallel groups are 0 2 4 6 and 1 3 5 7.

    Args:
        root: The group of all ranks; destroying the result leaves it alone.
        tp_size: Ranks that share a layer; must divide the world size.
        use_message_queue_broadcaster: Whether `root` and the tensor-parallel groups get an `mq_broadcaster`.

    Raises:
        UsageError: `root` is not the group of all ranks, or `tp_size` does not divide their number.
        Others: As `ParallelGroups.create`.
    """
    if root.ranks != list(range(root.world_size)):
        raise UsageError(f"root must be the group of all ranks in ascending order, not of {root.ranks}")
    return ParallelGroups.create(
        ParallelLayout.from_world_size(root.world_size, tensor=tp_size),
        use_message_queue_broadcaster=use_message_queue_broadcaster,
        settings=root.settings,
        world=root,
    )


def create_fsdp_groups(groups: ParallelGroups, intra_node_size: int | None = None) -> ParallelGroups:
    """Return `groups` with `rdp` and `sdp` for hybrid or full sharding. Collective over the world.

    Args:
        groups: Existing groups. The result takes them over: destroy the result, not these.
        intra_node_size: Number of neighbours in `dp` over which the model is sharded, usually those of one host;
            must divide the size of `dp`. None shards over all of `dp`.

    Raises:
        UsageError: `intra_node_size` is less than 2 or does not divide the size of `dp`. Nothing is sent.
        Others: As `ParallelGroups.create`.
    """
    if intra_node_size is not None and (type(intra_node_size) is not int or intra_node_size < 2):
        raise UsageError(
            f"intra_node_size must be an integer of at least 2, or None, not {intra_node_size!r}"
        )
    shard = groups.layout.data if intra_node_size is None else intra_node_size
    return groups.with_sharding(shard)
