"""Collectives that no memory of all ranks carries: how one after the other begins on a rank, and what ends one halfway.

What is queued on a connection, and the steps in a host's memory, belong to one call until that has come to its end. The
operations of a process group have no numbers that tell to which call they belong.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from typing import Final, Protocol, TypeVar

from device_comm.health import GroupHealth, Operation
from shm_broadcast.errors import UsageError
from shm_broadcast.interruption import is_interrupting, raised_by_handler, tolerating
from shm_broadcast.reports.arrivals import Arrival
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import DONE, FAILED, NOBODY

__all__ = [
    "BUSY",
    "HOOKED",
    "NESTED",
    "Turns",
    "collective",
    "in_parts",
    "in_stages",
    "refuse_between",
    "until",
    "without_place",
]

Result = TypeVar("Result")

# Why a call is refused before it has a place in the order of calls.
BUSY: Final = "another thread of this rank is in a collective, and was until the deadline"
NESTED: Final = (
    "called by a signal handler or a finalizer inside of a collective of this group on the same thread"
)

HOOKED: Final = "called while a codec function runs inside of a call of this group on the same thread"

# The flags of code whose frame loses its calling frame when it is left for a while.
_SUSPENDED: Final = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
# The least that is left of a deadline: 0 would mean "the group's".
_LEAST_S: Final = 0.001
# How often a call looks whether its turn has come.
_TURN_S: Final = 0.0002


def without_place(health: GroupHealth, name: str, reason: str) -> UsageError:
    """Return the error for the call `name`, which is refused before it has a number; `reason` is one of these."""
    refusal = UsageError(f"{health.where(name)}: {reason}")
    # The other ranks make no call for it: there is nothing to tell them.
    refusal.is_told = True
    return refusal


def until(end: float) -> float:
    """Return how many seconds are left until the monotonic time `end`, as the deadline of what follows in a call."""
    return max(end - time.monotonic(), _LEAST_S)


def in_stages(health: GroupHealth, operation: Operation, stages: Callable[[], Result]) -> Result:
    """Return `stages()`, all stages of a call. What is raised in it breaks the group, except for the call's own errors.

    A process group does not know which of its operations belong to one call: behind a stage that was left out, the next
    operation of this rank would meet the next stage of the others. Calls over shared memory have numbers instead.

    This is no context manager: a signal handler could raise at the beginning of its `__exit__`, where a handle is lost
    or a second exception leaves the call unmarked.
    """
    try:
        return stages()
    except BaseException as error:
        health.left.append((operation, error))
        health.left_halfway(operation, error)
        raise


def in_parts(health: GroupHealth, operation: Operation, parts: Callable[[], Result]) -> Result:
    """Return `parts()`, which makes several collectives of the group that count as one; else as `in_stages`.

    Each of them ends before the next one begins, so `health` notes the whole: `refuse_between` looks there.
    """
    mark, thread = object(), threading.get_ident()
    try:
        health.composed[mark] = thread
        result = parts()
        del health.composed[mark]
    except BaseException as error:
        health.left.append((operation, error))
        health.composed.pop(mark, None)
        health.left_halfway(operation, error)
        raise
    return result


def refuse_between(health: GroupHealth, name: str) -> None:
    """Refuse the collective `name` if a handler or finalizer makes it inside of a call of several, on the same thread.

    The other ranks would take it for the next part of that call. The caller has seen that `health.composed` holds any.

    Raises:
        UsageError: It is refused; it has taken no number.
    """
    count = list(health.composed.values()).count(threading.get_ident())
    if count and is_interrupting(in_parts.__code__, "health", health, count):
        raise without_place(health, name, NESTED)


def collective(
    health: GroupHealth,
    plane: str,
    name: str,
    stages: Callable[[Operation], Result],
    nbytes: int = 0,
    root: int = NOBODY,
) -> Result:
    """Begin a collective and return `stages(operation)`, as `in_stages`. Raises as `GroupHealth.begin`.

    `nbytes` is what this rank brings and `root` a place in the group; the status page shows both.
    """
    # Used if a handler raises inside of `begin`, when the call may have taken its number already.
    operation = Operation(plane, name, 0)
    lane = health.shown.lanes[plane]
    try:
        operation = health.begin(plane, name, lane)
        lane.begin(kind_of(name), operation.number, nbytes, root)
        result = stages(operation)
        lane.end(DONE)
    except BaseException as error:
        health.left.append((operation, error))
        health.left_halfway(operation, error)
        if operation.number:
            lane.end(FAILED)
        raise
    return result


class Refusing(Protocol):
    """The memory of the ranks of one host; see `RegionCalls`."""

    def refuse(self, reason: str) -> None:
        """Take the number of a call that this rank refuses, and tell the others why."""

    def catch_up(self) -> None:
        """Tell the others of refusals whose turn has come."""


class _Claim:
    """A call that is made or waits for its turn; its function holds this in a local variable `claim`."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def is_live(self) -> bool:
        """Return whether the call goes on. What a signal handler raises at its end may leave the claim behind."""
        frame = sys._current_frames().get(self.thread)  # noqa: SLF001 - documented in spite of its name
        last = None
        while frame is not None:
            if frame.f_code in _CLAIMING and frame.f_locals.get("claim") is self:
                return True
            last, frame = frame, frame.f_back
        # The thread may have left a generator meanwhile, and who waits asks again.
        return last is not None and bool(last.f_code.co_flags & _SUSPENDED)


