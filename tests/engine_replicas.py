"""An engine shaped like vLLM's, for tests: a scheduler outside of the ranks writes a queue to each replica.

Each step goes to all data-parallel replicas, which first sum over all of them how many requests there are, as replicas
with experts do, and then compute: an answer is right if every rank of its replica has taken part. What the ranks do
about their members comes with a step, so that all of them do it between the same two steps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from coordinator.elastic import Plan
from coordinator.elastic.joining import join_distributed_environment
from coordinator.errors import (
    ClosedError,
    CommTimeoutError,
    DisagreementError,
    ExcludedError,
    PeerLostError,
)
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment
from coordinator.settings import CoordinatorSettings
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.settings import BroadcastSettings
from tests.queue_ranks import Marks
from tests.waiting import has_ended

__all__ = ["Scheduler", "work"]

TIMEOUT_S = 30.0
# Requests of a replica in one step.
BATCH = 2


def expected(request: int, tensor: int) -> float:
    """Return the right answer to a request."""
    return sum((place + 1) * (request + 0.5) for place in range(tensor))


def new_queue(marks: Marks, name: str, readers: int) -> QueueWriter:
    """Create a queue, and publish its handle and key."""
    queue = QueueWriter.create(name, range(readers), BroadcastSettings(ring_bytes=1 << 16))
    marks.mark(name, f"{queue.handle.to_bytes(queue.key).hex()} {queue.key.hex()}")
    return queue


def opened(marks: Marks, name: str, rank: int) -> QueueReader:
    """Open a queue that another process has created."""
    handle, key = map(bytes.fromhex, marks.wait(name).split())
    return QueueReader.open(handle, key, rank, TIMEOUT_S)


class Replica:
    """A replica as the scheduler sees it."""

    def __init__(self, marks: Marks, key: str, tensor: int) -> None:
        """Create the queue of its steps; its answers come later."""
        self.key = key
        self.steps = new_queue(marks, f"steps-{key}", tensor)
        self.answers: QueueReader | None = None
        self.asked: dict[int, None] = {}
        self.said: dict[str, Any] = {}

    def close(self) -> None:
        """Close both queues."""
        self.steps.close()
        if self.answers is not None:
            self.answers.close()


class Scheduler:
    """The engine's process. It is no rank."""

    def __init__(self, directory: Path, tensor: int, replicas: int, newcomer: str) -> None:
        """Start with some replicas; `newcomer` may join later."""
        self.marks = Marks(directory)
        self.tensor = tensor
        self.replicas = [Replica(self.marks, f"r{number}", tensor) for number in range(replicas)]
        self.newcomer = Replica(self.marks, newcomer, tensor)
        self.answered: dict[int, float] = {}
        self.by: dict[str, int] = {}
        self.asked_again = 0
        self.step = 0
        self.epochs: list[int] = []
        self.todo: deque[int] = deque()
        self._next_request = 0

    def serve(self, changes: Sequence[str], each: int) -> dict[str, Any]:
        """Make the changes, with `each` answers between two of them, and return what has happened.

        A change is "join", "leave KEY", "kill KEY", or "leave KEY, kill OTHER": the kill comes when the ranks have
        prepared the leave.
        """
        for replica in self.replicas:
            replica.answers = opened(self.marks, f"answers-{replica.key}", 0)
        for change in changes:
            self._answers(each)
            what, _, other = change.partition(", kill ")
            if what.startswith("kill "):
                self._kill(what.removeprefix("kill "))
            else:
                self._plan(what, other)
        self._answers(each)
        while self.todo or any(replica.asked for replica in self.replicas):
            self._go(None, new=False)
        self._send(["end"], {})
        self.marks.mark("over")
        for replica in [*self.replicas, self.newcomer]:
            replica.close()
        return {
            "answers": {str(request): value for request, value in self.answered.items()},
            "asked": self._next_request,
            "asked_again": self.asked_again,
            "by": self.by,
            "epochs": self.epochs,
        }

    def _answers(self, number: int) -> None:
        end = len(self.answered) + number
        while len(self.answered) < end:
            self._go(None)

    def _plan(self, what: str, victim: str) -> None:
        """Let a replica join or leave; steps go on meanwhile."""
        leaving = what.removeprefix("leave ") if what != "join" else ""
        while what == "join" and not any(each.said.get("waiting") == self.tensor for each in self.replicas):
            self._go(None)
        self._prepare(leaving, self.tensor if what == "join" else 0)
        if victim:
            self._kill(victim)
            self._plan(what, "")
            return
        if what == "join":
            # It takes part in this step already.
            self.replicas.append(self.newcomer)
        self._go(["commit"], leaving=leaving)
        for replica in [each for each in self.replicas if each.key == leaving]:
            replica.close()
            self.replicas.remove(replica)

    def _prepare(self, leaving: str, join: int) -> None:
        """Let the ranks prepare a change until they have: a replica that is lost meanwhile ends it."""
        while not all(each.said.get("plan") == "ready" for each in self.replicas):
            first = next((at for at, each in enumerate(self.replicas) if each.key == leaving), None)
            ranks = [] if first is None else [first * self.tensor + place for place in range(self.tensor)]
            self._go(["prepare", ranks, join])
            while any(each.said["plan"] == "going" for each in self.replicas):
                self._go(None)

    def _kill(self, key: str) -> None:
        """Kill the last rank of a replica when it has a step to do."""
        (pid,) = self.marks.wait(f"pid-{key}-{self.tensor - 1}").split()
        self._go(None, victim=int(pid))
        while any(each.key == key for each in self.replicas):
            self._go(None)

    def _go(self, do: Any, *, leaving: str = "", victim: int = 0, new: bool = True) -> None:
        """Do one step: give each replica some requests, and take its answers."""
        batches: dict[str, list[int]] = {}
        for replica in self.replicas:
            batches[replica.key] = []
            while replica.key != leaving and len(batches[replica.key]) < BATCH:
                if not self.todo and new:
                    self.todo.append(self._next_request)
                    self._next_request += 1
                if not self.todo:
                    break
                batches[replica.key].append(self.todo.popleft())
            replica.asked = dict.fromkeys(batches[replica.key])
        self._send(do, batches)
        if victim:
            os.kill(victim, signal.SIGKILL)
        for replica in list(self.replicas):
            try:
                self._take(replica)
            except (PeerLostError, ClosedError):
                # Killed, or left out because its replica has lost another rank.
                self._lose(replica)

    def _send(self, do: Any, batches: dict[str, list[int]]) -> None:
        self.step += 1
        total = sum(map(len, batches.values()))
        for replica in self.replicas:
            # Who has lost a rank is found by its answers.
            with suppress(PeerLostError):
                batch = batches.get(replica.key, [])
                replica.steps.enqueue(
                    {"step": self.step, "do": do, "batch": batch, "total": total}, TIMEOUT_S
                )

    def _take(self, replica: Replica) -> None:
        if replica.answers is None:
            replica.answers = opened(self.marks, f"answers-{replica.key}", 0)
        said = replica.said = self._awaited(replica, replica.answers)
        if said["step"] != self.step:
            raise AssertionError(f"{replica.key} answers step {said['step']} in step {self.step}")
        if said["epoch"] not in self.epochs:
            self.epochs.append(said["epoch"])
        for request, value in said["answers"]:
            del replica.asked[request]
            if request in self.answered:
                raise AssertionError(f"{replica.key} answers request {request} for a second time")
            self.answered[request] = value
            self.by[replica.key] = self.by.get(replica.key, 0) + 1

    def _awaited(self, replica: Replica, answers: QueueReader) -> Any:
        """Return the next answer, unless a process of the replica has ended, which the engine sees as their parent.

        The others cannot tell: they wait for the next step, and who has found the death waits for them in `rebuild`.
        """
        pids = [int(self.marks.wait(f"pid-{replica.key}-{place}").split()[0]) for place in range(self.tensor)]
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            lost = [pid for pid in pids if has_ended(pid)]
            try:
                return answers.dequeue(0.1)
            except CommTimeoutError:
                if lost:
                    raise PeerLostError(f"{replica.key} has lost {lost}", peers=()) from None
                if time.monotonic() > end_s:
                    raise

    def _lose(self, replica: Replica) -> None:
        """Ask others what a replica has not answered. Its queue is closed, so that nothing comes from it any more."""
        replica.close()
        self.replicas.remove(replica)
        self.asked_again += len(replica.asked)
        self.todo.extendleft(replica.asked)
        for other in self.replicas:
            # What they have prepared counts on the lost one.
            other.said["plan"] = "none"


