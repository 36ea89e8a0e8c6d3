"""All ranks agree on the facts of a group before anything is built, or every rank raises the same error.

The first rank to arrive writes a digest of its facts into the store, and the others compare theirs. The last one writes
the outcome. A rank that finds a difference, whose deadline passes, that notices a death or is interrupted, writes the
failure as the outcome. The waiting ranks sleep until there is an outcome, and ask the store once a second who has come.
If the store is a file, in which nobody can sleep, they look for the outcome every 0.2 to 20 ms.

A rank asks a served store for less than ten things however many ranks there are and however late they come, and gets
what is written for its own host. `outcomes` holds what is in the store, `views` what a rank knows in the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.agreement import outcomes
from coordinator.bootstrap.agreement.attendance import Attendance
from coordinator.bootstrap.agreement.outcomes import Broken, Complete, Dissent, Failure, Outcome, Proposal
from coordinator.bootstrap.agreement.views import Places, View, Views, unable
from coordinator.bootstrap.blocking_calls import (
    UNREADABLE,
    ask_store,
    clone_hint,
    no_check,
    pause_after,
    raise_if_lost,
    run_interruptibly,
    torch_error,
)
from coordinator.bootstrap.connections import SpareConnection
from coordinator.bootstrap.membership import is_served_here
from coordinator.stores import is_local
from shm_broadcast.descriptors import keep_spare
from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommError,
    CommTimeoutError,
    DisagreementError,
    NativeError,
    PeerLostError,
)
from shm_broadcast.interruption import raised_by_handler, tolerating
from shm_broadcast.liveness import PeerWatch, fork_count, refusal_to_watch
from shm_broadcast.stacks.attached import ask_missing, attach
from shm_broadcast.threads import owner_forks
from shm_broadcast.timeouts import as_timedelta

# A waiting rank asks at this interval who else has come on its kernel, so that it can watch them.
LOOK_EVERY_S: Final = 1.0
# After a failure a rank keeps the store alive at most this long, so that the others can read the outcome.
# After a deadline, the last rank to come gets this long to write the outcome.
LINGER_S: Final = 1.0
# How long a rank that takes no part lives on if another process serves the store: the others must read its
# reason before they find that it has ended, and its own error must come within a second.
_DECLINED_S: Final = 0.5
# The first pause between two looks at how many ranks have read a failure; each pause is twice the one before.
# It is longer in large groups, because each rank asks once per pause and the store takes about 6 us for an
# answer. Within `LINGER_S` a rank looks six times at most.
TOLD_PAUSE_S: Final = 0.02
TOLD_PAUSE_PER_RANK_S: Final = 50e-6
# How long a call that ends early waits for its thread: a store that answers does so within some milliseconds.
_SETTLE_S: Final = 0.05
# Ctrl-C must interrupt within 0.2 s. A store that answers takes some ms.
LEAVE_S: Final = 0.15
# A store that is silent for this long after the deadline counts as hung.
ANSWER_S: Final = 2.0
# The kernel closes a dying process's sockets some milliseconds before the process itself appears dead. Waiting this
# long lets the error name the dead rank.
EXPLAIN_S: Final = 0.2
# With these the others are told nothing: there is no thread, no answer, no store, or one that holds no outcome of ours.
_UNTOLD: Final = (
    CapabilityError,
    CommTimeoutError,
    NativeError,
    *UNREADABLE,
)


def agree(
    store: dist.Store,
    what: str,
    rank: int,
    ranks: Sequence[int],
    view: View,
    timeout_s: float,
    watch: PeerWatch | None = None,
    agreed: threading.Event | None = None,
    connect: Callable[[], AbstractContextManager[dist.Store]] | None = None,
    reported: PeerWatch | None = None,
    check_store: Callable[[], None] = no_check,
    check_parent: Callable[[], None] = no_check,
) -> Views:
    """Exchange views with all of `ranks`.

    Collective over `ranks`. Blocks until all have joined with the same facts, or one rank finds a failure.

    Args:
        store: A store whose keys are used by this agreement only.
        what: What is being created, for errors: "group 'tp:0'".
        rank: This process's global rank.
        ranks: Global ranks that must agree, in the same order on all of them.
        view: This rank's view.
        timeout_s: Deadline in seconds.
        watch: The other ranks' processes, if they are already known.
        agreed: Set once this rank knows that all have agreed, also if it is interrupted then: the others go on.
        connect: Lends a connection to `store` that no other thread uses; None opens one.
        reported: Who else knows of ranks that are lost, if `watch` is None.
        check_store: Raises `NativeError` once the host of the store is lost.
        check_parent: Raises what has broken the group whose ranks agree, if they have one already. From any thread.

    Returns:
        What this rank knows of the others, without the facts, which are equal.

    Raises:
        DisagreementError: Two ranks hold different facts (see `.views`), or two processes claim the same rank.
        CommTimeoutError: Ranks did not join in time; `.missing` names them. On the rank that lists them `.stacks` says
            where they and the others are, if `watch` knows their processes.
        PeerLostError: A rank died meanwhile, or was interrupted; `.peers` names it.
        CapabilityError: A rank could not take part, this one perhaps for lack of a thread; see `decline`.
        NativeError: The store is gone, and no known rank has died; or it holds what no rank has written.
        Others: As `check_parent`, on every rank.
    """
    where = f"creating {what} (rank {rank})"
    refusal = refusal_to_watch(view.process)
    view = msgspec.structs.replace(view, nonce=secrets.token_hex(8), refusal=str(refusal or ""))
    connect = connect or partial(SpareConnection().lent, store)
    agreement = _Agreement(
        store,
        connect,
        where,
        rank,
        ranks,
        view,
        timeout_s,
        watch,
        agreed or threading.Event(),
        reported,
        check_store,
        check_parent,
        refusal,
    )
    try:
        return run_interruptibly(agreement.exchange, f"agree on {what}", agreement.check)
    except CommError as error:
        if agreement.has_no_thread(error):
            decline(store, what, rank, error)
        elif isinstance(error, NativeError) or raised_by_handler(error):
            agreement.leave(error)
        agreement.add_stacks(error)
        raise
    except UNREADABLE as error:
        agreement.leave(error)
        text = (
            f"{where}: the rendezvous store holds a value that no rank of this version has written: {error}"
        )
        raise torch_error(text, "Store") from error
    except BaseException as error:
        if not isinstance(error, RuntimeError) or raised_by_handler(error):
            agreement.leave(error)
            raise
        # The process that serves the store is gone. Give it time to appear dead, so that the error can name it; unless
        # it has ended because the parent is broken.
        time.sleep(EXPLAIN_S)
        check_parent()
        agreement.raise_if_lost()
        raise torch_error(
            f"{where}: lost the connection to the rendezvous store: {error}", "Store"
        ) from error
    finally:
        agreement.close()


def decline(store: dist.Store, what: str, rank: int, error: CommError) -> None:
    """Tell the others why this rank takes no part in an agreement, unless they have decided it before.

    Takes up to `LEAVE_S`, and `_DECLINED_S` for others to read it, or `LINGER_S` if this process serves the store.

    Args:
        store: As of `agree`, and so the next two.
        what: What was to be created.
        rank: This process's global rank.
        error: The reason.
    """
    # The others notice that themselves.
    with tolerating(*_UNTOLD):
        ask_store(
            lambda: outcomes.decide(store, outcomes.Refused(0, rank, str(error))),
            f"creating {what} (rank {rank})",
            LEAVE_S,
        )
        time.sleep(LINGER_S if _may_be_served_here(store) else _DECLINED_S)


def _may_be_served_here(store: dist.Store) -> bool:
    """Return whether this process serves `store`, or cannot tell for lack of a descriptor."""
    try:
        return is_served_here(store)
    except (OSError, CommError) as error:
        if raised_by_handler(error):
            raise
        return True


@contextmanager
def declining(store: dist.Store, what: str, rank: int) -> Iterator[None]:
    """Tell the others why this rank takes no part, if the block cannot do what comes before an agreement.

    The arguments are those of `decline`, which it calls, but not in a child that a signal handler has forked meanwhile.
    """
    forks = owner_forks()
    spare: list[object] = []
    try:
        # With this one a store can be told that is a file: it is opened for each question.
        spare += keep_spare(1, "tells the other ranks if this one cannot take part")
        yield
    except CommError as error:
        spare.clear()
        if forks == fork_count():
            decline(store, what, rank, error)
        raise


@dataclasses.dataclass(eq=False, repr=False)
class _Agreement:
    """One rank's part in one agreement.

    `exchange` runs on a thread of its own and over a connection of its own, because it waits in the store, which may
    hang. `check` runs on the caller's thread, about ten times a second.
    """

    _store: dist.Store
    _connect: Callable[[], AbstractContextManager[dist.Store]]
    _where: str
    _rank: int
    _ranks: Sequence[int]
    _view: View
    _timeout_s: float
    _watch: PeerWatch | None
    _agreed: threading.Event
    _reported: PeerWatch | None
    _check_store: Callable[[], None]
    _check_parent: Callable[[], None]
    # Why this rank cannot watch processes.
    _refusal: CapabilityError | None
    # Whether the others may have seen this rank, once that is decided by the thread that joins or by the
    # caller that leaves. The first `setdefault` of the key wins, and no signal handler can interrupt it.
    _joins: dict[str, bool] = dataclasses.field(default_factory=dict)
    _forks: int = dataclasses.field(default_factory=owner_forks)
    _started: float = dataclasses.field(default_factory=time.monotonic)
    _next_look_s: float = LOOK_EVERY_S
    _next_parent_s: float = LOOK_EVERY_S
    _next_claim_s: float = 0.0
    # Whether it is this rank that lists who is missing.
    _lists: bool = False
    # The ranks on this kernel that have come, if the caller knows no processes.
    _mates: PeerWatch = dataclasses.field(init=False)
    _seen: Mapping[int, View] = dataclasses.field(default_factory=dict)

    # Set when the caller waits no longer.
    _over: threading.Event = dataclasses.field(default_factory=threading.Event)
    _has_begun: bool = False
    _has_ended: threading.Event = dataclasses.field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._mates = PeerWatch(self._view.process, {})

    def close(self) -> None:
        """Stop watching, and let the other thread end without joining. Waits up to `_SETTLE_S` for that.

        In a forked child it does nothing: the other thread runs in the parent, and may hold a lock that is copied.
        """
        if self._forks != fork_count():
            return
        self._joins.setdefault("joins", False)
        self._over.set()
        if self._has_begun:
            # A rank that leaves the world next removes its file, which torch would seek until its deadline.
            self._has_ended.wait(_SETTLE_S)
        self._mates.close()

    def exchange(self) -> Views:
        """Publish this rank's view, compare the facts, and wait for the outcome."""
        # Either `close` sees that this has begun, or this sees that it shall not begin.
        self._has_begun = True
        try:
            if self._over.is_set():
                raise self._cancelled()
            with self._connect() as store:
                return self._exchange(store)
        finally:
            self._has_ended.set()

    def _exchange(self, store: dist.Store) -> Views:
        attendance = Attendance(store, self._rank, self._ranks)
        if not self._joins.setdefault("joins", True):
            raise self._cancelled()
        outcome = self._compare(store, attendance)
        if self._watch is None:
            attendance.introduce(self._view.process.boot_id)
        if attendance.come() and outcome is None:
            outcome = self._complete(store, attendance)
        if outcome is None:
            self._await_outcome(store)
            outcome = outcomes.read(store)
        if not isinstance(outcome, Complete):
            raise self._told(store, outcome)
        self._agreed.set()
        places = Places.decode(outcome.places)
        if len(places) != len(self._ranks):
            raise msgspec.ValidationError(
                f"the outcome has {len(places)} places for {len(self._ranks)} ranks"
            )
        return Views(self._rank, self._ranks, self._near(attendance, places), places)

    def _complete(self, store: dist.Store, attendance: Attendance) -> Outcome:
        """Write that all have come with the same facts, unless there is an outcome; return the one that counts.

        If a rank cannot watch the others, its refusal is the outcome: all raise now, and nobody waits later.
        """
        views = attendance.views(self._ranks)
        rank = unable(views)
        if rank is not None:
            return outcomes.decide(store, outcomes.Refused(len(views), rank, views[rank].refusal))
        return outcomes.decide(store, Complete(Places.of(views.values()).encode()))

    def _await_outcome(self, store: dist.Store) -> None:
        """Return once there is an outcome; a failure comes as one too."""
        if not is_local(store):
            # `check`, on the caller's thread, raises before this wait can time out.
            store.wait([outcomes.KEY], as_timedelta(self._hung_after_s + ANSWER_S))
            return
        # Poll a file: if it is removed because this rank left, torch's own wait would last to its deadline.
        start = time.monotonic()
        while not store.check([outcomes.KEY]):
            if self._over.wait(pause_after(time.monotonic() - start)):
                raise self._cancelled()

    def _cancelled(self) -> ClosedError:
        return ClosedError(f"{self._where}: cancelled, the caller no longer waits")

    def check(self) -> None:
        """Raise if a rank died, or if the store hangs because its process is stopped. Runs on the caller's thread."""
        try:
            self.raise_if_lost()
        except PeerLostError as error:
            # A rank may have ended because the parent is broken: the rank at fault for that counts.
            self._raise_if_broken()
            lost = list(error.peers)
            self._tell(lambda came: outcomes.Left(came, lost, self._end_of(lost)), ANSWER_S)
            raise
        waited_s = time.monotonic() - self._started
        if waited_s >= self._next_parent_s:
            self._next_parent_s = waited_s + LOOK_EVERY_S
            self._raise_if_broken()
        if waited_s >= self._hung_after_s:
            raise self._unanswered()
        is_late = waited_s >= self._timeout_s
        if not is_late and (self._watch is not None or waited_s < self._next_look_s):
            return
        if is_late and waited_s < self._next_claim_s and not self._lists:
            return
        self._next_look_s = waited_s + LOOK_EVERY_S
        try:
            ask_store(self._give_up if is_late else self._look, self._where, ANSWER_S, self.raise_if_lost)
        except CapabilityError as error:
            # There is no thread with which to ask now. It asks again in a moment.
            if is_late or raised_by_handler(error):
                raise
        except CommTimeoutError as error:
            if raised_by_handler(error):
                raise
            if time.monotonic() - self._started >= self._timeout_s:
                raise self._unanswered() from None

    def _raise_if_broken(self) -> None:
        """Raise what has broken the parent, if anything has, and tell the others, who may not see that themselves."""
        try:
            self._check_parent()
        except CommError as error:
            if not raised_by_handler(error):
                reason, ranks = str(error), list(error.peers) if isinstance(error, PeerLostError) else []
                self._tell(lambda came: Broken(came, reason, ranks), ANSWER_S)
            raise

    def leave(self, error: BaseException) -> None:
        """Tell the others that `error` makes this rank leave, if they may have seen it. Takes `LEAVE_S` at most.

        If all have agreed before, nothing is told: they wait for this rank in their groups.
        """
        reason = f"was interrupted ({type(error).__name__}) and has left"
        self._tell(lambda came: outcomes.Left(came, [self._rank], reason), LEAVE_S)

    def has_no_thread(self, error: CommError) -> bool:
        """Return whether this rank has not taken part because it can have no further thread."""
        return isinstance(error, CapabilityError) and not self._has_begun and not raised_by_handler(error)

    def add_stacks(self, error: CommError) -> None:
        """Attach to a time-out where the ranks are, if this one lists who is missing and their processes are known."""
        if self._lists and self._watch is not None and isinstance(error, CommTimeoutError):
            attach(error, ask_missing(error.missing, self._rank, self._ranks, self._watch))

    def raise_if_lost(self) -> None:
        """Raise `PeerLostError` if a rank that is known to have come is dead."""
        raise_if_lost(self._watched, self._where)
        if self._reported is not None:
            raise_if_lost(self._reported, self._where)

    def _end_of(self, lost: Sequence[int]) -> str:
        """Return what has happened to `lost` ranks, as the end of a sentence."""
        if (how := self._watched.reported(lost[0])) is not None:
            return f"{'are' if len(lost) > 1 else 'is'} lost: {how}"
        return f"{'have' if len(lost) > 1 else 'has'} ended{clone_hint(self._watched, lost)}"

    @property
    def _watched(self) -> PeerWatch:
        return self._mates if self._watch is None else self._watch

    @property
    def _hung_after_s(self) -> float:
        """How long this rank waits for an outcome: two others have then had the time to list who is missing."""
        return self._timeout_s + 2 * LINGER_S + ANSWER_S

    def _compare(self, store: dist.Store, attendance: Attendance) -> Outcome | None:
        """Publish this rank's view; return the outcome if it holds other facts than the first rank."""
        digest = _digest_of(self._view)
        proposal = outcomes.propose(store, self._rank, digest)
        is_alike = proposal.digest == digest
        # Only the first rank and those that contradict it publish facts: these list the ranks of all groups.
        if proposal.rank == self._rank or not is_alike:
            outcomes.show_facts(store, digest, self._view.facts)
        taken = attendance.claim(msgspec.structs.replace(self._view, digest=digest))
        if taken is not None:
            raise DisagreementError(
                f"{self._where}: two processes claim to be rank {self._rank}: this one, and pid {taken.process.pid} "
                f"on host {taken.process.hostname}"
            )
        if is_alike:
            return None
        dissent = self._dissent(store, attendance, proposal)
        outcome = outcomes.decide(store, dissent)
        if isinstance(outcome, Complete):
            # The others completed an agreement that does not include this rank's groups.
            raise self._told(store, dissent)
        return outcome

    def _dissent(self, store: dist.Store, attendance: Attendance, proposal: Proposal) -> Dissent:
        """Return who holds which facts."""
        # The first rank publishes its facts and its view behind its proposal.
        attendance.has_view(proposal.rank, LINGER_S)
        came = {*attendance.present(), self._rank, proposal.rank}
        views = attendance.views([rank for rank in sorted(came) if attendance.has_view(rank, 0.0)])
        facts = {
            digest: outcomes.facts_of(store, digest) for digest in {view.digest for view in views.values()}
        }
        return Dissent(len(views), {rank: facts[view.digest] for rank, view in views.items()})

    def _near(self, attendance: Attendance, places: Places) -> dict[int, View]:
        """Return the views of the ranks on this kernel, of which some are known from watching."""
        own = places[self._ranks.index(self._rank)].kernel
        near = [rank for rank, place in zip(self._ranks, places, strict=True) if place.kernel == own]
        seen = self._seen
        return {**seen, **attendance.views([rank for rank in near if rank not in seen])}

    def _look(self) -> None:
        """Watch those on this kernel that have come."""
        if not self._joins.get("joins") or self._refusal is not None:
            return
        attendance = Attendance(self._store, self._rank, self._ranks)
        mates = set(attendance.mates(self._view.process.boot_id)) - {self._rank, *self._seen}
        if not mates:
            return
        # This look asks twice, so the next one is a second later: on average one question a second.
        self._next_look_s += LOOK_EVERY_S
        # The other thread reads this, so the dict is replaced and never changed.
        self._seen = {**self._seen, **attendance.views(sorted(mates))}
        before = self._mates
        self._mates = PeerWatch(self._view.process, {rank: view.process for rank, view in self._seen.items()})
        before.close()

    def _give_up(self) -> None:
        """Write who is missing, if this rank is the first one whose deadline has passed.

        If that rank dies meanwhile, the first rank that asks in the next second does it. If nobody is
        missing, the last rank to come has died before it wrote the outcome, so this rank writes it.
        """
        late_s = time.monotonic() - self._started - self._timeout_s
        second = int(late_s / LINGER_S)
        self._next_claim_s = self._timeout_s + (second + 1) * LINGER_S
        self._lists = self._lists or self._store.add(f"lists/{second}", 1) == 1
        if not self._lists:
            return
        attendance = Attendance(self._store, self._rank, self._ranks)
        present = attendance.present()
        missing = sorted(set(self._ranks) - set(present))
        if missing:
            outcomes.decide(self._store, outcomes.Missing(len(present), missing))
        elif late_s >= LINGER_S:  # until then the last rank may be about to write it
            self._complete(self._store, attendance)

    def _unanswered(self) -> CommTimeoutError:
        watch = self._watched
        stopped = tuple(rank for rank in sorted(watch.peers) if watch.state(rank) == "stopped")
        named = "".join(f"; rank {rank} ({watch.describe(rank)})" for rank in stopped)
        return CommTimeoutError(
            f"{self._where}: the rendezvous store did not answer within {self._timeout_s:.1f} s{named}",
            missing=stopped,
        )

    def _tell(self, failure_of: Callable[[int], Failure], within_s: float) -> None:
        """Tell the others of a failure, if they may have seen this rank, and have not agreed; else it joins no more.

        A child that a signal handler has forked tells nothing: the agreement is its parent's.
        """
        if self._forks != fork_count() or not self._joins.setdefault("joins", False):
            return

        def tell() -> None:
            came = len(Attendance(self._store, self._rank, self._ranks).present())
            if isinstance(outcomes.decide(self._store, failure_of(came)), Complete):
                self._agreed.set()
            else:
                self._store.add("told", 1)

        # The others notice that themselves.
        with tolerating(*_UNTOLD):
            self._check_store()
            ask_store(tell, self._where, within_s, self._check_store)

    def _told(self, store: dist.Store, failure: Failure) -> CommError:
        """Return the error for `failure` after the others have read it too: this rank may be serving the store."""
        pause_s = max(TOLD_PAUSE_S, len(self._ranks) * TOLD_PAUSE_PER_RANK_S)
        end = time.monotonic() + LINGER_S
        with tolerating(RuntimeError):  # the rank that serves the store has left
            told = store.add("told", 1)
            while told < (failure.came or len(self._ranks)) and time.monotonic() < end:
                if self._over.wait(min(pause_s, max(end - time.monotonic(), 0.0))):
                    break
                pause_s *= 2
                told = store.add("told", 0)
        if isinstance(failure, Broken):
            self._check_parent()
        refusal = self._refusal
        if refusal is not None and isinstance(failure, outcomes.Refused) and failure.reason == str(refusal):
            return refusal
        return failure.error(self._where, self._timeout_s)


def _digest_of(view: View) -> str:
    # Half of a SHA-256: each rank receives it with every view of its host, and nobody gains by a collision.
    return hashlib.sha256(msgspec.json.encode(view.facts, order="deterministic")).hexdigest()[:32]
