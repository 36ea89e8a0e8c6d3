"""The status store: what ranks tell each other through torch's store when a group's transport is stuck.

All keys are under the group's prefix. `arrived/<plane>/<rank>` says where a rank waits, `failure_record` is the failure
record (the first one written holds), and `left/<rank>` says that a rank has destroyed the group.
`refused/<plane>/<number>` says who has refused a call, and `refusals/<plane>/<rank>` how many a rank has refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final, TypeAlias, TypeVar

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import ask_store, no_check
from device_comm.health import StatusStore
from shm_broadcast.errors import CapabilityError, CommTimeoutError, NativeError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.reports.arrivals import Arrival
from shm_broadcast.reports.failure_record import FailureRecord
from shm_broadcast.reports.refusals import Refusal

# The process that serves the store may be stopped or dead. No query waits longer than this.
ANSWER_S: Final = 2.0

# As much of a refusal's text travels.
_REASON_CHARACTERS: Final = 4096

Result = TypeVar("Result")

# Lends the block a connection to a store that no other thread uses.
Connect: TypeAlias = Callable[[], AbstractContextManager[dist.Store]]

_arrival_decoder = msgspec.json.Decoder(Arrival)
_record_decoder = msgspec.json.Decoder(FailureRecord)
_refusal_decoder = msgspec.json.Decoder(Refusal)
_count_decoder = msgspec.json.Decoder(int)


class WorldStatusStore:
    """A `StatusStore` and `RefusalStore` on a torch store, which is not asked again once it has failed to answer.

    Attributes:
        rank: This process's global rank.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], check: Callable[[], None] = no_check
    ) -> None:
        """Use `store`, whose keys belong to this group only, until `check` raises `NativeError`: its host is lost."""
        self._store = store
        self._check = check
        self.rank: int = rank
        self._others = [other for other in ranks if other != rank]
        self._reachable = True

    @property
    def is_reachable(self) -> bool:
        """Return whether the store has answered so far."""
        return self._reachable

    def _ask(
        self,
        question: Callable[[], Result],
        otherwise: Result,
        within_s: float = ANSWER_S,
        check: Callable[[], None] = no_check,
    ) -> Result:
        """Return the store's answer, or `otherwise` if it does not come within `within_s` seconds."""
        if not self._reachable:
            return otherwise

        def check_both() -> None:
            self._check()
            check()

        try:
            self._check()
            return ask_store(question, "status store", within_s, check_both)
        except CapabilityError as error:
            # There is no thread with which to ask now. The store is in reach, and is asked again.
            if raised_by_handler(error):
                raise
        except CommTimeoutError as error:
            if raised_by_handler(error):
                raise
            if within_s >= ANSWER_S:
                self._reachable = False
        except NativeError as error:
            if raised_by_handler(error):
                raise
            # The store is gone, or holds a value that is none of ours: the caller continues with what it knows itself.
            self._reachable = False
        return otherwise

    @contextmanager
    def own_connection(
        self, connect: Connect, within_s: float, check: Callable[[], None] = no_check
    ) -> Iterator[None]:
        """Ask over a connection of its own in the block: torch locks the usual one while it waits for other ranks.

        Args:
            connect: Lends the block such a connection, to the same keys. Opening one may take seconds, which does not
                mean that the store is out of reach.
            within_s: How long to wait for it, in seconds.
            check: Called about ten times a second meanwhile; what it raises ends the wait and is raised.
        """
        shared = self._store
        with ExitStack() as lent:
            self._store = self._ask(lambda: lent.enter_context(connect()), shared, within_s, check)
            try:
                yield
            finally:
                self._store = shared

    def arrive(self, plane: str, arrival: Arrival) -> None:
        """Publish where this rank waits."""
        value = msgspec.json.encode(arrival).decode()
        self._ask(lambda: self._store.set(f"arrived/{plane}/{self.rank}", value), None)

    def arrivals(self, plane: str) -> dict[int, Arrival]:
        """Return where the other ranks wait, as they published it, by global rank."""
        return self._of_others(f"arrived/{plane}", _arrival_decoder)

    def _of_others(self, prefix: str, decoder: msgspec.json.Decoder[Result]) -> dict[int, Result]:
        """Return what the other ranks have published below `prefix`, by global rank."""

        def question() -> dict[int, Result]:
            keys = {rank: f"{prefix}/{rank}" for rank in self._others}
            found = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
            return {rank: decoder.decode(value) for rank, value in found.items()}

        return self._ask(question, {})

    def failure_record(self) -> FailureRecord | None:
        """Return the failure record, or None."""

        def question() -> FailureRecord | None:
            if not self._store.check(["failure_record"]):
                return None
            return _record_decoder.decode(self._store.get("failure_record"))

        return self._ask(question, None)

    def publish(self, failure_record: FailureRecord, within_s: float = ANSWER_S) -> FailureRecord:
        """Publish the failure record `failure_record` unless one exists; return the one that holds."""
        text = msgspec.json.encode(failure_record).decode()

        return self._ask(
            lambda: _record_decoder.decode(self._store.compare_set("failure_record", "", text)),
            failure_record,
            within_s,
        )

    def refuse(self, plane: str, number: int, count: int, reason: str) -> None:
        """Publish that this rank refuses call `number` of `plane`, and has refused `count` calls there."""
        refusal = msgspec.json.encode(Refusal(self.rank, reason[:_REASON_CHARACTERS])).decode()

        def told() -> None:
            self._store.set(f"refused/{plane}/{number}", refusal)
            self._store.set(f"refusals/{plane}/{self.rank}", str(count))

        self._ask(told, None)

    def refusal(self, plane: str, number: int) -> Refusal | None:
        """Return who has refused call `number` of `plane`, if a rank has; the last one if several have."""

        def question() -> Refusal | None:
            key = f"refused/{plane}/{number}"
            return _refusal_decoder.decode(self._store.get(key)) if self._store.check([key]) else None

        return self._ask(question, None)

    def refusals(self, plane: str) -> dict[int, int]:
        """Return how many calls of `plane` each other rank has refused, by global rank."""
        return self._of_others(f"refusals/{plane}", _count_decoder)

    def release(self) -> None:
        """Let go of torch's store, so that it can end while this object is still referenced."""
        self._reachable = False
        self._store = dist.HashStore()

    def leave(self) -> None:
        """Publish that this rank has destroyed the group."""
        self._ask(lambda: self._store.set(f"left/{self.rank}", "1"), None)

    def left(self) -> tuple[int, ...]:
        """Return the other ranks that have destroyed the group, ascending."""

        def question() -> tuple[int, ...]:
            return tuple(sorted(rank for rank in self._others if self._store.check([f"left/{rank}"])))

        return self._ask(question, ())


