"""How the last epoch's groups end: what its ranks do together before memory that devices share is freed.

See *The end of an epoch* in `device_comm/DESIGN.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import ask_store, pause_after
from coordinator.graph_capture import CaptureGuard
from device_comm.base import DeviceCommunicator
from shm_broadcast.errors import CommTimeoutError, GroupBrokenError, PeerLostError

__all__ = ["NOTHING", "TELL_S", "Ending", "Meeting", "ending_of"]

_OK: Final = "ok"

TELL_S: Final = 0.15
"""How long an interrupted rank tries to tell the others, in seconds: Ctrl-C must take effect soon."""


class Ending(NamedTuple):
    """How the groups of an epoch end, as this rank does it. The steps come in this order, and may be repeated.

    Attributes:
        check: Raises `CommError` if the device has failed, without waiting for it.
        quiesce: Ends all work on the device within some seconds, and lets go of the other ranks' memory. Raises
            `CommError` if the device has failed or does not come to rest.
        met: Takes note that these ranks have done the same.
        destroy: Destroys the groups.
        follow: Takes note that the groups of another epoch have taken the place of these; gets both epochs.
    """

    check: Callable[[], None]
    quiesce: Callable[[float], None]
    met: Callable[[Collection[int]], None]
    destroy: Callable[[], None]
    follow: Callable[[int, int], None]


def _nothing(*_: object) -> None:
    """Do nothing."""


NOTHING: Final = Ending(_nothing, _nothing, _nothing, _nothing, _nothing)
"""The `Ending` of a process that joins, which has no groups of the last epoch."""


def ending_of(
    communicators: Sequence[DeviceCommunicator],
    guards: Sequence[CaptureGuard],
    destroy: Callable[[], None],
) -> Ending:
    """Return the `Ending` of groups with these parts; NCCL ends in their order, which all ranks share."""

    def check() -> None:
        for each in communicators:
            each.check_device()

    def quiesce(timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for each in communicators:
            each.end_calls(max(deadline - time.monotonic(), 0.0))
        for each in communicators:
            each.quiesce(max(deadline - time.monotonic(), 0.0))

    def met(ranks: Collection[int]) -> None:
        for each in communicators:
            each.met(ranks)

    def follow(last: int, epoch: int) -> None:
        for each in guards:
            each.followed_by = last, epoch

    return Ending(check, quiesce, met, destroy, follow)


class Meeting:
    """A barrier of members on the store, at which a member that cannot come says why."""

    def __init__(
        self, store: dist.Store, number: int, me: int, dead: Callable[[], Collection[int]], where: str
    ) -> None:
        """Send nothing yet.

        Args:
            store: That of the line of epochs.
            number: The attempt.
            me: This member.
            dead: Returns the members that have ended.
            where: Begins the texts of errors.
        """
        self._store = store
        self._number = number
        self._me = me
        self._dead = dead
        self._where = where

    def come(self, ranks: Mapping[int, int], timeout_s: float) -> None:
        """Wait until all members in `ranks`, which maps each member to its rank, have come.

        Raises:
            GroupBrokenError: A member cannot come, with its reason.
            PeerLostError: A member has ended.
            CommTimeoutError: A member did not come in time, or the store does not answer.
            NativeError: The store is gone.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        self._say(_OK, timeout_s)
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            said = ask_store(lambda: self._said(ranks), self._where, left_s)
            reason = next((each for each in said.values() if each != _OK), "")
            if reason:
                raise GroupBrokenError(f"{self._where}: {reason}")
            missing = ranks.keys() - said.keys()
            if not missing:
                return
            gone = sorted(ranks[member] for member in missing.intersection(self._dead()))
            if gone:
                raise PeerLostError(f"{self._where}: rank(s) {gone} ended", peers=gone)
            if time.monotonic() >= deadline:
                late = sorted(ranks[member] for member in missing)
                raise CommTimeoutError(
                    f"{self._where}: rank(s) {late} have not let go of this epoch within {timeout_s:.1f} s",
                    missing=late,
                )
            time.sleep(pause_after(time.monotonic() - began))

    def refuse(self, reason: str, timeout_s: float) -> None:
        """Tell the others why this member does not come, so that they stop waiting for it.

        Raises for the store as `come` does.
        """
        self._say(reason, timeout_s)

    def _say(self, what: str, timeout_s: float) -> None:
        ask_store(lambda: self._store.set(self._key("rest", self._me), what), self._where, timeout_s)

    def _said(self, members: Collection[int]) -> dict[int, str]:
        """Return what members have said: that they are at rest, or why not, or why they have left the attempt."""
        found: dict[int, str] = {}
        for member in members:
            for step in ("rest", "made"):
                key = self._key(step, member)
                if member in found or not self._store.check([key]):
                    continue
                said = self._store.get(key).decode()
                # An "ok" below `made` is no rest: in a planned change all members have written it before.
                if step == "rest" or said != _OK:
                    found[member] = said
        return found

    def _key(self, step: str, member: int) -> str:
        return f"{self._number}/{step}/{member}"
