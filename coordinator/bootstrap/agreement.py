"""All ranks agree on the facts of a group before anything is built, or every rank raises the same error.

The first rank to arrive writes its facts into the store, and the others compare theirs. A rank that finds a
difference, whose deadline passes, or that is interrupted, writes the failure as the outcome. The waiting ranks poll
for the outcome.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import ask_store, raise_if_lost, run_interruptibly, torch_error
from coordinator.settings import differences
from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommError,
    CommTimeoutError,
    DisagreementError,
    NativeError,
    PeerLostError,
)
from shm_broadcast.interruption import raised_by_handler
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
# The outcome begins with one of these, or is a JSON list of the missing ranks. COMPLETE is followed by the views of all
# ranks as JSON, LEFT by the rank that has left and the name of what interrupted it, and REFUSED by the rank that cannot
# take part and why.
COMPLETE: Final = "complete "
DISSENT: Final = "dissent"
LEFT: Final = "left "
REFUSED: Final = "refused "
# Ctrl-C must interrupt within 0.2 s. A store that answers takes some ms.
LEAVE_S: Final = 0.15
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
        host_id: Host id; equal on ranks that can share memory.
        note: Further information for the other ranks; may differ.
        nonce: Random text that makes this view unique; filled in by `agree`.
    """

    facts: dict[str, str]
    process: ProcessIdentity
    address: str
    host_id: str = ""
    note: str = ""
    nonce: str = ""


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
    agreed: threading.Event | None = None,
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
        agreed: Set once this rank knows that all have agreed, also if it is interrupted then: the others go on.

    Returns:
        Every rank's view, by global rank. The facts, which are equal, are left out.

    Raises:
        DisagreementError: Two ranks hold different facts (see `.views`), or two processes claim the same rank.
        CommTimeoutError: Ranks did not join in time; `.missing` names them.
        PeerLostError: A rank died meanwhile, or was interrupted; `.peers` names it.
        CapabilityError: A rank could not take part; see `decline`.
        NativeError: The store is gone, and no known rank has died.
    """
    where = f"creating {what} (rank {rank})"
    view = msgspec.structs.replace(view, nonce=secrets.token_hex(8))
    agreement = _Agreement(store, where, rank, ranks, view, timeout_s, watch, agreed or threading.Event())
    try:
        return run_interruptibly(agreement.exchange, f"agree on {what}", agreement.check)
    except CommError:
        raise
    except BaseException as error:
        if not isinstance(error, RuntimeError) or raised_by_handler(error):
            agreement.leave(error)
            raise
        # The process that serves the store is gone. Give it time to appear dead, so that the error can name it.
        time.sleep(EXPLAIN_S)
        agreement.raise_if_lost()
        raise torch_error(
            f"{where}: lost the connection to the rendezvous store: {error}", "Store"
        ) from error
    finally:
        agreement.stop.set()


def decline(store: dist.Store, what: str, rank: int, error: CommError) -> None:
    """Tell the others why this rank takes no part in an agreement, unless they have decided it before.

    Takes up to `LEAVE_S`, and `LINGER_S` for others to read it: this process may serve the store.

    Args:
        store: As of `agree`, and so the next two.
        what: What was to be created.
        rank: This process's global rank.
        error: The reason.
    """
    outcome = REFUSED + msgspec.json.encode((rank, str(error))).decode()
    # A store that does not answer tells the others nothing. They notice that themselves.
    with suppress(CommTimeoutError, NativeError):
        ask_store(
            lambda: store.compare_set("outcome", "", outcome), f"creating {what} (rank {rank})", LEAVE_S
        )
        time.sleep(LINGER_S)


@dataclasses.dataclass(eq=False, repr=False)
class _Agreement:
    """One rank's part in one agreement. `exchange` runs on its own thread, because a store may hang."""

    _store: dist.Store
    _where: str
    _rank: int
    _ranks: Sequence[int]
    _view: View
    _timeout_s: float
    _watch: PeerWatch | None
    _agreed: threading.Event
    # Whether the others may have seen this rank.
    _has_joined: bool = False
    _started: float = dataclasses.field(default_factory=time.monotonic)
    # The views seen so far. Another thread reads this, so the dict is replaced and never changed.
    _known: dict[int, View] = dataclasses.field(default_factory=dict)
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise if a rank died, or if the store hangs because its process is stopped. Runs on the caller's thread."""
        if self._watch is not None:
            raise_if_lost(self._watch, self._where)
        if time.monotonic() < self._started + self._timeout_s + ANSWER_S:
            return
        with self._watching() as watch:
            stopped = tuple(other for other in sorted(self._known) if watch.state(other) == "stopped")
            named = "".join(f"; rank {other} ({watch.describe(other)})" for other in stopped)
        raise CommTimeoutError(
            f"{self._where}: the rendezvous store did not answer within {self._timeout_s:.1f} s{named}",
            missing=stopped,
        )

    def exchange(self) -> dict[int, View]:
        """Publish this rank's view, compare the facts, and wait for the outcome."""
        store, rank = self._store, self._rank
        own = msgspec.json.encode(self._view).decode()
        self._has_joined = True
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
        self._agreed.set()
        views = _all_decoder.decode(outcome.removeprefix(COMPLETE))
        return dict(zip(self._ranks, views, strict=True))

    def leave(self, error: BaseException) -> None:
        """Tell the others that `error` makes this rank leave, if they may have seen it. Takes `LEAVE_S` at most.

        If all have agreed before, nothing is told: they wait for this rank in their groups.
        """
        if not self._has_joined:
            return
        outcome = LEFT + msgspec.json.encode((self._rank, type(error).__name__)).decode()

        def tell() -> None:
            if self._decide(outcome).startswith(COMPLETE):
                self._agreed.set()
            else:
                self._store.add("told", 1)

        # A store that does not answer tells the others nothing. They notice that themselves.
        with suppress(CommTimeoutError, NativeError):
            ask_store(tell, self._where, LEAVE_S)

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
                self._known = self._present()
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
        if outcome.startswith(LEFT):
            rank, reason = msgspec.json.decode(outcome.removeprefix(LEFT), type=tuple[int, str])
            return PeerLostError(
                f"{self._where}: rank {rank} was interrupted ({reason}) and has left", peers=(rank,)
            )
        if outcome.startswith(REFUSED):
            rank, reason = msgspec.json.decode(outcome.removeprefix(REFUSED), type=tuple[int, str])
            return CapabilityError(
                f"{self._where}: rank {rank} cannot take part: {reason}",
                requirement="a rank that can take part",
            )
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
        with suppress(RuntimeError):  # the rank that serves the store has left
            told = store.add("told", 1)
            while told < len(self._present()) and time.monotonic() < end:
                time.sleep(LONGEST_PAUSE_S)
                told = store.add("told", 0)
        return error

    def raise_if_lost(self) -> None:
        """Raise `PeerLostError` if a rank that has joined is dead."""
        with self._watching() as watch:
            raise_if_lost(watch, self._where)

    def _watching(self) -> closing[PeerWatch]:
        peers = {other: seen.process for other, seen in self._known.items() if other != self._rank}
        return closing(PeerWatch(self._view.process, peers))

    def _present(self) -> dict[int, View]:
        """Return the views of the ranks that have joined so far."""
        return {
            other: _decoder.decode(self._store.get(f"view/{other}"))
            for other in self._ranks
            if self._store.check([f"view/{other}"])
        }

    def _disagreement(self) -> DisagreementError:
        facts = {other: view.facts for other, view in self._present().items()}
        views = {
            other: msgspec.json.encode(held, order="deterministic").decode() for other, held in facts.items()
        }
        return DisagreementError(
            f"{self._where}: ranks disagree: {'; '.join(differences(facts))}", views=views
        )