class GroupStatusStore:
    """The status store of one group: torch's store, and the board in shared memory once the group has one.

    A rank maps the board while the group is created, so until all have, what it reports must be in both. Afterwards the
    board alone counts: the process that serves the store may have ended.
    """

    def __init__(self, store: WorldStatusStore) -> None:
        """Use `store` until there is a board."""
        self._store = store
        self._board: StatusStore | None = None
        self._is_settled = False

    def attach(self, board: StatusStore) -> None:
        """Use `board` too, which this rank has mapped."""
        self._board = board

    def settle(self) -> None:
        """Use the board alone from now on, if there is one: every rank has mapped it."""
        self._is_settled = self._board is not None

    @property
    def is_reachable(self) -> bool:
        """Return whether reports reach the other ranks."""
        return self._is_settled or self._store.is_reachable

    @property
    def _current(self) -> StatusStore:
        return self._board if self._is_settled and self._board is not None else self._store

    def arrive(self, plane: str, arrival: Arrival) -> None:
        """Publish where this rank waits."""
        self._current.arrive(plane, arrival)

    def arrivals(self, plane: str) -> dict[int, Arrival]:
        """Return where the other ranks wait, as they published it, by global rank."""
        return self._current.arrivals(plane)

    def failure_record(self) -> FailureRecord | None:
        """Return the failure record, or None."""
        recorded = self._board.failure_record() if self._board is not None else None
        return recorded if recorded is not None or self._is_settled else self._store.failure_record()

    def publish(self, failure_record: FailureRecord, within_s: float = ANSWER_S) -> FailureRecord:
        """Publish a failure record unless one exists; return the one that counts."""
        if not self._is_settled:
            failure_record = self._store.publish(failure_record, within_s)
        return failure_record if self._board is None else self._board.publish(failure_record)

    def leave(self) -> None:
        """Publish that this rank has destroyed the group."""
        self._current.leave()

    def left(self) -> tuple[int, ...]:
        """Return the other ranks that have destroyed the group, ascending."""
        return self._current.left()

    def release(self) -> None:
        """Let go of torch's store; see `WorldStatusStore.release`."""
        self._store.release()
