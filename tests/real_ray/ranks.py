"""The actor that the tests run: a rank that does a few collectives, waits for others, and can be killed at a time."""

import os
import signal
import threading
import time
from typing import Any

import torch

from coordinator import get_world_group, init_distributed_environment
from coordinator.integrations.ray import RankActor
from coordinator.meeting import Ticket
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CommError
from shm_broadcast.liveness import this_process

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Rank(RankActor):
    """A rank under test."""

    def __init__(self) -> None:
        self.dies_at: float | None = None
        self.raises = False
        self.kept: Ticket | None = None

    def join(
        self, ticket: Ticket, settings: CoordinatorSettings | None = None, backend: str | None = None
    ) -> None:
        """Join; keep the ticket, or die or raise on the way if that was asked for."""
        self.kept = ticket
        if self.dies_at == 0.0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.raises:
            self.raises = False
            raise KeyError("no such weight")
        super().join(ticket, settings, backend)

    def die_in_join(self) -> None:
        self.dies_at = 0.0

    def raise_in_join(self) -> None:
        self.raises = True

    def ticket(self) -> Ticket | None:
        return self.kept

    def who(self) -> dict[str, Any]:
        """Return where this process is, and what it finds in its environment."""
        own = this_process()
        return {
            "host": own.hostname,
            "boot_id": own.boot_id,
            "pid": own.pid,
            "launcher": [name for name in LAUNCHERS if name in os.environ],
            "secret": [name for name, value in os.environ.items() if self.kept and self.kept.offer in value],
        }

    def use(self) -> dict[str, Any]:
        """Do collectives of the world."""
        group = get_world_group()
        total = group.all_reduce(torch.tensor([float(group.rank + 1)]))
        large = group.all_reduce(torch.full((300_000,), 2.0**group.rank))
        return {
            "rank": group.rank,
            "ranks": group.all_gather_object(group.rank),
            "local_rank": group.local_rank,
            "sum": total.item(),
            "large": [large.min().item(), large.max().item()],
            "object": group.broadcast_object({"from": group.rank}, src=2 % group.world_size),
            "tensor": group.broadcast(torch.full((3,), float(group.rank)), src=1).tolist(),
            "token_of_world": None if self.kept is None else self.kept.meeting,
        }

    def wait_for(self, victim: int, at: float) -> dict[str, Any]:
        """Call all-reduce until it fails; the victim stays away and is killed by SIGKILL at the monotonic time `at`."""
        group = get_world_group()
        if group.rank == victim:
            threading.Timer(max(at - time.monotonic(), 0.0), os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(3600)
        try:
            group.all_reduce(torch.ones(1))
        except CommError as error:
            return {
                "kind": type(error).__name__,
                "peers": list(getattr(error, "peers", ())),
                "after_s": time.monotonic() - at,
                "text": str(error),
            }
        return {"kind": "none"}

    def raise_own(self) -> None:
        """Raise an error that is no consequence of another rank's, on rank 1; wait on the others."""
        if get_world_group().rank == 1:
            raise KeyError("no such weight")
        get_world_group().barrier()

    def use_again(self) -> None:
        """Use the kept ticket a second time."""
        init_distributed_environment(meeting=self.kept)
