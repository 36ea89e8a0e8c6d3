"""The keys of a store, and who waits for which of them. Without a socket, a thread or a clock."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

from coordinator.security.records import (
    Add,
    Answer,
    Append,
    Await,
    Count,
    Has,
    Put,
    Question,
    Read,
    Remove,
    Swap,
)
from shm_broadcast.errors import UsageError

__all__ = ["Asker", "Table"]

# What torch's stores hold for a number: 64 bits.
_LOWEST: Final = -(1 << 63)
_HIGHEST: Final = (1 << 63) - 1


class Asker(NamedTuple):
    """Who asked a question: the name of the connection in zmq, and the number of the question."""

    route: bytes
    number: int


@dataclasses.dataclass(eq=False)
class _Waiter:
    asker: Asker
    question: Read | Await
    missing: set[str]
    expires_at: float


class Table:
    """The keys of a store. One thread uses it. Times are in seconds, by one clock."""

    def __init__(self) -> None:
        """Begin without keys."""
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, list[_Waiter]] = {}

    def ask(self, asker: Asker, question: Question, now: float) -> list[tuple[Asker, Answer]]:
        """Return whom to answer now, and what: the asker unless it waits, and those that waited for this.

        Raises:
            UsageError: The question cannot be answered with the value that a key has.
        """
        if isinstance(question, Read | Await):
            missing = {key for key in question.keys if key not in self._values}
            if missing:
                waiter = _Waiter(asker, question, missing, now + question.within_ms / 1000)
                for key in missing:
                    self._waiters.setdefault(key, []).append(waiter)
                return []
            return [(asker, self._read(question))]
        answer, changed = self._change(question)
        return [(asker, answer), *(each for key in changed for each in self._served(key))]

    def expire(self, now: float) -> None:
        """Forget those whose time is over; they have noticed that themselves."""
        for key, waiters in list(self._waiters.items()):
            left = [waiter for waiter in waiters if waiter.expires_at > now]
            if left:
                self._waiters[key] = left
            else:
                del self._waiters[key]

    @property
    def waiting(self) -> int:
        """Return the number of questions that wait for keys."""
        return len({id(waiter) for waiters in self._waiters.values() for waiter in waiters})

    def _read(self, question: Read | Await) -> Answer:
        return [self._values[key] for key in question.keys] if isinstance(question, Read) else None

    def _change(self, question: Question) -> tuple[Answer, list[str]]:
        """Return the answer to a question that waits for nothing, and the keys that may be new."""
        values = self._values
        if isinstance(question, Put):
            values.update(zip(question.keys, question.values, strict=True))
            return None, question.keys
        if isinstance(question, Has):
            return all(key in values for key in question.keys), []
        if isinstance(question, Add):
            total = self._number(question.key) + question.amount
            if not _LOWEST <= total <= _HIGHEST:
                raise UsageError(f"the sum in key {question.key!r} does not fit into 64 bits")
            values[question.key] = str(total).encode()
            return total, [question.key]
        if isinstance(question, Swap):
            return self._swap(question)
        if isinstance(question, Append):
            values[question.key] = values.get(question.key, b"") + question.value
            return None, [question.key]
        if isinstance(question, Remove):
            return values.pop(question.key, None) is not None, []
        assert isinstance(question, Count)
        return len(values), []

    def _swap(self, question: Swap) -> tuple[Answer, list[str]]:
        found = self._values.get(question.key)
        if found is None and question.expected:
            return question.expected, []
        if found is None or found == question.expected:
            self._values[question.key] = question.desired
            return question.desired, [question.key]
        return found, []

    def _number(self, key: str) -> int:
        value = self._values.get(key, b"0")
        try:
            return int(value)
        except ValueError:
            raise UsageError(f"key {key!r} holds no number") from None

    def _served(self, key: str) -> list[tuple[Asker, Answer]]:
        """Return those who waited for nothing but `key`, and their answers."""
        served = []
        for waiter in self._waiters.pop(key, ()):
            waiter.missing.discard(key)
            # A key that was there when the wait began may have been deleted since.
            if not waiter.missing and all(each in self._values for each in waiter.question.keys):
                served.append((waiter.asker, self._read(waiter.question)))
            elif not waiter.missing:
                waiter.missing = {each for each in waiter.question.keys if each not in self._values}
                for each in waiter.missing:
                    self._waiters.setdefault(each, []).append(waiter)
        return served
