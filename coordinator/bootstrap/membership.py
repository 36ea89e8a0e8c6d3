"""The rank of this process, its position in a group, and the address at which others reach it."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch.distributed as dist

from coordinator.addresses.interfaces import interface_address, routed_address
from coordinator.addresses.names import addresses_of, is_loopback, is_numeric, refuse_loopback
from coordinator.host.process_groups import LOOPBACK
from coordinator.security.store import SecuredStore
from coordinator.stores import base_of
from shm_broadcast.descriptors import read_text
from shm_broadcast.errors import CapabilityError, NativeError, UsageError
from shm_broadcast.interruption import raised_by_handler, tolerating


@dataclasses.dataclass(frozen=True)
class Membership:
    """This process's position in one group.

    Attributes:
        rank: Global rank.
        ranks: Global ranks of the group, in group order.
        rank_in_group: Position of `rank` in `ranks`.
        everyone: Global ranks of all groups that are created together, ascending.
    """

    rank: int
    ranks: tuple[int, ...]
    rank_in_group: int
    everyone: tuple[int, ...]


def find_membership(group_ranks: Sequence[Sequence[int]], rank: int, world_size: int) -> Membership:
    """Return the group of `rank` among `group_ranks`.

    Raises:
        UsageError: A rank appears twice, is out of range, or this rank is in no group.
    """
    seen: dict[int, int] = {}
    _check_is_list("group_ranks", group_ranks, "group_ranks.tolist()")
    for index, ranks in enumerate(group_ranks):
        _check_is_list(f"group_ranks[{index}]", ranks, "[ranks.tolist() for ranks in group_ranks]")
        if not ranks:
            raise UsageError(f"group_ranks[{index}] is empty")
        for member in ranks:
            if isinstance(member, bool) or not isinstance(member, int):
                hint = "; pass a list of int, such as ranks.tolist()" if hasattr(member, "tolist") else ""
                raise UsageError(f"group_ranks[{index}] holds {member!r}, which is not a rank{hint}")
            if not 0 <= member < world_size:
                raise UsageError(
                    f"rank {member} in group_ranks[{index}] is outside the world of {world_size} ranks"
                )
            if member in seen:
                raise UsageError(
                    f"rank {member} appears in group_ranks[{seen[member]}] and again in group_ranks[{index}]"
                )
            seen[member] = index
    if rank not in seen:
        raise UsageError(f"this rank, {rank}, is in none of the groups {[list(r) for r in group_ranks]}")
    ranks = tuple(group_ranks[seen[rank]])
    return Membership(rank, ranks, ranks.index(rank), tuple(sorted(seen)))


def _check_is_list(name: str, value: object, instead: str) -> None:
    """Raise unless `value` is a list or another sequence. For a tensor or an array the error says to pass `instead`."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return
    hint = f"; pass {instead}" if hasattr(value, "tolist") else ""
    raise UsageError(f"{name} must be a list, not {type(value).__module__}.{type(value).__qualname__}{hint}")


def world_store() -> dist.Store:
    """Return the store of the initialised world.

    Raises:
        UsageError: torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised: call coordinator.init_distributed_environment(...) first, "
            "or torch.distributed.init_process_group(...)"
        )
    world = dist.group.WORLD
    assert world is not None
    return world.get_group_store()


def own_address(interface: str | None, store: dist.Store, spans_hosts: bool = False) -> str:
    """Return the address that this process announces: that of `interface`, or that of the route to the store's server.

    A store that is not served over TCP is reachable from this host only: the result is then loopback, unless
    `interface` is given.

    Args:
        interface: Name of a network interface.
        store: The store in which the ranks meet.
        spans_hosts: Whether a launcher says that the ranks are on several hosts.

    Raises:
        SettingsError: There is no such interface, or it has no address.
        UsageError: `spans_hosts`, and the name of the store's host stands for a loopback address here.
        CapabilityError: There is no route to the store's host.
        NativeError: The name of the store's host has no address any more.
    """
    store = base_of(store)
    if not isinstance(store, dist.TCPStore | SecuredStore):
        return LOOPBACK if interface is None else interface_address(interface)
    try:
        server = addresses_of(store.host, store.port or 1)
    except OSError as error:
        if raised_by_handler(error):
            raise
        raise NativeError(
            f"the name of the store's host, {store.host}, has no address any more: {error.strerror}",
            library="libc",
            function="getaddrinfo",
            code=error.errno or 0,
        ) from error
    if interface is not None:
        return interface_address(interface, prefers_ipv6=server[0].family == socket.AF_INET6)
    address = routed_address(store.host, server)
    if spans_hosts and is_loopback(address):
        raise refuse_loopback(store.host, server[0].text)
    return address


def loopback_hint(store: dist.Store, address: str) -> str:
    """Return the end of an error's text about ranks that did not come, if perhaps they cannot reach the store; else "".

    Unless a launcher says so, nothing tells in advance that the ranks are on several hosts.

    Args:
        store: The store in which the ranks meet.
        address: What `own_address` has returned.
    """
    store = base_of(store)
    if not isinstance(store, dist.TCPStore | SecuredStore) or not is_loopback(address):
        return ""
    if store.host == "localhost" or is_numeric(store.host):
        return ""  # whoever passes that means this host
    return (
        f". On this host, {socket.gethostname()}, {store.host} stands for a loopback address, at which ranks on other "
        "hosts cannot reach the master: look into /etc/hosts"
    )


def serves_store(store: dist.Store) -> bool:
    """Return whether the host at which `store` is served, over TCP, is this one."""
    store = base_of(store)
    if not isinstance(store, dist.TCPStore | SecuredStore):
        return False
    try:
        server = addresses_of(store.host, store.port or 1)
        # To reach an address of this host, the kernel uses that same address as the source.
        return routed_address(store.host, server) in {address.text for address in server}
    except (OSError, CapabilityError) as error:  # no name or no route any more: then it is elsewhere
        if raised_by_handler(error):
            raise
        return False


def is_served_here(store: dist.Store) -> bool:
    """Return whether this process itself serves `store` over TCP, so that it ends with this process."""
    base = base_of(store)
    if not isinstance(base, dist.TCPStore | SecuredStore) or base.port not in _listening_ports():
        return False
    return serves_store(base)  # another store may be served at the same port of another host


def _listening_ports() -> Iterator[int]:
    """Yield the ports on which this process listens: torch does not say whether a store has a server."""
    own = set[str]()
    for name in os.listdir("/proc/self/fd"):
        with tolerating(OSError):  # another thread may close one meanwhile
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    for table in ("tcp", "tcp6"):
        lines = list[str]()
        with tolerating(FileNotFoundError):  # a kernel without IPv6
            lines = read_text(Path(f"/proc/self/net/{table}")).splitlines()[1:]
        for fields in map(str.split, lines):
            address, state, inode = fields[1], fields[3], fields[9]
            if state == _LISTEN and f"socket:[{inode}]" in own:
                yield int(address.rpartition(":")[2], 16)


# The kernel's TCP_LISTEN, as the tables of sockets show it.
_LISTEN: Final = "0A"
