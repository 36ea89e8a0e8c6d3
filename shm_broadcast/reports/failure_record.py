"""What broke a group: the record that its ranks share, and how an error becomes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from shm_broadcast.errors import CommError, CommTimeoutError, PeerLostError

__all__ = ["FailureKind", "FailureRecord", "failure_of", "interruption_of", "other_calls", "time_out_of"]

FailureKind = Literal["timeout", "lost", "left", "interrupted", "failed"]


class FailureRecord(msgspec.Struct, frozen=True):
    """A failure record: what broke a group. The first one published counts for all ranks.

    Attributes:
        kind: Why the group broke.
        ranks: Global ranks at fault, ascending.
        by: Global rank that found the failure.
        operation: The call in which it found the failure.
        within_s: Deadline of that call in seconds; 0 unless `kind` is "timeout".
        detail: Further text: pids, process states, the last known call of the ranks at fault.
    """

    kind: FailureKind
    ranks: tuple[int, ...]
    by: int
    operation: str
    within_s: float = 0.0
    detail: str = ""


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def failure_of(
    error: BaseException,
    rank: int,
    what: str,
    describe: Callable[[Sequence[int]], str] = _named,
    within_s: float = 0.0,
) -> FailureRecord:
    """Return the record of `error`, which ends the call `what` of `rank` and with it the group.

    An error that is no `CommError`, such as that of Ctrl-C, has interrupted the rank. `describe` returns the
    text on the ranks at fault. `within_s` is the deadline that has passed, in seconds; if it is not known,
    the record holds only the text of the time-out.
    """
    if isinstance(error, CommTimeoutError) and error.missing and within_s:
        return FailureRecord("timeout", error.missing, rank, what, within_s, describe(error.missing))
    if isinstance(error, PeerLostError) and error.peers:
        return FailureRecord("lost", error.peers, rank, what, detail=describe(error.peers))
    if isinstance(error, CommError):
        return FailureRecord("failed", (), rank, what, detail=str(error))
    return interruption_of(error, rank, what)


def interruption_of(error: BaseException, rank: int, what: str) -> FailureRecord:
    """Return the record of what a signal handler has raised in the call `what` of `rank`."""
    return FailureRecord("interrupted", (rank,), rank, what, detail=f"{rank} ({type(error).__name__})")


def other_calls(name: str, number: int, calls: Iterable[tuple[int, str, int]]) -> str:
    """Return which ranks have come to another call than `name` under its `number`, in brackets; "" if none has.

    `calls` holds for each rank that rank, the name of the call in which it waits, and its number.
    """
    others = [
        f"rank {rank} made {other} #{number}" for rank, other, its in calls if its == number and other != name
    ]
    return f" (at different calls: {', '.join(others)})" if others else ""


def time_out_of(record: FailureRecord, rank: int) -> str:
    """Return what a time-out means to `rank`, for the text of its error."""
    if not record.ranks:
        return f"every rank arrived{record.detail} but the transfer did not finish"
    if record.ranks == (rank,):
        return "the other ranks had given up before this rank came: no answer from it"
    text = f"no answer from {'rank' if len(record.ranks) == 1 else 'ranks'} {record.detail}"
    return f"the other ranks had given up before this rank came: {text}" if rank in record.ranks else text
