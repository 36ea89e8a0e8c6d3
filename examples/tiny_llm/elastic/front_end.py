"""The front end: it has the requests, starts the workers, kills one, starts new ones, and judges the answers.

It is outside of the ranks, like the front end of an engine. Therefore it survives each of them, and no request is lost
with a replica. It does not import torch.
"""

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from examples.tiny_llm.errors import RunError
from examples.tiny_llm.launcher import Signals

from .account import Account
from .options import REPLICAS, ElasticOptions
from .processes import Worker, Workers, kill
from .requests import Prompt, Requests

__all__ = ["run_front_end"]

POLL_S = 0.05
# A worker is killed once its replica has given so many tokens, and is in the middle of an answer.
TOKENS_BEFORE_KILL = (100, 300)
TOKENS_OF_ANSWER = 5
# The old replica leaves once the new one has given so many answers, and the run ends after so many more.
ANSWERS_OF_NEWCOMERS = 6

# What workers say that is printed as it is.
SAID = {
    "training": "trains a tiny model: loss {loss:.3f}",
    "failure": "learns: {error}",
    "excluded": "is left out, as its replica has lost a rank, and ends",
    "joining": "has loaded its part of the model, and joins",
    "given up": "says that the change is given up: {error}",
    "left": "has left, as planned, and ends",
}

Phase = Literal[
    "starting", "serving", "killed", "joining", "grown", "leaving", "shrunk", "draining", "ending", "over"
]


def run_front_end(options: ElasticOptions, arguments: Sequence[str]) -> int:
    """Run the demo.

    Args:
        options: The user's options.
        arguments: The command line with these options, for the workers.

    Returns:
        The exit status: 0 if all answers are right, 1 if not.

    Raises:
        RunError: A worker has failed, or the deadline has passed.
        SystemExit: A signal asked this process to end.
    """
    signals = Signals()
    account = Account(is_quiet=options.as_json)
    with (
        tempfile.TemporaryDirectory(prefix="group-coordinator-demo-") as directory,
        Workers(Path(directory), arguments) as workers,
    ):
        front_end = FrontEnd(options, workers, account)
        give_up_s = time.monotonic() + options.deadline_s
        while front_end.phase != "over":
            signals.check()
            if time.monotonic() > give_up_s:
                raise RunError(
                    f"not finished within {options.deadline_s:g} s (--deadline), but {front_end.phase}"
                )
            front_end.advance()
    return 0 if account.close(front_end.requests, front_end.newcomers) else 1


