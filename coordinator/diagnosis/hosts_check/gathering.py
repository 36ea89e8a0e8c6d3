"""All ranks meet in the store of their world, as they would to start, and tell each other their facts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import UNREADABLE, ask_store
from coordinator.diagnosis.hosts_check.records import Link, Plan, RankFacts
from shm_broadcast.errors import DecodeError

__all__ = ["Gathering"]

_PREFIX: Final = "group_coordinator/hosts_check"
# Pauses before the store is asked again: an eighth of the wait so far, within these limits. A thousand ranks that wait
# for the slowest pair ask it 2,000 times a second, of which it can answer 100,000.
_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.5
# Far more than any rank tells. Whoever reaches a store without a secret can write there.
_MOST_BYTES: Final = 1 << 20

_Record = TypeVar("_Record", RankFacts, Plan, Link)
_Answer = TypeVar("_Answer")


class Gathering:
    """The keys of the check in the store. Every question has a deadline."""

    def __init__(self, store: dist.Store, rank: int, timeout_s: float) -> None:
        """Use a store that all ranks reach, for questions of at most `timeout_s` each."""
        # torch's stubs do not know `append`.
        self._store: Any = dist.PrefixStore(_PREFIX, store)
        self._rank = rank
        self._timeout_s = timeout_s

    def arrive(self) -> None:
        """Say that this rank is there, in a few bytes.

        Raises:
            CommTimeoutError: The store does not answer.
            NativeError: The store is gone.
        """
        self._ask(lambda: self._store.append("arrived", f"{self._rank} "), "arriving")

    def tell(self, key: str, record: RankFacts | Plan | Link) -> None:
        """Write a record. The errors are those of `arrive`."""
        text = msgspec.json.encode(record).decode()
        self._ask(lambda: self._store.set(key, text), f"telling {key}")

    def read(self, key: str, kind: type[_Record]) -> _Record:
        """Return a record that is there.

        Raises:
            DecodeError: The store holds something else under its key.
        """
        content = self._ask(lambda: self._store.get(key), f"reading {key}")
        try:
            if len(content) > _MOST_BYTES:
                raise DecodeError(f"the store holds {len(content)} bytes under {key}")
            return msgspec.json.decode(content, type=kind)
        except UNREADABLE as error:
            raise DecodeError(f"the store holds something else under {key}: {error}") from error

    def has(self, key: str) -> bool:
        """Return whether there is such a key. The errors are those of `arrive`."""
        return bool(self._ask(lambda: self._store.check([key]), f"looking for {key}"))

    def mark(self, key: str, text: str) -> None:
        """Append a number or a word to a list of them. The errors are those of `arrive`."""
        self._ask(lambda: self._store.append(key, f"{text} "), f"marking {key}")

    def marks(self, key: str) -> set[int]:
        """Return the numbers that were marked, those of digits alone. The errors are those of `arrive`."""
        if not self.has(key):
            return set()
        content = self._ask(lambda: self._store.get(key), f"reading {key}")[:_MOST_BYTES]
        return {int(word[:12]) for word in content.split() if word.isdigit()}

    def await_marks(self, key: str, expected: Iterable[int], until: float) -> set[int]:
        """Return which of the expected numbers are marked: all of them, or those that are at the time `until`.

        Args:
            key: Of the list.
            expected: The numbers.
            until: On the clock of `time.monotonic`.
        """
        wanted, begin = set(expected), time.monotonic()
        while True:
            found = self.marks(key) & wanted
            if found == wanted or time.monotonic() >= until:
                return found
            _pause(begin)

    def await_key(self, key: str, limit_s: float) -> bool:
        """Return whether there is such a key before `limit_s` have passed."""
        begin = time.monotonic()
        while not self.has(key):
            if time.monotonic() - begin >= limit_s:
                return False
            _pause(begin)
        return True

    def facts_of(self, ranks: Sequence[int]) -> dict[int, RankFacts]:
        """Return the facts of these ranks, as far as they have told them."""
        return {rank: self.read(f"facts/{rank}", RankFacts) for rank in ranks if self.has(f"facts/{rank}")}

    def _ask(self, question: Callable[[], _Answer], what: str) -> _Answer:
        return ask_store(question, f"check --hosts, {what}", self._timeout_s)


def _pause(begin: float) -> None:
    time.sleep(min(max((time.monotonic() - begin) / 8, _FIRST_PAUSE_S), _LONGEST_PAUSE_S))
