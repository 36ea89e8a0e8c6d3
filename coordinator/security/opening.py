"""Open the store of a job: rank 0 serves it, and every rank connects to it with the keys of its place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from coordinator.addresses.names import is_loopback
from coordinator.security.client import StoreClient
from coordinator.security.keys import keys_of_rank, keys_of_store, public_keys
from coordinator.security.place import Place
from coordinator.security.server import StoreServer
from coordinator.security.store import SecuredStore
from shm_broadcast.endpoint import VERSION, RemoteEndpoint, RemoteSettings
from shm_broadcast.errors import CapabilityError, CommTimeoutError, UsageError

__all__ = ["connect_to", "serve_at"]

# How the requirement begins of the error for a range in which no port is free.
_FREE_PORT: Final = "a free port"
_PINGS_AT_HOME: Final = RemoteSettings(heartbeat_s=5.0, lost_after_s=60.0)


def _pings(place: Place, address: str) -> RemoteSettings:
    """Return when zmq drops a silent connection: after `lost_after_s`, where ranks may be on another host.

    On one host the kernel tells of ranks that end, and a debugger may stop one for long.
    """
    if is_loopback(address):
        return _PINGS_AT_HOME
    remote = place.remote
    # zmq pings twice in a `heartbeat_s`, and waits for 3/8 of `lost_after_s`.
    return RemoteSettings(heartbeat_s=2 * remote.heartbeat_s, lost_after_s=remote.lost_after_s * 8 / 3)


def serve_at(
    place: Place,
    address: str,
    ports: tuple[int, int] | None,
    timeout_s: float,
    check: Callable[[], None],
    descriptor: int | None = None,
) -> SecuredStore:
    """Return rank 0's store, which it serves at a numeric address and a port of a range, and nowhere else.

    Args:
        place: Rank 0's place.
        address: The address to listen on.
        ports: The first and the last port; None for any.
        timeout_s: How long its own connection may take, in seconds.
        check: As of `connect_to`.
        descriptor: A socket that listens there already, which the store owns, also if this raises.

    Raises:
        UsageError: This process cannot listen there.
        CapabilityError: The kernel refuses a descriptor.
        CommTimeoutError: The store does not welcome its own rank within `timeout_s`.
    """
    with ExitStack() as unused:
        if descriptor is not None:
            unused.callback(os.close, descriptor)
        keys = keys_of_store(place.secret, place.run)
        ranks = public_keys(place.secret, place.run, place.world_size)
        unused.pop_all()
    try:
        server = StoreServer(keys, ranks, (address, ports), _pings(place, address), descriptor)
    except CapabilityError as error:
        if ports is None or not error.requirement.startswith(_FREE_PORT):
            raise
        named = str(ports[0]) if ports[0] == ports[1] else f"{ports[0]}-{ports[1]}"
        raise UsageError(
            f"rank 0 cannot listen on {address}:{named} (no free port): the address must belong to this host, and the "
            "port must be free"
        ) from error
    try:
        return connect_to(place, address, server.port, timeout_s, check, server=server)
    except BaseException:
        server.close()
        raise


def connect_to(
    place: Place,
    address: str,
    port: int,
    timeout_s: float,
    check: Callable[[], None],
    *,
    told_by: str = "",
    server: StoreServer | None = None,
) -> SecuredStore:
    """Return the store that rank 0 serves at a numeric address and a port, once it has welcomed this rank.

    Args:
        place: This process's place.
        address: Rank 0's address.
        port: Its port.
        timeout_s: How long to try, in seconds.
        check: Called about ten times a second; what it raises ends the attempt.
        told_by: Who named the address, for the error.
        server: On rank 0 what serves there.

    Raises:
        CommTimeoutError: No store that holds the secret and serves this run answered there; `.missing` names rank 0.
        UsageError: It refuses this rank.
    """
    public = keys_of_store(place.secret, place.run).public
    endpoint = RemoteEndpoint(VERSION, address, port, public, 0, (place.rank,), _pings(place, address))
    start = time.monotonic()
    client = StoreClient(endpoint, keys_of_rank(place.secret, place.run, place.rank), place.rank)
    try:
        if client.join(timeout_s, check):
            return SecuredStore(client, address, port, server)
    except BaseException:
        client.close()
        raise
    client.close()
    raise CommTimeoutError(
        f"{place.where}: the store of run {place.run!r} did not answer at {address}:{port}{told_by} within "
        f"{time.monotonic() - start:.1f} s; {client.tried}",
        missing=(0,),
    )
