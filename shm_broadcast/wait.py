"""How a reader waits: spin briefly, spin while an expected message is due, or sleep in the kernel.

A policy is pure: times in, durations out. The native core spins and sleeps; see `ring_wait`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from shm_broadcast.settings import WaitMode

# One wait without looking around lasts at most this long: what a writer or a reader of several queues sleeps, which
# must see signals within 0.2 s. Ten wake-ups a second cost 0.02 % of a core.
SLICE_NS: Final = 100_000_000

# A reader looks for signals in between, in the native core. Dead peers and deadlines are looked for at the end:
# death must be noticed within 1 s.
READER_SLICE_NS: Final = 400_000_000

# Polling this long is cheaper for both sides than a sleep and a wake-up, 5 to 20 us of processor time.
SHORT_SPIN_NS: Final = 15_000

# The reader gets up this much before it starts to poll: Linux rounds sleeps of ordinary threads up by as much as 50 us
# (timer slack, prctl(2)), and waking a core takes 20 us on a quiet machine.
RISE_NS: Final = 100_000

# The part of the time between two messages for which an expected one may be awaited awake: 1/3, and 1 ms.
WATCHED_PART: Final = 3
LONGEST_WATCH_NS: Final = 1_000_000

# A message is awaited from 2 average deviations before it is due until 4 after, and this long at least: of 1,200
# messages 2 ms apart 45 to 95 came earlier with half of it. Where messages are less than 2 ms apart a part of the gap is
# enough, as else they would not be awaited at all.
_EARLY: Final = 2
_LATE: Final = 4
_LEAST_EARLY_NS: Final = 80_000
_LEAST_EARLY_PART: Final = 25
_LEAST_LATE_NS: Final = 120_000
_LEAST_LATE_PART: Final = 16

# Weight of the latest gap in the running averages, as a shift: 1/4 follows a change within a few messages.
_SHIFT: Final = 2
# This many gaps must have been seen before anything is expected.
_SAMPLES: Final = 3
# A gap of this many averages is a pause: what was known is forgotten, and learned again from the next gaps.
_PAUSE: Final = 4


class Stage(NamedTuple):
    """One stage of a wait: poll for `spin_ns`, then sleep for at most `park_ns`."""

    spin_ns: int
    park_ns: int


_SPIN_STAGE: Final = Stage(READER_SLICE_NS, 0)
_PARK_STAGE: Final = Stage(0, READER_SLICE_NS)


class Pacer:
    """Learns the time between messages and says what to do until the next one.

    `adaptive` expects the next message one average gap after the last. It sleeps until shortly before, polls until the
    message is late, and sleeps again. Where the gaps vary so much that polling would take too long, it polls briefly
    once and sleeps.
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
        gap = now_ns - self._last_ns
        if self._last_ns == 0 or (self._samples >= _SAMPLES and gap > _PAUSE * self._gap_ns):
            self._samples = 0
        else:
            off = gap - self._gap_ns if self._samples else 0
            self._gap_ns = self._gap_ns + (off >> _SHIFT) if self._samples else gap
            self._deviation_ns += (abs(off) - self._deviation_ns) >> _SHIFT
            self._samples += 1
        self._last_ns = now_ns
        self._has_spun = False

    def next_stage(self, now_ns: int) -> Stage:
        """Return what to do now; called again after each stage until the message is there."""
        if self._mode == "spin":
            return _SPIN_STAGE
        if self._mode == "park":
            return _PARK_STAGE
        early = max(_EARLY * self._deviation_ns, min(_LEAST_EARLY_NS, self._gap_ns // _LEAST_EARLY_PART))
        late = max(_LATE * self._deviation_ns, min(_LEAST_LATE_NS, self._gap_ns // _LEAST_LATE_PART))
        most = min(self._gap_ns // WATCHED_PART, LONGEST_WATCH_NS)
        if self._samples >= _SAMPLES and RISE_NS + early + late <= most:
            due = self._last_ns + self._gap_ns
            until_rise = due - early - RISE_NS - now_ns
            if until_rise > SHORT_SPIN_NS:
                return Stage(0, min(until_rise, READER_SLICE_NS))
            if due + late > now_ns:
                self._has_spun = True
                return Stage(due + late - now_ns, READER_SLICE_NS)
        spin_ns = 0 if self._has_spun else SHORT_SPIN_NS
        self._has_spun = True
        return Stage(spin_ns, READER_SLICE_NS)
