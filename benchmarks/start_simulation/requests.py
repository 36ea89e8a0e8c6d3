"""What a rank asks the store while a world starts, recorded from the code that real ranks run."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import torch.distributed as dist

from benchmarks.agreement import RANKS_PER_HOST, view_of
from benchmarks.results import BenchmarkError
from coordinator.bootstrap.agreement import outcomes
from coordinator.bootstrap.agreement.agreeing import agree
from coordinator.bootstrap.agreement.attendance import Attendance
from coordinator.bootstrap.group_names import GroupNames
from shm_broadcast.liveness import PeerWatch

__all__ = ["WAKING", "Request", "Round", "record"]

WAKING: Final = "set the outcome"
"""The kind of the request that wakes those that wait."""

GROUPS: Final = ("tp", "pp", "dp", "ep", "dcp")
# With tensor parallelism over the ranks of each host, its first rank tells the others how to map the memory of these.
ON_ONE_HOST: Final = ("tp", "ep", "dcp")
OFFER: Final = "x" * 124
LIMIT_S: Final = 120.0


@dataclasses.dataclass(frozen=True)
class Request:
    """One request to the store.

    Attributes:
        kind: The operation, or `WAKING`.
        keys: How many keys it names.
        sent: Bytes of its arguments.
        received: Bytes of the answer.
        before_s: Processor time of the rank since its last answer.
    """

    kind: str
    keys: int
    sent: int
    received: int
    before_s: float


@dataclasses.dataclass(frozen=True)
class Round:
    """An agreement of all ranks.

    Attributes:
        first: What the rank asks that comes first, until it has come.
        others: What another one asks until it has come.
        ending: What the one asks that comes last, behind that.
        told: What one asks that waits for it, from the wait on.
        ending_s: Processor time of the last one, and of another one, behind its last answer.
        told_s: See there.
        behind: What each asks between this agreement and the next one.
    """

    first: list[Request]
    others: list[Request]
    ending: list[Request]
    told: list[Request]
    ending_s: float
    told_s: float
    behind: list[Request]


class _Recorder:
    """Passes operations on to a store in memory and records them."""

    def __init__(self, store: Any) -> None:
        self.requests: list[Request] = []
        self.after_s = 0.0
        self._store = store
        self._answered = threading.local()

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """Lend this store, and record the processor time behind the last answer."""
        yield self
        self.after_s = time.thread_time() - self._answered.at

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            before_s = time.thread_time() - getattr(self._answered, "at", 0.0)
            keys = len(args[0]) if isinstance(args[0], list) else 1
            place = len(self.requests)
            kind = WAKING if name == "set" and args[0] == outcomes.KEY else name
            self.requests.append(Request(kind, keys, sum(map(_size_of, args)), 0, before_s))
            answer = getattr(self._store, name)(*args)
            self.requests[place] = dataclasses.replace(self.requests[place], received=_size_of(answer))
            self._answered.at = time.thread_time()
            return answer

        return ask


def _size_of(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_size_of, value))
    return len(value) if isinstance(value, str | bytes) else 8


def note_of(rank: int) -> str:
    """Return what a rank tells the others on its host with the groups of the layout."""
    offering = ON_ONE_HOST if rank % RANKS_PER_HOST == 0 else ()
    return msgspec.json.encode([OFFER if group in offering else "" for group in GROUPS]).decode()


def record(ranks: int) -> list[Round]:
    """Return the agreements of a start: that of the world, and that of the groups of a layout."""
    world = _record_agreement(
        ranks, {"world_size": str(ranks), "backend": "gloo"}, lambda _: "", has_watch=False
    )
    rows = [list(range(first, first + RANKS_PER_HOST)) for first in range(0, ranks, RANKS_PER_HOST)]
    layout = _record_agreement(ranks, {"group_ranks": str([rows] * len(GROUPS))}, note_of, has_watch=True)
    names = _Recorder(dist.HashStore())
    GroupNames(names, 0, LIMIT_S).take_round("layout", GROUPS)  # type: ignore[arg-type]
    return [dataclasses.replace(world, behind=names.requests), layout]


def _record_agreement(
    ranks: int, facts: dict[str, str], note: Callable[[int], str], *, has_watch: bool
) -> Round:
    """Let three ranks agree for real: the first one, one that waits, and the last one. The others have come before."""
    store = dist.HashStore()
    # The second to last does not fill a word of `come` when it comes, as one of 62 does, which asks for more.
    roles = (0, ranks - 2, ranks - 1)
    for rank in set(range(ranks)) - set(roles):
        own = view_of(rank, {}, note(rank))
        attendance = Attendance(store, rank, range(ranks))
        attendance.claim(msgspec.structs.replace(own, digest="0" * 32, nonce="0" * 16))
        if not has_watch:
            attendance.introduce(own.process.boot_id)
        attendance.come()
    recorders = [_Recorder(store) for _ in roles]
    threads = []
    for rank, recorder in zip(roles, recorders, strict=True):
        threads.append(
            threading.Thread(target=_agree, args=(recorder, rank, ranks, facts, note(rank), has_watch))
        )
        threads[-1].start()
        while rank != ranks - 1 and not any(each.kind == "wait" for each in recorder.requests):
            if not threads[-1].is_alive():
                raise BenchmarkError("a rank did not agree; its error is above")
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    first, middle, last = recorders
    come, first_come = (
        next(place for place, each in enumerate(asked.requests) if each.kind == "wait")
        for asked in (middle, first)
    )
    return Round(
        first=first.requests[:first_come],
        others=middle.requests[:come],
        ending=last.requests[come:],
        told=middle.requests[come:],
        ending_s=last.after_s,
        told_s=middle.after_s,
        behind=[],
    )


def _agree(
    recorder: _Recorder, rank: int, ranks: int, facts: dict[str, str], note: str, has_watch: bool
) -> None:
    own = view_of(rank, facts, note)
    watch = PeerWatch(own.process, {}) if has_watch else None
    store: Any = recorder
    agree(store, "the world", rank, range(ranks), own, LIMIT_S, watch, connect=recorder.lent)
