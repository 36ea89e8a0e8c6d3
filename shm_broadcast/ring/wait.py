"""How long calls of the Python parts poll and sleep; how a reader of one ring waits stands in `csrc/pacer.hpp`."""

from __future__ import annotations

from typing import Final

# One wait without looking around lasts at most this long: signals must be seen within 0.2 s. Ten wake-ups a second cost
# 0.02 % of a core.
SLICE_NS: Final = 100_000_000

# Polling this long is cheaper for both sides than a sleep and a wake-up, 5 to 20 us of processor time.
SHORT_SPIN_NS: Final = 15_000
