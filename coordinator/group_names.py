"""Names that tell the groups of a world apart, equal on all ranks that create their groups in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    return _count({"group" if name is None else name: 1}, store, rank, timeout_s)[0]


def next_names(
    meeting: str, names: Sequence[str], store: dist.Store, rank: int, timeout_s: float
) -> tuple[str, list[str]]:
    """Return a unique name of the meeting, and those that groups of `names` will have if the ranks agree.

    Ranks that do not agree may have asked for different groups; so these names are not counted before `use_names`.
    """
    unique, *found = _count({meeting: 1, **dict.fromkeys(names, 0)}, store, rank, timeout_s)
    return unique, found


def use_names(names: Sequence[str], store: dist.Store, rank: int, timeout_s: float) -> None:
    """Count `names`, which groups have now."""
    _count(dict.fromkeys(names, 1), store, rank, timeout_s)


def _count(added: Mapping[str, int], store: dist.Store, rank: int, timeout_s: float) -> list[str]:
    """Count `added` groups of each name; return each name with how many there were before."""
    for base in added:
        if not isinstance(base, str) or not base.isprintable() or not base or ":" in base:
            raise UsageError(f"group_name must be printable text without a colon, not {base!r}")

    def count() -> list[str]:
        return [
            f"{base}:{store.add(f'group_coordinator/created/{base}/{rank}', one) - one}"
            for base, one in added.items()
        ]

    where = f"creating group {' and '.join(map(repr, added))} (rank {rank})"
    return ask_store(count, where, timeout_s)
