"""Continuous batching on rank 0: which request runs in which step, and in which slot of the KV cache.

This is pure bookkeeping without tensors and groups. Rank 0 broadcasts each decision as a `StepPlan`.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import DemoError

__all__ = ["Request", "Scheduler", "StepPlan"]


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        number: Unique number in the run.
        prompt: Token ids, at least one.
        max_tokens: Maximal number of tokens to generate.
        arrival_step: The step at which it arrives.
    """

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    arrival_step: int = 0


@dataclass(frozen=True)
class Admission:
    """A request that starts in this step.

    Attributes:
        number: The request's number.
        slot: Cache slot for its keys and values.
        prompt: Its token ids.
    """

    number: int
    slot: int
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """The work of all ranks in one step. They apply the fields in this order.

    Attributes:
        finished: Requests that have ended; their slots are free.
        appended: The token that each request got in the previous step.
        admitted: Requests that start.
        run: Number of tokens that each request computes in this step, in the order of the batch.
        stop: Whether this is the last plan; all other fields are empty then.
    """

    finished: tuple[int, ...] = ()
    appended: Mapping[int, int] = field(default_factory=dict)
    admitted: tuple[Admission, ...] = ()
    run: Mapping[int, int] = field(default_factory=dict)
    stop: bool = False

    def to_message(self) -> dict[str, Any]:
        """Return the plan as plain lists and numbers, for the broadcast."""
        return {
            "finished": list(self.finished),
            "appended": [[number, token] for number, token in self.appended.items()],
            "admitted": [[new.number, new.slot, list(new.prompt)] for new in self.admitted],
            "run": [[number, count] for number, count in self.run.items()],
            "stop": self.stop,
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "StepPlan":
        """Return the plan from the result of `to_message`."""
        return cls(
            finished=tuple(message["finished"]),
            appended=dict(message["appended"]),
            admitted=tuple(
                Admission(number, slot, tuple(prompt)) for number, slot, prompt in message["admitted"]
            ),
            run=dict(message["run"]),
            stop=message["stop"],
        )


@dataclass
class _Running:
    """A request that holds a slot."""

    request: Request
    slot: int
    computed: int = 0
    generated: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Number of known tokens that are not computed yet; more than one means that the prompt is incomplete."""
        return len(self.request.prompt) + len(self.generated) - self.computed


class Scheduler:
    """Serves requests in order of arrival. Decoding requests get their tokens first, prompts the rest of a step.

    Attributes:
        generated: Generated tokens of each finished or running request, by number.
        step: Number of the next step.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        slots: int,
        tokens_per_step: int,
        max_length: int,
        eos_tokens: Sequence[int] = (),
    ) -> None:
        """Queue the requests.

        Args:
            requests: The requests, in any order.
            slots: Maximal number of requests at the same time.
            tokens_per_step: Maximal number of tokens in a batch, at least `slots`. Longer prompts take several steps.
            max_length: Maximal number of tokens in a sequence, including the prompt.
            eos_tokens: Tokens that end a request.

        Raises:
            DemoError: The limits contradict each other, or a request exceeds them.
        """
        if slots < 1 or tokens_per_step < slots:
            raise DemoError(f"{slots} slots need at least as many tokens per step, not {tokens_per_step}")
        self.generated: dict[int, list[int]] = {}
        self.step = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._free_slots = list(range(slots))
        self._tokens_per_step = tokens_per_step
        self._eos_tokens = frozenset(eos_tokens)
        self._max_length = max_length
        self._finished: list[int] = []
        self._appended: dict[int, int] = {}
        for request in sorted(requests, key=lambda request: request.arrival_step):
            self.submit(request)

    def submit(self, request: Request) -> None:
        """Queue a request behind the others.

        Args:
            request: Its `arrival_step` is not before that of the one that was queued last.

        Raises:
            DemoError: It exceeds the limits.
        """
        total = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1:
            raise DemoError(f"request {request.number} needs a prompt and at least one token to generate")
        if total > self._max_length:
            text = f"request {request.number} needs {total} tokens, prompt included"
            raise DemoError(f"{text}; at most {self._max_length} fit")
        self._waiting.append(request)

    def unfinished(self) -> list[Request]:
        """Return the requests that have not ended; to the prompts of those that run belongs what they have generated.

        A new scheduler can go on with them where the caches are lost: tokens and their positions stay as they were.
        """
        begun = [
            Request(
                each.request.number,
                (*each.request.prompt, *each.generated),
                each.request.max_tokens - len(each.generated),
            )
            for each in self._running.values()
        ]
        return [*begun, *self._waiting]

    def is_running(self, number: int) -> bool:
        """Return whether a request holds a slot.

        Args:
            number: The request's number.
        """
        return number in self._running

    @property
    def running(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    def next_plan(self) -> StepPlan:
        """Plan the next step. Call `take_tokens` with its tokens before the next call.

        Returns:
            The plan; with `stop` set if every request is finished.
        """
        if not self._running and not self._waiting:
            return StepPlan(stop=True)
        if not self._running:
            self.step = max(self.step, self._waiting[0].arrival_step)  # skip idle steps
        admitted = self._admit()
        plan = StepPlan(tuple(self._finished), dict(self._appended), admitted, self._share_tokens())
        self._finished.clear()
        self._appended.clear()
        self.step += 1
        return plan

    def take_tokens(self, tokens: Mapping[int, int]) -> None:
        """Record the tokens that a step sampled, and release the requests that end with them.

        Args:
            tokens: The new token of each request whose known tokens have all been computed.
        """
        for number, token in tokens.items():
            running = self._running[number]
            running.generated.append(token)
            if token in self._eos_tokens or len(running.generated) == running.request.max_tokens:
                del self._running[number]
                self._free_slots.append(running.slot)
                self._finished.append(number)
            else:
                self._appended[number] = token

    def _admit(self) -> tuple[Admission, ...]:
        """Give the free slots to requests that have arrived."""
        admitted = []
        while self._free_slots and self._waiting and self._waiting[0].arrival_step <= self.step:
            request = self._waiting.popleft()
            slot = self._free_slots.pop(0)
            running = _Running(request, slot)
            self._running[request.number] = running
            self.generated[request.number] = running.generated
            admitted.append(Admission(request.number, slot, request.prompt))
        return tuple(admitted)

    def _share_tokens(self) -> dict[int, int]:
        """Divide the step's tokens: one for each decoding request, the rest for prompts in order of arrival."""
        left = self._tokens_per_step
        run = {}
        for running in sorted(self._running.values(), key=lambda running: running.pending > 1):
            count = min(running.pending, left)
            if count:
                run[running.request.number] = count
                running.computed += count
                left -= count
        return run
