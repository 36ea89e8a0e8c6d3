"""How many bytes the line between the leaders carries in a short swap: measured once, agreed on by all ranks.

An all-reduce in two swaps instead of one sends fewer bytes, but takes the time of another swap. How many bytes that is
worth depends on the machines and on the network between them: 62,500 bytes at 10 Gbit/s and 50 us, a fourth of it over
a slow line. The leaders measure both with the swaps that collectives make.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from typing import Final

import torch

from device_comm.cpu.several_hosts.leaders import Call, Leaders
from shm_broadcast.errors import InternalError

# What 10 Gbit/s carry in 50 us: for a group whose line nobody has measured.
UNMEASURED_BYTES: Final = 62_500
# A measurement beside other work may be far off; the agreed value stays between what lines of 1 Gbit/s in 64 us and of
# 100 Gbit/s in 80 us would give.
_LEAST_BYTES: Final = 8 << 10
_MOST_BYTES: Final = 1 << 20
# Each swap is repeated and the fastest counts, because what slows a swap down is mostly other work on the machine.
_SHORT_SWAPS: Final = 5
_LONG_SWAPS: Final = 3
# What a leader sends in a long swap to all others together: 2 ms at 1 Gbit/s.
_LONG_BYTES: Final = 256 << 10
_FIGURES: Final = struct.Struct("<dd")


def measured_worth_bytes(
    leaders: Leaders | None, call: Call, exchange: Callable[[bytes], list[bytes]]
) -> float:
    """Return how many bytes another swap must save to be worth its time; the same number on all ranks.

    Collective over the group. The slowest leader counts, since the others wait for it in every call.

    Args:
        leaders: The leaders of the hosts; None on a rank that is not one of them.
        call: Of the measurement: its deadline and its name in errors.
        exchange: As in `CommunicatorContext`.

    Raises:
        As `Leaders.swap`, `Leaders.wait` and `exchange`.
    """
    own = b"" if leaders is None else _FIGURES.pack(*_measure(leaders, call))
    found = [each for each in exchange(own) if each]
    if any(len(each) != _FIGURES.size for each in found):
        raise InternalError(f"leaders measured {[len(each) for each in found]} bytes of figures")
    figures = [_FIGURES.unpack(each) for each in found]
    return worth_bytes(max(swap_s for swap_s, _ in figures), min(rate for _, rate in figures))


def worth_bytes(swap_s: float, bytes_per_s: float) -> float:
    """Return how many bytes the line carries in `swap_s` seconds, within limits; see `measured_worth_bytes`."""
    carried = swap_s * bytes_per_s
    return min(max(carried, _LEAST_BYTES), _MOST_BYTES) if math.isfinite(carried) else UNMEASURED_BYTES


def _measure(leaders: Leaders, call: Call) -> tuple[float, float]:
    """Return the seconds of a swap of one byte, and the bytes per second of a long one."""
    call.view = "measure the line"
    length = _LONG_BYTES // len(leaders.others)
    _swap_s(leaders, call, 1)  # compares the call
    short_s = min(_swap_s(leaders, call, 1) for _ in range(_SHORT_SWAPS))
    long_s = min(_swap_s(leaders, call, length) for _ in range(_LONG_SWAPS))
    sent = length * len(leaders.others)
    return short_s, sent / (long_s - short_s) if long_s > short_s else math.inf


def _swap_s(leaders: Leaders, call: Call, length: int) -> float:
    """Swap `length` bytes with each other leader, and return how many seconds that took."""
    own = torch.zeros(length, dtype=torch.uint8, device="cpu")
    received = {host: torch.empty_like(own) for host in leaders.others}
    start = time.monotonic()
    leaders.wait(call, leaders.swap(call, dict.fromkeys(leaders.others, own), received))
    return time.monotonic() - start


__all__ = ["UNMEASURED_BYTES", "measured_worth_bytes", "worth_bytes"]
