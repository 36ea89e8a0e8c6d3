"""Unique names for the groups of a world. Ranks that create their groups in the same order get the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import ask_store
from shm_broadcast.errors import UsageError


def unique_name(name: str | None, store: dist.Store, rank: int, timeout_s: float) -> str:
    """Return `name` followed by the number of earlier groups of that name on this rank: `tp:0`, `tp:1`.

    The count is kept in the world's store. Ranks that retry after a failure that only some of them saw therefore
    continue from the same number.

    Args:
        name: The caller's name for the group; None means "group".
        store: The world's store.
        rank: This process's global rank.
        timeout_s: How long to wait for the store's answer, in seconds.
    """
    return _count({"group" if name is None else name: 1}, store, rank, timeout_s)[0]


def next_names(
    meeting: str, names: Sequence[str], store: dist.Store, rank: int, timeout_s: float
) -> tuple[str, list[str]]:
    """Return a unique name for this agreement, and the names that groups of `names` get if the ranks agree.

    The group names are counted only by `use_names`: ranks that disagree may have asked for different groups.
    """
    unique, *found = _count({meeting: 1, **dict.fromkeys(names, 0)}, store, rank, timeout_s)
    return unique, found


def use_names(names: Sequence[str], store: dist.Store, rank: int, timeout_s: float) -> None:
    """Count `names` as used, after their groups have been agreed on."""
    _count(dict.fromkeys(names, 1), store, rank, timeout_s)


def _count(added: Mapping[str, int], store: dist.Store, rank: int, timeout_s: float) -> list[str]:
    """Add `added` to the count of each name; return each name with its count before."""
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
