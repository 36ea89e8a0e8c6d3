"""Run the ranks of a world as Ray actors; needs the extra `ray`.

    seats = plan(placement_group)
    actors = [rank_actor(MyRank).options(scheduling_strategy=seat.strategy(placement_group)).remote() for seat in seats]
    meeting = meet(actors, seats)
    results = watch([actor.run.remote() for actor in actors], meeting)

Where a rank sits, its number and its place among those of its node follow from the placement group. Rank 0 listens
where its node is reached and keeps the descriptor; the tickets go to the actors by method calls, never by
`runtime_env` or the environment. Ray pickles the arguments and results of methods: offers, seats, tickets and settings
are frozen structs of numbers and short text, and each actor checks its ticket. Ray itself is imported when one of the
functions is called.
"""

from coordinator.integrations.ray.actor import RankActor, rank_actor
from coordinator.integrations.ray.meeting import Meeting, meet
from coordinator.integrations.ray.seats import Seat, plan
from coordinator.integrations.ray.watching import watch

__all__ = ["Meeting", "RankActor", "Seat", "meet", "plan", "rank_actor", "watch"]
