"""Who has come to an agreement: a few counters in the store, however many ranks there are.

| key | value |
|---|---|
| `view/<rank>` | the rank's view without its facts |
| `come/<word>` | a bit for each of 62 ranks, set behind its view; a store adds numbers of 64 bits |
| `full` | how many of these words are full, if there are several |
| `kernel/<boot id>` | the ranks on one kernel, each followed by a blank |
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.agreement.views import View, read_view, write_view

__all__ = ["Attendance"]

_BITS: Final = 62


class Attendance:
    """Who of `ranks` has come, as a store says. One thread at a time uses its store."""

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        """Use `store`, whose keys belong to this agreement only; `rank` is this process's."""
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._words = range(-(-len(ranks) // _BITS))

    def claim(self, view: View) -> View | None:
        """Publish this rank's view, not its facts; return that of another process that has taken the rank, or None."""
        own = write_view(view)
        found = self._store.compare_set(f"view/{self._rank}", "", own).decode()
        return None if found == own else read_view(found.encode())

    def introduce(self, boot_id: str) -> None:
        """Tell the other ranks on this kernel that this one is there."""
        store: Any = self._store  # torch's stubs do not know `append`
        store.append(f"kernel/{boot_id}", f"{self._rank} ")

    def mates(self, boot_id: str) -> list[int]:
        """Return the ranks on this kernel that have introduced themselves, of which there must be one.

        Raises:
            msgspec.MsgspecError: The store holds something else.
        """
        return [msgspec.json.decode(each, type=int) for each in self._store.get(f"kernel/{boot_id}").split()]

    def come(self) -> bool:
        """Say that this rank has come; return whether it is the last one."""
        word, bit = divmod(self._ranks.index(self._rank), _BITS)
        if self._store.add(f"come/{word}", 1 << bit) != self._full(word):
            return False
        return len(self._words) == 1 or self._store.add("full", 1) == len(self._words)

    def present(self) -> list[int]:
        """Return the ranks that have come."""
        words = [self._store.add(f"come/{word}", 0) for word in self._words]
        return [rank for place, rank in enumerate(self._ranks) if words[place // _BITS] >> place % _BITS & 1]

    def views(self, ranks: Sequence[int]) -> dict[int, View]:
        """Return the views of ranks, of which all have published theirs."""
        found = self._store.multi_get([f"view/{rank}" for rank in ranks]) if ranks else []
        return {rank: read_view(each) for rank, each in zip(ranks, found, strict=True)}

    def has_view(self, rank: int, within_s: float) -> bool:
        """Return whether a rank that is about to publish its view has done so within some seconds."""
        end = time.monotonic() + within_s
        while not self._store.check([f"view/{rank}"]):
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def _full(self, word: int) -> int:
        return (1 << min(_BITS, len(self._ranks) - word * _BITS)) - 1
