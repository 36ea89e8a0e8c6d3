"""The store of a job as torch sees it: a `dist.Store` whose keys rank 0 serves to those that hold the job's secret."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from coordinator.security.records import (
    Add,
    Answer,
    Append,
    Await,
    Count,
    Has,
    Put,
    Question,
    Read,
    Remove,
    Swap,
)
from coordinator.stores import base_of

if TYPE_CHECKING:  # they load zmq, which processes without a secret do not need
    from coordinator.security.client import StoreClient
    from coordinator.security.server import StoreServer

__all__ = ["SecuredStore", "close", "generation_facts", "secured"]


# A store of torch's that wraps one of these keeps its C++ half only, whose methods look for those of the Python half.
_open: Final[set[SecuredStore]] = set()


class SecuredStore(dist.Store):
    """A store over an encrypted connection. Every rank is a client, rank 0 of its own server too. Thread-safe.

    It has the operations of torch's stores with torch's results and errors. A wait holds up no other thread, so `clone`
    returns the store itself. C++ calls the methods with bytes where Python code passes text.

    Attributes:
        host: Numeric address of rank 0.
        port: Its TCP port.
    """

    def __init__(self, client: StoreClient, host: str, port: int, server: StoreServer | None = None) -> None:
        """Use a connection that was welcomed, and on rank 0 the server; `close` closes both."""
        super().__init__()
        self.host = host
        self.port = port
        self._client = client
        self._server = server
        _open.add(self)

    @property
    def generation(self) -> str:
        """Return the random text that tells this start of the store from all others."""
        return self._client.generation.hex()

    def close(self) -> None:
        """Close the connection, and on rank 0 end the store. Idempotent; ends every wait."""
        try:
            self._client.close()
        finally:
            if self._server is not None:
                self._server.close()
            _open.discard(self)

    def watch(self, on_lost: Callable[[int, str], None]) -> None:
        """Call `on_lost` with each rank that is lost, now or later, and with how it was; from any thread."""
        self._client.watch(on_lost)

    # --- what torch and Gloo call -----------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask(Put([key], [_bytes(value)]), f"set({key!r})")

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        return self.multi_get([key])[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there; raise `DistStoreError` if they are not within the timeout."""
        within_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._ask(Await(list(keys), int(within_s * 1000)), f"wait({list(keys)})", within_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return self._ask(Has(list(keys)), f"check({list(keys)})") is True

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number; return the sum."""
        total = self._ask(Add(key, int(amount)), f"add({key!r})")
        assert isinstance(total, int)
        return total

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the expected value, or is new and an empty one is expected; return what it has then."""
        question = Swap(key, _bytes(expected_value), _bytes(desired_value))
        found = self._ask(question, f"compare_set({key!r})")
        assert isinstance(found, bytes)
        return found

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return self._ask(Remove(key), f"delete_key({key!r})") is True

    def num_keys(self) -> int:
        """Return the number of keys."""
        count = self._ask(Count(), "num_keys()")
        assert isinstance(count, int)
        return count

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a key's value."""
        self._ask(Append(key, _bytes(value)), f"append({key!r})")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, once all are there."""
        within_s = self._timeout_s
        values = self._ask(Read(list(keys), int(within_s * 1000)), f"get({list(keys)})", within_s)
        assert isinstance(values, list)
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once."""
        self._ask(Put(list(keys), [_bytes(value) for value in values]), f"set({list(keys)})")

    def has_extended_api(self) -> bool:
        """Return that `append`, `multi_get` and `multi_set` are there."""
        return True

    def clone(self) -> SecuredStore:
        """Return this store: it may be used by several threads at once, one of which waits."""
        return self

    # The names under which C++ looks for two of them.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    @property
    def _timeout_s(self) -> float:
        """Return the timeout that torch's `set_timeout` has set, in seconds."""
        of_torch: Any = self  # torch's stubs do not know it
        timeout: timedelta = of_torch.timeout
        return timeout.total_seconds()

    def _ask(self, question: Question, what: str, timeout_s: float | None = None) -> Answer:
        within_s = self._timeout_s if timeout_s is None else timeout_s
        return self._client.ask(question, within_s, f"the store's {what}")

    def __repr__(self) -> str:
        """Name the address, never a key."""
        return f"<SecuredStore at {self.host}:{self.port}>"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def secured(store: dist.Store) -> SecuredStore | None:
    """Return the secured store below any prefixes of `store`; None if it is another one."""
    base = base_of(store)
    return base if isinstance(base, SecuredStore) else None


def close(store: dist.Store | None) -> None:
    """Close the secured store below any prefixes of `store`; does nothing to another one, or if there is none."""
    base = None if store is None else secured(store)
    if base is not None:
        base.close()


def generation_facts(store: dist.Store) -> dict[str, str]:
    """Return what ranks that meet in `store` must hold alike: the generation of a secured one."""
    base = secured(store)
    return {} if base is None else {"store generation": base.generation}
