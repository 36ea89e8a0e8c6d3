"""Wait for what the actors of a meeting run, and tell the others when one of them dies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.integrations.ray.calls import collect
from coordinator.integrations.ray.meeting import Meeting
from shm_broadcast.errors import UsageError

__all__ = ["watch"]


def watch(
    run_refs: Sequence[Any], meeting: Meeting, *, timeout_s: float | None = None, grace_s: float = 10.0
) -> list[Any]:
    """Return the result of each rank's call, and tell the other ranks if an actor dies. The driver calls this.

    Ray's agent on each node watches its processes: an actor that is killed is known here within a fraction of a second,
    a node that vanishes when Ray's health check has failed (`RAY_health_check_*`: a minute by default). The other
    actors are told by method calls. What waits for the dead rank there raises `PeerLostError` with it, and so do the
    calls of ranks that wait for those.

    Args:
        run_refs: What the actors' methods have returned to the driver, one per rank, by rank.
        meeting: What `meet` has returned.
        timeout_s: Deadline in seconds; None waits for as long as they run.
        grace_s: How long the other calls may take to end after one has failed, so that their errors are known too.

    Raises:
        PeerLostError: Actors have died; `.peers` names them, and notes hold what the others have raised.
        CommTimeoutError: The deadline has passed; `.missing` names the ranks whose calls go on.
        Exception: What a rank has raised: the one that no other rank has caused, if there is one. An error of this
            project arrives as it was, another one as Ray raises it.
        UsageError: There are not as many calls as ranks.
    """
    if len(run_refs) != len(meeting.actors):
        raise UsageError(f"watch takes one call per rank: {len(meeting.actors)}, not {len(run_refs)}")
    return collect(run_refs, meeting.seats, "watch", timeout_s, grace_s, meeting.report_loss)
