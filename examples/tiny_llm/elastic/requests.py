"""The requests of the front end: who has which, and what has come of it. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Answer", "Prompt", "Requests"]


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the answer that an undisturbed process gives.

    Attributes:
        text: The prompt.
        tokens: Its token ids.
        answer: Token ids of the answer.
    """

    text: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass
class Answer:
    """A request, and the part of its answer that has come.

    Attributes:
        number: The request's number.
        prompt: What was asked.
        by: The worker at the head of the replica that has it.
        tokens: Token ids so far.
        is_finished: Whether the answer is complete.
        times_lost: How often a replica was lost that had it.
    """

    number: int
    prompt: Prompt
    by: int
    tokens: list[int] = field(default_factory=list)
    is_finished: bool = False
    times_lost: int = 0

    @property
    def is_right(self) -> bool:
        """Whether it is the answer of an undisturbed process, token by token."""
        return self.is_finished and tuple(self.tokens) == self.prompt.answer


class Requests:
    """Asks the prompts again and again, and gives each request to the replica that has the fewest.

    A request lives here, outside of the replicas, until its answer is complete: none is lost with a replica.

    Attributes:
        prompts: What is asked, once there is a model.
        answers: All requests by number.
    """

    def __init__(self, at_a_time: int) -> None:
        """Ask nothing yet.

        Args:
            at_a_time: Unfinished requests of a replica.
        """
        self.prompts: list[Prompt] = []
        self.answers: dict[int, Answer] = {}
        self._at_a_time = at_a_time
        self._orphans: list[int] = []

    def hand_out(self, heads: Sequence[int], *, more: bool) -> list[Answer]:
        """Give requests to replicas that have room, first those of lost replicas.

        Args:
            heads: The workers at the heads of the replicas that serve.
            more: Whether to ask prompts anew; else only what was asked is brought to its end.

        Returns:
            The requests, each with the replica that it goes to.
        """
        given = []
        loads = {head: len(self.of(head)) for head in heads}
        while loads and min(loads.values()) < self._at_a_time and (self._orphans or more):
            head = min(loads, key=loads.__getitem__)
            loads[head] += 1
            if self._orphans:
                answer = self.answers[self._orphans.pop(0)]
                answer.by = head
            else:
                number = len(self.answers)
                answer = Answer(number, self.prompts[number % len(self.prompts)], head)
                self.answers[number] = answer
            given.append(answer)
        return given

    def take(self, head: int, tokens: Mapping[int, int], finished: Sequence[int]) -> None:
        """Take the tokens of one step of a replica.

        Args:
            head: The worker at its head.
            tokens: One new token for each of some requests, by number.
            finished: Those of them that end with it.
        """
        for number, token in tokens.items():
            answer = self.answers[number]
            assert answer.by == head
            answer.tokens.append(token)
            answer.is_finished = number in finished

    def lose(self, head: int) -> list[Answer]:
        """Take the unfinished requests of a lost replica back, without the tokens that had come; return them."""
        lost = self.of(head)
        for answer in lost:
            answer.tokens.clear()
            answer.by = -1
            answer.times_lost += 1
        self._orphans += [answer.number for answer in lost]
        return lost

    def of(self, head: int) -> list[Answer]:
        """Return the unfinished requests of a replica."""
        return [each for each in self.answers.values() if each.by == head and not each.is_finished]

    @property
    def unfinished(self) -> int:
        """Number of requests without a complete answer."""
        return sum(not each.is_finished for each in self.answers.values())

    def finished_by(self, head: int) -> int:
        """Number of complete answers of a replica."""
        return sum(each.is_finished for each in self.answers.values() if each.by == head)
