"""Settings of the host broadcast. Whoever creates a queue hands them to it; nothing here reads the environment."""

import math
from typing import Literal, get_args

import msgspec

from shm_broadcast.errors import SettingsError

__all__ = ["MIN_RING_BYTES", "BroadcastSettings", "WaitMode", "positive_seconds"]

WaitMode = Literal["adaptive", "spin", "park"]

MIN_RING_BYTES = 64 * 1024
"""Below this even a step input of a small batch would not fit into a ring."""


class BroadcastSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the writer and the readers of a queue must agree on.

    Attributes:
        wait: How a reader waits for the next message, and a writer for room. `spin` never gives the core
            away: lowest latency, a whole core for each waiting process. `park` sleeps in the kernel at once:
            no processor time, some ten microseconds more. `adaptive` spins briefly, then parks.
        ring_bytes: Size of the shared ring of one queue, in bytes; a message may take all of it.
        warn_after_s: A writer or reader that waits longer than this logs, once, for whom it waits.

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
    """Return `value` as a float.

    Raises:
        SettingsError: It is no positive, finite number.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value):
        return float(value)
    raise SettingsError(f"{field} is {value!r}, but must be a positive, finite number of seconds")
