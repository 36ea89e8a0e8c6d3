"""Settings of the host broadcast. The creator of a queue passes them in; nothing here reads the environment."""

import math
from datetime import timedelta
from typing import Literal, get_args

import msgspec

from shm_broadcast.errors import SettingsError

__all__ = ["MIN_RING_BYTES", "BroadcastSettings", "WaitMode", "positive_seconds"]

WaitMode = Literal["adaptive", "spin", "park"]

MIN_RING_BYTES = 64 * 1024
"""The smallest size of a ring: even the step input of a small batch would not fit into a smaller one."""


class BroadcastSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings on which the writer and the readers of a queue must agree.

    Attributes:
        wait: How a reader waits for a message and a writer for room. `spin` polls without a break: it has the lowest
            latency, but uses one core for each waiting process. `park` sleeps in the kernel at once: it uses no
            processor time, but takes about ten microseconds more. `adaptive` sleeps, and polls while a message is due.
        ring_bytes: Size of one queue's shared ring in bytes, at least 64 KiB. A message may be longer: one that takes
            more than half of the ring goes in parts.
        warn_after_s: A call that waits for this many seconds logs a warning that names the peers it waits for.

    Raises:
        SettingsError: A value is out of range; the text names the field and the value.
    """

    wait: WaitMode = "adaptive"
    ring_bytes: int = 4 * 1024 * 1024
    warn_after_s: float = 60.0

    def __post_init__(self) -> None:
        """Check every field."""
        if self.wait not in get_args(WaitMode):
            raise SettingsError(f"broadcast.wait is {self.wait!r}, but must be one of {get_args(WaitMode)}")
        if type(self.ring_bytes) is not int or self.ring_bytes < MIN_RING_BYTES:
            raise SettingsError(
                f"broadcast.ring_bytes is {self.ring_bytes!r}, but must be an int of at least {MIN_RING_BYTES}"
            )
        seconds = positive_seconds("broadcast.warn_after_s", self.warn_after_s)
        msgspec.structs.force_setattr(self, "warn_after_s", seconds)


def positive_seconds(field: str, value: object) -> float:
    """Return a number of seconds or a `timedelta` as a float; `field` is the name of the setting in the error.

    Raises:
        SettingsError: `value` is not a positive, finite time.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value):
        return float(value)
    raise SettingsError(f"{field} is {value!r}, but must be a positive, finite number of seconds")
