"""How the ranks of a Gloo group find each other: with three operations of the store each, however many they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from coordinator.stores import base_of

# Between two looks into a file; torch looks as often.
_PAUSE_S: Final = 0.01


class GatheredAddresses(dist.Store):
    """A store for one group that connects at its creation. It fetches all addresses when Gloo asks for the first.

    Gloo publishes its address as `<prefix>/<rank>`, then asks for that of each rank in turn, `wait` and `get`: of n
    ranks each has 2 n + 1 operations, and the process that serves the store 2 n² + n. Whatever else is asked goes to
    the store below. C++ looks for the methods in this Python half, so the user of the group must keep a
    reference to it.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, is_over: Callable[[], bool] | None = None
    ) -> None:
        """Ask nothing yet.

        Args:
            store: The store below, of this group only.
            rank: This process's rank in the group.
            size: Number of ranks in the group.
            is_over: Whether nobody wants the group any more. A wait for what is in a file then ends: torch's would go
                on until the deadline of the store, if the last rank has removed the file meanwhile.
        """
        super().__init__()
        self._store: Any = store  # torch's stubs lack some methods
        self._rank = rank
        self._size = size
        self._is_over = is_over or _never
        # Torch itself looks into a file again and again.
        self._is_polled = isinstance(base_of(store), dist.FileStore)
        self._addresses: list[str] = []
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key; the first one that ends with this rank's number says under which keys the addresses are."""
        own = f"/{self._rank}"
        if not self._addresses and key.endswith(own):
            prefix = key.removesuffix(own)
            self._addresses = [f"{prefix}/{rank}" for rank in range(self._size)]
        self._store.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there, and with the address of one rank those of all."""
        missing = [key for key in keys if key not in self._found]
        if not missing:
            return
        is_address = set(missing) <= set(self._addresses)
        wanted = self._addresses if is_address else missing
        if self._is_polled:
            self._poll(wanted, self._store.timeout if timeout is None else timeout)
        elif timeout is None:
            self._store.wait(wanted)
        else:
            self._store.wait(wanted, timeout)
        if is_address:
            self._found = dict(zip(wanted, self._store.multi_get(wanted), strict=True))
            self._is_over = _never  # it holds the group, which holds this

    def _poll(self, keys: Sequence[str], timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self._is_over():
            if self._store.check(keys):
                return
            if time.monotonic() > end:
                raise dist.DistStoreError(f"wait timeout after {timeout.total_seconds():g} s, keys: {keys}")
            time.sleep(_PAUSE_S)
        raise dist.DistStoreError("nobody wants the group any more")

    def get(self, key: str) -> bytes:
        """Return the value of a key; an address that has come is handed out once."""
        found = self._found.pop(key, None)
        return bytes(self._store.get(key)) if found is None else found

    # --- passed on -----------------------------------------------------------------------------------------------

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number; return the sum."""
        return int(self._store.add(key, amount))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, once all are there."""
        return list(self._store.multi_get(list(keys)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Set several keys at once."""
        self._store.multi_set(list(keys), list(values))

    def has_extended_api(self) -> bool:
        """Return whether the store below has more than the basic operations."""
        return bool(self._store.has_extended_api())


def _never() -> bool:
    return False


__all__ = ["GatheredAddresses"]
