"""A rank as a Ray actor."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from coordinator.integrations.ray.library import import_ray
from coordinator.integrations.ray.seats import Seat
from coordinator.meeting import Offer, Ticket, offer, report_loss, withdraw
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import UsageError

__all__ = ["RankActor", "rank_actor"]

# The concurrency group in which an actor hears of losses while another method of it runs.
_CONTROL = "group_coordinator"


class RankActor:
    """A process that offers itself, joins a world with a ticket, and leaves it. Derive from it, and add what it runs.

    `rank_actor` makes the actor class. `meet` calls the first two methods; after `leave` the actor can meet again. A
    ticket is good for one start: an actor that Ray has started anew refuses the one that it is sent again, and the
    driver calls `meet` once more with all actors.

    Ray runs an actor's methods on a thread that is not the main one, always the same.
    """

    _offer: Offer | None = None

    def offer(self, seat: Seat, ports: tuple[int, int] | None = None) -> Offer:
        """Offer to start once. The actor of rank 0 listens at its node's address from now on.

        An earlier offer of this actor is withdrawn.

        Args:
            seat: Where it sits.
            ports: For rank 0, the first and the last TCP port of which one is taken; None takes any free one.

        Raises:
            UsageError: It does not sit there, it cannot listen, or it is in a world.
        """
        node_id = import_ray().get_runtime_context().get_node_id()
        if node_id != seat.node_id:
            raise UsageError(
                f"the actor of rank {seat.rank} is on node {node_id}, and its seat is bundle {seat.bundle} on node "
                f"{seat.node_id} ({seat.address}): start it with scheduling_strategy=seat.strategy(placement_group)"
            )
        if dist.is_initialized():
            # It would fail in `join`, where the others wait for it.
            raise UsageError(
                f"the actor of rank {seat.rank} (pid {os.getpid()}) is in a world already: let all actors leave first"
            )
        self._withdraw()
        self._offer = offer(seat.address, ports) if seat.rank == 0 else offer()
        return self._offer

    def join(
        self, ticket: Ticket, settings: CoordinatorSettings | None = None, backend: str | None = None
    ) -> None:
        """Join the world of the ticket, as `init_distributed_environment` does. Collective over the meeting's actors.

        Args:
            ticket: That of this actor.
            settings: Settings of the world; None reads this actor's environment.
            backend: torch backend of the world; None takes the accelerator's, else "gloo".

        Raises:
            UsageError: The ticket was made for another start, also an earlier one of this actor, or the actor is in a
                world.
            CommError: As `init_distributed_environment`.
        """
        init_distributed_environment(
            meeting=ticket, settings=settings, backend=backend, local_rank=self.device_index(ticket)
        )

    def device_index(self, ticket: Ticket) -> int:
        """Return the index of this rank's device among those that this process sees: its place on the node.

        Ray hides from an actor the GPUs that it has not asked for. Where each asks for one it sees that one only:
        return 0 there.
        """
        return ticket.local_rank

    def leave(self) -> None:
        """Leave the world and withdraw an offer that was not used. Idempotent, not collective."""
        destroy_distributed_environment()
        self._withdraw()

    def _withdraw(self) -> None:
        if self._offer is not None:
            withdraw(self._offer.token)
            self._offer = None


def _hear_of_loss(_self: RankActor, rank: int, how: str) -> None:
    """Report a rank as lost; runs beside the actor's other methods."""
    report_loss(rank, how)


def rank_actor(cls: type[RankActor] = RankActor, **options: Any) -> Any:
    """Return the actor class of `cls`, as `ray.remote` does, whose actors hear of losses while they run.

    Args:
        cls: A class derived from `RankActor`.
        options: Those of `ray.remote`, such as `num_gpus=1`.

    Raises:
        UsageError: `cls` is no such class.
        CapabilityError: Ray is not installed.
    """
    if not isinstance(cls, type) or not issubclass(cls, RankActor):
        raise UsageError(f"rank_actor takes a class derived from RankActor, not {cls!r}")
    ray = import_ray()
    body = {
        "hear_of_loss": ray.method(concurrency_group=_CONTROL)(_hear_of_loss),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    groups = {_CONTROL: 1, **options.pop("concurrency_groups", {})}
    return ray.remote(concurrency_groups=groups, **options)(type(cls.__name__, (cls,), body))
