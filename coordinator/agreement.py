"""All ranks agree on the facts of a group before anything is built, or every one raises.

The first rank proposes, the others compare. Whoever holds something else, or has waited in vain, says so in
the store and raises, and those that wait look for such a failure many times a second: all raise the same.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from coordinator.blocking_calls import run_interruptibly
from coordinator.settings import differences
from shm_broadcast.errors import (
    ClosedError,
    CommError,
    CommTimeoutError,
    DisagreementError,
    NativeError,
    PeerLostError,
)
from shm_broadcast.liveness import PeerWatch, ProcessIdentity

# The pauses between two looks into the store, which take 5 to 40 us each: an eighth of the time waited so far, so the
# end is seen late by at most that. Not `store.wait`: a FileStore then looks every 10 ms; a TCPStore locks out this
# process's other threads, and writes to stderr each time that the wait is ended to look around.
FIRST_PAUSE_S: Final = 0.0002
LONGEST_PAUSE_S: Final = 0.02
PART_OF_WAIT: Final = 0.125
# A rank that has waited this long looks for peers that died meanwhile, this often.
WATCH_EVERY_S: Final = 0.3
# A rank that found a failure stays this long for the others to read it: they look every `LONGEST_PAUSE_S`.
LINGER_S: Final = 1.0
# Outcomes of an agreement besides a list of missing ranks. The first is followed by what all ranks brought, as JSON.
COMPLETE: Final = "complete "
DISSENT: Final = "dissent"
# A store that has not answered this long after the deadline hangs.
ANSWER_S: Final = 2.0
# The kernel closes a dying process's sockets some milliseconds before the process can be seen to have ended.
EXPLAIN_S: Final = 0.2


class View(msgspec.Struct, frozen=True):
    """What one rank brings to the creation of a group.

    Attributes:
        facts: What must be equal on all ranks, as text by name.
        process: Who the rank is.
        address: Where it can be reached by the group's other ranks; may differ.
        place: Equal on ranks that can share memory; may differ.
        note: What else the others should know; may differ.
        seat: Tells this view from all others; filled in by `agree`.
    """

    facts: dict[str, str]
    process: ProcessIdentity
    address: str
    place: str = ""
    note: str = ""
    seat: str = ""


_decoder = msgspec.json.Decoder(View)
_all_decoder = msgspec.json.Decoder(list[View])


def agree(
    store: dist.Store,
    what: str,
    rank: int,
    ranks: Sequence[int],
    view: View,
    timeout_s: float,
    watch: PeerWatch | None = None,
) -> dict[int, View]:
    """Exchange views with all of `ranks`.

    Collective over `ranks`; blocks until all have come and hold the same facts.

    Args:
        store: A store whose keys belong to this agreement alone.
        what: What is being created, for errors: "group 'tp:0'".
        rank: This process's global rank.
        ranks: Global ranks that must agree.
        view: What this rank brings.
        timeout_s: Deadline in seconds.
        watch: The other ranks' processes, where they are known before they come.

    Returns:
        Every rank's view, by global rank.

    Raises:
        DisagreementError: Two ranks hold different facts, which `.views` shows, or two processes one rank.
        CommTimeoutError: Ranks did not come; `.missing` names them.
        PeerLostError: A rank died meanwhile; `.peers` names it.
        NativeError: The store is gone, with a host that this rank has not seen.
    """
    agreement = _Agreement(store, what, rank, ranks, view, timeout_s, watch)
    try:
        return run_interruptibly(agreement.exchange, f"agree on {what}", agreement.check)
    except RuntimeError as error:
        # The store's host is gone, some milliseconds before its process can be seen to have ended.
        time.sleep(EXPLAIN_S)
        agreement.raise_if_lost()
        raise NativeError(
            f"creating {what} (rank {rank}): the store through which the ranks meet is gone: {error}",
            library=f"torch {torch.__version__}",
            function="Store",
        ) from error
    finally:
        agreement.stop.set()


class _Agreement:
    """One rank's part in one agreement; `exchange` runs on a thread of its own, as a store may hang."""

    def __init__(
        self,
        store: dist.Store,
        what: str,
        rank: int,
        ranks: Sequence[int],
        view: View,
        timeout_s: float,
        watch: PeerWatch | None = None,
    ) -> None:
        self._watch = watch
        self.stop = threading.Event()
        self._store = store
        self._where = f"creating {what} (rank {rank})"
        self._rank = rank
        self._ranks = ranks
        self._view = msgspec.structs.replace(view, seat=secrets.token_hex(8))
        self._timeout_s = timeout_s
        self._silent_at = time.monotonic() + timeout_s + ANSWER_S
        # The views of others that were seen so far; replaced, never changed.
        self._known: dict[int, View] = {}

    def check(self) -> None:
        """Raise if a rank dies, or the store hangs as its host is stopped. Called on the thread that waits."""
        if self._watch is not None:
            self._raise_lost(self._watch)
        if time.monotonic() < self._silent_at:
            return
        with self._watching() as watch:
            stopped = tuple(other for other in sorted(self._known) if watch.state(other) == "stopped")
            who = "".join(f"; rank {other} ({watch.describe(other)})" for other in stopped)
        raise CommTimeoutError(
            f"{self._where}: the store through which the ranks meet did not answer within "
            f"{self._timeout_s:.1f} s{who}",
            missing=stopped,
        )

    def exchange(self) -> dict[int, View]:
        """Bring this rank's view, wait for the others', and compare."""
        store, rank = self._store, self._rank
        own = msgspec.json.encode(self._view).decode()
        found = store.compare_set(f"view/{rank}", "", own).decode()
        if found != own:
            taken = _decoder.decode(found).process
            raise DisagreementError(
                f"{self._where}: two processes say that they are rank {rank}, this one and pid {taken.pid} "
                f"on host {taken.hostname}"
            )
        mine = msgspec.json.encode(self._view.facts, order="deterministic").decode()
        outcome = ""
        if store.compare_set("proposal", "", mine).decode() != mine:
            outcome = self._decide(DISSENT)
            if outcome.startswith(COMPLETE):
                # The others came to an end without this rank: what they told each other is not about its groups.
                raise self._told(self._disagreement())
        elif store.add("agreed", 1) == len(self._ranks):
            outcome = self._decide(COMPLETE + self._gathered())
        outcome = outcome or self._await_outcome()
        if not outcome.startswith(COMPLETE):
            raise self._told(self._failure(outcome))
        views = _all_decoder.decode(outcome.removeprefix(COMPLETE))
        facts = self._view.facts
        return {
            other: msgspec.structs.replace(view, facts=facts, seat="")
            for other, view in zip(self._ranks, views, strict=True)
        }

    def _gathered(self) -> str:
        """Return what all ranks brought, without the facts, which are equal: so only the last to come has to ask."""
        values = self._store.multi_get([f"view/{other}" for other in self._ranks])
        views = [msgspec.structs.replace(_decoder.decode(value), facts={}) for value in values]
        return msgspec.json.encode(views).decode()

    def _decide(self, outcome: str) -> str:
        """Set the outcome for all ranks, unless there is one; return the one that counts."""
        return self._store.compare_set("outcome", "", outcome).decode()

    def _await_outcome(self) -> str:
        start = time.monotonic()
        next_watch = WATCH_EVERY_S
        while not self._store.check(["outcome"]):
            waited = time.monotonic() - start
            if waited >= next_watch:
                self._known = self._present(self._ranks)
                self.raise_if_lost()
                next_watch = waited + WATCH_EVERY_S
            if waited >= self._timeout_s:
                missing = [other for other in self._ranks if not self._store.check([f"view/{other}"])]
                # Who has come a moment ago is about to say that it agrees.
                if missing or waited >= self._timeout_s + LINGER_S:
                    return self._decide(msgspec.json.encode(missing).decode())
            if self.stop.wait(min(max(waited * PART_OF_WAIT, FIRST_PAUSE_S), LONGEST_PAUSE_S)):
                raise ClosedError(f"{self._where}: nobody waits for it any more")
        return self._store.get("outcome").decode()

    def _failure(self, outcome: str) -> CommError:
        """Return the error for what the rank that found out first decided: all raise the same."""
        if outcome == DISSENT:
            return self._disagreement()
        missing = msgspec.json.decode(outcome, type=list[int])
        listed = ", ".join(str(rank) for rank in missing)
        return CommTimeoutError(
            f"{self._where}: no sign of rank(s) {listed} within {self._timeout_s:.1f} s; were they started, "
            "with the same rendezvous, and do they create their groups in the same order?",
            missing=missing,
        )

    def _told(self, error: CommError) -> CommError:
        """Return `error` once the others that came know of it too: the store may go with this rank."""
        store = self._store
        end = time.monotonic() + LINGER_S
        try:
            told = store.add("told", 1)
            while told < len(self._present(self._ranks)) and time.monotonic() < end:
                time.sleep(LONGEST_PAUSE_S)
                told = store.add("told", 0)
        except RuntimeError as gone:
            # The rank that hosts the store has left.
            del gone
        return error

    def raise_if_lost(self) -> None:
        """Raise `PeerLostError` if a rank that was seen has died."""
        with self._watching() as watch:
            self._raise_lost(watch)

    def _raise_lost(self, watch: PeerWatch) -> None:
        lost = watch.lost()
        if lost:
            who = ", ".join(f"{other} ({watch.describe(other)})" for other in lost)
            raise PeerLostError(f"{self._where}: lost rank(s) {who}", peers=lost)

    @contextmanager
    def _watching(self) -> Iterator[PeerWatch]:
        peers = {other: seen.process for other, seen in self._known.items() if other != self._rank}
        watch = PeerWatch(self._view.process, peers)
        try:
            yield watch
        finally:
            watch.close()

    def _present(self, ranks: Sequence[int]) -> dict[int, View]:
        found = {}
        for other in ranks:
            if self._store.check([f"view/{other}"]):
                found[other] = _decoder.decode(self._store.get(f"view/{other}"))
        return found

    def _disagreement(self) -> DisagreementError:
        facts = {other: view.facts for other, view in self._present(self._ranks).items()}
        views = {
            other: msgspec.json.encode(held, order="deterministic").decode() for other, held in facts.items()
        }
        return DisagreementError(
            f"{self._where}: ranks disagree: {'; '.join(differences(facts))}", views=views
        )
