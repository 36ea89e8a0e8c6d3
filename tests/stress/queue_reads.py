"""All ways to read the next message of a queue, with deadlines that pass and handlers that raise meanwhile."""

import asyncio
import inspect
import random
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from coordinator.errors import CommTimeoutError
from shm_broadcast.queue import QueueReader, dequeue_any
from tests.stress.alarms import Alarms
from tests.stress.model import MismatchError, check_same

__all__ = ["PATIENCE_S", "StepMessage", "read_any", "read_next"]

PATIENCE_S = 60.0
STRUCK = 0.3
"""The share of reads in which a handler may raise."""


class StepMessage(msgspec.Struct):
    """The type of a short message, which is sent as a dict."""

    step: int
    data: bytes


@dataclass
class Reading:
    """One call that is to read a message; if it is struck or late, another follows.

    Attributes:
        end: The queue.
        expected: What must come.
        what: What this is, for an error.
        limit_s: The deadline of a call that has one.
        alarms: What may strike it.
        selector: An empty selector, opened where nothing strikes: one that a strike left would be nobody's to close.
        taken: What was read.
        is_checked: Whether the call itself has compared it.
    """

    end: QueueReader
    expected: Any
    what: str
    limit_s: float
    alarms: Alarms
    selector: selectors.BaseSelector | None = None
    taken: list[Any] = field(default_factory=list)
    is_checked: bool = False


def _dequeue(reading: Reading) -> None:
    reading.taken.append(reading.end.dequeue())


def _timed(reading: Reading) -> None:
    reading.taken.append(reading.end.dequeue(reading.limit_s))


def _typed(reading: Reading) -> None:
    expected = reading.expected
    kind: Any = type(expected)
    if isinstance(expected, dict) and expected.keys() == {"step", "data"}:
        kind = StepMessage
        reading.expected = StepMessage(**expected)
    elif isinstance(expected, StepMessage):
        kind = StepMessage
    reading.taken.append(reading.end.dequeue(PATIENCE_S, kind))


def _try_dequeue(reading: Reading) -> None:
    found = reading.end.try_dequeue()
    if found[0]:
        reading.taken.append(found[1])


def _loan(reading: Reading) -> None:
    with reading.end.loan(PATIENCE_S) as found:
        reading.taken.append(found)
        reading.alarms.disarm()
        check_same(found, reading.expected, reading.what)
        reading.is_checked = True


def _dequeue_one(reading: Reading) -> None:
    reading.taken.append(dequeue_any([reading.end], reading.limit_s)[1])


def _selected(reading: Reading) -> None:
    assert reading.selector is not None
    reading.selector.register(reading.end, selectors.EVENT_READ)
    reading.selector.select(PATIENCE_S)
    _try_dequeue(reading)


# The coroutine itself stores what it has read: a strike may come between its end and that of the loop.
async def _await(reading: Reading, limit_s: float) -> None:
    reading.taken.append(await reading.end.adequeue(limit_s))


def _adequeue(reading: Reading) -> None:
    asyncio.run(_await(reading, PATIENCE_S))


def _timed_adequeue(reading: Reading) -> None:
    asyncio.run(_await(reading, reading.limit_s))


def _cancelled_adequeue(reading: Reading) -> None:
    async def read() -> None:
        async with asyncio.timeout(reading.limit_s):
            reading.taken.append(await reading.end.adequeue())

    try:
        asyncio.run(read())
    except CommTimeoutError as error:
        raise MismatchError(f"{reading.what}: a read without a deadline was late: {error}") from error
    except TimeoutError as error:
        raise CommTimeoutError("cancelled", missing=()) from error


