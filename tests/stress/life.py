"""The life of one rank: it follows the common schedule until rank 0 ends it, or a rank is killed or interrupted."""

import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import finish_calls
from coordinator.errors import ClosedError, CommError
from coordinator.group import GroupCoordinator
from coordinator.torch_backend import BACKEND
from device_comm.cpu import shared_memory
from tests.stress import collective_steps, engine_steps, message_steps, strike_steps
from tests.stress.alarms import Alarms
from tests.stress.message_steps import CREATION_S, Queues
from tests.stress.model import Model
from tests.stress.queue_reads import PATIENCE_S
from tests.waiting import wait_until
from tests.worlds import join_world, meet, world

__all__ = ["CREATES", "StressError", "live"]

BATCH = 4
"""After so many steps rank 0 says whether the life goes on."""
RENEWALS = 60
"""One in so many steps makes the group and its queues anew."""
REMOTE = 0.5
"""How many groups have queues over TCP, beside those in shared memory."""
LONGEST_S = 60.0
"""No life that is to end by a kill or an interrupt may go on for longer."""

Step = Callable[[GroupCoordinator, Queues, Model], None]


class StressError(AssertionError):
    """A step ended otherwise than the model says; the text holds what is needed to look into it."""


def _without_queues(
    step: Callable[[GroupCoordinator, Model], None], group: GroupCoordinator, _: Queues, model: Model
) -> None:
    step(group, model)


PLAIN = {**collective_steps.STEPS, **engine_steps.STEPS}
STEPS: dict[str, Step] = {
    **{name: partial(_without_queues, step) for name, (step, _) in PLAIN.items()},
    **{name: step for name, (step, _) in message_steps.STEPS.items()},
}
TORCH = "calls of torch.distributed"
WEIGHTS = [weight for table in (PLAIN, message_steps.STEPS) for _, weight in table.values()]
WEIGHTS.append(6)
RENEWAL = "renewal"
CREATES = {RENEWAL, *engine_steps.CREATES}
"""The steps in which ranks create groups."""
STRUCK = "calls that are struck"
STRUCK_SHARE = 0.3
"""How many steps of a life in which handlers break groups are such calls."""


class Life:
    """The groups of one rank, and where it is in the schedule.

    Attributes:
        step: Number of the current step.
        doing: Its name.
    """

    def __init__(
        self,
        everyone: GroupCoordinator,
        seed: str,
        alarms: Alarms,
        places: str,
        *,
        one_group: bool,
        breaks: bool = False,
    ) -> None:
        """Create a group of all ranks with queues. Collective.

        With `one_group` the world's group is not used: where it breaks, the other one does not, and a rank that waits
        in that one for a rank that has raised an error waits rightly. With `breaks` some steps make groups of their
        own, in whose calls handlers raise.
        """
        self.step = 0
        self.doing = "creation"
        self._everyone = everyone
        self._seed = seed
        self._schedule = random.Random(seed)
        self._one_group = one_group
        self._places = places
        self._breaks = breaks
        self._alarms = alarms
        # Between hosts torch's group would be one of Gloo, which names nobody.
        is_apart = len(set(places)) > 1
        self._torch = None if is_apart else _torch_group(everyone.ranks)
        self._renew()

    def _renew(self) -> None:
        self.group = GroupCoordinator(
            [self._everyone.ranks],
            self._everyone.local_rank,
            "gloo",
            True,
            True,
            group_name=f"g{self.step}",
            settings=Queues.settings(),
        )
        world_size = self._everyone.world_size
        chosen = random.Random(f"{self._seed}/{self.step}/places")
        places = (
            [chosen.randrange(2) for _ in range(world_size)] if chosen.random() < REMOTE else [0] * world_size
        )
        if len(set(self._places)) > 1:
            places = [0] * world_size  # the hosts say who shares memory
        place = places[self._everyone.rank_in_group]
        self.queues = Queues.create(self.group, self.step % world_size, self._alarms, place)

    def take_step(self) -> None:
        """Take the next step of the schedule."""
        self.step += 1
        self.doing = self._schedule.choices([*STEPS, TORCH], WEIGHTS)[0]
        model = Model(f"{self._seed}/{self.step}", self._places)
        group = self._everyone if self._schedule.random() < 0.2 and not self._one_group else self.group
        if self._schedule.randrange(RENEWALS) == 0:
            self.doing = RENEWAL
            self.group.barrier()  # a rank that leaves would take the others' unread messages with it
            self.group.destroy()
            self._renew()
        elif self._breaks and self._schedule.random() < STRUCK_SHARE:
            self.doing = STRUCK
            strike_steps.calls(group, self._alarms, model, f"s{self.step}")
        elif self.doing == TORCH:
            self._call_torch(model)
        else:
            STEPS[self.doing](group, self.queues, model)

    def _call_torch(self, model: Model) -> None:
        """Make calls of the group that torch has, or of one that it makes for them, of some ranks.

        In a life that ends by a kill or an interrupt it makes none: torch itself waits for the others there, and for
        minutes.
        """
        if self._torch is None:
            return
        if self._one_group or model.plan.random() < 0.7:
            collective_steps.torch_calls(self._torch, model)
            return
        members = sorted(model.plan.sample(range(model.world_size), model.plan.randint(1, model.world_size)))
        part = _torch_group([self._everyone.ranks[each] for each in members])
        if self._everyone.rank_in_group in members:
            inner = model.inner("part", "".join(model.places[each] for each in members))
            collective_steps.torch_calls(part, inner)
            dist.barrier(part)  # a rank that leaves would end the calls of the others
            dist.destroy_process_group(part)

    def goes_on(self, until: float) -> bool:
        """Learn from rank 0 whether there is time left."""
        self.doing = "end of a batch"
        return self.group.broadcast_flag(time.monotonic() < until, 0)


