"""The health of one group: how all its planes wait, find the rank at fault and break the group.

A call that cannot finish must name the rank at fault, and all ranks must name the same. The transports cannot do
that: Gloo reports "connection closed by peer" on ranks whose peer only gave up, and only on those that were
communicating with it. Therefore a rank that has waited for `ANNOUNCE_AFTER_S` writes where it waits into a status store
that all ranks of the group can read, and that the wait is over when it is. The first rank that finds a failure reads
the store and publishes a failure record, which all other ranks adopt. A call that succeeds within `ANNOUNCE_AFTER_S`
does not use the store.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import msgspec

from shm_broadcast.errors import (
    ClosedError,
    CommError,
    CommTimeoutError,
    GroupBrokenError,
    NativeError,
    NcclError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.interruption import Posts, raised_by_handler, tolerating
from shm_broadcast.liveness import PeerWatch, fork_count
from shm_broadcast.reports.arrivals import Announcer, Arrival, late_for
from shm_broadcast.reports.failure_record import (
    FailureKind,
    FailureRecord,
    failure_of,
    interruption_of,
    other_calls,
    time_out_of,
)
from shm_broadcast.reports.log_fields import LogFields, log_fields
from shm_broadcast.reports.refusals import Refusals
from shm_broadcast.stacks.attached import ask_members, attach
from shm_broadcast.status.shown_calls import ShownCalls, StatusLane

# A waiting call checks signals, dead peers and `close` at this interval. Ctrl-C must interrupt within 0.2 s.
SLICE_S: Final = 0.1
# How long a rank waits before it writes to the status store where it waits.
ANNOUNCE_AFTER_S: Final = 0.5
# Where only the status store knows who is missing, a rank reports and looks for others during this last part of its
# deadline, or during the second half of a shorter one. It is twice ANNOUNCE_AFTER_S, so that even on a busy machine
# those who came before are seen.
GRACE_S: Final = 1.0
# A waiting call checks for other ranks' failure records at the first interval if it has a deadline, else at the second.
FAILURE_EVERY_S: Final = 0.25
FAILURE_IDLE_EVERY_S: Final = 1.0
# How long to look for the cause of a transport's error. It shows up late: the kernel closes a dying process's sockets
# some milliseconds before its pidfd fires. A peer that gives up publishes its failure record before it closes.
EXPLAIN_S: Final = 2.0

# A wait without a deadline ends after a year.
FOREVER_S: Final = 86400.0 * 365


def _is_own(error: BaseException, *, anywhere: bool = False) -> bool:
    """Return whether a call has raised `error` itself: it is an error of this package, and of no signal handler.

    `anywhere` as in `raised_by_handler`.
    """
    return isinstance(error, CommError) and not raised_by_handler(error, anywhere=anywhere)


class StatusStore(Protocol):
    """The status store: how the ranks of a group communicate when the group's own transport is stuck.

    Every method takes at most about two seconds. If the store cannot be reached, reads return nothing.
    """

    @property
    def is_reachable(self) -> bool:
        """Return whether the store has always answered so far."""

    def arrive(self, plane: str, arrival: Arrival) -> None:
        """Record in which call this rank waits, or that its wait there is over."""

    def arrivals(self, plane: str) -> dict[int, Arrival]:
        """Return the recorded calls in which ranks wait or waited last, by global rank."""

    def failure_record(self) -> FailureRecord | None:
        """Return the failure record, if there is one."""

    def publish(self, failure_record: FailureRecord, within_s: float = ...) -> FailureRecord:
        """Publish a failure record unless one exists; return the one that counts, as far as known by then."""

    def leave(self) -> None:
        """Record that this rank has destroyed the group."""

    def left(self) -> tuple[int, ...]:
        """Return the global ranks that have destroyed the group."""


class Pollable(Protocol):
    """Work in flight that can be waited for in slices."""

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds; return whether the work is complete. Raise its error if it failed."""

    def pending(self) -> Sequence[int] | None:
        """Return the global ranks that it still waits for, or None if only the status store knows."""


