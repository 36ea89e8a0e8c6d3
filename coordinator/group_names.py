"""Names that tell the groups of a world apart, equal on all ranks that create their groups in the same order."""

from __future__ import annotations

import torch.distributed as dist

from coordinator.blocking_calls import ask_store
from shm_broadcast.errors import UsageError


def unique_name(name: str | None, store: dist.Store, rank: int, timeout_s: float) -> str:
    """Return `name` with how many groups of that name this rank has created before: `tp:0`, `tp:1`.

    The world's store counts, not this process: so ranks that come together anew, after a failure that only
    some of them saw, start from the same number.

    Args:
        name: What the caller calls the group; None for "group".
        store: The world's store.
        rank: This process's global rank.
        timeout_s: How long to wait for the store's answer.
    """
    base = "group" if name is None else name
    if not isinstance(base, str) or not base.isprintable() or not base or ":" in base:
        raise UsageError(f"group_name must be printable text without a colon, not {name!r}")
    key = f"group_coordinator/created/{base}/{rank}"
    number = ask_store(lambda: store.add(key, 1), f"creating group {base!r} (rank {rank})", timeout_s)
    return f"{base}:{number - 1}"