def _torch_group(ranks: list[int]) -> dist.ProcessGroup:
    """Return a group of our backend for torch; to a rank that is not among them something else. Of all ranks."""
    found: Any = dist.new_group(ranks, timedelta(seconds=PATIENCE_S), BACKEND)
    group: dist.ProcessGroup = found
    return group


def live(
    rank: int,
    world_size: int,
    directory: Path,
    seed: str,
    seconds: float,
    marks: str,
    culprits: list[int],
    kind: str,
    places: str,
) -> dict[str, Any]:
    """Follow the schedule of `seed`. This is a function for `run_ranks`.

    Args:
        rank: This rank.
        world_size: How many there are.
        directory: For the rendezvous.
        seed: Names the life.
        seconds: How long it lasts if nobody is to be hit.
        marks: A directory in which each rank says that it is ready to be hit.
        culprits: Ranks that will be killed or interrupted.
        kind: How the life is disturbed, as in `LifePlan`.
        places: The host on which each rank pretends to be, a letter each.

    Returns:
        How many steps were taken, and how they ended: "done", or the error, and when it came.

    Raises:
        StressError: A step ended otherwise than the model says.
    """
    if len(set(places)) > 1:
        shared_memory.host_id = lambda: f"host {places[rank]}"
    alarms = Alarms(f"{seed}/alarms of rank {rank}", may_strike="interrupted" not in kind)
    signal.signal(signal.SIGINT, alarms.interrupt)
    if not culprits:
        try:
            with world(rank, world_size, directory) as everyone:
                life = Life(everyone, seed, alarms, places, one_group=False, breaks=kind == "struck")
                _take_steps(life, alarms, seconds, seed, rank)
                alarms.end()
                life.group.barrier()
                life.group.destroy()
        finally:
            alarms.end()
        return {"steps": life.step, "end": "done", "alarms": alarms.count, "strikes": alarms.strikes}
    join_world(rank, world_size, directory)
    from coordinator.parallel_state import destroy_distributed_environment, get_world_group

    found: dict[str, Any] = {"end": "done"}
    hits: list[int] = []
    life = Life(get_world_group(), seed, alarms, places, one_group=True)
    (Path(marks) / f"ready-{rank}").touch()
    try:
        _take_steps_until_hit(life, alarms, seed, rank, hits)
    except KeyboardInterrupt as error:
        found = _ending(error)
    except StressError as error:
        if not isinstance(error.__cause__, CommError):
            raise
        found = _ending(error.__cause__)
        # A queue tells its own end only. A collective looks for the culprit, tells all others, and ends their waits.
        after = _ending(_error_of(life.group.barrier))
        # The former group is destroyed, and the next one may not be there.
        is_renewed = life.doing == RENEWAL
        if isinstance(error.__cause__, ClosedError) or not (after["peers"] or is_renewed):
            found = after
    finally:
        alarms.end()
    if rank in culprits and found["end"] != "KeyboardInterrupt":
        # Another culprit was hit first, and this rank learned of that before its own signal came.
        wait_until(lambda: hits, "the signal that is to hit this rank")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank not in culprits:
        # Whoever leaves at once could be taken for the culprit by a rank that has not yet looked.
        meet(rank, [other for other in range(world_size) if other not in culprits], Path(marks), "told")
    life.group.destroy()
    destroy_distributed_environment()
    if len(set(places)) > 1:
        # Gloo goes on to connect to a rank that has died for up to five times the deadline of the creation.
        finish_calls(6 * CREATION_S)
    return {**found, "steps": life.step, "doing": life.doing}


def _take_steps(life: Life, alarms: Alarms, seconds: float, seed: str, rank: int) -> None:
    until = time.monotonic() + seconds
    try:
        while life.step % BATCH or life.goes_on(until):
            alarms.change()
            life.take_step()
    except Exception as error:
        raise StressError(
            f"life {seed}, step {life.step} ({life.doing}), rank {rank}: {type(error).__name__}: {error}"
        ) from error


def _take_steps_until_hit(life: Life, alarms: Alarms, seed: str, rank: int, hits: list[int]) -> None:
    """Take steps; an interrupt that comes behind them is added to `hits` and raises nothing."""
    try:
        _take_steps(life, alarms, LONGEST_S, seed, rank)
    finally:
        signal.signal(signal.SIGINT, lambda number, _: hits.append(number))


def _error_of(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except (CommError, KeyboardInterrupt) as error:
        return error
    raise StressError("the barrier of a broken group ended without an error")


def _name_of(error: BaseException | None) -> str:
    """Return the name of the class; of an error for callers of torch that of the class which it stands for."""
    return next(each.__name__ for each in type(error).__mro__ if not issubclass(each, dist.DistBackendError))


def _ending(error: BaseException) -> dict[str, Any]:
    blamed: BaseException | None = error
    while blamed is not None and not (getattr(blamed, "peers", None) or getattr(blamed, "missing", None)):
        blamed = blamed.__cause__
    ranks = [*getattr(blamed, "peers", ()), *getattr(blamed, "missing", ())]
    return {
        "end": _name_of(error),
        "blamed": _name_of(blamed),
        "peers": ranks,
        "text": str(error),
        "at": time.monotonic(),
    }
