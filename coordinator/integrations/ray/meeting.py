"""Bring actors together as the ranks of a world."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from coordinator.integrations.ray.calls import collect
from coordinator.integrations.ray.library import import_ray
from coordinator.integrations.ray.seats import Seat
from coordinator.meeting import make_tickets
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import UsageError

__all__ = ["Meeting", "meet"]

# How long the other actors may take to end their calls, once one has failed.
_GRACE_S: Final = 5.0


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Actors that form a world.

    Attributes:
        actors: Their handles, by rank.
        seats: Their seats, by rank.
    """

    actors: tuple[Any, ...]
    seats: tuple[Seat, ...]

    def report_loss(self, rank: int, how: str) -> None:
        """Tell all actors but that of `rank` that it is lost. Does not wait; one that is dead too is not told."""
        self._tell(rank, how)

    def _tell(self, rank: int, how: str) -> list[Any]:
        """Do what `report_loss` does, and return Ray's object refs of the calls."""
        others = [actor for other, actor in enumerate(self.actors) if other != rank]
        return [actor.hear_of_loss.remote(rank, how) for actor in others]


def meet(
    actors: Sequence[Any],
    seats: Sequence[Seat],
    settings: CoordinatorSettings | None = None,
    *,
    ports: tuple[int, int] | None = None,
    backend: str | None = None,
) -> Meeting:
    """Let the actors form a world, in which the actor at each position has the rank of the seat there.

    The driver calls this, and once more after actors were started anew or have left. Blocks until all have joined; the
    two steps, offers and joining, take at most `create_timeout_s` each, the first one also the start of the actors.

    Args:
        actors: Handles of actors that `rank_actor` has made, by rank.
        seats: What `plan` has returned.
        settings: Settings of the world on all ranks; None lets each actor read its own environment, and this process
            its own for the deadlines.
        ports: First and last TCP port of which rank 0 takes one for the store; None takes any free one.
        backend: torch backend of the world; None takes that of the actors' accelerators, else "gloo".

    Raises:
        UsageError: There are not as many actors as seats, an actor was not made by `rank_actor`, sits elsewhere, or is
            in a world; or rank 0 cannot listen.
        PeerLostError: Actors have died meanwhile; `.peers` names them. The others have given up too, as they do behind
            an error of one actor of its own, which arrives as it was.
        CommTimeoutError: Actors were not started or did not join in time; `.missing` names them.
        CommError: Another error of `init_distributed_environment`.
        CapabilityError: Ray is not installed.
    """
    if len(actors) != len(seats) or [seat.rank for seat in seats] != list(range(len(seats))):
        raise UsageError(
            f"meet takes an actor for each seat, by rank; got {len(actors)} actors and the seats of ranks "
            f"{[seat.rank for seat in seats]}"
        )
    strange = [rank for rank, actor in enumerate(actors) if not hasattr(actor, "hear_of_loss")]
    if strange:
        raise UsageError(
            f"the actors of ranks {strange} were not made by rank_actor, so they cannot be told of losses"
        )
    meeting = Meeting(tuple(actors), tuple(seats))
    timeout_s = (settings or CoordinatorSettings.from_env()).create_timeout_s
    calls = [
        actor.offer.remote(seat, ports if seat.rank == 0 else None)
        for actor, seat in zip(actors, seats, strict=True)
    ]
    offers = collect(calls, seats, "meet, offers", timeout_s, 0.0, lambda _rank, _how: None)
    tickets = make_tickets(offers, [(seat.local_rank, seat.local_world_size) for seat in seats])
    calls = [
        actor.join.remote(ticket, settings, backend) for actor, ticket in zip(actors, tickets, strict=True)
    ]
    told = list[Any]()

    def tell(rank: int, how: str) -> None:
        told.extend(meeting._tell(rank, how))  # noqa: SLF001 - ours

    def tell_of_error(rank: int, how: str) -> None:
        # Its process lives and will not come, so that the others would wait for it until their deadline.
        tell(rank, f"it could not join: {how}")

    try:
        # The actors have the same deadline, and know better who is missing.
        collect(calls, seats, "meet, joining", timeout_s + _GRACE_S, _GRACE_S, tell, tell_of_error)
    finally:
        if told:
            # What an actor hears later it would take for a loss of the next meeting.
            import_ray().wait(told, num_returns=len(told), timeout=_GRACE_S)
    return meeting
