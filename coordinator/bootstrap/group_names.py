"""Unique names for the groups of a world. Ranks that create their groups in the same order get the same names."""

from __future__ import annotations

import dataclasses
import re
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.agreement.agreeing import EXPLAIN_S
from coordinator.bootstrap.blocking_calls import ask_store, raise_if_lost
from coordinator.bootstrap.world import World
from shm_broadcast.errors import (
    CapabilityError,
    CommTimeoutError,
    DisagreementError,
    NativeError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.interruption import raised_by_handler, tolerating
from shm_broadcast.liveness import PeerWatch, ProcessIdentity, fork_count, this_process
from shm_broadcast.threads import owned_by

__all__ = ["GroupNames"]

_counts_decoder: Final = msgspec.json.Decoder(dict[str, int])
_facts_decoder: Final = msgspec.json.Decoder(dict[str, str])
# A unique name: `tp:0`, or `tp:0@1` in a later epoch.
_NAME: Final = re.compile(r"([^:]+):([0-9]{1,18})(?:@[0-9]+)?")
# The key of a random number that makes every written value different. No group name contains a colon.
_MARK: Final = ":"
_MARK_BITS: Final = 62
# By the store of a world, what this process has last written there. An entry ends with its store; the callback runs no
# Python code, for the reason that `host/process_groups.py` gives.
_written: Final[dict[weakref.ref[dist.Store], bytes]] = {}


@dataclasses.dataclass(frozen=True)
class GroupNames:
    """Counts the names of the groups that this rank creates in one world.

    The counts are kept in the world's store, so in a new world all ranks start from 0. Threads may count at the same
    time; each then gets names of its own.

    Attributes:
        store: The world's store.
        rank: This process's global rank.
        timeout_s: How long to wait for the store's answer, in seconds.
        epoch: The epoch of the world; after the first change of members each name ends with it: `tp:0@1`.
        forks: The fork count of the process to which the world belongs.
        processes: The processes that an error may name, by rank: those of the group, and of rank 0, which may serve the
            store.
    """

    store: dist.Store
    rank: int
    timeout_s: float
    epoch: int = 0
    forks: int = dataclasses.field(default_factory=fork_count)
    processes: Mapping[int, ProcessIdentity] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, world: World, timeout_s: float, ranks: Collection[int]) -> GroupNames:
        """Return what counts the names in `world` of groups of `ranks`."""
        processes = world.processes_of({0, *ranks})
        return cls(world.store, world.rank, timeout_s, world.epoch, world.forks, processes)

    def take(self, name: str | None) -> str:
        """Return `name` followed by the number of times that this rank has taken the name before: `tp:0`, `tp:1`.

        The name is counted before its group is created, and stays counted if the creation fails. Ranks that make the
        same attempts therefore get the same names, even if only some of them saw an attempt fail.

        Args:
            name: The caller's name for the group; None means "group".

        Raises:
            PeerLostError: The store is gone, and one of `processes` has ended.
            NativeError: The store is gone, and none of them has.
            CommTimeoutError: The store did not answer; `.missing` names those of `processes` that are stopped.
        """
        base = "group" if name is None else name
        return self._in_epoch(self._take([base]))[0]

    def take_round(self, round_name: str, names: Sequence[str]) -> tuple[str, list[str]]:
        """Return a unique name for this round of agreement, and one for each of its groups; errors as of `take`.

        The counts of ranks that ask for different groups in one round differ afterwards; see `catch_up`.
        """
        unique, *taken = self._take([round_name, *names])
        return unique, self._in_epoch(taken)

    @contextmanager
    def caught_up(self) -> Iterator[None]:
        """Run a round of agreement as the block; if the ranks disagree in it, catch up with their counts."""
        try:
            yield
        except DisagreementError as error:
            # If the store does not answer, the next round tells the ranks once more that they differ.
            with tolerating(CapabilityError, CommTimeoutError, NativeError, PeerLostError):
                self.catch_up(error.views.values())
            raise

    def catch_up(self, views: Iterable[str]) -> None:
        """Count the names of all groups that any of the disagreeing ranks has asked for; errors as of `take`.

        All ranks get the same views. Their next round then has the same names, whatever each has counted before.

        Args:
            views: As of `DisagreementError.views`.
        """
        asked = [name for view in views for name in _facts_decoder.decode(view).get("groups", "").split(", ")]
        taken = [(found[1], int(found[2])) for name in asked if (found := _NAME.fullmatch(name))]

        def raised(counts: dict[str, int]) -> dict[str, int]:
            for base, number in taken:
                counts[base] = max(counts.get(base, 0), number + 1)
            return counts

        if taken:
            self._change(raised, sorted({base for base, _ in taken}))

    def _take(self, bases: Sequence[str]) -> list[str]:
        """Count each of `bases` once; return each as `base:count`, with the count before."""
        for base in bases:
            if not isinstance(base, str) or not base.isprintable() or not base or ":" in base:
                raise UsageError(f"group_name must be printable text without a colon, not {base!r}")
        before = self._change(
            lambda counts: counts | {base: counts.get(base, 0) + 1 for base in bases}, bases
        )
        return [f"{base}:{before.get(base, 0)}" for base in bases]

    def _in_epoch(self, names: list[str]) -> list[str]:
        """Return the names of groups in the epoch: a process has groups of several while it changes to the next."""
        return [f"{name}@{self.epoch}" for name in names] if self.epoch else names

    def _change(
        self, changed: Callable[[dict[str, int]], dict[str, int]], bases: Collection[str]
    ) -> dict[str, int]:
        """Replace this rank's counts by `changed` of them; return those before. `bases` are named in errors.

        All counts of a rank are one value, so the number of queries does not depend on the number of names.
        One query is enough if this process has written before, because it then knows the present value. Only
        this rank changes its counts; if two of its threads do so at the same time, one finds the other's
        value and tries again.
        """
        store, key = self.store, f"group_coordinator/created/{self.rank}"

        def change() -> dict[str, int]:
            known = _written.get(weakref.ref(store), b"")
            while True:
                counts = _counts_decoder.decode(known or b"{}")
                # The mark makes the value unique to this call. Without it, an equal value that the store
                # holds already would look as if the store had just taken this one.
                marked = {**changed(dict(counts)), _MARK: secrets.randbits(_MARK_BITS)}
                own = msgspec.json.encode(marked)
                found = store.compare_set(key, known.decode(), own.decode())
                if found == own:
                    _written[weakref.ref(store, _written.pop)] = own
                    return counts
                # The store has another value, and returns it; or none, and returns what was expected.
                known = b"" if found == known else found

        where = f"creating group {' and '.join(map(repr, bases))} (rank {self.rank})"
        try:
            return owned_by(self.forks, lambda: ask_store(change, where, self.timeout_s))
        except NativeError as error:
            if raised_by_handler(error):
                raise
            # The process that serves the store is gone. Give it time to appear dead, so that the error can name it.
            time.sleep(EXPLAIN_S)
            with self._watch() as watch:
                raise_if_lost(watch, where)
            raise
        except CommTimeoutError as error:
            if raised_by_handler(error):
                raise
            with self._watch() as watch:
                stopped = [rank for rank in watch.peers if watch.state(rank) == "stopped"]
                named = "".join(f"; rank {rank} ({watch.describe(rank)})" for rank in stopped)
            raise CommTimeoutError(f"{error}{named}", missing=stopped) from error

    def _watch(self) -> closing[PeerWatch]:
        others = {rank: process for rank, process in self.processes.items() if rank != self.rank}
        return closing(PeerWatch(this_process(), others))
