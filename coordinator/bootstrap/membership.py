"""The rank of this process, its position in a group, and the address at which others reach it."""

from __future__ import annotations

import dataclasses
import fcntl
import socket
import struct
from collections.abc import Sequence
from typing import Final

import torch.distributed as dist

from coordinator.host.process_groups import LOOPBACK
from shm_broadcast.errors import SettingsError, UsageError

_SIOCGIFADDR: Final = 0x8915  # netdevice(7)


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


def routed_address(host: str, port: int) -> str:
    """Return this host's address on the interface that routes to `host`, without sending anything."""
    family, _, _, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only looks up the route.
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        SettingsError: There is no such interface, or it has no IPv4 address.
    """
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise SettingsError(
                f"setting interface = {interface!r}: there is no such interface, or it has no IPv4 address; "
                f"this host has {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def own_address(interface: str | None, store: dist.Store) -> str:
    """Return the address that this process announces: that of `interface`, or that of the route to the store's server.

    A store that is not served over TCP is reachable from this host only: the result is then loopback, unless
    `interface` is given.
    """
    if interface is not None:
        return interface_address(interface)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return routed_address(store.host, store.port) if isinstance(store, dist.TCPStore) else LOOPBACK
