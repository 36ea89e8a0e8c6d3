"""Which communicator serves a group on the CPU: decided once, when it is made, from where its ranks are."""

from __future__ import annotations

from contextlib import ExitStack

from device_comm.base import CommunicatorContext
from device_comm.cpu import shared_memory
from device_comm.cpu.communicator import SharedMemoryCommunicator
from device_comm.cpu.several_hosts.communicator import HierarchicalCommunicator, group_by_host
from device_comm.cpu.several_hosts.levels import partners_of
from device_comm.process_group import ProcessGroupCommunicator
from shm_broadcast.errors import UsageError


def connect_cpu(
    context: CommunicatorContext,
) -> SharedMemoryCommunicator | HierarchicalCommunicator | ProcessGroupCommunicator:
    """Return the communicator of a group on the CPU, the same class on all ranks. Collective.

    * All ranks share memory (`context.shared`): shared memory. Nothing else is needed.
    * Several hosts: two levels, shared memory inside each host that has several ranks, TCP between the hosts.
      The speed of the line between the hosts is measured.
    * All ranks on one host, but no shared memory given: the process group. None is made here; a group makes its shared
      memory when its ranks first meet.

    All but the first need `context.process_group` and `context.exchange`, the second `context.connect` too.

    Raises:
        UsageError: The context has neither shared memory nor an exchange, or no `connect`; nothing was sent.
        CapabilityError: On some host the memory could not be made or mapped; on every rank of the group.
        CommTimeoutError, PeerLostError, NativeError: While the line was measured; the group is broken.
    """
    if isinstance(context.shared, shared_memory.SharedMemory):
        return SharedMemoryCommunicator(context, context.shared)
    if context.exchange is None:
        raise UsageError(
            f"{context.name!r}: the context of several ranks on the CPU needs `exchange`, over which they learn who "
            "shares a host, or `shared`, the memory that all of them share"
        )
    general = ProcessGroupCommunicator(context)
    hosts = group_by_host(shared_memory.host_ids(context.exchange))
    if len(hosts) == 1:
        return general
    if context.connect is None:
        raise UsageError(
            f"{context.name!r}: the context of ranks on several hosts needs `connect`, which opens their connections"
        )
    rank = context.rank_in_group
    own = next(ranks for ranks in hosts if rank in ranks)
    with ExitStack() as made:
        part = shared_memory.connect_part(context.health, rank, own, context.timeout_s, context.exchange)
        if part is not None:
            made.callback(part.close)
        connections = context.connect(list(partners_of(rank, hosts).values()))
        communicator = HierarchicalCommunicator(context, general, hosts, part, connections)
        made.callback(communicator.destroy)
        communicator.measure_line(context.exchange)
        made.pop_all()
    return communicator


def needs_process_group(factory: object, device_type: str, *, shares_memory: bool) -> bool:
    """Return whether a group connects a process group for what `factory` builds.

    On the CPU it does where the ranks share no memory. Otherwise the factory's attribute
    `needs_process_group` decides; without that attribute it does, unless the factory is `connect_cpu`.
    """
    if device_type == "cpu" and not shares_memory:
        return True
    return bool(getattr(factory, "needs_process_group", factory is not connect_cpu))


__all__ = ["connect_cpu", "needs_process_group"]