READS: dict[str, Callable[[Reading], None]] = {
    "dequeue": _dequeue,
    "timed": _timed,
    "typed": _typed,
    "try_dequeue": _try_dequeue,
    "loan": _loan,
    "dequeue_any": _dequeue_one,
    "selected": _selected,
    "adequeue": _adequeue,
    "timed adequeue": _timed_adequeue,
    "cancelled adequeue": _cancelled_adequeue,
}
LATE = {"timed", "dequeue_any", "timed adequeue", "cancelled adequeue"}
"""Those whose deadline may pass before the message comes."""
BY_ASYNCIO = {"adequeue", "timed adequeue", "cancelled adequeue"}
"""asyncio itself leaves a loop open, or a coroutine unstarted, if Ctrl-C comes while it makes them."""


def _in_loop(frame: FrameType | None) -> bool:
    """Return whether a handler may raise in a read by asyncio: inside of `adequeue`, or while the loop waits.

    asyncio itself catches what is raised in a callback of its loop, and leaves the loop open that it makes or closes.
    In the coroutine that awaits `adequeue`, `async with` would leave its last coroutine unstarted.
    """
    interrupted = frame
    outer: FrameType | None = None
    while frame is not None and "/asyncio/" not in frame.f_code.co_filename:
        outer, frame = frame, frame.f_back
    if frame is None or outer is None:
        return False
    is_inside = outer is not interrupted and bool(outer.f_code.co_flags & inspect.CO_COROUTINE)
    if not is_inside and outer.f_code.co_name != "select":
        return False
    names = set()
    while frame is not None:
        names.add(Path(frame.f_code.co_filename).stem + "." + frame.f_code.co_name)
        frame = frame.f_back
    return "base_events.run_forever" in names and "runners.close" not in names


def _limit_s(own: random.Random) -> float:
    return own.choice((0.0, 0.00001, 0.001, 0.02))


def read_next(end: QueueReader, expected: Any, alarms: Alarms, own: random.Random, what: str) -> None:
    """Read the next message in a way that `own` chooses. Whatever strikes, it must be `expected`."""
    way = own.choice(sorted(READS if alarms.may_strike else READS.keys() - BY_ASYNCIO))
    reading = Reading(end, expected, f"{what}, read by {way}", 0.0, alarms)
    deadline = time.monotonic() + PATIENCE_S
    while not reading.taken:
        if time.monotonic() > deadline:
            raise MismatchError(f"{reading.what}: nothing came within {PATIENCE_S} s")
        reading.limit_s = _limit_s(own)
        call = partial(READS[way], reading)
        try:
            with selectors.DefaultSelector() as reading.selector:
                if way in BY_ASYNCIO and alarms.wants_strike(STRUCK):
                    alarms.strike(call, _in_loop)
                elif way not in BY_ASYNCIO and alarms.wants_strike(STRUCK):
                    alarms.strike(call)
                else:
                    call()
        except CommTimeoutError:
            if way not in LATE:
                raise
    if not reading.is_checked and way != "loan":
        check_same(reading.taken[0], reading.expected, reading.what)


def read_any(
    ends: dict[int, QueueReader], unread: dict[int, list[Any]], alarms: Alarms, own: random.Random
) -> None:
    """Read everything that is unread in several queues with `dequeue_any`, in the order in which it comes."""
    deadline = time.monotonic() + PATIENCE_S
    while left := [rank for rank in ends if unread[rank]]:
        taken: list[tuple[int, Any]] = []
        if time.monotonic() > deadline:
            raise MismatchError(f"dequeue_any: nothing came from ranks {left} within {PATIENCE_S} s")
        call = partial(_take_any, [ends[rank] for rank in left], _limit_s(own), taken)
        try:
            if alarms.wants_strike(STRUCK):
                alarms.strike(call)
            else:
                call()
        except CommTimeoutError:
            continue
        for at, found in taken:
            check_same(found, unread[left[at]].pop(0), f"message of rank {left[at]}, read by dequeue_any")


def _take_any(ends: list[QueueReader], limit_s: float, taken: list[tuple[int, Any]]) -> None:
    taken.append(dequeue_any(ends, limit_s))
