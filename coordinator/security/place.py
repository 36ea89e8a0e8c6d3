"""Who a process is in a job with a secret."""

from __future__ import annotations

import dataclasses
from typing import Final

from coordinator.security.secret import Secret
from shm_broadcast.endpoint import RemoteSettings

__all__ = ["Place"]

_DEFAULTS: Final = RemoteSettings()


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's place in a run.

    Attributes:
        secret: What all ranks of the job hold.
        run: Names this start of the job; equal on all ranks.
        rank: Global rank of this process.
        world_size: Number of processes.
        remote: Heartbeats: how long a rank may be silent before it counts as lost.
    """

    secret: Secret
    run: str
    rank: int
    world_size: int
    remote: RemoteSettings = _DEFAULTS

    @property
    def where(self) -> str:
        """Return the beginning of an error's text."""
        return f"rendezvous (rank {self.rank} of {self.world_size})"