class Turns:
    """Lets one collective of a plane after the other begin on this rank; see `Plane` of its refusals."""

    def __init__(self, health: GroupHealth, plane: str, region: Refusing | None = None) -> None:
        """Order the calls of a group.

        Args:
            health: The group's shared state.
            plane: Their plane, "host" or "device".
            region: The memory of the ranks of this host, if it carries a part of these calls.
        """
        self._health = health
        self._plane = plane
        self._region = region
        # The first one is in its call, the others wait. Appending and removing are atomic.
        self._claims: deque[_Claim] = deque()
        # Reasons of refusals that other threads have made during a call.
        self._refusals: deque[str] = deque()
        health.attach(plane, self)

    def make(
        self,
        name: str,
        stages: Callable[[Operation, float], Result],
        timeout_s: float,
        nbytes: int = 0,
        root: int = NOBODY,
    ) -> Result:
        """Begin a collective when its turn has come, and return `stages(operation, end)`.

        Args:
            name: Of the call.
            stages: Makes the call until the monotonic time `end`.
            timeout_s: Deadline in seconds, to which waiting for the turn counts.
            nbytes: What this rank brings, for the status page.
            root: Its place in the group, for the same.

        Raises:
            UsageError: As `take`.
            Others: As `collective`.
        """

        def call(end: float) -> Result:
            return collective(
                self._health, self._plane, name, lambda operation: stages(operation, end), nbytes, root
            )

        return self.take(name, call, timeout_s)

    def take(self, name: str, call: Callable[[float], Result], timeout_s: float) -> Result:
        """Return `call(end)`, which takes the number of the call `name` and makes it, when its turn has come.

        Raises:
            UsageError: The call is made inside of another one of its thread, or its turn has not come in time. The
                group is intact, and the call has taken no number.
            Others: As `call`.
        """
        end = time.monotonic() + timeout_s
        claim = _Claim()
        try:
            if self._claims:
                self._refuse_inside(name, claim)
            if self._health.composed:
                refuse_between(self._health, name)
            self._claims.append(claim)
            if self._claims[0] is not claim:
                self._await_turn(name, claim, end)
            self._settle()
            return call(end)
        finally:
            if claim in self._claims:  # else it was refused before it had a place
                self._claims.remove(claim)
            self.settle_between_calls()

    def _refuse_inside(self, name: str, claim: _Claim) -> None:
        """Raise if this thread is in a call already, further out."""
        for other in list(self._claims):
            if other.thread == claim.thread and other.is_live():
                raise without_place(self._health, name, NESTED)

    def _await_turn(self, name: str, claim: _Claim, end: float) -> None:
        """Return when the claims before this one are gone."""
        while not self._is_first(claim):
            if time.monotonic() >= end:
                raise without_place(self._health, name, BUSY)
            self._health.check_usable(name)
            time.sleep(_TURN_S)

    def _is_first(self, claim: _Claim) -> bool:
        """Return whether it is the turn of `claim`, which has a place; drop claims of calls that are over."""
        while (first := self._claims[0]) is not claim and not first.is_live():
            with tolerating(ValueError):  # another thread has found it, too
                self._claims.remove(first)
        return first is claim

    # ------------------------------------------------------------------ refusals, as of a `Plane`

    def refuse(self, reason: str) -> None:
        """Take the number of a call that this rank refuses: the next one's, behind a call of another thread.

        Does nothing inside of a call of the same thread, where the refused one would have had no number.
        """
        own = threading.get_ident()
        if not any(claim.thread == own and claim.is_live() for claim in list(self._claims)):
            self._refusals.append(reason)
            self.settle_between_calls()

    def catch_up(self) -> None:
        """Tell the others of refusals that had to wait for earlier ones to be seen."""
        if self._region is not None:
            self._region.catch_up()

    def last_calls(self) -> dict[int, Arrival]:
        """Return nothing: only the status store knows."""
        return {}

    def settle_between_calls(self) -> None:
        """Take the numbers of refused calls, unless a call is in progress or waits, which then takes them.

        No refusal is lost: it enters `_refusals` before its thread looks at `_claims`, and this loop reads
        `_refusals` again after it has removed its claim.
        """
        while self._refusals:
            claim = _Claim()
            try:
                self._claims.append(claim)
                if not self._is_first(claim):
                    return
                self._settle()
            finally:
                with tolerating(ValueError):
                    self._claims.remove(claim)

    def _settle(self) -> None:
        """Take the numbers of the calls that were refused.

        What a signal handler raises between two of these steps breaks the group: nobody else has the reason.
        """
        while self._refusals:
            operation = Operation(self._plane, "a refused call", 0)
            try:
                try:
                    reason = self._refusals.popleft()
                except IndexError as error:
                    if raised_by_handler(error):
                        raise
                    return  # another thread has taken it
                self._health.refusals.tell(self._health, self._plane, reason)
                if self._region is not None:
                    self._region.refuse(reason)
            except BaseException as error:
                self._health.left.append((operation, error))
                self._health.left_halfway(operation, error)
                raise


# The functions that hold a claim while they run.
_CLAIMING: Final = frozenset({Turns.take.__code__, Turns.settle_between_calls.__code__})