class Plane(Protocol):
    """What one plane of a group knows of its collectives without the status store."""

    def last_calls(self) -> dict[int, Arrival]:
        """Return the last collective that each rank has come to, by global rank."""

    def refuse(self, reason: str) -> None:
        """Take the number of a collective that this rank refuses. The others' call raises `reason`."""

    def catch_up(self) -> None:
        """Tell the others of refusals that had to wait for earlier ones to be seen."""


class Operation(msgspec.Struct, frozen=True):
    """One call in progress.

    Attributes:
        number: Counts the collectives of a plane; 0 for point to point.
        lane: Where the status page shows the call, if it is a collective that Python code makes.
    """

    plane: str
    name: str
    number: int
    lane: StatusLane | None = None

    def __str__(self) -> str:
        """Return the name, with the number of a collective."""
        return f"{self.name} #{self.number}" if self.number else self.name


class GroupHealth:
    """Whether a group can be used; the only place that breaks a group.

    All planes of a group in this process share one object. A failure is final: the first one is kept as the cause,
    every transport is aborted, and each later call raises `GroupBrokenError`.

    Attributes:
        watch: The other ranks' processes.
        forks: The fork count of the process to which the group belongs.
        posts: What posts on its transports.
        planes: What carries its collectives, by name; see `attach`.
        refusals: The calls that this rank refuses.
    """

    def __init__(
        self, name: str, rank: int, ranks: Sequence[int], watch: PeerWatch, status_store: StatusStore
    ) -> None:
        """Start healthy.

        Args:
            name: The group's unique name, for texts.
            rank: This process's global rank.
            ranks: Global ranks of the group in group order.
            watch: Watches the other ranks' processes.
            status_store: The group's status store.
        """
        self.name = name
        self.rank = rank
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.watch: PeerWatch = watch
        self._status_store = status_store
        self._announcer = Announcer(status_store.arrive)
        self._cause: BaseException | None = None
        # The calls that exceptions are leaving, of all threads, each with its exception; see `left_halfway`.
        self.left: list[tuple[Operation, BaseException]] = []
        # The calls in progress that are made of several collectives, each with its thread; see `in_parts`.
        self.composed: dict[object, int] = {}
        # The thread that has broken the group and has not aborted all transports yet.
        self._breaker: int | None = None
        self._failure_record: FailureRecord | None = None
        self._closed = False
        # Where the members of a world can change, this returns `ExcludedError` if the others have gone on
        # without this rank. A call that fails asks it, and passes the beginning of the error's text.
        self.exclusion: Callable[[str], CommError | None] = lambda _where: None
        # Ranks whose process has ended after they had destroyed the group.
        self._excused: set[int] = set()
        # Messages that a transport may still be sending, whether or not anybody has their handles.
        self.unfinished_sends: set[object] = set()
        self.forks: int = fork_count()
        self.posts: Posts = Posts(name)
        # `next` on a count is atomic under the GIL and faster than a lock; the group's own thread calls `begin` too.
        self._numbers: dict[str, Iterator[int]] = {"host": itertools.count(1), "device": itertools.count(1)}
        self._aborts: list[Callable[[], None]] = []
        self.planes: dict[str, Plane] = {}
        self.refusals: Refusals = Refusals()
        # What other processes see of the group.
        self.shown: ShownCalls = ShownCalls(name, self.ranks.index(rank), self.ranks)
        # A signal handler may destroy the group while this thread holds it.
        self._lock = threading.RLock()

    @property
    def is_broken(self) -> bool:
        """Return whether a failure made the group unusable."""
        return self._cause is not None

    @property
    def failure_record(self) -> FailureRecord | None:
        """Return what broke the group, if ranks must learn of it: the record that counts, as far as known here."""
        return self._failure_record

    @property
    def is_closed(self) -> bool:
        """Return whether this process destroyed the group."""
        return self._closed

    @property
    def is_inherited(self) -> bool:
        """Return whether this is a copy in a forked child, which must not use the group."""
        return self.forks != fork_count()

    def where(self, operation: object) -> str:
        """Return `all_reduce #3 on 'tp:0' (rank 5, 1 of 4)`, the beginning of every error's text."""
        return f"{operation} on {self.name!r} (rank {self.rank}, {self.ranks.index(self.rank)} of {len(self.ranks)})"

    def log_fields(self, call: str | None = None, algorithm: str | None = None) -> LogFields:
        """Return the fields of a log record on this group, and on a call of it and what carries that if given."""
        return log_fields(group=self.name, rank=self.rank, call=call, algorithm=algorithm)

    def check_usable(self, name: str) -> None:
        """Raise unless the group can be used by this process now.

        Raises:
            UsageError: This process is a forked child of the group's owner.
            ClosedError: The group was destroyed by this process (also a `UsageError`).
            GroupBrokenError: An earlier failure broke the group; `__cause__` is that failure.
            ExcludedError: As before, and the other ranks have gone on without this one.
        """
        # Every call asks this: one test, and no further frame, for a group that can be used.
        if not self._closed and self._cause is None and not self.left and self.forks == fork_count():
            return
        self.check_owner(name)
        for left in self.left.copy():
            self.left_halfway(*left)
        if self._closed:
            raise ClosedError(f"{self.where(name)}: the group was destroyed")
        if self._cause is not None:
            if (excluded := self.exclusion(self.where(name))) is not None:
                raise excluded from self._cause
            raise GroupBrokenError(
                f"{self.where(name)}: an earlier failure made the group unusable, destroy it: {self._cause}"
            ) from self._cause

    def check_owner(self, name: object) -> None:
        """Raise `UsageError` if this process is a forked child of the group's owner."""
        if self.forks != fork_count():
            raise UsageError(
                f"{self.where(name)}: the group belongs to the process that forked this one; "
                "a forked child must create its own groups, or be started with spawn"
            )

    def begin(self, plane: str, name: str, lane: StatusLane | None = None) -> Operation:
        """Start a collective, which `lane` shows: check the state and count it. Raises as `check_usable`."""
        self.check_usable(name)
        return Operation(plane, name, next(self._numbers[plane]), lane)

    def begin_point_to_point(self, plane: str, name: str) -> Operation:
        """Start a point-to-point call: check the state. Raises as `check_usable`."""
        self.check_usable(name)
        return Operation(plane, name, 0)

    def on_abort(self, abort: Callable[[], None]) -> None:
        """Call `abort` when the group breaks or is closed; it must not block and not raise."""
        self._aborts.append(abort)

    def attach(self, name: str, plane: Plane) -> None:
        """Ask `plane`, whose name is `name`, when a call is refused or a deadline passes."""
        self.planes[name] = plane

    def left_halfway(self, operation: Operation, error: BaseException) -> None:
        """Break the group because `error` has ended a call that has begun; not for the call's own errors.

        The call's own errors were raised before it had begun, or `wait` has dealt with them. If a call is
        unfinished nevertheless, it is one further out: a handler has interrupted it to make this call, and it
        may go on.

        The caller has appended the arguments to `left` in the first statement after the exception, so that no
        handler runs in between. If one raises again before this has returned, the next call of the group finds
        them in `left` and does the rest, on whichever thread.
        """
        if not _is_own(error, anywhere=True):
            self._interrupted(operation, error)
        self.forget_left(operation, error)

    def forget_left(self, operation: Operation, error: BaseException) -> None:
        """Remove a note from `left`, unless another thread has done so, which has found it, too."""
        with tolerating(ValueError):
            self.left.remove((operation, error))

    def wait(self, operation: Operation, work: Pollable, timeout_s: float | None) -> None:
        """Wait for `work`; check signals, dead peers, failure records and `close` meanwhile.

        Args:
            operation: The call in progress.
            work: What it waits for.
            timeout_s: Seconds from now, or None to wait without limit.

        Raises:
            CommTimeoutError: The deadline passed, here or on the rank that published first; the group is broken.
            PeerLostError: A rank died, was interrupted, or left the group, which is broken.
            ClosedError: Another thread destroyed the group.
            NativeError: The transport failed although every process is alive; the group is broken.
        """
        try:
            self.shown.wait(operation, work, timeout_s, self._wait)
        except BaseException as error:
            explained = self._explained(operation, error, work.pending)
            if not (self._closed or self.is_broken):  # a rank has refused the call, and the group goes on
                self._announcer.end_wait(operation.plane, operation.number)
            if explained is None:
                raise
            raise explained from error

    def _explained(
        self, operation: Operation, error: BaseException, pending: Callable[[], Sequence[int] | None]
    ) -> CommError | None:
        """Return what to raise in place of `error`, which has ended a call, or None to raise `error` itself.

        A `CommError` of the call itself has been dealt with. One that a signal handler raises counts like any
        other exception of a handler: the call is left halfway.
        """
        try:
            if _is_own(error):
                return None
            if isinstance(error, RuntimeError) and not raised_by_handler(error):
                return self.explain(operation, error, pending())
            self._interrupted(operation, error)
        except BaseException as second:
            # A handler has raised again, perhaps before the group was broken. Break it now.
            self._interrupted(operation, second)
            raise
        return None

    def _wait(self, operation: Operation, work: Pollable, timeout_s: float | None) -> None:
        start = time.monotonic()
        deadline = FOREVER_S if timeout_s is None else timeout_s
        # If only the status store knows who is missing, the call asks it in this last part of its deadline.
        last_part = deadline - min(GRACE_S, deadline / 2)
        waited, next_look, is_announced = 0.0, ANNOUNCE_AFTER_S, False
        while not work.poll(min(SLICE_S, max((last_part if waited < last_part else deadline) - waited, 0.0))):
            waited = time.monotonic() - start
            self._raise_if_ended(operation)
            # The rank that this call waits for may itself wait for a refusal by this rank.
            for plane in list(self.planes.values()):
                plane.catch_up()
            if waited >= deadline or (waited >= last_part and operation.number and work.pending() is None):
                self._expire(operation, work, start + deadline, deadline)
                break
            if waited >= ANNOUNCE_AFTER_S and not is_announced and operation.number:
                self.announce(operation)
                is_announced = True
            if waited >= next_look:
                self.check_record(operation)
                often = FAILURE_EVERY_S if timeout_s is not None else FAILURE_IDLE_EVERY_S
                next_look = waited + often
        self._announcer.end_wait(operation.plane, operation.number)

    def announce(self, operation: Operation) -> None:
        """Report to the status store that this rank waits in the collective `operation`, until a `wait` of it ends."""
        self._announcer.begin_wait(operation.plane, Arrival(operation.name, operation.number))

    def check_peers(self, operation: Operation) -> None:
        """Break the group and raise if a peer's process has ended.

        Raises:
            PeerLostError: At least one has ended.
        """
        if lost := self.gone():
            raise self._record(operation, self._failure(operation, "lost", lost))

    def check_leavers(self, operation: Operation) -> None:
        """Break the group and raise if a rank has ended after it destroyed the group, as `check_peers` has found.

        A call over a transport that does not tell who has left needs this: NCCL waits for such a rank for ever.

        Raises:
            PeerLostError: At least one has.
        """
        if self._excused:
            raise self._record(operation, self._failure(operation, "left", tuple(sorted(self._excused))))

    def gone(self) -> tuple[int, ...]:
        """Return the ranks whose process has ended, except those that have destroyed the group before.

        A call that waits for one of those learns from the transport that it has left, and can still receive
        what it sent before.
        """
        if lost := set(self.watch.lost()) - self._excused:
            self._excused |= lost.intersection(self._status_store.left())
        return tuple(sorted(lost - self._excused))

    def check_record(self, operation: Operation) -> None:
        """Break the group and raise if another rank has published what broke it, or that it refuses `operation`."""
        if (refused := self.refusals.found(self, operation)) is not None:
            raise refused
        if (failure_record := self._status_store.failure_record()) is not None:
            raise self._adopt(operation, failure_record)

    def others_failed(self) -> bool:
        """Return whether another rank has published a failure record. From any thread; as quick as the status store."""
        return (record := self._status_store.failure_record()) is not None and record.by != self.rank

    def _raise_if_ended(self, operation: Operation) -> None:
        if self._closed:
            raise ClosedError(f"{self.where(operation)}: the group was destroyed while the call waited")
        self.check_owner(operation)
        self.check_peers(operation)

    def _expire(self, operation: Operation, work: Pollable, end: float, within_s: float) -> None:
        """Report, wait for reports until the monotonic time `end`, then break the group and raise.

        Returns if the call completes before.
        """
        if operation.number:
            self.announce(operation)
        while time.monotonic() < end:
            if work.poll(min(SLICE_S / 2, max(end - time.monotonic(), 0.0))):
                return
            self._raise_if_ended(operation)
            self.check_record(operation)
        arrivals = self._status_store.arrivals(operation.plane) if operation.number else {}
        pending = work.pending()
        if pending is None:
            others = [rank for rank in self.ranks if rank != self.rank]
            pending = late_for(operation.number, others, arrivals)
        if operation.number and not self._status_store.is_reachable:
            # The status store does not answer. A stopped process among the pending ranks explains the timeout.
            pending = self._stopped(pending) or pending
        missing = tuple(sorted(pending))
        # The last rank may have come since the last look.
        if not missing and work.poll(0.0):
            return
        known = self.planes.get(operation.plane)
        detail = self._describe(missing, arrivals | (known.last_calls() if known is not None else {}))
        if not missing:
            calls = [(rank, seen.operation, seen.number) for rank, seen in sorted(arrivals.items())]
            detail = other_calls(operation.name, operation.number, calls)
        raise self._record(operation, self._failure(operation, "timeout", missing, within_s, detail))

    def _stopped(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(rank for rank in ranks if self.watch.state(rank) == "stopped"))

    def _describe(self, ranks: Sequence[int], arrivals: dict[int, Arrival] | None = None) -> str:
        """Return the state of each rank's process and, if it is in `arrivals`, the call in which the rank waited."""
        last = {rank: f", last at {seen.operation} #{seen.number}" for rank, seen in (arrivals or {}).items()}
        return ", ".join(f"{rank} ({self.watch.describe(rank)}{last.get(rank, '')})" for rank in ranks)

    def explain(self, operation: Operation, error: Exception, pending: Sequence[int] | None) -> CommError:
        """Find the cause of a transport's error, break the group, and return the error to raise.

        Blocks up to `EXPLAIN_S`, and longer while a rank on another host may turn out to be lost: a rank that
        knows already has closed its connections, which causes an error here. If a signal handler raises
        meanwhile, the group is broken for that reason.

        Args:
            operation: The call in progress.
            error: The transport's error.
            pending: Global ranks that the call waited for; None if the transport does not know.

        Returns:
            The error to raise from `error`.
        """
        try:
            return self._explain(operation, error, pending)
        except BaseException as interruption:
            self._interrupted(operation, interruption)
            raise

    def _explain(self, operation: Operation, error: Exception, pending: Sequence[int] | None) -> CommError:
        end = time.monotonic() + EXPLAIN_S
        while True:
            if self._closed:
                return ClosedError(f"{self.where(operation)}: the group was destroyed while the call waited")
            # `is_in_doubt` comes first: it looks for lost ranks itself, and the next line must see them.
            is_over = not self.watch.is_in_doubt() and time.monotonic() >= end
            known = self._known_failure(operation, pending)
            if known is not None:
                return known
            if is_over:
                break
            time.sleep(0.02)
        suspects = pending or self.ranks
        unseen = tuple(rank for rank in suspects if rank != self.rank and not self.watch.watches(rank))
        if unseen:
            detail = f"{self._describe(unseen)}: {error}"
            return self._record(operation, self._failure(operation, "lost", unseen, detail=detail))
        stopped = () if self._status_store.is_reachable else self._stopped(suspects)
        if stopped:
            # A peer gave up waiting for the stopped rank, and could not publish that.
            waited_s = time.monotonic() - end + EXPLAIN_S
            return self._record(operation, self._failure(operation, "timeout", stopped, waited_s))
        self._record(operation, self._failure(operation, "failed", (), detail=str(error)))
        text = f"{self.where(operation)}: the transport failed though every process is alive: {error}; "
        text += "the group is now unusable, destroy it"
        failure = NativeError(text, library="torch.distributed", function=operation.name)
        if isinstance(error, NcclError):
            failure = NcclError(text, library=error.library, function=error.function, code=error.code)
        self._cause = failure
        return failure

    def _known_failure(self, operation: Operation, pending: Sequence[int] | None) -> CommError | None:
        """Break the group and return the error to raise if a failure is recorded, or a rank has died or left.

        A rank that has left counts only if the call waits for it, or may do so because `pending` is unknown.
        """
        if (refused := self.refusals.found(self, operation)) is not None:
            return refused
        if (failure_record := self._status_store.failure_record()) is not None:
            return self._adopt(operation, failure_record)
        if lost := self.gone():
            return self._record(operation, self._failure(operation, "lost", lost))
        needed = set(pending or self.ranks) - {self.rank}
        left = tuple(rank for rank in self._status_store.left() if rank in needed)
        return self._record(operation, self._failure(operation, "left", left)) if left else None

    @contextmanager
    def transport(self, operation: Operation) -> Iterator[Posts]:
        """Give the block what it posts with, and convert an error that a transport raises then into a `CommError`."""
        try:
            yield self.posts
        except GeneratorExit:
            # A signal handler has raised before the block began.
            raise
        except BaseException as error:
            explained = self._explained(operation, error, lambda: None)
            if explained is None:
                raise
            raise explained from error

    def _interrupted(self, what: object, error: BaseException) -> None:
        """Break the group after Ctrl-C or another exception interrupted the call `what`, whose state is unknown.

        If the group is broken already, this only completes a break that a signal handler has interrupted. In a
        forked child, in whose copy of the call a handler has forked, it does nothing: the call is the parent's.
        """
        if self._cause is None and not self._closed and not self.is_inherited:
            # Published first, as in `fail`. Ctrl-C must interrupt within 0.2 s.
            failure_record = interruption_of(error, self.rank, str(what))
            self._failure_record = self._status_store.publish(failure_record, within_s=SLICE_S)
        self._break(error)

    def _failure(
        self,
        operation: object,
        kind: FailureKind,
        ranks: tuple[int, ...],
        within_s: float = 0.0,
        detail: str = "",
    ) -> FailureRecord:
        """Return a record of what this rank found; by default `detail` describes the processes of `ranks`."""
        described = detail or self._describe(ranks)
        return FailureRecord(kind, ranks, self.rank, str(operation), within_s, described)

    def _record(self, operation: Operation, failure_record: FailureRecord) -> CommError:
        self.check_owner(operation)
        counted = self._status_store.publish(failure_record)
        # Ask for stacks before the transports are aborted, while the other ranks are still where they hang.
        texts = ask_members(counted, self.rank, self.ranks, self.watch)
        return attach(self._adopt(operation, counted), texts)

    def _adopt(self, operation: Operation, failure_record: FailureRecord) -> CommError:
        self._failure_record = failure_record
        error = self.exclusion(self.where(operation)) or self._error(operation, failure_record)
        self._break(error)
        return error

    def _error(self, operation: Operation, failure_record: FailureRecord) -> CommError:
        where = self.where(operation)
        end = "; the group is now unusable, destroy it"
        if failure_record.by != self.rank:
            end = f" (found by rank {failure_record.by} in {failure_record.operation}){end}"
        ranks = "rank" if len(failure_record.ranks) == 1 else "ranks"
        if failure_record.kind == "timeout":
            text = time_out_of(failure_record, self.rank)
            return CommTimeoutError(
                f"{where}: {text} within {failure_record.within_s:.1f} s{end}", missing=failure_record.ranks
            )
        if failure_record.kind == "failed":
            return GroupBrokenError(
                f"{where}: the transport failed on rank {failure_record.by}: {failure_record.detail}{end}"
            )
        verbs = {"lost": "lost", "left": "the group was destroyed by", "interrupted": "interrupted:"}
        text = f"{where}: {verbs[failure_record.kind]} {ranks} {failure_record.detail}{end}"
        return PeerLostError(text, peers=failure_record.ranks)

    def _break(self, cause: BaseException) -> None:
        thread = threading.get_ident()
        with self._lock:
            if self._closed or self.is_inherited:
                return
            if self._cause is None:
                self._cause, self._breaker = cause, thread
                self.shown.broken(cause, self._failure_record, self.watch.state)
            if self._breaker != thread:
                return
        # If a signal handler raises here, this thread's next call of this function does the rest.
        self.abort()
        self._breaker = None

    def fail(
        self,
        error: BaseException,
        what: str = "a transfer",
        failure_record: FailureRecord | None = None,
        *,
        within_s: float = 0.0,
    ) -> None:
        """Break the group because of `error`, which the caller raises, and publish it; not in a forked child.

        Args:
            error: The error. One that is no `CommError` has interrupted this rank, as Ctrl-C does.
            what: In which call it was found, for the texts of the other ranks' errors.
            failure_record: What to publish, if another group of this rank has broken for the same reason.
            within_s: The deadline that has passed, in seconds: the other ranks then raise the time-out, too.
        """
        if self.is_inherited:
            return
        if failure_record is None:
            failure_record = failure_of(error, self.rank, what, self._describe, within_s)
        # Ctrl-C must interrupt within 0.2 s.
        within = {} if isinstance(error, CommError) else {"within_s": SLICE_S}
        try:
            # Published first: the break closes transports, and whoever finds one closed looks for the reason.
            self._failure_record = self._status_store.publish(failure_record, **within)
            self._break(error)
        except BaseException:
            # A signal handler has raised. Its exception goes on to the caller, but `error` breaks the group.
            if self._cause is None and not self._closed and not self.is_inherited:
                self._failure_record = self._status_store.publish(failure_record, within_s=SLICE_S)
            self._break(error)
            raise

    def lost(self) -> tuple[int, ...]:
        """Return the global ranks whose process has ended, ascending. Does not block; from any thread."""
        return self.watch.lost()

    def blame(self, operation: str, missing: Sequence[int], within_s: float) -> CommError:
        """Find the rank at fault after a device gave up waiting, break the group, and return the error to raise.

        Args:
            operation: The device's operation.
            missing: Global ranks that it waited for; empty if it does not know.
            within_s: How long it waited, in seconds.

        Returns:
            The error of an earlier failure record if there is one, else `PeerLostError` if a rank is gone, else
            `CommTimeoutError` with `missing`.
        """
        stated = Operation("device", operation, 0)
        found = self._failure(operation, "timeout", tuple(sorted(missing)), within_s)
        return self._known_failure(stated, missing) or self._record(stated, found)

    def close(self) -> bool:
        """Refuse every later call; calls that wait raise `ClosedError` within `SLICE_S`.

        Returns:
            True for the first call in the process that owns the group, False for any other, so that the group's
            resources are released once.
        """
        with self._lock:
            # `is_inherited` comes first, so that no handler runs between reading `_closed` and setting it.
            if self.is_inherited or self._closed:
                return False
            self._closed = True
        return True

    def abort(self) -> None:
        """Call every function that was registered with `on_abort`, to end all work in flight."""
        for abort in self._aborts:
            abort()

    def say_goodbye(self) -> None:
        """Record that this rank left, for the texts of the other ranks' errors; not if the group is broken."""
        if self._cause is None:
            self._status_store.leave()

    def release(self) -> None:
        """Stop watching the other ranks and drop the transports, as the last step of leaving."""
        self.shown.status.leave()
        self.watch.close()
        self._aborts.clear()
        self.planes.clear()
