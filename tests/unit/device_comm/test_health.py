"""With a fake status store and fake transports: which ranks a group's health blames, and what follows."""

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from device_comm import health as health_module
from device_comm.health import GroupHealth, Operation
from shm_broadcast.errors import (
    ClosedError,
    CommTimeoutError,
    DisagreementError,
    GroupBrokenError,
    NativeError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.reports.arrivals import Arrival
from shm_broadcast.reports.failure_record import FailureRecord, failure_of

# Deadlines that must never matter.
LONG_S = 600.0
# What must happen at once may take this long on a busy machine.
SOON_S = 20.0
OPERATION = Operation("host", "barrier", 3)


class FakeWatch:
    """Reports the process states that the test sets."""

    def __init__(self) -> None:
        self.dead: tuple[int, ...] = ()
        self.stopped: tuple[int, ...] = ()
        self.unseen: tuple[int, ...] = ()
        self.doubts = 0
        self.closed = 0

    def lost(self) -> tuple[int, ...]:
        return self.dead

    def is_in_doubt(self) -> bool:
        """Say yes `doubts` times; behind the last time rank 6 is found dead."""
        self.doubts -= 1
        if self.doubts == 0:
            self.dead = (6,)
        return self.doubts >= 0

    def watches(self, rank: int) -> bool:
        return rank not in self.unseen

    def state(self, rank: int) -> str:
        return "dead" if rank in self.dead else "stopped" if rank in self.stopped else "alive"

    def process(self, rank: int) -> None:
        return None

    def describe(self, rank: int) -> str:
        return f"pid {1000 + rank}, {self.state(rank)}"

    def close(self) -> None:
        self.closed += 1


class FakeStatusStore:
    """A status store in this process; `others` holds the arrivals of the other ranks."""

    def __init__(self) -> None:
        self.failure_records: list[FailureRecord] = []
        self.others: dict[int, Arrival] = {}
        self.own: list[Arrival] = []
        self.gone: tuple[int, ...] = ()
        self.goodbyes = 0
        self.is_reachable = True
        self.asked = 0

    def arrive(self, plane: str, arrival: Arrival) -> None:
        self.own.append(arrival)

    def arrivals(self, plane: str) -> dict[int, Arrival]:
        return self.others if self.is_reachable else {}

    def failure_record(self) -> FailureRecord | None:
        self.asked += 1
        return self.failure_records[0] if self.failure_records else None

    def publish(self, failure_record: FailureRecord, within_s: float = 2.0) -> FailureRecord:
        if not self.is_reachable:
            return failure_record
        self.failure_records.append(failure_record)
        return self.failure_records[0]

    def leave(self) -> None:
        self.goodbyes += 1

    def left(self) -> tuple[int, ...]:
        return self.gone


class FakeWork:
    """Work that completes after `after_s` seconds, fails then, or never ends."""

    def __init__(
        self,
        after_s: float = LONG_S,
        error: BaseException | None = None,
        pending: Sequence[int] | None = None,
    ) -> None:
        self._at = time.monotonic() + after_s
        self._error = error
        self._pending = pending
        self.polls = 0

    def poll(self, slice_s: float) -> bool:
        self.polls += 1
        time.sleep(max(0.0, min(slice_s, self._at - time.monotonic())))
        if time.monotonic() < self._at:
            return False
        if self._error is not None:
            raise self._error
        return True

    def pending(self) -> Sequence[int] | None:
        return self._pending


class Group:
    """The health of rank 4 among ranks 4, 5, 6 and 9, with its fakes."""

    def __init__(self) -> None:
        self.watch = FakeWatch()
        self.status_store = FakeStatusStore()
        watch: Any = self.watch
        self.health = GroupHealth("tp:0", 4, [4, 5, 6, 9], watch, self.status_store)
        self.aborts = 0
        self.health.on_abort(self._count)

    def _count(self) -> None:
        self.aborts += 1

    def others_wait(self, *ranks: int, number: int = 3) -> None:
        self.status_store.others = {rank: Arrival("barrier", number) for rank in ranks}

    def fails(
        self, work: FakeWork, timeout_s: float | None = LONG_S, operation: Operation = OPERATION
    ) -> Any:
        """Wait, expect an error, check that it breaks the group, and return it."""
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the test looks at it
            self.health.wait(operation, work, timeout_s)
        assert self.health.is_broken
        assert self.aborts == 1
        with pytest.raises(GroupBrokenError) as again:
            self.health.check_usable("barrier")
        assert again.value.__cause__ is caught.value
        return caught.value


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Return a healthy group with short waits."""
    for name, seconds in (
        ("SLICE_S", 0.01),
        ("ANNOUNCE_AFTER_S", 0.05),
        ("GRACE_S", 0.1),
        ("FAILURE_EVERY_S", 0.02),
        ("FAILURE_IDLE_EVERY_S", 0.02),
        ("EXPLAIN_S", 0.2),
    ):
        assert hasattr(health_module, name)
        monkeypatch.setattr(health_module, name, seconds)
    return Group()


# --- calls that end well ------------------------------------------------------------------------------------


def test_a_call_that_finishes_touches_no_status_store(group: Group) -> None:
    """A call that finishes neither writes nor reads the status store."""
    group.health.wait(OPERATION, FakeWork(0.02), LONG_S)
    assert group.status_store.own == []
    assert group.status_store.asked == 0
    group.health.check_usable("barrier")


def test_a_call_that_waits_says_once_where_and_that_this_is_over(group: Group) -> None:
    """A call that waits for a while writes its operation and number once, and once more when its wait is over."""
    group.health.wait(OPERATION, FakeWork(0.3), LONG_S)
    assert group.status_store.own == [Arrival("barrier", 3), Arrival("barrier", 3, is_over=True)]


@pytest.mark.guarantee("D6", "D69")
def test_a_refused_call_says_that_its_wait_is_over(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group goes on, and a later call must not take this rank for one that still waits here."""
    looks, refused = iter([None] * 9), DisagreementError("refused")
    monkeypatch.setattr(group.health.refusals, "found", lambda *_: next(looks, refused))
    with pytest.raises(DisagreementError):
        group.health.wait(OPERATION, FakeWork(), LONG_S)
    group.health.check_usable("barrier")
    assert group.status_store.own == [Arrival("barrier", 3), Arrival("barrier", 3, is_over=True)]


def test_point_to_point_calls_are_not_announced(group: Group) -> None:
    """Point-to-point calls have no number to compare and are not written."""
    group.health.wait(Operation("host", "recv_object from rank 5", 0), FakeWork(0.3), None)
    assert group.status_store.own == []


def test_a_call_that_finishes_in_the_last_part_of_its_deadline_is_no_failure(group: Group) -> None:
    """A call that finishes while it asks the status store succeeds; it has reported where it waits."""
    group.health.wait(OPERATION, FakeWork(0.2), 0.28)
    assert not group.health.is_broken
    assert group.status_store.own[-2:] == [Arrival("barrier", 3), Arrival("barrier", 3, is_over=True)]


@pytest.mark.parametrize("pending", [None, [6]])
def test_asking_the_status_store_is_part_of_the_deadline(group: Group, pending: list[int] | None) -> None:
    """A time-out comes at the deadline, whoever knows the missing ranks."""
    start = time.monotonic()
    assert isinstance(group.fails(FakeWork(pending=pending), 0.3), CommTimeoutError)
    assert 0.3 <= time.monotonic() - start < 0.5


def test_numbers_count_the_collectives_of_each_plane(group: Group) -> None:
    """Neither point-to-point nor refused calls are counted."""
    begin = group.health.begin
    calls = [begin("host", "barrier"), begin("device", "x"), begin("host", "y")]
    assert [call.number for call in calls] == [1, 1, 2]
    assert group.health.begin_point_to_point("host", "send").number == 0
    assert str(begin("host", "gather")) == "gather #3"
    assert str(Operation("host", "send to rank 5", 0)) == "send to rank 5"


def test_numbers_of_several_threads_are_different(group: Group) -> None:
    """Threads that count at once get different numbers, as when a barrier runs in the group's own thread."""
    numbers: list[int] = []
    before = sys.getswitchinterval()

    def count() -> None:
        numbers.extend([group.health.begin("host", "barrier").number for _ in range(5000)])

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sorted(numbers) == list(range(1, 15001))


# --- the clock ------------------------------------------------------------------------------------------------


def test_ranks_that_wait_elsewhere_or_nowhere_are_missing(group: Group) -> None:
    """A rank at an earlier collective is missing; one at the same or a later collective is not."""
    group.status_store.others = {5: Arrival("barrier", 3), 6: Arrival("gather", 2), 9: Arrival("gather", 4)}
    error = group.fails(FakeWork(), 0.05)
    assert isinstance(error, CommTimeoutError)
    assert error.missing == (6,)
    assert "6 (pid 1006, alive, last at gather #2)" in str(error)
    assert "barrier #3 on 'tp:0' (rank 4, 0 of 4)" in str(error)
    assert "within 0.1 s" in str(error)
    assert group.status_store.failure_records[0].kind == "timeout"


def test_what_a_transfer_still_waits_for_is_missing(group: Group) -> None:
    """If the transport knows which ranks are missing, the status store is not read."""
    group.others_wait(5, 6, 9)
    assert group.fails(FakeWork(pending=[9, 6]), 0.05).missing == (6, 9)


def test_all_arrived_but_stuck_is_a_timeout_without_names(group: Group) -> None:
    """If all ranks have arrived the transfer is at fault, and no rank is named."""
    group.others_wait(5, 6, 9)
    error = group.fails(FakeWork(), 0.05)
    assert error.missing == ()
    assert "every rank arrived" in str(error)


@pytest.mark.guarantee("D6")
@pytest.mark.parametrize("pending", [(), None])
def test_a_call_that_is_complete_when_the_missing_are_asked_for_is_no_time_out(
    group: Group, pending: tuple[int, ...] | None
) -> None:
    """The last rank may come between the last look at the deadline and the question who is missing."""
    group.others_wait(5, 6, 9)
    work = FakeWork()

    def arrive_and_ask() -> tuple[int, ...] | None:
        if time.monotonic() - start >= 0.05:
            work._at = 0.0
        return pending

    work.pending = arrive_and_ask  # type: ignore[method-assign]
    start = time.monotonic()
    group.health.wait(OPERATION, work, 0.05)
    assert not group.health.is_broken
    assert group.status_store.failure_records == []


def test_without_a_status_store_a_stopped_rank_explains_the_timeout(group: Group) -> None:
    """Without a status store the stopped ranks are blamed, or all if none is stopped."""
    group.status_store.is_reachable = False
    group.watch.stopped = (6,)
    assert group.fails(FakeWork(), 0.05).missing == (6,)
    other = Group()
    other.status_store.is_reachable = False
    assert other.fails(FakeWork(), 0.05).missing == (5, 6, 9)


def test_without_a_deadline_a_call_waits(group: Group) -> None:
    """A call without a deadline waits much longer than the settings' deadline."""
    group.health.wait(OPERATION, FakeWork(0.8), None)


# --- other ranks ----------------------------------------------------------------------------------------------


def judged(kind: Any, ranks: tuple[int, ...], detail: str) -> FailureRecord:
    """Return a failure record written by rank 9."""
    return FailureRecord(kind, ranks, 9, "gather #2", 30.0, detail)


@pytest.mark.parametrize("operation", [OPERATION, Operation("host", "recv_object from rank 5", 0)])
def test_a_dead_rank_ends_every_wait(group: Group, operation: Operation) -> None:
    """A dead rank ends even calls that do not wait for it, as the group is lost without it."""
    group.watch.dead = (5, 9)
    error = group.fails(FakeWork(pending=[6]), None, operation)
    assert isinstance(error, PeerLostError)
    assert error.peers == (5, 9)
    assert "pid 1005, dead" in str(error)
    assert group.status_store.failure_records[0].kind == "lost"


@pytest.mark.parametrize(
    ("failure_record", "kind", "text"),
    [
        (judged("timeout", (6,), "6 (pid 1006, alive)"), CommTimeoutError, "no answer from rank 6"),
        (judged("timeout", (4,), "4 (pid 1004)"), CommTimeoutError, "before this rank came"),
        (judged("lost", (6,), "6 (pid 1006, dead)"), PeerLostError, "lost rank 6"),
        (judged("left", (6,), "6"), PeerLostError, "destroyed by rank 6"),
        (judged("interrupted", (9,), "9 (KeyboardInterrupt)"), PeerLostError, "interrupted: rank 9"),
        (judged("failed", (), "no route"), GroupBrokenError, "failed on rank 9: no route"),
    ],
)
def test_the_failure_record_of_another_rank_is_adopted(
    group: Group, failure_record: FailureRecord, kind: type[Exception], text: str
) -> None:
    """Failure records of every kind are adopted; the error says which rank wrote it, in which call."""
    group.status_store.failure_records = [failure_record]
    error = group.fails(FakeWork(), None)
    assert type(error) is kind
    assert text in str(error)
    assert "found by rank 9 in gather #2" in str(error)
    assert (getattr(error, "missing", ()) or getattr(error, "peers", ())) == failure_record.ranks


def test_the_first_failure_record_wins(group: Group) -> None:
    """A rank that finds a failure second raises the first record, not what it saw itself."""
    published = FailureRecord("lost", (9,), 5, "barrier #3", detail="9")
    group.status_store.failure_record = lambda: None  # type: ignore[method-assign]
    group.status_store.failure_records = [published]
    error = group.fails(FakeWork(), 0.05)
    assert isinstance(error, PeerLostError)
    assert error.peers == (9,)


# --- transports -----------------------------------------------------------------------------------------------


def test_a_transport_error_is_explained_by_a_death_seen_later(group: Group) -> None:
    """A dying process closes its sockets before the kernel reports its end."""
    threading.Timer(0.05, lambda: setattr(group.watch, "dead", (5,))).start()
    error = group.fails(FakeWork(0.0, RuntimeError("connection reset")))
    assert isinstance(error, PeerLostError)
    assert error.peers == (5,)
    assert isinstance(error.__cause__, RuntimeError)


def test_a_transport_error_waits_for_a_rank_of_which_the_death_is_in_doubt(group: Group) -> None:
    """A peer that knows already of a vanished host closes its connections. Ten times 20 ms of doubt are 0.2 s more."""
    group.watch.doubts = 30
    error = group.fails(FakeWork(0.0, RuntimeError("connection closed by peer"), [5]), LONG_S)
    assert isinstance(error, PeerLostError)
    assert list(error.peers) == [6]


def test_a_rank_that_the_last_look_finds_lost_explains_a_transport_error(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question whether a rank is in doubt looks for lost ones itself; it is asked before the reason is decided."""

    def look() -> bool:
        group.watch.dead = (9,)
        return False

    monkeypatch.setattr(group.watch, "is_in_doubt", look)
    monkeypatch.setattr(health_module, "EXPLAIN_S", 0.0)
    error = group.fails(FakeWork(0.0, RuntimeError("connection reset")))
    assert isinstance(error, PeerLostError)
    assert error.peers == (9,)


def test_a_transport_error_is_explained_by_a_failure_record(group: Group) -> None:
    """A peer that gives up writes the failure record before it closes its connections."""
    group.status_store.failure_records = [FailureRecord("timeout", (9,), 5, "barrier #3", 30.0, "9")]
    error = group.fails(FakeWork(0.0, RuntimeError("connection reset")))
    assert isinstance(error, CommTimeoutError)
    assert error.missing == (9,)


@pytest.mark.parametrize("pending", [None, ()])
def test_a_transport_error_is_explained_by_a_rank_that_left(
    group: Group, pending: tuple[int, ...] | None
) -> None:
    """A rank that leaves writes so to the status store. A transfer that has failed may wait for nobody any more."""
    group.status_store.gone = (4, 6)
    error = group.fails(FakeWork(0.0, RuntimeError("connection closed"), pending=pending))
    assert isinstance(error, PeerLostError)
    assert error.peers == (6,)
    assert "destroyed by rank 6" in str(error)


@pytest.mark.guarantee("D7")
def test_a_rank_that_left_is_not_blamed_by_a_call_that_does_not_wait_for_it(group: Group) -> None:
    """Rank 5 has left, rank 9 on another host is lost: who receives from rank 9 names that one."""
    group.status_store.gone = (5,)
    group.watch.unseen = (9,)
    error = group.fails(FakeWork(0.0, RuntimeError("connection reset"), pending=[9]))
    assert isinstance(error, PeerLostError)
    assert error.peers == (9,)
    assert group.status_store.failure_records[0].ranks == (9,)


@pytest.mark.guarantee("D7")
def test_of_those_that_left_a_call_names_the_ones_that_it_waits_for(group: Group) -> None:
    """Ranks 5 and 6 have left, and the call waits for ranks 6 and 9."""
    group.status_store.gone = (5, 6)
    error = group.fails(FakeWork(0.0, RuntimeError("connection closed"), pending=[6, 9]))
    assert isinstance(error, PeerLostError)
    assert error.peers == (6,)


def test_a_transport_error_blames_peers_that_cannot_be_seen(group: Group) -> None:
    """Awaited peers on other hosts are blamed, because nothing here shows whether they live."""
    group.watch.unseen = (6, 9)
    error = group.fails(FakeWork(0.0, RuntimeError("connection reset"), pending=[5, 9]))
    assert isinstance(error, PeerLostError)
    assert error.peers == (9,)


def test_a_transport_error_that_nothing_explains_is_native(group: Group) -> None:
    """If every process lives, the transport is at fault, and the others learn so."""
    error = group.fails(FakeWork(0.0, RuntimeError("no buffer space")))
    assert isinstance(error, NativeError)
    assert "no buffer space" in str(error)
    assert error.function == "barrier"
    assert group.status_store.failure_records[0].kind == "failed"


def test_an_error_while_a_call_is_posted_is_explained_too(group: Group) -> None:
    """An error of the transport while posting is explained; our own errors pass unchanged."""
    group.watch.dead = (5,)
    with pytest.raises(UsageError, match="ours"), group.health.transport(OPERATION):
        raise UsageError("ours")
    assert not group.health.is_broken
    with pytest.raises(PeerLostError), group.health.transport(OPERATION):
        raise RuntimeError("connection reset")
    assert group.health.is_broken


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), SystemExit(1)])
def test_an_interruption_breaks_the_group_and_is_told(group: Group, error: BaseException) -> None:
    """The interrupt passes unchanged; the others read which rank was interrupted and by what."""
    with pytest.raises(type(error)):
        group.health.wait(OPERATION, FakeWork(0.0, error), LONG_S)
    failure_record = group.status_store.failure_records[0]
    assert (failure_record.kind, failure_record.ranks) == ("interrupted", (4,))
    assert type(error).__name__ in failure_record.detail
    with pytest.raises(GroupBrokenError) as again:
        group.health.check_usable("barrier")
    assert again.value.__cause__ is error


# --- the end ----------------------------------------------------------------------------------------------------


def test_closing_wakes_a_waiting_call(group: Group) -> None:
    """Closing ends a waiting call soon with `ClosedError`; nobody is blamed."""
    threading.Timer(0.1, group.health.close).start()
    start = time.monotonic()
    with pytest.raises(ClosedError, match="destroyed while the call waited"):
        group.health.wait(OPERATION, FakeWork(), LONG_S)
    assert time.monotonic() - start < SOON_S
    assert group.status_store.failure_records == []


def test_closing_explains_a_transport_error(group: Group) -> None:
    """A transport error after closing is a `ClosedError`, as this process closed the connections."""
    group.health.close()
    with pytest.raises(ClosedError):
        group.health.wait(OPERATION, FakeWork(0.0, RuntimeError("connection closed")), LONG_S)
    assert group.status_store.failure_records == []


def test_closing_counts_once(group: Group) -> None:
    """`close` returns true only the first time, so that resources are released once."""
    assert group.health.close()
    assert not group.health.close()
    with pytest.raises(ClosedError):
        group.health.check_usable("barrier")
    assert isinstance(ClosedError("x"), UsageError)


def test_a_broken_group_is_left_without_goodbye(group: Group) -> None:
    """Leaving a broken group is not announced: the others have the failure record."""
    group.fails(FakeWork(), 0.05)
    group.health.say_goodbye()
    assert group.status_store.goodbyes == 0
    healthy = Group()
    healthy.health.say_goodbye()
    assert healthy.status_store.goodbyes == 1


def test_releasing_closes_the_watch_and_drops_the_transports(group: Group) -> None:
    """Releasing drops the transports, so that their owners hold the last references."""
    group.health.release()
    group.health.abort()
    assert group.watch.closed == 1
    assert group.aborts == 0


def test_the_copy_of_a_forked_child_refuses(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in a forked child can be neither used nor closed."""
    monkeypatch.setattr(health_module, "fork_count", lambda: 1000)
    assert group.health.is_inherited
    for check in (group.health.check_usable, group.health.check_owner):
        with pytest.raises(UsageError, match="forked"):
            check("barrier")
    assert not group.health.close()
    assert not group.health.is_closed


def test_a_failure_that_the_caller_found_is_told_to_the_others(group: Group) -> None:
    """`fail` breaks the group with an error that the caller then raises itself."""
    found = UsageError("does not fit")
    group.health.fail(found)
    assert group.aborts == 1
    assert group.status_store.failure_records[0].detail == "does not fit"
    with pytest.raises(GroupBrokenError) as again:
        group.health.check_usable("barrier")
    assert again.value.__cause__ is found


def test_a_lost_rank_is_recorded_as_lost_by_whoever_tells() -> None:
    """Also by a rank that has no group yet, so that the others raise what it raises."""
    record = failure_of(PeerLostError("creating group 'tp:0': lost rank 2", peers=(2,)), 1, "creating")
    assert record == FailureRecord("lost", (2,), 1, "creating", detail="2")
    assert failure_of(PeerLostError("nobody knows who"), 1, "creating").kind == "failed"


def test_a_time_out_says_that_a_rank_made_another_call(group: Group) -> None:
    """All ranks have come to call #3, rank 9 to another one: it answers nobody."""
    group.others_wait(5, 6)
    group.status_store.others[9] = Arrival("all_gather_object", 3)
    error = group.fails(FakeWork(), 0.2)
    assert isinstance(error, CommTimeoutError)
    assert "every rank arrived (at different calls: rank 9 made all_gather_object #3) but" in str(error)


@pytest.mark.guarantee("D6")
def test_a_time_out_that_the_caller_found_is_told_as_one(group: Group) -> None:
    """The others raise it with the same `missing`, and with the deadline, where the caller states that."""
    group.health.fail(CommTimeoutError("no message", missing=(9,)), "broadcast_object", within_s=1.5)
    told = group.status_store.failure_records[0]
    assert told == FailureRecord("timeout", (9,), 4, "broadcast_object", 1.5, "9 (pid 1009, alive)")
    assert failure_of(CommTimeoutError("no message", missing=(9,)), 1, "creating").kind == "failed"
    assert failure_of(CommTimeoutError("all arrived"), 1, "creating", within_s=1.0).kind == "failed"
