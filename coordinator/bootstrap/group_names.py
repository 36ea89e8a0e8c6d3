"""Unique names for the groups of a world. Ranks that create their groups in the same order get the same names."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import ask_store
from shm_broadcast.errors import UsageError

_decoder: Final = msgspec.json.Decoder(dict[str, int])
# Only this rank changes its counts, but two of its threads may create groups at the same time.
_lock: Final = threading.Lock()
# No name of a group has a colon. What stands here differs in every value that is written.
_MARK: Final = ":"
_MARK_BITS: Final = 62
# By the store of a world, what this process has last written there.
_written: Final = weakref.WeakKeyDictionary[dist.Store, bytes]()


def unique_name(name: str | None, store: dist.Store, rank: int, timeout_s: float, epoch: int = 0) -> str:
    """Return `name` followed by the number of times that this rank has taken the name before: `tp:0`, `tp:1`.

    The name is counted before its group is created, and stays counted if the creation fails. Ranks that make the same
    attempts therefore get the same names, even if only some of them saw an attempt fail. The counts are kept in the
    world's store, so in a new world all ranks start from 0.

    Args:
        name: The caller's name for the group; None means "group".
        store: The world's store.
        rank: This process's global rank.
        timeout_s: How long to wait for the store's answer, in seconds.
        epoch: That of the world; from the first change of members on it ends the name: `tp:0@1`.
    """
    return _in_epoch(_count({"group" if name is None else name: 1}, store, rank, timeout_s), epoch)[0]


def next_names(
    round_name: str, names: Sequence[str], store: dist.Store, rank: int, timeout_s: float, epoch: int = 0
) -> tuple[str, list[str]]:
    """Return a unique name for this round of agreement, and the unique names that `names` get if the ranks agree.

    Only `use_names` counts the group names. Ranks that disagree may have asked for different groups; if they counted
    them, their numbers would diverge.
    """
    unique, *found = _count({round_name: 1, **dict.fromkeys(names, 0)}, store, rank, timeout_s)
    return unique, _in_epoch(found, epoch)


def use_names(names: Sequence[str], store: dist.Store, rank: int, timeout_s: float) -> None:
    """Count `names` as used, after their groups have been agreed on."""
    _count(dict.fromkeys(names, 1), store, rank, timeout_s)


def _in_epoch(names: list[str], epoch: int) -> list[str]:
    """Return the names of groups in an epoch: a process has groups of several epochs while it changes to the next."""
    return [f"{name}@{epoch}" for name in names] if epoch else names


def _count(added: Mapping[str, int], store: dist.Store, rank: int, timeout_s: float) -> list[str]:
    """Add `added` to the count of each name; return each as `name:count`, with the count before the addition.

    All counts of a rank are one value, so the number of names does not change how often the store is asked. It is asked
    once where this rank has asked it before: it then knows what it has written.
    """
    for base in added:
        if not isinstance(base, str) or not base.isprintable() or not base or ":" in base:
            raise UsageError(f"group_name must be printable text without a colon, not {base!r}")

    def count() -> list[str]:
        key = f"group_coordinator/created/{rank}"
        with _lock:
            known = _written.get(store, b"")
            while True:
                counts = _decoder.decode(known or b"{}")
                names = [f"{base}:{counts.get(base, 0)}" for base in added]
                counts |= {base: counts.get(base, 0) + number for base, number in added.items() if number}
                # Its value is this call's own, so that a store which already holds it cannot seem to have taken it now.
                own = msgspec.json.encode({**counts, _MARK: secrets.randbits(_MARK_BITS)})
                found = store.compare_set(key, known.decode(), own.decode())
                if found == own:
                    _written[store] = own
                    return names
                # The store has another value, and returns it; or none, and returns what was expected.
                known = b"" if found == known else found

    where = f"creating group {' and '.join(map(repr, added))} (rank {rank})"
    return ask_store(count, where, timeout_s)
