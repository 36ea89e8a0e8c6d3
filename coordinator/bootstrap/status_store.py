"""The status store: what ranks tell each other through torch's store when a group's transport is stuck.

All keys are under the group's prefix. `arrived/<plane>/<rank>` says where a rank waits, `verdict` is the failure
record (the first one written holds), and `left/<rank>` says that a rank has destroyed the group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
import torch.distributed as dist

from device_comm.health import Arrival, Verdict

# The process that serves the store may be stopped or dead. No query waits longer than this.
ANSWER_S: Final = 2.0

Result = TypeVar("Result")

_arrival_decoder = msgspec.json.Decoder(Arrival)
_verdict_decoder = msgspec.json.Decoder(Verdict)


class StoreBoard:
    """A `Board` on a torch store. After the store has failed to answer once, it is not queried again."""

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        """Use `store`, whose keys belong to this group only."""
        self._store = store
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._reachable = True

    @property
    def is_reachable(self) -> bool:
        """Return whether the store has answered so far."""
        return self._reachable

    def _ask(self, question: Callable[[], Result], otherwise: Result, within_s: float = ANSWER_S) -> Result:
        """Return the store's answer, or `otherwise` if it does not come within `within_s` seconds."""
        if not self._reachable:
            return otherwise
        answers: list[Result] = []

        def body() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                # The store is gone: the caller continues with what it knows itself.
                del error

        thread = threading.Thread(target=body, name="group-coordinator-board", daemon=True)
        thread.start()
        thread.join(within_s)
        if answers:
            return answers[0]
        self._reachable = self._reachable and thread.is_alive() and within_s < ANSWER_S
        return otherwise

    def arrive(self, plane: str, arrival: Arrival) -> None:
        """Publish where this rank waits."""
        value = msgspec.json.encode(arrival).decode()
        self._ask(lambda: self._store.set(f"arrived/{plane}/{self._rank}", value), None)

    def arrivals(self, plane: str) -> dict[int, Arrival]:
        """Return where the other ranks wait, as they published it, by global rank."""

        def question() -> dict[int, Arrival]:
            found = {}
            for rank in self._others:
                key = f"arrived/{plane}/{rank}"
                if self._store.check([key]):
                    found[rank] = _arrival_decoder.decode(self._store.get(key))
            return found

        return self._ask(question, {})

    def verdict(self) -> Verdict | None:
        """Return the failure record, or None."""

        def question() -> Verdict | None:
            if not self._store.check(["verdict"]):
                return None
            return _verdict_decoder.decode(self._store.get("verdict"))

        return self._ask(question, None)

    def publish(self, verdict: Verdict, within_s: float = ANSWER_S) -> Verdict:
        """Publish the failure record `verdict` unless one exists; return the one that holds."""
        text = msgspec.json.encode(verdict).decode()

        def question() -> Verdict:
            return _verdict_decoder.decode(self._store.compare_set("verdict", "", text))

        return self._ask(question, verdict, within_s)

    def leave(self) -> None:
        """Publish that this rank has destroyed the group."""
        self._ask(lambda: self._store.set(f"left/{self._rank}", "1"), None)

    def left(self) -> tuple[int, ...]:
        """Return the other ranks that have destroyed the group, ascending."""

        def question() -> tuple[int, ...]:
            return tuple(sorted(rank for rank in self._others if self._store.check([f"left/{rank}"])))

        return self._ask(question, ())
