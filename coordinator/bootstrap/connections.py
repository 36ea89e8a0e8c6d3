"""Connections to the store of a world: the usual one, and those on which a thread can wait while others use that.

torch locks a connection over TCP while it waits for a key. A second one is opened once for a world and kept: opening it
may take seconds where names are resolved slowly, since torch looks up the name that belongs to an address.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist

from coordinator.addresses.names import await_addresses, is_loopback, refuse_loopback
from coordinator.bootstrap.blocking_calls import run_interruptibly, torch_error
from coordinator.bootstrap.secured import find_store, serve_store
from coordinator.bootstrap.serving import allow_descriptors, listen_at, options_of_server
from coordinator.security.place import Place
from coordinator.security.store import close
from coordinator.settings import CoordinatorSettings
from coordinator.stores import is_local
from shm_broadcast.errors import CommError, CommTimeoutError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.timeouts import as_timedelta

__all__ = ["SpareConnection", "connection_of_its_own", "open_tcp_store"]

# Connecting gets at least this long, even if the name got its address late in `create_timeout_s`.
_LEAST_TIMEOUT_S: Final = 1.0


class SpareConnection:
    """At most one connection to the store of a world that nobody uses now. Thread-safe."""

    def __init__(self) -> None:
        """Begin without one."""
        # A signal handler may destroy a group while this thread holds it.
        self._lock = threading.RLock()
        self._spare: dist.Store | None = None

    @contextmanager
    def lent(self, store: dist.Store, prefix: str | None = None) -> Iterator[dist.Store]:
        """Give the block a connection to `store`, below `prefix`, that no other thread uses.

        After an error the connection is not kept, because a call may still wait on it.
        """
        with self._lock:
            connection, self._spare = self._spare, None
        connection = connection or connection_of_its_own(store)
        yield connection if prefix is None else dist.PrefixStore(prefix, connection)
        if connection is not store:
            with self._lock:
                self._spare = connection

    def drop(self) -> None:
        """Close the connection."""
        with self._lock:
            self._spare = None


def connection_of_its_own(store: dist.Store) -> dist.Store:
    """Return `store` over a new connection; itself if it uses none. May block as long as its server does."""
    if is_local(store):
        return store
    connected: Any = store  # torch's stubs do not know `clone`
    clone: dist.Store = connected.clone()
    return clone


def _no_check() -> None:
    """Raise nothing: no rank is known to be lost."""


def open_tcp_store(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    serve: bool,
    settings: CoordinatorSettings,
    place: Place | None,
    spans_hosts: bool = False,
    listener: socket.socket | None = None,
    check: Callable[[], None] = _no_check,
) -> dist.Store:
    """Connect to the store at `host`; if `serve`, listen on that address only, or use `listener`, which does.

    With a `place` in a job with a secret it is a secured store. A loopback address is refused if `spans_hosts`, before
    anything listens.
    """
    end, over = time.monotonic() + settings.create_timeout_s, threading.Event()

    def connect() -> dist.Store:
        addresses = await_addresses(host, port, settings.create_timeout_s, rank, over)
        if spans_hosts and is_loopback(addresses[0].text):
            raise refuse_loopback(host, addresses[0].text)
        if place is not None:
            left_s = max(end - time.monotonic(), _LEAST_TIMEOUT_S)
            if not serve:
                return find_store(place, addresses, left_s, over)
            allow_descriptors(world_size)
            own, address = listen_at(host, port) if listener is None else (listener, addresses[0].text)
            return serve_store(place, address, port, left_s, over, own)
        options: dict[str, Any] = {}
        if serve:
            options = options_of_server(host, port, world_size, listener)
        timeout = as_timedelta(max(end - time.monotonic(), _LEAST_TIMEOUT_S))
        store = dist.TCPStore(
            host, port, world_size, is_master=serve, timeout=timeout, wait_for_workers=False, **options
        )
        store.set_timeout(as_timedelta(settings.create_timeout_s))
        return store

    where = f"rendezvous (rank {rank} of {world_size})"
    try:
        try:
            # Nothing is called behind this: an interrupt would lose the store, which nobody else could close.
            return run_interruptibly(connect, "rendezvous", check, close)
        except BaseException:
            over.set()
            raise
    except dist.DistError as error:
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            raise CommTimeoutError(
                f"{where}: nothing answered at {host}:{port} within {settings.create_timeout_s:.1f} s; "
                "check that rank 0, or the agent that serves the store, is running and that this is its address",
                missing=(0,),
            ) from error
        raise torch_error(f"{where} at {host}:{port}: {error}", "TCPStore") from error
    except CommError:
        raise  # CommTimeoutError is an OSError too
    except OSError as error:
        if raised_by_handler(error):
            raise
        raise _nameless(where, host, settings.create_timeout_s, serve, error) from error


def _nameless(where: str, host: str, timeout_s: float, serve: bool, error: OSError) -> CommError:
    """Return the error for a name that has had no address for `timeout_s`: rank 0's own, or where it is looked for."""
    text = f"the name {host} had no address within {timeout_s:.1f} s: {error.strerror}"
    if serve:
        return UsageError(f"rank 0 cannot listen on {host}: {text}")
    return CommTimeoutError(f"{where}: {text}", missing=(0,))
