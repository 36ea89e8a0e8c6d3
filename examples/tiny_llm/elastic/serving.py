"""The steps of a worker: all replicas meet, each computes its requests, and the members change between two steps.

In each step all ranks meet once, in a sum of what each of them knows. They decide by the sum alone, so they decide
alike; and whoever waits there learns at once that another rank is gone.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from coordinator import (
    CommTimeoutError,
    DisagreementError,
    GroupBrokenError,
    ParallelGroups,
    PeerLostError,
)
from coordinator.elastic import drop_replicas
from examples.tiny_llm.group import ModelGroups
from examples.tiny_llm.scheduler import Request, Scheduler
from examples.tiny_llm.worker import StageWorker, run_step

from .options import ElasticOptions
from .planned_change import PlannedChange
from .wire import Wire

__all__ = ["ReplicaServer", "groups_of_replica"]

# After so many steps the first rank asks whether workers wait to join: it asks the store, which takes a while.
STEPS_PER_LOOK = 8
REBUILD_TIMEOUT_S = 30.0
TOKENS_PER_STEP = 48


def groups_of_replica(groups: ParallelGroups) -> ModelGroups:
    """Return the groups of a replica: what is the world for the model is one replica here."""
    assert groups.replica is not None
    return ModelGroups(groups.replica, groups.tp, groups.pp)


class Agreed(NamedTuple):
    """What all ranks know together: each field is a sum over the ranks.

    Attributes:
        waiting: Workers that wait to join.
        leaving: One more than the number of the replica that the front end lets leave; 0 if it lets none.
        prepared: Ranks that have done their part of a change.
        failed: Those of them for which it has failed.
        ending: Replicas that the front end has told to end.
    """

    waiting: int
    leaving: int
    prepared: int
    failed: int
    ending: int


class ReplicaServer:
    """One rank of a replica.

    Attributes:
        groups: The groups of this epoch.
    """

    def __init__(
        self,
        groups: ParallelGroups,
        worker: StageWorker,
        wire: Wire,
        say: Callable[..., None],
        options: ElasticOptions,
    ) -> None:
        """Serve nothing yet.

        Args:
            groups: The groups of the first epoch of this worker.
            worker: This rank's part of the model, in the groups of its replica.
            wire: Brings requests to the first rank of a replica.
            say: Sends a message to the front end.
            options: The user's options.
        """
        self.groups = groups
        self._worker = worker
        self._wire = wire
        self._say = say
        self._options = options
        self._scheduler: Scheduler | None = None
        self._max_length = worker.max_length
        if groups_of_replica(groups).world.is_first_rank:
            self._scheduler = self._make_scheduler([])
        self._planned: PlannedChange | None = None
        self._is_ending = self._is_leaving = False
        self._steps = 0
        # Steps of the model in this epoch, also without requests.
        self._begun = self._done = 0
        self._waiting = 0

    def serve(self) -> None:
        """Serve until the front end has told this replica to leave, or all replicas to end.

        Raises:
            ExcludedError: The others go on without this rank.
        """
        while True:
            try:
                if not self._step():
                    return
            except (PeerLostError, CommTimeoutError, GroupBrokenError) as error:
                self._rebuild(error)

    def say_place(self, how: str, **more: Any) -> None:
        """Tell the front end where this rank is now."""
        change = self.groups.change
        self._say(
            told="serving",
            how=how,
            epoch=0 if change is None else change.epoch,
            rank=self.groups.world.rank_in_group,
            replica=self.groups.dp.rank_in_group,
            shard=self.groups.tp.rank_in_group,
            lost=[] if change is None else change.lost,
            joined=[] if change is None else change.joined,
            old_to_new=[] if change is None else sorted(change.old_to_new.items()),
            **more,
        )

    def _step(self) -> bool:
        """Meet the others, let members change if all are ready for it, and compute one step; False at the end."""
        start_s = time.monotonic()
        self._hear()
        agreed = self._meet()
        if agreed.ending or not self._change_members(agreed):
            return False
        self._begun += 1
        tokens = run_step(self._worker, self._scheduler)
        self._done += 1
        if self._scheduler is not None and tokens:
            finished = [number for number in tokens if not self._scheduler.is_running(number)]
            epoch = 0 if self.groups.change is None else self.groups.change.epoch
            self._say(told="tokens", epoch=epoch, tokens=list(tokens.items()), finished=finished)
        time.sleep(max(self._options.step_ms / 1e3 - (time.monotonic() - start_s), 0.0))
        return True

    def _hear(self) -> None:
        """Take requests from the front end."""
        for message in self._wire.receive():
            if message["do"] == "end":
                self._is_ending = True
            elif message["do"] == "leave":
                self._is_leaving = True
            elif self._scheduler is not None:
                prompt = tuple(message["prompt"])
                self._scheduler.submit(Request(message["number"], prompt, self._options.max_tokens))

    def _meet(self) -> Agreed:
        """Meet all other ranks, and return what they know together."""
        planned = self._planned
        if self._steps % STEPS_PER_LOOK == 0 and self.groups.world.is_first_rank and planned is None:
            self._waiting = self.groups.pending_members()
        self._steps += 1
        is_prepared = planned is not None and planned.is_prepared
        has_failed = is_prepared and planned is not None and planned.error is not None
        leaving = self.groups.dp.rank_in_group + 1 if self._is_leaving else 0
        known = [self._waiting, leaving, is_prepared, has_failed, self._is_ending]
        sums = self.groups.world.all_reduce(torch.tensor([int(each) for each in known]))
        return Agreed(*sums.tolist())

    def _change_members(self, agreed: Agreed) -> bool:
        """Prepare a change beside the steps, and go over to it once all have prepared; False if this rank has left."""
        if self._planned is None:
            self._plan(agreed)
            return True
        if agreed.prepared < self.groups.world.world_size:
            return True
        planned, self._planned, self._waiting = self._planned, None, 0
        if agreed.failed:
            planned.give_up()
            self._say(told="given up", error=str(planned.error or "another rank has failed"))
            return True
        start_s = time.monotonic()
        try:
            groups = planned.commit()
        except DisagreementError as error:
            # A rank has ended in the meantime. The old groups serve on, until the next step meets that rank.
            self._say(told="given up", error=str(error))
            return True
        blocked_s = time.monotonic() - start_s
        if groups is None:
            self._say(told="left")
            return False
        self._go_over(groups)
        how = "grown" if groups.change is not None and groups.change.joined else "shrunk"
        self.say_place(how, prepare_s=planned.seconds, blocked_s=blocked_s)
        return True

    def _plan(self, agreed: Agreed) -> None:
        """Begin a change if whole replicas wait to join, or one is to leave."""
        tensor = self._options.tensor
        if agreed.waiting >= tensor:
            self._planned = PlannedChange(self.groups, join=agreed.waiting // tensor * tensor)
        elif agreed.leaving:
            first = (agreed.leaving - 1) * tensor
            self._planned = PlannedChange(self.groups, leave=range(first, first + tensor))

    def _rebuild(self, error: Exception) -> None:
        """Go on with the ranks that are left.

        Raises:
            ExcludedError: This replica has lost a rank.
        """
        start_s = time.monotonic()
        self._say(told="failure", error=str(error).partition("; ")[0])
        planned, self._planned, self._waiting = self._planned, None, 0
        if planned is not None:
            planned.give_up()
        groups = self.groups.rebuild(
            layout=drop_replicas, progress=self._begun + self._done, timeout_s=REBUILD_TIMEOUT_S
        )
        self._go_over(groups)
        is_kept = self._keep_caches()
        self.say_place("rebuilt", seconds=time.monotonic() - start_s, is_kept=is_kept)

    def _keep_caches(self) -> bool:
        """Return whether all ranks of this replica have ended the same step, and can go on behind it.

        If not, a rank may have computed what another one has not: they forget their caches, and compute the tokens of
        their requests again. All of them see the same progress, so they decide alike.
        """
        change = self.groups.change
        assert change is not None
        progress = {change.progress[rank] for rank in groups_of_replica(self.groups).world.ranks}
        self._begun = self._done = 0
        if len(progress) == 1 and progress.pop() % 2 == 0:
            return True
        self._worker.forget()
        if self._scheduler is not None:
            self._scheduler = self._make_scheduler(self._scheduler.unfinished())
        return False

    def _go_over(self, groups: ParallelGroups) -> None:
        self.groups = groups
        self._steps = 0
        self._worker.use(groups_of_replica(groups))

    def _make_scheduler(self, requests: list[Request]) -> Scheduler:
        slots = self._options.slots
        return Scheduler(
            requests,
            slots=slots,
            tokens_per_step=max(TOKENS_PER_STEP, slots),
            max_length=self._max_length,
            eos_tokens=self._worker.config.eos_token_ids,
        )
