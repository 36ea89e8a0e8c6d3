"""How rank 0 serves the store of a world: on one address, and with a descriptor for each connection."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
from typing import Any, Final

from coordinator.addresses.names import addresses_of
from shm_broadcast.errors import UsageError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["allow_descriptors", "descriptors_needed", "listen", "listen_at", "options_of_server"]

# Each rank connects once for everything, once to wait in agreements, and once while it connects Gloo.
_CONNECTIONS_PER_RANK: Final = 3
# What this process may have open besides: libraries, segments, sockets of its groups.
_OTHER_DESCRIPTORS: Final = 512
# torch's older server asks the kernel about all connections for every request, libuv's does not. A process that has
# used libuv keeps a pipe of it for ever, so small worlds do without.
_RANKS_FOR_LIBUV: Final = 128


def options_of_server(
    host: str, port: int, world_size: int, listener: socket.socket | None = None
) -> dict[str, Any]:
    """Return what a `TCPStore` that serves `world_size` ranks takes: a descriptor that listens there, and the server.

    Raises the limit of open descriptors of this process if so many ranks need it. `listener` listens there already; it
    is used up if there is no error.

    Raises:
        UsageError: This process cannot listen there, or may not open so many descriptors.
    """
    allow_descriptors(world_size)
    # The store takes over the descriptor; detaching prevents a second close.
    return {
        "master_listen_fd": (listener or listen(host, port)).detach(),
        "use_libuv": world_size >= _RANKS_FOR_LIBUV,
    }


def descriptors_needed(world_size: int) -> int:
    """Return how many open descriptors a process takes that serves the store of so many ranks."""
    return _CONNECTIONS_PER_RANK * world_size + _OTHER_DESCRIPTORS


def allow_descriptors(world_size: int) -> None:
    """Raise the limit of open descriptors of this process if serving the store of so many ranks needs it.

    Raises:
        UsageError: It may not open so many.
    """
    needed = descriptors_needed(world_size)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"rank 0 serves the store of {world_size} ranks, which takes {needed} open descriptors, and this process "
            f"may open {hard}: raise the hard limit (ulimit -Hn {needed}), or let torchrun's agent serve the store"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the first address of `host` that belongs to this host, for rank 0's store.

    The errors are those of `listen_at`.
    """
    return listen_at(host, port)[0]


def listen_at(host: str, port: int) -> tuple[socket.socket, str]:
    """Return a socket that listens on the first address of `host` that belongs to this host, and that numeric address.

    Raises:
        UsageError: It is a wildcard address, or this process cannot listen there. Port 0 takes any free one.
    """
    try:
        addresses = addresses_of(host, port)
    except OSError as error:
        if raised_by_handler(error):
            raise
        raise UsageError(f"rank 0 cannot listen on {host}:{port}: {error.strerror}") from error
    refused = list[OSError]()
    for address in addresses:
        if ipaddress.ip_address(address.text.partition("%")[0]).is_unspecified:
            raise UsageError(
                f"rank 0 does not listen on the wildcard address {host}:{port}, because any host could connect: "
                "use the address at which the other ranks reach this host"
            )
        try:
            return socket.create_server(address.target, family=address.family, backlog=2048), address.text
        except OSError as error:
            if raised_by_handler(error):
                raise
            refused.append(error)
    reasons = ", ".join(dict.fromkeys(os.strerror(error.errno or 0) for error in refused))
    raise UsageError(
        f"rank 0 cannot listen on {host}:{port} ({reasons}): the address must belong to this host, "
        "and the port must be free"
    ) from refused[0]
