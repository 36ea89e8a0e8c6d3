"""Measure what an idle wait costs, on machines too whose memory is slow after each sleep.

A virtual machine may lose the processor's caches, and even its host's page tables, within 0.1 s of sleep: a bare sleep
then costs 0.3 ms of processor time, and each page that a wake-up touches 5 to 40 us more. That is no property of
the code under test, so its wake-ups are counted, and each is priced while the memory is warm.
"""

import resource
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Spent", "spent"]


class Spent(NamedTuple):
    """What a call took: how often its threads slept, their processor time, and the time on the clock (seconds)."""

    wakeups: int
    cpu_s: float
    wall_s: float

    @property
    def wakeups_per_s(self) -> float:
        """How often the threads woke in a second."""
        return self.wakeups / self.wall_s

    @property
    def per_wakeup_s(self) -> float:
        """Processor time for each wake-up."""
        return self.cpu_s / self.wakeups


def spent(call: Callable[[], object], who: int = resource.RUSAGE_SELF) -> Spent:
    """Measure `call`, with all threads of this process, or with this thread alone (`resource.RUSAGE_THREAD`)."""
    start, before = time.monotonic(), resource.getrusage(who)
    call()
    after = resource.getrusage(who)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(after.ru_nvcsw - before.ru_nvcsw, cpu_s, time.monotonic() - start)
