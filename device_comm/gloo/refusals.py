"""Calls that a rank refuses: how they take their number, and how the other ranks learn of them.

Where ranks share memory, the memory carries a refusal. Between hosts the refusing rank writes it into the world's
store, where a rank that waits in the refused call finds it with the failure record. A call that nobody refuses costs
nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from shm_broadcast.errors import CommError, DisagreementError

if TYPE_CHECKING:
    from device_comm.health import GroupHealth, Operation

__all__ = ["Refusal", "RefusalStore", "Refusals"]

# For each plane of a group, those in shared memory that carry its collectives; "device" is for several hosts.
_SHARED_PLANES: Final = {"host": ("shared host",), "device": ("shared", "device")}
# How often a rank that has refused a call looks whether the others have too: a store answers in 5 to 40 us.
_LOOK_S: Final = 0.01


class Refusal(msgspec.Struct, frozen=True):
    """Which rank has refused a call, and the text of its error."""

    rank: int
    reason: str


class RefusalStore(Protocol):
    """Where ranks tell those on other hosts what they refuse. Every method takes at most about two seconds."""

    def refuse(self, plane: str, number: int, count: int, reason: str) -> None:
        """Record that this rank refuses call `number` of `plane`, and that it has refused `count` calls there."""

    def refusal(self, plane: str, number: int) -> Refusal | None:
        """Return who has refused call `number` of `plane`, if a rank has."""

    def refusals(self, plane: str) -> dict[int, int]:
        """Return how many calls of `plane` each other rank has refused, by global rank."""


class Refusals:
    """The calls that one rank of a group refuses."""

    def __init__(self, health: GroupHealth) -> None:
        """Begin with none, and with no store."""
        self._health = health
        self._store: RefusalStore | None = None
        # How many calls of each plane this rank has refused of which no memory tells all the others.
        self._counts = {"host": 0, "device": 0}
        # How many of those of the host plane all ranks are known to have refused.
        self._settled = 0
        # A signal handler may refuse a call while this thread holds it.
        self._lock = threading.RLock()

    @property
    def untold(self) -> int:
        """Return how many calls of a host plane without shared memory this rank has refused."""
        return self._counts["host"]

    def use(self, store: RefusalStore) -> None:
        """Tell ranks on other hosts through `store` from now on."""
        self._store = store

    def refuse(self, plane: str, reason: str) -> None:
        """Take the number of a collective of `plane`, "host" or "device", that this rank refuses.

        On the ranks that share memory with this one, the call with that number raises `DisagreementError` with
        `reason`, and the next calls belong together again. On the others it raises that too, and the group is broken.
        Over NCCL nobody is told.
        """
        planes = self._health.planes
        told = [planes[name] for name in _SHARED_PLANES[plane] if name in planes]
        for each in told:
            each.refuse(reason)
        if plane == "host" and not told:
            with suppress(CommError):  # the group has come to its end
                self.tell(plane, reason)

    def tell(self, plane: str, reason: str) -> None:
        """Take the number of a call of `plane` between hosts, and tell the other ranks that this one refuses it."""
        with self._lock:
            # The count comes first: an exception of a signal handler behind it leaves a difference that others notice.
            self._counts[plane] += 1
            number = self._health.begin(plane, "a refused call").number
            if self._store is not None:
                self._store.refuse(plane, number, self._counts[plane], reason)

    def check(self, operation: Operation) -> None:
        """Break the group and raise if another rank has refused the collective `operation`.

        Raises:
            DisagreementError: It has; its views hold the reason.
        """
        if self._store is None or not operation.number:
            return
        refusal = self._store.refusal(operation.plane, operation.number)
        if refusal is None or refusal.rank == self._health.rank:
            return
        what = f"refused {refusal.reason}"
        error = DisagreementError(
            f"{self._health.where(operation)}: rank {refusal.rank} {what}; the group is now unusable, destroy it",
            views={refusal.rank: what},
        )
        self._health.fail(error, str(operation))
        raise error

    def compare(self, operation: Operation, numbers: Sequence[int]) -> None:
        """Break the group and raise unless all ranks' calls of this name have the same number.

        Raises:
            DisagreementError: They do not: a rank has refused a call that others have made. All ranks raise it.
        """
        if len(set(numbers)) == 1:
            return
        ranks = self._health.ranks
        views = {rank: f"{operation.name} #{number}" for rank, number in zip(ranks, numbers, strict=True)}
        listed = "; ".join(f"rank {rank} made {call}" for rank, call in views.items())
        error = DisagreementError(
            f"{self._health.where(operation)}: a rank has refused a call that others have made, so the calls do not "
            f"belong together: {listed}; the group is now unusable, destroy it",
            views=views,
        )
        self._health.fail(error, str(operation))
        raise error

    def settle(self, operation: Operation, timeout_s: float) -> None:
        """Return when all ranks have refused as many calls of the host plane as this one.

        The barrier `operation` of this rank would else end the refused one of the others. Raises as `GroupHealth.wait`.
        """
        if self._store is not None and self.untold > self._settled:
            count = self.untold
            self._health.wait(operation, _Settling(self._store, self._health, count), timeout_s)
            self._settled = count


class _Settling:
    """The wait until the others have refused what this rank has refused; see `Pollable`."""

    def __init__(self, store: RefusalStore, health: GroupHealth, count: int) -> None:
        self._store = store
        self._others = [rank for rank in health.ranks if rank != health.rank]
        self._count = count
        self._behind: list[int] = self._others

    def poll(self, slice_s: float) -> bool:
        end = time.monotonic() + slice_s
        while True:
            refused = self._store.refusals("host")
            self._behind = [rank for rank in self._others if refused.get(rank, 0) < self._count]
            if not self._behind or time.monotonic() >= end:
                return not self._behind
            time.sleep(_LOOK_S)

    def pending(self) -> Sequence[int]:
        return self._behind
