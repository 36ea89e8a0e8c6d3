"""The store of torch.distributed below the prefixes that callers, torch and this package put before its keys."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["base_of", "is_local"]


def base_of(store: dist.Store) -> dist.Store:
    """Return the store below any prefixes of `store`."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def is_local(store: dist.Store) -> bool:
    """Return whether `store` is a file or this process's memory: asking it costs no server anything."""
    return isinstance(base_of(store), dist.FileStore | dist.HashStore)
