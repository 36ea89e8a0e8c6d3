"""Define how long Python code polls and sleeps. `csrc/ring/pacer.hpp` decides how a reader of one ring waits."""

from __future__ import annotations

from typing import Final

# A wait lasts at most this long before the call looks around: signals must be seen within 0.2 s. Ten wake-ups a second
# cost 0.02 % of a core.
SLICE_NS: Final = 100_000_000

# Polling this long is cheaper for both sides than a sleep and a wake-up, which take 5 to 20 us of processor time.
SHORT_SPIN_NS: Final = 15_000
