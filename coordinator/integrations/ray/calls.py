"""Wait for one call of each actor, and find out who is at fault if one fails."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from coordinator.integrations.ray.library import import_ray
from coordinator.integrations.ray.seats import Seat
from shm_broadcast.errors import (
    CommError,
    CommTimeoutError,
    DisagreementError,
    GroupBrokenError,
    PeerLostError,
)

__all__ = ["collect"]

# By these a rank reports what another rank has done: whoever caused it may still be to come.
_CONSEQUENCES: Final = (PeerLostError, GroupBrokenError, CommTimeoutError, DisagreementError)
# Ray's errors by which an actor, its process or its node has ended. All others concern one call: that it was cancelled,
# or that its result cannot be had here, as of a class that the driver cannot import.
_DEATHS: Final = (
    "RayActorError",
    "WorkerCrashedError",
    "NodeDiedError",
    "OutOfMemoryError",
    "OwnerDiedError",
)
# Ray's text on a dead actor is long.
_MOST_TEXT: Final = 300


@dataclasses.dataclass(eq=False, repr=False)
class _Calls:
    """What has become of the calls so far, by rank."""

    where: str
    seats: Sequence[Seat]
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    deaths: dict[int, Exception] = dataclasses.field(default_factory=dict)
    errors: dict[int, Exception] = dataclasses.field(default_factory=dict)

    @property
    def is_explained(self) -> bool:
        """Return whether an error is known that is no consequence of another rank's."""
        own = [error for error in self.errors.values() if not isinstance(_cause(error), _CONSEQUENCES)]
        return bool(own)

    def failure(self) -> Exception:
        """Return what to raise: the deaths, else an error of a rank itself, else a consequence."""
        if self.deaths:
            named = "; ".join(
                f"rank {rank} on node {self.seats[rank].address}: {_brief(error)}"
                for rank, error in sorted(self.deaths.items())
            )
            failure: Exception = PeerLostError(f"{self.where}: lost {named}", peers=sorted(self.deaths))
            failure.__cause__ = self.deaths[min(self.deaths)]
        else:
            order = sorted(
                self.errors, key=lambda rank: (isinstance(_cause(self.errors[rank]), _CONSEQUENCES), rank)
            )
            failure = _cause(self.errors[order[0]])
            failure.add_note(
                f"{self.where}: raised by rank {order[0]} on node {self.seats[order[0]].address}"
            )
        for rank, error in sorted(self.errors.items()):
            if _cause(error) is not failure:
                failure.add_note(f"rank {rank}: {type(_cause(error)).__name__}: {_brief(_cause(error))}")
        return failure


def collect(
    calls: Sequence[Any],
    seats: Sequence[Seat],
    where: str,
    timeout_s: float | None,
    grace_s: float,
    on_death: Callable[[int, str], None],
    on_error: Callable[[int, str], None] | None = None,
) -> list[Any]:
    """Return the result of each rank's call.

    Args:
        calls: Ray's object refs, by rank.
        seats: The ranks' seats.
        where: Begins the text of errors.
        timeout_s: Deadline in seconds; None waits without one.
        grace_s: How long the other calls may take to end after a death or an error of which the cause is not known.
        on_death: Called with each rank whose actor has died, and what Ray says.
        on_error: Called with the first rank that has raised an error of its own, and its text, so that the caller can
            end the other calls, which are waited for. None if the others need not end: such an error ends the wait.

    Raises:
        PeerLostError: Actors have died; `.peers` names them, and notes hold the errors of the others.
        CommTimeoutError: The deadline has passed; `.missing` names the ranks whose calls go on.
        Exception: What a rank has raised: the one that no other rank has caused, if there is one.
    """
    ray = import_ray()
    deaths = tuple(getattr(ray.exceptions, name) for name in _DEATHS)
    state, pending = _Calls(where, seats), {call: rank for rank, call in enumerate(calls)}
    end = None if timeout_s is None else time.monotonic() + timeout_s
    has_failed = False
    while pending and not (state.is_explained and on_error is None):
        left_s = None if end is None else end - time.monotonic()
        ready, _ = ray.wait(list(pending), timeout=None if left_s is None else max(left_s, 0.0))
        if not ready:
            break
        for call in ready:
            rank = pending.pop(call)
            try:
                state.results[rank] = ray.get(call)
            except ray.exceptions.RayError as error:
                # What a method raises is a task's error, also if that is the death of another actor that it has called.
                if isinstance(error, deaths) and not isinstance(error, ray.exceptions.RayTaskError):
                    state.deaths[rank] = error
                    on_death(rank, f"Ray has lost its actor on node {seats[rank].address}: {_brief(error)}")
                else:
                    was_explained, cause = state.is_explained, _cause(error)
                    state.errors[rank] = error
                    if on_error is not None and state.is_explained and not was_explained:
                        on_error(rank, f"{type(cause).__name__}: {_brief(cause)}")
        if not has_failed and (state.errors or state.deaths):
            has_failed = True
            end = min(end or float("inf"), time.monotonic() + grace_s)
    if state.errors or state.deaths:
        raise state.failure()
    if pending:
        missing = sorted(pending.values())
        raise CommTimeoutError(
            f"{where}: ranks {missing} did not answer within {timeout_s} s", missing=missing
        )
    return [state.results[rank] for rank in range(len(calls))]


def _cause(error: Exception) -> Exception:
    """Return the error of ours that a rank has raised, or `error`, which Ray has made of another one."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, CommError) else error


def _brief(error: Exception) -> str:
    """Return the first line of an error's text."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:_MOST_TEXT]
