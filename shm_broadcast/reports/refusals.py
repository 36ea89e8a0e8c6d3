"""Calls that a rank refuses: how they take their number, and how ranks that share no memory learn of them.

Where ranks share memory, the memory carries a refusal. Else the refusing rank writes it into the world's store, where a
rank that waits in the refused call finds it. Gloo's messages do not say to which call they belong, so a rank that has
refused a call makes no further collective over Gloo before the store says that all others have refused as many.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from shm_broadcast.errors import CommError, DisagreementError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["Refusal", "RefusalStore", "Refusals"]

# What carries the collectives of a plane, and so their refusals: shared memory, or the transports between hosts.
_CARRIERS: Final = {"host": ("shared host", "host"), "device": ("shared", "device")}
# How often a rank that has refused a call looks whether the others have too: a store answers in 5 to 40 us.
_LOOK_S: Final = 0.01
# The least that is left of a deadline: 0 would mean "without limit".
_LEAST_S: Final = 0.001


class Refusal(msgspec.Struct, frozen=True):
    """Which rank has refused a call, and the text of its error."""

    rank: int
    reason: str


class RefusalStore(Protocol):
    """Where ranks tell others what they refuse. Every method takes at most about two seconds."""

    @property
    def is_reachable(self) -> bool:
        """Return whether the store has always answered so far."""

    def refuse(self, plane: str, number: int, count: int, reason: str) -> None:
        """Record that this rank refuses call `number` of `plane`, and that it has refused `count` calls there."""

    def refusal(self, plane: str, number: int) -> Refusal | None:
        """Return who has refused call `number` of `plane`, if a rank has."""

    def refusals(self, plane: str) -> dict[int, int]:
        """Return how many calls of `plane` each other rank has refused, by global rank."""


class Operation(Protocol):
    """A call in progress; its number is 0 if it is no collective."""

    @property
    def plane(self) -> str:
        """Return the name of its plane."""

    @property
    def number(self) -> int:
        """Return its number among the collectives of its plane."""


class Health(Protocol):
    """What is needed of the state of a group; see `GroupHealth` of `device_comm`."""

    rank: int
    ranks: tuple[int, ...]
    planes: dict[str, Any]
    refusals: Refusals

    def where(self, operation: object) -> str:
        """Return the beginning of an error's text."""

    def begin(self, plane: str, name: str) -> Operation:
        """Take the number of a collective, or raise why the group cannot be used."""

    def fail(self, error: BaseException, what: str) -> None:
        """Break the group because of `error`, which was found in the call `what`."""

    def wait(self, operation: Any, work: Any, timeout_s: float | None) -> None:
        """Wait for `work` in the call `operation`."""


class Refusals:
    """The calls that one rank of a group refuses. It holds no reference to the group's health, which holds it."""

    def __init__(self) -> None:
        """Begin with none, and with no store."""
        self._store: RefusalStore | None = None
        # How many calls of each plane this rank has refused of which no memory tells all the others.
        self._counts = {"host": 0, "device": 0}
        # How many of those all ranks are known to have refused.
        self._settled = {"host": 0, "device": 0}
        # A signal handler may refuse a call while this thread holds it.
        self._lock = threading.RLock()

    def use(self, store: RefusalStore) -> None:
        """Tell ranks through `store` what no memory tells them, from now on."""
        self._store = store

    def refuse(self, health: Health, plane: str, reason: str) -> None:
        """Take the number of a collective of `plane`, "host" or "device", that this rank refuses.

        On the ranks that share memory with this one, the call with that number raises `DisagreementError` with
        `reason`, and the next calls belong together again. On the others it raises that too, and the group is broken.
        On accelerators nobody is told.
        """
        for name in _CARRIERS[plane]:
            if name in health.planes:
                health.planes[name].refuse(reason)

    def tell(self, health: Health, plane: str, reason: str) -> None:
        """Take the number of a call of `plane` that no memory carries, and tell the others that this rank refuses it.

        An exception of a signal handler breaks the group: the others may have been told or not.
        """
        try:
            with self._lock:
                self._counts[plane] += 1
                operation = health.begin(plane, "a refused call")
                if self._store is not None:
                    self._store.refuse(plane, operation.number, self._counts[plane], reason)
        except BaseException as error:
            if isinstance(error, CommError) and not raised_by_handler(error):
                return  # the group has come to its end
            health.fail(error, "a refused call")
            raise

    def found(self, health: Health, operation: Operation) -> DisagreementError | None:
        """Break the group and return the error to raise if another rank has refused the collective `operation`."""
        if self._store is None or not operation.number or operation.plane not in self._counts:
            return None
        refusal = self._store.refusal(operation.plane, operation.number)
        if refusal is None or refusal.rank == health.rank:
            return None
        what = f"refused {refusal.reason}"
        text = f"{health.where(operation)}: rank {refusal.rank} {what}; the group is now unusable, destroy it"
        error = DisagreementError(text, views={refusal.rank: what})
        health.fail(error, str(operation))
        return error

    def settle(self, health: Health, operation: Operation, timeout_s: float) -> float:
        """Return what is left of `timeout_s` once all ranks have refused as many calls of a plane as this one.

        The collective `operation` of this rank would else answer the refused one of the others. Raises as
        `GroupHealth.wait`, so `NativeError` if the store is out of reach.
        """
        plane, store = operation.plane, self._store
        count = self._counts[plane]
        if store is None or count == self._settled[plane]:
            return timeout_s
        end = time.monotonic() + timeout_s
        health.wait(operation, _Settling(store, plane, health, count), timeout_s)
        self._settled[plane] = count
        return max(end - time.monotonic(), _LEAST_S)


class _Settling:
    """The wait until the others have refused what this rank has refused; see `Pollable`."""

    def __init__(self, store: RefusalStore, plane: str, health: Health, count: int) -> None:
        self._store = store
        self._plane = plane
        self._others = [rank for rank in health.ranks if rank != health.rank]
        self._count = count
        self._behind: list[int] = self._others

    def poll(self, slice_s: float) -> bool:
        end = time.monotonic() + slice_s
        while True:
            refused = self._store.refusals(self._plane)
            self._behind = [rank for rank in self._others if refused.get(rank, 0) < self._count]
            if not self._behind:
                return True
            if not self._store.is_reachable:
                raise RuntimeError(
                    "the world's store, which is out of reach, cannot say whether other ranks have refused what this "
                    "rank has refused"
                )
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_S)

    def pending(self) -> Sequence[int]:
        return self._behind
