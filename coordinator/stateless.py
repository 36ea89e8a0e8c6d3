"""A group without torch.distributed: for weight updates between a trainer and an engine, and the like."""

from __future__ import annotations

import torch

from coordinator.bootstrap.creation import device_of
from coordinator.bootstrap.world import join_own_world
from coordinator.group import GroupCoordinator
from coordinator.groups import default_backend
from coordinator.settings import CoordinatorSettings

__all__ = ["create_stateless_group"]


def create_stateless_group(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    *,
    backend: str | None = None,
    local_rank: int | None = None,
    use_message_queue_broadcaster: bool = False,
    group_name: str = "stateless",
    settings: CoordinatorSettings | None = None,
) -> GroupCoordinator:
    """Create a group of processes that share no world, as vLLM's `StatelessProcessGroup.create`. Collective.

    It needs no torch.distributed world and changes no state of the process: a process may be in several such groups,
    also beside a world, and has a rank of its own in each. Its methods are those of any group: tensors over shared
    memory, between hosts over TCP of ours and Gloo, on CUDA over our kernels and NCCL; objects, queues, point to point,
    sub-groups. `as_process_group` is refused. `cpu_group` is a process group of which torch's world knows nothing:
    torch's collectives take it.

    Blocks until all ranks have joined, for at most the settings' `create_timeout_s`.

    Args:
        host: Name or address of rank 0's host. Rank 0 serves the store there and on no other address.
        port: TCP port of the store.
        rank: This process's rank in the group, from 0. No other process passes the same.
        world_size: Number of ranks in the group.
        backend: torch backend that stands for the device, "gloo" or "nccl"; None takes the accelerator's, else "gloo".
        local_rank: Index of this process's device; None takes the current device.
        use_message_queue_broadcaster: Whether to create `mq_broadcaster` with rank 0 as its writer.
        group_name: Name such as "weights". The address and a number are appended.
        settings: Settings of the group; default: read from the environment.

    Returns:
        The group, which the caller must destroy. The store ends when rank 0 has destroyed it and all groups that were
        split off it; the address can then be used again.

    Raises:
        UsageError: The arguments name no address or no rank, or rank 0 cannot listen there.
        SettingsError: The environment has a setting that is unknown or malformed.
        DisagreementError: Ranks have different world sizes, settings or versions, or two have the same rank.
        CommTimeoutError: Ranks did not join in time; `.missing` names them.
        PeerLostError: A rank died meanwhile; `.peers` names it.
        CapabilityError: Ranks are on several hosts and one announced a loopback address, or the device's communicator
            needs a process group of torch.
    """
    settings = settings or CoordinatorSettings.from_env()
    backend = backend or default_backend()
    if local_rank is None:
        on_host = device_of(backend, 0).type == "cpu"
        local_rank = 0 if on_host else torch.accelerator.current_device_index()
    world, is_made = join_own_world(host, port, rank, world_size, settings), False
    try:
        group = GroupCoordinator.__new__(GroupCoordinator)
        group._create(  # noqa: SLF001 - ours
            world,
            [list(range(world_size))],
            local_rank,
            backend,
            True,
            use_message_queue_broadcaster,
            # A process may be in several groups, and finds each by its name.
            f"{group_name}@{host.replace(':', '.')}.{port}",
            settings,
        )
        is_made = True
        group._parts.after.append(world.leave)  # noqa: SLF001 - ours
    except BaseException:
        try:
            if is_made:
                group.destroy()
        finally:
            world.leave()
        raise
    return group
