"""Open the store of a job: rank 0 serves it, and every rank connects to it with the keys of its place."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from coordinator.security.client import StoreClient
from coordinator.security.keys import keys_of_rank, keys_of_store, public_keys
from coordinator.security.secret import Secret
from coordinator.security.server import PINGS, StoreServer
from coordinator.security.store import SecuredStore
from shm_broadcast.endpoint import VERSION, RemoteEndpoint
from shm_broadcast.errors import CapabilityError, CommTimeoutError, UsageError

__all__ = ["Place", "connect_to", "serve_at"]


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's place in a run.

    Attributes:
        secret: What all ranks of the job hold.
        run: Names this start of the job; equal on all ranks.
        rank: Global rank of this process.
        world_size: Number of processes.
    """

    secret: Secret
    run: str
    rank: int
    world_size: int

    @property
    def where(self) -> str:
        """Return the beginning of an error's text."""
        return f"rendezvous (rank {self.rank} of {self.world_size})"


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
        descriptor: A socket that listens there already, which the store then owns.

    Raises:
        UsageError: This process cannot listen there.
        CapabilityError: The kernel refuses a descriptor.
        CommTimeoutError: The store does not welcome its own rank within `timeout_s`.
    """
    keys = keys_of_store(place.secret, place.run)
    try:
        ranks = public_keys(place.secret, place.run, place.world_size)
        server = StoreServer(keys, ranks, (address, ports), descriptor)
    except CapabilityError as error:
        if ports is None:
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
    endpoint = RemoteEndpoint(VERSION, address, port, public, 0, (place.rank,), PINGS)
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
