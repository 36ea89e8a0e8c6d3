"""Revoke groups, so that ranks which wait in them for a rank that gave them up come to the agreement too."""

from __future__ import annotations

from collections.abc import Sequence

from device_comm.health import GroupHealth
from shm_broadcast.errors import GroupBrokenError
from shm_broadcast.reports.failure_record import FailureRecord

__all__ = ["revoke"]


def revoke(healths: Sequence[GroupHealth]) -> None:
    """Break those of a rank's groups that no failure has broken yet; their other ranks raise in their next calls.

    A failure breaks only the groups in which a call involves the lost rank. A rank that shares another group
    with this one would wait there for this rank, which no longer comes. So it gets the first failure that
    this rank has found or, if there is none, `PeerLostError` with this rank, which has given the group up.
    """
    known = next((health.failure_record for health in healths if health.failure_record is not None), None)
    for health in healths:
        if health.is_broken or health.is_closed or len(health.ranks) == 1:
            continue
        text = f"{health.where('rebuild')}: this rank has given the group up, to create it again"
        record = known or FailureRecord(
            "interrupted", (health.rank,), health.rank, "rebuild", detail=f"{health.rank} (rebuild)"
        )
        health.fail(GroupBrokenError(text), "rebuild", record)
