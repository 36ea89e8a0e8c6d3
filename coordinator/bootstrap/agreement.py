"""All ranks agree on the facts of a group before anything is built, or every rank raises the same error.

The first rank to arrive writes its facts into the store, and the others compare theirs. A rank that finds a
difference, or whose deadline passes, writes the failure as the outcome. The waiting ranks poll for the outcome.
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

from coordinator.bootstrap.blocking_calls import run_interruptibly
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

# A waiting rank polls the store, which takes 5 to 40 us. The pause between polls is an eighth of the time waited so
# far, so the outcome is noticed at most that much late. `store.wait` is worse: a FileStore polls every 10 ms, and a
# TCPStore blocks this process's other threads and writes to stderr each time a wait ends without the key.
FIRST_PAUSE_S: Final = 0.0002
LONGEST_PAUSE_S: Final = 0.02
PART_OF_WAIT: Final = 0.125
# A waiting rank checks at this interval whether a peer has died.
WATCH_EVERY_S: Final = 0.3
# After a failure a rank keeps the store alive at most this long, so that the others, polling every
# `LONGEST_PAUSE_S`, can read the outcome.
LINGER_S: Final = 1.0
# The outcome is one of these two, or a JSON list of the missing ranks. The views of all ranks follow COMPLETE as JSON.
COMPLETE: Final = "complete "
DISSENT: Final = "dissent"
# A store that is silent for this long after the deadline counts as hung.
ANSWER_S: Final = 2.0
# The kernel closes a dying process's sockets some milliseconds before the process itself appears dead. Waiting this
# long lets the error name the dead rank.
EXPLAIN_S: Final = 0.2


class View(msgspec.Struct, frozen=True):
    """What one rank tells the others when a group is created.

    Attributes:
        facts: Values that must be equal on all ranks, as text by name.
        process: Identity of the rank's process.
        address: Address at which the group's other ranks reach this rank; may differ.
        place: Host id; equal on ranks that can share memory.
        note: Further information for the other ranks; may differ.
        seat: Random text that makes this view unique; filled in by `agree`.
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

    Collective over `ranks`. Blocks until all have joined with the same facts, or one rank finds a failure.

    Args:
        store: A store whose keys are used by this agreement only.
        what: What is being created, for errors: "group 'tp:0'".
        rank: This process's global rank.
        ranks: Global ranks that must agree.
        view: This rank's view.
        timeout_s: Deadline in seconds.
        watch: The other ranks' processes, if they are already known.

    Returns:
        Every rank's view, by global rank.

    Raises:
        DisagreementError: Two ranks hold different facts (see `.views`), or two processes claim the same rank.
        CommTimeoutError: Ranks did not join in time; `.missing` names them.
        PeerLostError: A rank died meanwhile; `.peers` names it.
        NativeError: The store is gone, and no known rank has died.
    """
    agreement = _Agreement(store, what, rank, ranks, view, timeout_s, watch)
    try:
        return run_interruptibly(agreement.exchange, f"agree on {what}", agreement.check)
    except RuntimeError as error:
        # The process that serves the store is gone. Give it time to appear dead, so that the error can name it.
        time.sleep(EXPLAIN_S)
        agreement.raise_if_lost()
        raise NativeError(
            f"creating {what} (rank {rank}): lost the connection to the rendezvous store: {error}",
            library=f"torch {torch.__version__}",
            function="Store",
        ) from error
    finally:
        agreement.stop.set()


class _Agreement:
    """One rank's part in one agreement. `exchange` runs on its own thread, because a store may hang."""

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
        # The views seen so far. Another thread reads this, so the dict is replaced and never changed.
        self._known: dict[int, View] = {}

    def check(self) -> None:
        """Raise if a rank died, or if the store hangs because its process is stopped. Runs on the caller's thread."""
        if self._watch is not None:
            self._raise_lost(self._watch)
        if time.monotonic() < self._silent_at:
            return
        with self._watching() as watch:
            stopped = tuple(other for other in sorted(self._known) if watch.state(other) == "stopped")
            who = "".join(f"; rank {other} ({watch.describe(other)})" for other in stopped)
        raise CommTimeoutError(
            f"{self._where}: the rendezvous store did not answer within {self._timeout_s:.1f} s{who}",
            missing=stopped,
        )

    def exchange(self) -> dict[int, View]:
        """Publish this rank's view, compare the facts, and wait for the outcome."""
        store, rank = self._store, self._rank
        own = msgspec.json.encode(self._view).decode()
        found = store.compare_set(f"view/{rank}", "", own).decode()
        if found != own:
            taken = _decoder.decode(found).process
            raise DisagreementError(
                f"{self._where}: two processes claim to be rank {rank}: this one, and pid {taken.pid} "
                f"on host {taken.hostname}"
            )
        mine = msgspec.json.encode(self._view.facts, order="deterministic").decode()
        outcome = ""
        if store.compare_set("proposal", "", mine).decode() != mine:
            outcome = self._decide(DISSENT)
            if outcome.startswith(COMPLETE):
                # The others completed an agreement that does not include this rank's groups.
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
        """Return all ranks' views as JSON, without the facts, which are equal. Only the last rank to join runs this."""
        values = self._store.multi_get([f"view/{other}" for other in self._ranks])
        views = [msgspec.structs.replace(_decoder.decode(value), facts={}) for value in values]
        return msgspec.json.encode(views).decode()

    def _decide(self, outcome: str) -> str:
        """Set the outcome for all ranks unless it is set already; return the outcome that holds."""
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
                # A rank that joined just before the deadline gets time to compare its facts.
                if missing or waited >= self._timeout_s + LINGER_S:
                    return self._decide(msgspec.json.encode(missing).decode())
            if self.stop.wait(min(max(waited * PART_OF_WAIT, FIRST_PAUSE_S), LONGEST_PAUSE_S)):
                raise ClosedError(f"{self._where}: cancelled, the caller no longer waits")
        return self._store.get("outcome").decode()

    def _failure(self, outcome: str) -> CommError:
        """Return the error for a failed outcome. Every rank reads the same outcome, so all raise the same error."""
        if outcome == DISSENT:
            return self._disagreement()
        missing = msgspec.json.decode(outcome, type=list[int])
        listed = ", ".join(str(rank) for rank in missing)
        return CommTimeoutError(
            f"{self._where}: rank(s) {listed} did not join within {self._timeout_s:.1f} s; check that they were "
            "started with the same rendezvous, and that all ranks create their groups in the same order",
            missing=missing,
        )

    def _told(self, error: CommError) -> CommError:
        """Return `error` after the other ranks have read the failure too: this rank may be serving the store."""
        store = self._store
        end = time.monotonic() + LINGER_S
        try:
            told = store.add("told", 1)
            while told < len(self._present(self._ranks)) and time.monotonic() < end:
                time.sleep(LONGEST_PAUSE_S)
                told = store.add("told", 0)
        except RuntimeError as gone:
            # The rank that serves the store has left.
            del gone
        return error

    def raise_if_lost(self) -> None:
        """Raise `PeerLostError` if a rank that has joined is dead."""
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
