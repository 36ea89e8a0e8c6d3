"""In which collectives the ranks of a group wait, as they report it, and which ranks a call names if it cannot end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

__all__ = ["Announcer", "Arrival", "late_for"]


class Arrival(msgspec.Struct, frozen=True):
    """The call in which a rank waits or has waited: the operation and its number among the collectives of its plane.

    Attributes:
        operation: Its name.
        number: Its number; at least 1.
        is_over: Whether that wait has ended and the group goes on. A call of several rounds waits in each of them.
    """

    operation: str
    number: int
    is_over: bool = False


class Announcer:
    """Reports in which collective of each plane this rank waits, the last one if it waits in several. Thread-safe."""

    def __init__(self, arrive: Callable[[str, Arrival], None]) -> None:
        """Report by `arrive`, to which a plane and an arrival are given."""
        self._arrive = arrive
        # By plane and number, of which only the last one is kept. No lock: a signal handler may interrupt a report, and
        # wait for a thread that makes another one.
        self._waits: dict[str, dict[int, Arrival]] = {}

    def begin_wait(self, plane: str, arrival: Arrival) -> None:
        """Report that this rank waits in `arrival`, or, if it has come to a later collective, that one again."""
        waits = self._waits.setdefault(plane, {})
        waits[arrival.number] = arrival
        self._report(plane, waits)

    def end_wait(self, plane: str, number: int) -> None:
        """Report that the wait in the collective `number` is over, if that is the one that was reported last."""
        waits = self._waits.get(plane, {})
        if (ended := waits.get(number)) is not None and not ended.is_over:
            waits[number] = msgspec.structs.replace(ended, is_over=True)
            self._report(plane, waits)

    def _report(self, plane: str, waits: dict[int, Arrival]) -> None:
        """Report the last of `waits`, and drop the others."""
        told: Arrival | None = None
        # If another thread reports meanwhile, this report may overtake that one: look again.
        while (last := max(list(waits.values()), key=lambda each: each.number)) is not told:
            for number in [each for each in list(waits) if each < last.number]:
                waits.pop(number, None)
            self._arrive(plane, last)
            told = last


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