class Worker:
    """One rank of a replica."""

    def __init__(self, marks: Marks, key: str, groups: ParallelGroups, step: int = 0) -> None:
        """Open the queues of the replica. A rank that joins begins in the middle of a step."""
        self.groups = groups
        self.place = groups.tp.rank_in_group
        marks.mark(f"pid-{key}-{self.place}", str(os.getpid()))
        self.answers = new_queue(marks, f"answers-{key}", 1) if self.place == 0 else None
        self.steps = opened(marks, f"steps-{key}", self.place)
        self._is_first = True
        self._has_joined = step > 0
        self._plan: Plan[ParallelGroups] | None = None
        self._preparing: threading.Thread | None = None
        # Steps up to this one do not count requests: members of an epoch may begin in different steps.
        self._uncounted = 0

    def run(self) -> str:
        """Serve until the end; return why."""
        while True:
            told = self.steps.dequeue(TIMEOUT_S)
            if told["do"] == ["end"]:
                return "end"
            try:
                values = self._act(told)
            except (PeerLostError, CommTimeoutError):
                try:
                    self._rebuild(told["step"])
                except ExcludedError:
                    return "excluded"
                values = self._compute(told)
            self._answer(told, values)
            if values is None:
                return "left"

    def _act(self, told: dict[str, Any]) -> list[float] | None:
        """Change the members if the step says so, and compute; None on a rank that leaves."""
        do, is_first = told["do"], self._is_first
        self._is_first = False
        if do and do[0] == "prepare":
            self._give_up()
            self._preparing = threading.Thread(target=self._prepare, args=(tuple(do[1]), do[2]))
            self._preparing.start()
        elif do == ["commit"] and not (self._has_joined and is_first):
            # The rank that has told the scheduler was ready before this one, perhaps.
            assert self._preparing is not None
            self._preparing.join()
            assert self._plan is not None
            after, self._plan, self._preparing = self._plan.commit(), None, None
            if after is None:
                return None
            self.groups = after
        return self._compute(told)

    def _prepare(self, leave: tuple[int, ...], join: int) -> None:
        # A replica was lost before all had come: the next collective raises for the same reason.
        with suppress(CommTimeoutError):
            self._plan = self.groups.prepare(leave=leave, join=join, timeout_s=TIMEOUT_S)

    def _give_up(self) -> None:
        """Forget a change that is not committed."""
        if self._preparing is not None:
            self._preparing.join()
        if self._plan is not None:
            self._plan.abort("a replica was lost")
        self._plan = self._preparing = None

    def _rebuild(self, step: int) -> None:
        self._give_up()
        self.groups = self.groups.rebuild(progress=step, timeout_s=TIMEOUT_S)
        assert self.groups.change is not None
        self._uncounted = max(self.groups.change.progress)

    def _compute(self, told: dict[str, Any]) -> list[float]:
        batch = torch.tensor([float(request) for request in told["batch"]])
        if told["step"] > self._uncounted:
            total = self.groups.dp.all_reduce(torch.tensor([float(len(batch))])).item()
            assert total == told["total"], f"{total:.0f} requests in step {told['step']}, not {told['total']}"
        values: list[float] = self.groups.tp.all_reduce((batch + 0.5) * (self.place + 1)).tolist()
        return values

    def _answer(self, told: dict[str, Any], values: list[float] | None) -> None:
        if self.answers is None:
            return
        preparing = self._preparing
        plan = "none" if preparing is None else "going"
        if preparing is not None and not preparing.is_alive():
            plan = "none" if self._plan is None else "ready"
        self.answers.enqueue(
            {
                "step": told["step"],
                "answers": list(zip(told["batch"], values or [], strict=values is not None)),
                "plan": plan,
                # Of the ranks one asks the store; the scheduler tells the others what they do about it.
                "waiting": 0 if values is None or self.groups.world.rank else self.groups.pending_members(),
                "epoch": 0 if self.groups.change is None else self.groups.change.epoch,
            },
            TIMEOUT_S,
        )