class FrontEnd:
    """What the front end knows, and what it does next.

    Attributes:
        phase: How far the run is.
        requests: All requests; none until there is a model.
        newcomers: Numbers of the workers that were started behind the kill.
    """

    def __init__(self, options: ElasticOptions, workers: Workers, account: Account) -> None:
        """Start the first workers.

        Args:
            options: The user's options.
            workers: Starts workers.
            account: Gets what happens.
        """
        self.phase: Phase = "starting"
        self.requests = Requests(options.slots + 1)
        self.newcomers: list[int] = []
        self._options = options
        self._workers = workers
        self._account = account
        self._model: dict[str, Any] = {}
        self._ready: set[int] = set()
        self._settled: dict[str, list[Mapping[str, Any]]] = {
            how: [] for how in ("rebuilt", "grown", "joined", "shrunk")
        }
        self._tokens_before_kill = random.Random(options.seed).randrange(*TOKENS_BEFORE_KILL)
        self._tokens: dict[int, int] = {}
        self._killed_s = 0.0
        # The head of the replica that leaves, once that is planned.
        self._leaver: Worker | None = None
        self._is_told_to_leave = False
        # Answers of the new replica when the old one had left.
        self._shown = 0
        size = options.world_size
        account.tell(f"{size} workers start: {REPLICAS} replicas of a model, TP {options.tensor} each")
        for rank in range(size):
            workers.start(rank % options.tensor)

    def advance(self) -> None:
        """Hear what the workers say, for a moment, and do what is next."""
        for worker, message in self._workers.messages(POLL_S):
            self._hear(worker, message)
        for worker, status in self._workers.ended():
            self._note_end(worker, status)
        self._do_next()
        if self.phase not in ("starting", "ending", "over"):
            heads = [each.number for each in self._workers.all if each.is_head and each is not self._leaver]
            for answer in self.requests.hand_out(heads, more=self.phase != "draining"):
                head = self._workers.all[answer.by]
                head.tell(do="serve", number=answer.number, prompt=answer.prompt.tokens)

    # ------------------------------------------------------------------ what is heard

    def _hear(self, worker: Worker, message: Mapping[str, Any]) -> None:
        told = message["told"]
        if told in SAID:
            self._account.tell(f"worker {worker.number} {SAID[told].format(**message)}", message["at_s"])
        if told == "tokens":
            self._take_tokens(worker, message)
        elif told == "model":
            self._take_model(message)
        elif told == "ready":
            self._ready.add(worker.number)
        elif told == "serving":
            self._settle(worker, message)
        elif told in ("excluded", "left"):
            self._leave(worker)
        elif told == "error":
            raise RunError(f"worker {worker.number} has failed: {message['trace']}")

    def _take_model(self, message: Mapping[str, Any]) -> None:
        prompts = self.requests.prompts
        prompts += [Prompt(text, tuple(tokens), tuple(answer)) for text, tokens, answer in message["prompts"]]
        self._model = {"directory": message["directory"], "max_length": message["max_length"]}
        trained = "the model is trained" if self._options.model is None else "the model is there"
        self._account.tell(
            f"{trained}, and one process alone has answered {len(prompts)} prompts", message["at_s"]
        )
        for worker in self._workers.all:
            worker.tell(do="load", **self._model)

    def _take_tokens(self, worker: Worker, message: Mapping[str, Any]) -> None:
        tokens = dict(message["tokens"])
        self.requests.take(worker.number, tokens, message["finished"])
        self._tokens[worker.number] = self._tokens.get(worker.number, 0) + len(tokens)
        if self.phase == "joining":
            self._account.figures.steps_beside += 1
        if self.phase == "killed" and message["epoch"] > 0:
            seconds = self._account.figures.first_step_s = message["at_s"] - self._killed_s
            self._account.tell(
                f"worker {worker.number}: first good step, {seconds * 1e3:.0f} ms after the kill",
                message["at_s"],
            )
            self._start_newcomers()

    def _settle(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Note where a worker is in a new epoch; tell what has changed once all of them are there."""
        if message["shard"] != worker.shard:
            raise RunError(f"worker {worker.number} has shard {worker.shard}, and place {message['shard']}")
        worker.rank, worker.replica, worker.epoch = message["rank"], message["replica"], message["epoch"]
        settled = self._settled
        settled[message["how"]].append(message)
        old, new = (REPLICAS - 1) * self._options.tensor, self._options.tensor
        if message["how"] == "rebuilt" and len(settled["rebuilt"]) == old:
            kept = "kept" if message["is_kept"] else "lost, and computed again"
            self._tell_epoch(message, f"caches are {kept}")
        elif self.phase == "joining" and len(settled["grown"]) == old and len(settled["joined"]) == new:
            self._tell_epoch(message, self._durations(settled["grown"]))
            self.phase = "grown"
        elif self.phase == "leaving" and len(settled["shrunk"]) == new:
            self._tell_epoch(message, self._durations(settled["shrunk"]))
            self._shown = self._answers_of_newcomers()
            self.phase = "shrunk"

    def _durations(self, settled: Sequence[Mapping[str, Any]]) -> str:
        """Note how long a planned change has taken on the rank that it has taken longest."""
        prepare_s = max(each["prepare_s"] for each in settled)
        blocked_s = max(each["blocked_s"] for each in settled)
        figures = self._account.figures
        figures.prepare_s = max(figures.prepare_s, prepare_s)
        figures.blocked_s = max(figures.blocked_s, blocked_s)
        return f"prepared in {prepare_s * 1e3:.0f} ms beside the steps, committed in {blocked_s * 1e3:.1f} ms"

    def _tell_epoch(self, message: Mapping[str, Any], text: str) -> None:
        """Tell who is where in a new epoch."""
        epoch = message["epoch"]
        members = sorted((each.rank, each.number) for each in self._workers.all if each.epoch == epoch)
        moved = [f"{old} to {new}" for old, new in message["old_to_new"]]
        changes = [f"old ranks {', '.join(moved)}"]
        gone = "left" if message["how"] == "shrunk" else "lost"
        changes += [f"{gone} {_listed(message['lost'])}"] if message["lost"] else []
        changes += [f"new {_listed(message['joined'])}"] if message["joined"] else []
        self._account.figures.epochs.append(epoch)
        self._account.tell(
            f"epoch {epoch}: {_workers([number for _, number in members])} ({'; '.join(changes)}); {text}",
            message["at_s"],
        )

    def _note_end(self, worker: Worker, status: int) -> None:
        was_killed = worker.number == self._options.victim and self._killed_s > 0.0
        if status and not was_killed:
            raise RunError(f"worker {worker.number} has ended with status {status}")
        if not was_killed and worker.rank is not None and self.phase != "ending":
            raise RunError(f"worker {worker.number} has ended while the others serve")
        self._leave(worker)

    def _leave(self, worker: Worker) -> None:
        """Take a worker out, and the requests of its replica back if it had them."""
        was_head, worker.rank = worker.is_head, None
        if was_head and (lost := self.requests.lose(worker.number)):
            self._account.tell(f"{len(lost)} requests of worker {worker.number} are asked again")

    # ------------------------------------------------------------------ what is next

    def _do_next(self) -> None:
        if self.phase == "starting" and len(self._ready) == self._options.world_size:
            self._open()
        elif self.phase == "serving":
            self._kill_in_the_middle()
        elif self.phase == "grown":
            self._let_old_replica_leave()
        elif self.phase == "leaving":
            self._part_when_idle()
        elif self.phase == "shrunk":
            if self._answers_of_newcomers() >= self._shown + ANSWERS_OF_NEWCOMERS:
                self.phase = "draining"
        elif self.phase == "draining":
            self._close_when_idle()
        elif self.phase == "ending" and self._workers.are_over:
            self.phase = "over"

    def _open(self) -> None:
        """Begin to ask: all first workers serve."""
        tensor = self._options.tensor
        for worker in self._workers.all:
            worker.rank, worker.replica, worker.epoch = worker.number, worker.number // tensor, 0
        replicas = [
            f"replica {each} is {_workers(range(each * tensor, (each + 1) * tensor))}"
            for each in range(REPLICAS)
        ]
        self._account.figures.epochs.append(0)
        self._account.tell(f"epoch 0: {', '.join(replicas)}")
        self.phase = "serving"

    def _kill_in_the_middle(self) -> None:
        """Kill the victim if its replica is in the middle of answers."""
        victim = self._workers.all[self._options.victim]
        head = victim.number - victim.shard
        begun = [len(answer.tokens) for answer in self.requests.of(head) if answer.tokens]
        if self._tokens.get(head, 0) < self._tokens_before_kill or max(begun, default=0) < TOKENS_OF_ANSWER:
            return
        self._killed_s = time.monotonic()
        kill(victim)
        self._account.tell(
            f"SIGKILL to worker {victim.number}: its replica is in the middle of {len(begun)} answers, of which "
            f"{sum(begun)} tokens have come",
            self._killed_s,
        )
        self.phase = "killed"

    def _start_newcomers(self) -> None:
        self.phase = "joining"
        tensor = self._options.tensor
        first = self._options.victim // tensor * tensor
        for shard in range(tensor):
            worker = self._workers.start(shard, replaces=first + shard)
            worker.tell(do="load", **self._model)
            self.newcomers.append(worker.number)
        self._account.tell(f"start of {_workers(self.newcomers)} in place of the lost replica")

    def _answers_of_newcomers(self) -> int:
        return self.requests.finished_by(self.newcomers[0])

    def _let_old_replica_leave(self) -> None:
        """Ask the old replica no more, once the new one has shown that it answers."""
        if self._answers_of_newcomers() < ANSWERS_OF_NEWCOMERS:
            return
        self._leaver = next(each for each in self._workers.all if each.is_head)
        self._account.tell(
            f"the new replica has given {ANSWERS_OF_NEWCOMERS} answers; that of worker {self._leaver.number} is to "
            "leave, and is asked no more"
        )
        self.phase = "leaving"

    def _part_when_idle(self) -> None:
        """Let the old replica leave once it has answered all that it had."""
        assert self._leaver is not None
        if not self._is_told_to_leave and not self.requests.of(self._leaver.number):
            self._is_told_to_leave = True
            self._leaver.tell(do="leave")

    def _close_when_idle(self) -> None:
        if not self.requests.unfinished:
            self._account.tell("all requests are answered; the workers end")
            self.phase = "ending"
            for worker in self._workers.all:
                if worker.is_head:
                    worker.tell(do="end")


def _workers(numbers: Sequence[int]) -> str:
    """Name some workers."""
    return f"worker{'s' if len(numbers) > 1 else ''} {_listed(numbers)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
