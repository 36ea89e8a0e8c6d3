"""Connections to a store on which a thread can wait while others of the process use the usual one.

torch locks a connection over TCP while it waits for a key. A second one is opened once for a world and kept: opening it
may take seconds where names are resolved slowly, since torch looks up the name that belongs to an address.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

__all__ = ["SpareConnection", "connection_of_its_own", "is_local"]


class SpareConnection:
    """At most one connection to the store of a world that nobody uses now. Thread-safe."""

    def __init__(self) -> None:
        """Begin without one."""
        self._lock = threading.Lock()
        self._spare: dist.Store | None = None

    @contextmanager
    def lent(self, store: dist.Store, prefix: str | None = None) -> Iterator[dist.Store]:
        """Give the block a connection to `store`, below `prefix`, that no other thread uses.

        After an error in the block, which may still wait there, it is not kept.
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


def is_local(store: dist.Store) -> bool:
    """Return whether `store` is a file or this process's memory: asking it costs no server anything."""
    base: object = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    return isinstance(base, dist.FileStore | dist.HashStore)


def connection_of_its_own(store: dist.Store) -> dist.Store:
    """Return `store` over a new connection; itself if it is used without one. May block as long as a server does."""
    if is_local(store):
        return store
    connected: Any = store  # torch's stubs do not know `clone`
    clone: dist.Store = connected.clone()
    return clone
