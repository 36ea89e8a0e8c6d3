"""Time-outs as callers pass them. All public functions convert them here."""

import math
from datetime import timedelta
from typing import Final, TypeAlias

from shm_broadcast.errors import UsageError

__all__ = ["AnyTimeout", "as_timedelta", "seconds"]

AnyTimeout: TypeAlias = float | timedelta | None
"""A number of seconds, a `timedelta`, or None for the default of the call."""

_KINDS: Final = "a number of seconds, a timedelta, or None"


# No wait ends later: a year. A `timedelta`, and torch behind it, has limits that a number of seconds has not.
_MOST_S: Final = 86400.0 * 365


def as_timedelta(timeout_s: float) -> timedelta:
    """Return a time-out as torch takes it, also one that is longer than a `timedelta` can be."""
    return timedelta(seconds=min(timeout_s, _MOST_S))


def seconds(timeout: object, name: str = "timeout_s", *, may_be_zero: bool = False) -> float | None:
    """Return a time-out in seconds; None stays None.

    Args:
        timeout: An `AnyTimeout`.
        name: The name of the argument, for errors.
        may_be_zero: Whether the call can look without waiting.

    Raises:
        UsageError: `timeout` has another type, is NaN or negative, or is zero without `may_be_zero`.
    """
    if timeout is None:
        return None
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(given, bool) or not isinstance(given, (int, float)) or math.isnan(given):
        raise UsageError(f"{name} must be {_KINDS}, not {timeout!r}")
    if given < 0 or (given == 0 and not may_be_zero):
        raise UsageError(f"{name} must be positive, not {timeout!r}: it is {_KINDS}")
    return float(given)
