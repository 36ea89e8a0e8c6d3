"""How a reader waits: spin, sleep, or both, so that it is awake when the next message is due.

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

# The reader gets up this much before it wants to look, as it learns how late it wakes: Linux rounds sleeps of ordinary
# threads up by as much as 50 us (timer slack, prctl(2)), and waking a core takes 20 us on a quiet machine and 150 us on
# one whose cores others use too.
RISE_NS: Final = 80_000
LONGEST_RISE_NS: Final = 400_000

# The part of the time between two messages for which an expected one may be awaited awake: 1/3, and 1 ms. Less
# is used, as the reader wakes late and stops when the message comes: 8 to 10 % of 2 ms, 1.7 % of 20 ms in all.
WATCHED_PART: Final = 3
LONGEST_WATCH_NS: Final = 1_000_000

# A message is awaited from so many average deviations before it is due until so many after, and this long at least: of
# 1,200 messages 2 ms apart 45 to 95 came earlier with half of it, which costs 60 us each, and 7 to 10 come earlier now.
# Where messages are less than 2 ms apart a part of the gap is enough, as else they would not be awaited at all.
_EARLY: Final = 2
_LATE: Final = 4
_LEAST_EARLY_NS: Final = 80_000
_LEAST_EARLY_PART: Final = 25
_LEAST_LATE_NS: Final = 120_000
_LEAST_LATE_PART: Final = 16

# Weight of the latest gap in the running averages, as a shift: 1/4 follows a change within a few steps.
_SHIFT: Final = 2
# So many gaps must have been seen before anything is expected.
_SAMPLES: Final = 3
# A late wake-up is forgotten by 1/16 with each one that was less late.
_FORGET_SHIFT: Final = 4
# One gap counts as no more than so many deviations (and this many ns) off the average: a single pause, or a
# machine that stood still for a moment, does not spoil what is known.
_CLIPPED: Final = 4
_LEAST_CLIP_NS: Final = 20_000

# Where nothing can be expected the reader naps: it gets up for a moment when another 1/16 of the time since the last
# message has passed. That halves the 90th percentile of the latency (40 us instead of 70 with gaps of 5 ms), as the
# core does not fall into its deepest sleep, and costs 2 % of a core at gaps of 5 ms and nothing when idle.
_NAP_SHIFT: Final = 4
SHORTEST_NAP_NS: Final = 500_000
# Where messages are further apart on average, so many naps would cost more than 1 % of a core.
LONGEST_NAPPED_GAP_NS: Final = 12_000_000
# After so long without a message it sleeps soundly.
NAPPING_NS: Final = 100_000_000


class Stage(NamedTuple):
    """One stage of a wait: poll for `spin_ns`, then sleep for at most `park_ns`, in naps of `nap_ns` unless 0."""

    spin_ns: int
    park_ns: int
    nap_ns: int = 0


_SPIN_STAGE: Final = Stage(READER_SLICE_NS, 0)
_PARK_STAGE: Final = Stage(0, READER_SLICE_NS)


class Pacer:
    """Learns the time between messages and says what to do until the next one.

    `adaptive` expects the next message one average gap after the last. It sleeps until shortly before,
    polls while the message is due, and naps if it does not come. How long it polls follows from
    how regular the gaps are: where that would take too long, it polls only briefly and then naps.
    """

    def __init__(self, mode: WaitMode) -> None:
        """Know nothing yet."""
        self._mode = mode
        self._last_ns = 0
        self._gap_ns = 0
        self._deviation_ns = 0
        self._samples = 0
        self._has_spun = False
        self._lateness_ns = RISE_NS
        self._wakes_ns = 0  # when the reader wanted to get up, if it sleeps until then

    def arrived(self, now_ns: int) -> None:
        """Note that a message came; called only when the reader had to wait for it."""
        if now_ns > self._wakes_ns:
            # It came first, so the reader was at least so late.
            self._woke(now_ns)
        self._wakes_ns = 0
        if self._last_ns:
            gap = now_ns - self._last_ns
            if self._samples == 0:
                self._gap_ns, self._deviation_ns = gap, gap >> _SHIFT
            else:
                most = max(_CLIPPED * self._deviation_ns, _LEAST_CLIP_NS)
                off = min(max(gap - self._gap_ns, -most), most)
                self._gap_ns += off >> _SHIFT
                self._deviation_ns += (abs(off) - self._deviation_ns) >> _SHIFT
            self._samples += 1
        self._last_ns = now_ns
        self._has_spun = False

    def _woke(self, now_ns: int) -> None:
        if self._wakes_ns:
            late = min(now_ns - self._wakes_ns, LONGEST_RISE_NS)
            self._lateness_ns = max(late, self._lateness_ns - (self._lateness_ns >> _FORGET_SHIFT))
            self._wakes_ns = 0

    def next_stage(self, now_ns: int) -> Stage:
        """Return what to do now; called again after each stage until the message is there."""
        if self._mode == "spin":
            return _SPIN_STAGE
        if self._mode == "park":
            return _PARK_STAGE
        if now_ns >= self._wakes_ns:
            self._woke(now_ns)
        rise = min(max(self._lateness_ns + (self._lateness_ns >> 1), RISE_NS), LONGEST_RISE_NS)
        early = max(_EARLY * self._deviation_ns, min(_LEAST_EARLY_NS, self._gap_ns // _LEAST_EARLY_PART))
        late = max(_LATE * self._deviation_ns, min(_LEAST_LATE_NS, self._gap_ns // _LEAST_LATE_PART))
        most = min(self._gap_ns // WATCHED_PART, LONGEST_WATCH_NS)
        if self._samples >= _SAMPLES and rise + early + late <= most:
            due = self._last_ns + self._gap_ns
            until_rise = due - early - rise - now_ns
            if until_rise > SHORT_SPIN_NS:
                park_ns = min(until_rise, READER_SLICE_NS)
                self._wakes_ns = now_ns + park_ns
                return Stage(0, park_ns)
            until_late = due + late - now_ns
            if until_late > 0:
                self._has_spun = True
                return Stage(until_late, SHORTEST_NAP_NS)
        spin_ns = 0 if self._has_spun else SHORT_SPIN_NS
        self._has_spun = True
        elapsed = now_ns - self._last_ns if self._last_ns else NAPPING_NS
        if elapsed >= NAPPING_NS or self._gap_ns > LONGEST_NAPPED_GAP_NS:
            return Stage(spin_ns, READER_SLICE_NS)
        nap_ns = max(elapsed >> _NAP_SHIFT, SHORTEST_NAP_NS)
        return Stage(spin_ns, 4 * nap_ns, nap_ns)
