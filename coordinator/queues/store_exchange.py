"""How ranks of a job with a secret exchange keys and handles of queues: in the secured store, not by Gloo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import run_interruptibly, torch_error
from coordinator.bootstrap.world import World
from coordinator.security.store import secured
from device_comm.health import GroupHealth, Operation
from shm_broadcast import codec
from shm_broadcast.interruption import tolerating
from shm_broadcast.timeouts import as_timedelta

__all__ = ["StoreExchange", "exchange_of"]

_WHAT: Final = "create queue"


class StoreExchange:
    """Gathers objects of a group's ranks through a store. Whoever can read and change Gloo's traffic sees none of them.

    Its calls are collective, in one order on all ranks.
    """

    def __init__(self, store: dist.Store, health: GroupHealth) -> None:
        """Use a store that all ranks reach, below the name of the group."""
        self._store = dist.PrefixStore(f"group_coordinator/queues/{health.name} of {health.ranks[0]}", store)
        self._health = health
        self._round = 0

    def all_gather_object(self, obj: object, timeout_s: float) -> list[Any]:
        """Return every rank's object, in the order of the group.

        Raises:
            CommTimeoutError: Ranks in `.missing` did not call this within `timeout_s`. This error and the
                next three break the group.
            PeerLostError: A rank has died, or another rank has published that.
            NativeError: The store is gone.
            DecodeError: A rank sent what cannot be decoded.
        """
        message = codec.encode(obj).to_bytes()
        self._round += 1
        keys = {rank: f"{self._round}/{rank}" for rank in self._health.ranks}
        operation = Operation("host", _WHAT, 0)

        def exchange() -> list[bytes]:
            store: Any = self._store  # it takes bytes too, of which torch's stubs know nothing
            store.set(keys[self._health.rank], message)
            self._store.wait(list(keys.values()), as_timedelta(timeout_s))
            return self._store.multi_get(list(keys.values()))

        def check() -> None:
            self._health.check_peers(operation)
            self._health.check_record(operation)

        try:
            found = [codec.decode(each) for each in run_interruptibly(exchange, _WHAT, check)]
            if self._round > 2:
                # All ranks have read that round: otherwise they would not have come to this one.
                self._store.delete_key(f"{self._round - 2}/{self._health.rank}")
        except dist.DistStoreError:
            raise self._health.blame(_WHAT, self._missing(keys), timeout_s) from None
        except dist.DistError as error:
            text = f"{self._health.where(_WHAT)}: lost the connection to the store: {error}"
            failure = torch_error(text, "Store")
            self._health.fail(failure, _WHAT)
            raise failure from error
        except BaseException as error:
            # The others wait for this rank in this round or in the next one.
            if not self._health.is_broken:
                self._health.fail(error, _WHAT)
            raise
        return found

    def _missing(self, keys: dict[int, str]) -> list[int]:
        with tolerating(RuntimeError):
            return [rank for rank, key in keys.items() if not self._store.check([key])]
        return []


def exchange_of(
    world: World | None, host_ids: Mapping[int, str], health: GroupHealth
) -> StoreExchange | None:
    """Return the exchange of a group on several hosts whose world has a secured store; None for other groups."""
    if world is None or len(set(host_ids.values())) < 2:
        return None
    return None if secured(world.store) is None else StoreExchange(world.store, health)
