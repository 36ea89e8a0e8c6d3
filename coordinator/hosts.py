"""Which ranks of a group are on one host, for our own groups and for torch process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from coordinator import group_registry
from coordinator.group import GroupCoordinator
from device_comm import checks
from device_comm.cpu import shared_memory
from shm_broadcast.errors import UsageError


def same_host(group: object, source_rank: int = 0) -> list[bool]:
    """Return for each rank of `group` whether it is on the host of rank `source_rank`; see `in_the_same_node_as`."""
    ids = _host_ids(group)
    source = checks.check_rank(source_rank, len(ids), "source_rank")
    return [each == ids[source] for each in ids]


def host_count(group: object) -> int:
    """Return on how many hosts the ranks of `group` are. Collective in the same cases as `in_the_same_node_as`."""
    return len(set(_host_ids(group)))


def _host_ids(group: object) -> list[str]:
    """Return the host id of each rank, in the order of the group. Ranks on one host have one id."""
    owner = group if isinstance(group, GroupCoordinator) else _owner(group)
    if owner is not None:
        # A fake group has no host ids: all of its ranks are in this process, so all get the same one, "".
        known = owner._parts.host_ids  # noqa: SLF001 - ours
        return [known.get(rank, "") for rank in owner.ranks]
    if isinstance(group, dist.ProcessGroup):
        return _exchange_host_ids(group)
    gather: Callable[[Any], list[Any]] | None = getattr(group, "all_gather_obj", None)
    if callable(gather):
        return [str(each) for each in gather(shared_memory.host_id())]
    raise UsageError(
        "in_the_same_node_as takes a GroupCoordinator, a torch process group, or a group with all_gather_obj, "
        f"not {type(group).__name__}"
    )


def _owner(group: object) -> GroupCoordinator | None:
    """Return our group that made the process group `group`, or None."""
    for each in group_registry.live_groups():
        if isinstance(each, GroupCoordinator) and each._parts.process_groups.owns(group):  # noqa: SLF001 - ours
            return each
    return None


def _exchange_host_ids(group: dist.ProcessGroup) -> list[str]:
    """Exchange host ids over a process group that is not ours. Collective."""
    if dist.get_backend(group) == dist.Backend.NCCL:
        raise UsageError(
            "in_the_same_node_as needs a process group for CPU tensors, such as cpu_group, not NCCL's"
        )
    own = torch.frombuffer(bytearray(shared_memory.host_id(), "utf-8"), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [bytes(each.tolist()).decode("utf-8") for each in found]
