"""How a reader waits: spin, sleep, or both, so that it is awake when the next message is due.

A policy is pure: times in, durations out. The native core spins and sleeps; see `ring_wait`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from shm_broadcast.settings import WaitMode

# One sleep lasts at most this long: then signals, dead peers and deadlines are looked for. Ctrl-C must
# interrupt within 0.2 s, death must be noticed within 1 s. Ten wake-ups a second cost 0.02 % of a core.
SLICE_NS: Final = 100_000_000

# Polling this long is cheaper for both sides than a sleep and a wake-up, 5 to 20 us of processor time.
SHORT_SPIN_NS: Final = 15_000

# Linux rounds sleeps of ordinary threads up by as much as 50 us (timer slack, prctl(2)), and waking
# takes some more: the reader gets up this much before it wants to look.
RISE_NS: Final = 90_000

# The part of the time between two messages that may be spent polling for an expected one. A reader that
# polls for 1/12 uses 8 % of a core at most, half of it on average, as it stops when the message comes.
POLLED_PART: Final = 12
LONGEST_WATCH_NS: Final = 1_500_000

# The next message is awaited this many average deviations around the time when it is due.
_DEVIATIONS: Final = 3

# Weight of the latest gap in the running averages, as a shift: 1/4 follows a change within a few steps.
_SHIFT: Final = 2
# So many gaps must have been seen before anything is expected.
_SAMPLES: Final = 3


class Stage(NamedTuple):
    """One stage of a wait: poll for `spin_ns`, then sleep for at most `park_ns`; both may be 0."""

    spin_ns: int
    park_ns: int


_SPIN_STAGE: Final = Stage(SLICE_NS, 0)
_PARK_STAGE: Final = Stage(0, SLICE_NS)
_SHORT_STAGE: Final = Stage(SHORT_SPIN_NS, SLICE_NS)


class Pacer:
    """Learns the time between messages and says what to do until the next one.

    `adaptive` expects the next message one average gap after the last. It sleeps until shortly before,
    polls while the message is due, and sleeps again if it does not come. How long it polls follows from
    how regular the gaps are: where that would take too long, it polls only briefly and then sleeps.
    """

    def __init__(self, mode: WaitMode) -> None:
        """Know nothing yet."""
        self._mode = mode
        self._last_ns = 0
        self._gap_ns = 0
        self._deviation_ns = 0
        self._samples = 0
        self._has_spun = False

    def arrived(self, now_ns: int) -> None:
        """Note that a message came; called only when the reader had to wait for it."""
        if self._last_ns:
            gap = now_ns - self._last_ns
            if self._samples == 0:
                self._gap_ns, self._deviation_ns = gap, gap
            else:
                off = abs(gap - self._gap_ns)
                self._gap_ns += (gap - self._gap_ns) >> _SHIFT
                self._deviation_ns += (off - self._deviation_ns) >> _SHIFT
            self._samples += 1
        self._last_ns = now_ns
        self._has_spun = False

    def next_stage(self, now_ns: int) -> Stage:
        """Return what to do now; called again after each stage until the message is there."""
        if self._mode == "spin":
            return _SPIN_STAGE
        if self._mode == "park":
            return _PARK_STAGE
        watch = min(_DEVIATIONS * self._deviation_ns, LONGEST_WATCH_NS)
        if self._samples >= _SAMPLES and 2 * watch + SHORT_SPIN_NS <= self._gap_ns // POLLED_PART:
            due = self._last_ns + self._gap_ns
            until_open = due - watch - RISE_NS - now_ns
            if until_open > SHORT_SPIN_NS:
                return Stage(0, min(until_open, SLICE_NS))
            if now_ns < due + watch:
                self._has_spun = True
                return Stage(due + watch - now_ns, SLICE_NS)
        if self._has_spun:
            return _PARK_STAGE
        self._has_spun = True
        return _SHORT_STAGE