def work(rank: int, directory: Path, tensor: int, replicas: int, newcomer: str) -> str:
    """Be a rank: of a first replica, or of the one that joins. Return how it ended."""
    marks, store = Marks(directory), f"file://{directory}/store"
    first = tensor * replicas
    if rank < first:
        init_distributed_environment(first, rank, store, backend="gloo", timeout=TIMEOUT_S, elastic=True)
        groups = ParallelGroups.from_sizes(tensor_parallel_size=tensor)
        marks.mark(f"begun-{rank}")
        worker = Worker(marks, f"r{rank // tensor}", groups)
    else:
        for other in range(first):
            marks.wait(f"begun-{other}")
        worker = Worker(marks, newcomer, joined(store), step=1)
    ended = worker.run()
    if ended == "end":
        marks.wait("over")
    worker.steps.close()
    if worker.answers is not None:
        worker.answers.close()
    if ended != "left":
        worker.groups.destroy()
    if rank < first:
        destroy_distributed_environment()
    return ended


def joined(store: str) -> ParallelGroups:
    """Return the groups that this process joins; a change that is given up is followed by another one."""
    settings = CoordinatorSettings.resolve(timeout_s=TIMEOUT_S)
    while True:
        with suppress(DisagreementError):
            return join_distributed_environment(store, settings=settings, timeout_s=2 * TIMEOUT_S)
