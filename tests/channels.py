"""The channels of a group whose ranks all are in this process, so that a test can strike any step of a call."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from device_comm import _core
from device_comm.cpu.channels import Channels, room_bytes
from device_comm.health import GroupHealth, StatusStore
from shm_broadcast.liveness import PeerWatch
from shm_broadcast.reports.arrivals import Arrival
from shm_broadcast.reports.failure_record import FailureRecord
from shm_broadcast.segment import Segment

__all__ = ["QuietStore", "QuietWatch", "channels_of", "health_of"]


class QuietWatch:
    """Watches ranks that all live."""

    def lost(self) -> tuple[int, ...]:
        """Return no rank."""
        return ()

    def is_in_doubt(self) -> bool:
        """Return that no rank may soon be lost."""
        return False

    def watches(self, rank: int) -> bool:
        """Return whether the rank can be seen from here."""
        return rank >= 0

    def state(self, _rank: int) -> str:
        """Return that a rank lives."""
        return "alive"

    def process(self, _rank: int) -> None:
        """Return that no process is known, which could be asked for its stacks."""

    def describe(self, rank: int) -> str:
        """Return a text for a rank."""
        return f"rank {rank} of this process"

    def close(self) -> None:
        """Do nothing."""


class QuietStore:
    """A status store to which no other rank reports."""

    is_reachable = True

    def arrive(self, plane: str, arrival: Any) -> None:
        """Forget it."""

    def arrivals(self, _plane: str) -> dict[int, Arrival]:
        """Return no rank's call."""
        return {}

    def failure_record(self) -> FailureRecord | None:
        """Return no record."""
        return None

    def publish(self, failure_record: FailureRecord, within_s: float = 2.0) -> FailureRecord:
        """Return what a rank publishes: it counts."""
        return failure_record

    def leave(self) -> None:
        """Do nothing."""

    def left(self) -> tuple[int, ...]:
        """Return no rank."""
        return ()


def health_of(channels: Channels) -> GroupHealth:
    """Return the state of the group as the rank of `channels` sees it."""
    health: GroupHealth = getattr(channels, "_health")  # noqa: B009 - a test looks inside
    return health


@contextmanager
def channels_of(world_size: int) -> Iterator[list[Channels]]:
    """Make the memory of a group, and yield the channels of each of its ranks."""
    nbytes = -(-_core.channel_table_bytes(world_size) // mmap.PAGESIZE) * mmap.PAGESIZE
    segment = Segment.create(nbytes, room_bytes(world_size))
    ranks = range(world_size)
    watch, store = cast("PeerWatch", QuietWatch()), cast("StatusStore", QuietStore())
    healths = [GroupHealth("tp:0", rank, ranks, watch, store) for rank in ranks]
    table = memoryview(segment.memory)
    made = [Channels(segment, table, nbytes, health, rank) for rank, health in enumerate(healths)]
    for health, channels in zip(healths, made, strict=True):
        health.on_abort(channels.close)
    try:
        yield made
    finally:
        for channels in made:
            channels.close()
            channels.end_threads(5.0)
        table.release()
        segment.close()
