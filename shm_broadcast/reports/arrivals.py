"""In which collectives the ranks of a group wait, as they report it, and which ranks a call names if it cannot end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

__all__ = ["Announcer", "Arrival", "late_for"]


class Arrival(msgspec.Struct, frozen=True):
    """The call in which a rank waits or has waited: the operation and its number among the collectives of its plane.

    Attributes:
        operation: Its name.
        number: Its number; at least 1.
        is_over: Whether that wait has ended well. A call of several rounds waits in each of them.
    """

    operation: str
    number: int
    is_over: bool = False


class Announcer:
    """Reports in which collective of each plane this rank waits, the last one if it waits in several. Thread-safe."""

    def __init__(self, arrive: Callable[[str, Arrival], None]) -> None:
        """Report by `arrive`, to which a plane and an arrival are given."""
        self._arrive = arrive
        self._last: dict[str, Arrival] = {}
        # Held while `arrive` runs, so that reports of several threads arrive in their order. A signal handler may make
        # a call of another plane meanwhile.
        self._lock = threading.RLock()

    def begin_wait(self, plane: str, arrival: Arrival) -> None:
        """Report that this rank waits in `arrival`, unless it has come to a later collective."""
        with self._lock:
            last = self._last.get(plane)
            if last is None or last.number <= arrival.number:
                self._report(plane, arrival)

    def end_wait(self, plane: str, number: int) -> None:
        """Report that the wait in the collective `number` is over, if that is the one that was reported last."""
        if not self._last:  # no call of this group has waited for long
            return
        with self._lock:
            last = self._last.get(plane)
            if last is not None and last.number == number and not last.is_over:
                self._report(plane, msgspec.structs.replace(last, is_over=True))

    def _report(self, plane: str, arrival: Arrival) -> None:
        self._last[plane] = arrival
        self._arrive(plane, arrival)


def late_for(number: int, ranks: Sequence[int], arrivals: Mapping[int, Arrival]) -> list[int]:
    """Return which of `ranks` to name because they have not come to the collective `number`.

    A rank that waits in an earlier collective waits for others, which have not come as far; these alone are named.
    """
    missing = [rank for rank in ranks if rank not in arrivals or arrivals[rank].number < number]
    waits = {
        rank: arrivals[rank].number for rank in missing if rank in arrivals and not arrivals[rank].is_over
    }
    first = min((waits.get(rank, 0) for rank in missing), default=0)
    return [rank for rank in missing if waits.get(rank, 0) == first]
