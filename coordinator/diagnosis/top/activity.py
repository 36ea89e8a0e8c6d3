"""Tell what a process does outside of calls, from what the kernel counts and from its ends of queues."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from coordinator.diagnosis.processes import Process
from coordinator.diagnosis.queues import Ring
from coordinator.diagnosis.top.quantities import in_bytes
from coordinator.diagnosis.top.sampling import Seen

__all__ = ["LOADING_BYTES_PER_S", "RUNNING_SHARE", "Activity", "activity_of"]

LOADING_BYTES_PER_S: Final = 4e6
"""A process that reads so much is loading. Reading a disk gives far more, and what else a rank reads far less."""

RUNNING_SHARE: Final = 0.5
"""A process that takes this share of a core computes."""


class Activity(NamedTuple):
    """What a process does outside of calls.

    Attributes:
        state: "dead", "unknown", "stopped", "loading", "running", "waiting" (for room in a queue), "idle" (for a
            message), "blocked" (in the kernel, where no signal reaches it) or "sleeping".
        note: More of it, for people.
    """

    state: str
    note: str


def activity_of(before: Process | None, seen: Seen, passed_s: float, rings: Iterable[Ring]) -> Activity:
    """Return what a process does that is in no call.

    Args:
        before: The process at the sample before, or None.
        seen: The process now.
        passed_s: Seconds between both.
        rings: Queues and channels, of which its ends count.
    """
    process = seen.process
    if process is None:
        return Activity("unknown" if seen.is_hidden else "dead", "")
    if process.is_stopped:
        return Activity("stopped", "by a debugger" if process.state == "t" else "until SIGCONT")
    share = read = None
    if before is not None and passed_s > 0 and before.start_ticks == process.start_ticks:
        share = max(process.cpu_ns - before.cpu_ns, 0) / 1e9 / passed_s
        read = _read_rate(before, process, passed_s)
    if read is not None and read >= LOADING_BYTES_PER_S:
        return Activity("loading", f"reading {in_bytes(read)}/s")
    # On a busy host a process that computes may get little of a core, but it is ready to run at each look.
    is_ready = process.state == "R" and (before is None or before.state == "R")
    if is_ready or (share is not None and share >= RUNNING_SHARE):
        return Activity("running", "outside of calls" if share is None else f"CPU {share:.0%}")
    queued = _queued(seen, rings)
    if queued is not None:
        return queued
    return Activity("blocked" if process.state == "D" else "sleeping", process.waits_in)


def _read_rate(before: Process, now: Process, passed_s: float) -> float | None:
    """Return the bytes that were read per second, from storage or from what the kernel keeps of it."""
    rates = [
        (new - old) / passed_s
        for new, old in ((now.read_bytes, before.read_bytes), (now.stored_bytes, before.stored_bytes))
        if new is not None and old is not None
    ]
    return max(rates, default=None)


def _queued(seen: Seen, rings: Iterable[Ring]) -> Activity | None:
    """Return that the process waits in a queue, if it does."""
    idle = None
    own = {(end.inode, end.offset, end.reader) for end in seen.page.queues}
    for ring in rings:
        if ring.writer_waits and (ring.inode, ring.offset, -1) in own:
            return Activity("waiting", f"for room in {ring.name}")
        for reader in ring.readers:
            if reader.waits and (ring.inode, ring.offset, reader.place) in own:
                idle = idle or Activity("idle", f"reads {ring.name}")
    return idle
