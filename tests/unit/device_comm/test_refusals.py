"""With a fake store: what a refusal that no memory carries costs, changes and tells."""

import gc
import os
import signal
import threading
import time
import weakref
from itertools import count

import pytest

from device_comm.health import ANNOUNCE_AFTER_S, Operation
from device_comm.stages import Turns
from shm_broadcast.errors import (
    ClosedError,
    CommTimeoutError,
    DisagreementError,
    GroupBrokenError,
    NativeError,
    UsageError,
)
from shm_broadcast.reports.refusals import Refusal
from tests.handlers import Interrupt, handling_at
from tests.unit.device_comm.test_health import LONG_S, OPERATION, SOON_S, FakeWork, Group


class FakeRefusalStore:
    """A store in this process, of the group of ranks 4, 5, 6 and 9."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int, str]] = []
        self.refused: dict[tuple[str, int], Refusal] = {}
        self.counts: dict[int, int] = {}
        self.asked = 0
        self.is_reachable = True

    def refuse(self, plane: str, number: int, count: int, reason: str) -> None:
        self.told.append((plane, number, count, reason))

    def refusal(self, plane: str, number: int) -> Refusal | None:
        self.asked += 1
        return self.refused.get((plane, number))

    def refusals(self, plane: str) -> dict[int, int]:
        assert plane == "host"
        self.asked += 1
        return dict(self.counts) if self.is_reachable else {}


def refuse(group: Group, plane: str, reason: str) -> None:
    """Refuse a call, as the gate of a group does."""
    group.health.refusals.refuse(group.health, plane, reason)


@pytest.fixture
def group() -> Group:
    """Return the health of rank 4."""
    return Group()


@pytest.fixture
def store(group: Group) -> FakeRefusalStore:
    """Return the store that it uses for its host plane, whose transport tells no refusals."""
    made = FakeRefusalStore()
    group.health.refusals.use(made)
    Turns(group.health, "host")
    return made


@pytest.mark.guarantee("G66")
def test_a_refused_call_takes_its_number_and_is_told(group: Group, store: FakeRefusalStore) -> None:
    """Calls of the device plane have numbers of their own; nobody is told where nothing carries them."""
    refuse(group, "host", "barrier: wrong")
    assert group.health.begin("host", "barrier").number == 2
    refuse(group, "host", "barrier: wrong again")
    refuse(group, "device", "all_reduce: wrong")
    assert store.told == [("host", 1, 1, "barrier: wrong"), ("host", 3, 2, "barrier: wrong again")]
    assert group.health.begin("device", "all_reduce").number == 1


def test_a_refusal_at_the_end_of_a_group_is_no_other_error(group: Group, store: FakeRefusalStore) -> None:
    """The caller raises the refusal itself."""
    group.health.close()
    refuse(group, "host", "barrier: wrong")
    assert not store.told


@pytest.mark.guarantee("G66")
@pytest.mark.parametrize("deadline_s", [ANNOUNCE_AFTER_S / 2, LONG_S])
def test_a_rank_that_waits_learns_who_has_refused_the_call(
    group: Group, store: FakeRefusalStore, deadline_s: float
) -> None:
    """Also within a deadline that is shorter than what a rank waits before it looks."""
    store.refused["host", 3] = Refusal(6, "barrier: timeout_s must be positive")
    began = time.monotonic()
    with pytest.raises(DisagreementError, match="rank 6 refused barrier: timeout_s must be positive") as told:
        group.health.wait(OPERATION, FakeWork(), deadline_s)
    assert time.monotonic() - began < SOON_S
    assert told.value.views == {6: "refused barrier: timeout_s must be positive"}
    with pytest.raises(GroupBrokenError, match="rank 6 refused"):
        group.health.check_usable("barrier")


@pytest.mark.parametrize(
    ("place", "refusal"),
    [
        (("host", 2), Refusal(6, "old")),
        (("device", 3), Refusal(6, "other")),
        (("host", 3), Refusal(4, "own")),
    ],
    ids=["another call", "another plane", "its own"],
)
def test_other_refusals_do_not_concern_a_call(
    group: Group, store: FakeRefusalStore, place: tuple[str, int], refusal: Refusal
) -> None:
    """It goes on."""
    store.refused[place] = refusal
    group.health.wait(OPERATION, FakeWork(ANNOUNCE_AFTER_S + 0.2), LONG_S)
    assert store.asked
    group.health.check_usable("barrier")


def test_a_call_that_finishes_and_a_transfer_ask_for_no_refusal(
    group: Group, store: FakeRefusalStore
) -> None:
    """A transfer has no number, so nobody can have refused it."""
    group.health.wait(OPERATION, FakeWork(0.1), LONG_S)
    transfer = Operation("host", "recv from rank 6", 0)
    group.health.wait(transfer, FakeWork(ANNOUNCE_AFTER_S + 0.2, pending=[6]), LONG_S)
    group.health.refusals.settle(group.health, OPERATION, LONG_S)
    assert not store.asked


@pytest.mark.guarantee("G66")
def test_a_barrier_behind_a_refusal_waits_until_all_have_refused(
    group: Group, store: FakeRefusalStore
) -> None:
    """And is held up once: what all have refused is settled."""
    refuse(group, "host", "barrier: wrong")
    store.counts = {5: 1, 6: 2}

    def follow() -> None:
        time.sleep(0.3)
        store.counts[9] = 1

    thread = threading.Thread(target=follow)
    began = time.monotonic()
    thread.start()
    group.health.refusals.settle(group.health, OPERATION, LONG_S)
    assert time.monotonic() - began >= 0.3
    thread.join()
    asked = store.asked
    group.health.refusals.settle(group.health, OPERATION, LONG_S)
    assert store.asked == asked


@pytest.mark.guarantee("G66")
def test_a_barrier_behind_a_refusal_names_those_who_do_not_refuse(
    group: Group, store: FakeRefusalStore
) -> None:
    """They made the call, or do not come."""
    refuse(group, "host", "barrier: wrong")
    store.counts = {5: 1}
    with pytest.raises(CommTimeoutError) as late:
        group.health.refusals.settle(group.health, OPERATION, 0.3)
    assert late.value.missing == (6, 9)


@pytest.mark.guarantee("G66")
def test_a_store_out_of_reach_ends_a_barrier_behind_a_refusal(group: Group, store: FakeRefusalStore) -> None:
    """Whether others have made the refused call is unknown, and no rank decides that alone."""
    refuse(group, "host", "barrier: wrong")
    store.is_reachable = False
    began = time.monotonic()
    with pytest.raises(NativeError, match="the world's store, which is out of reach, cannot say"):
        group.health.refusals.settle(group.health, OPERATION, LONG_S)
    assert time.monotonic() - began < SOON_S
    with pytest.raises(GroupBrokenError):
        group.health.check_usable("barrier")


def test_no_cycle_of_references_keeps_a_group(group: Group, store: FakeRefusalStore) -> None:
    """Its store would go on listening, and its transports would end in the middle of the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        kept = weakref.ref(group.health)
        group.health.release()
        del group.health
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), UsageError("of a handler")], ids=["Ctrl-C", "its own"]
)
def test_an_interrupted_refusal_breaks_the_group(
    group: Group, store: FakeRefusalStore, error: BaseException
) -> None:
    """The others may have been told or not; what has interrupted it arrives."""

    def interrupted(*_: object) -> None:
        # What a handler raises has its frame in the traceback.
        old = signal.signal(signal.SIGUSR1, handler)
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(LONG_S)
        finally:
            signal.signal(signal.SIGUSR1, old)

    def handler(*_: object) -> None:
        raise error

    store.refuse = interrupted  # type: ignore[assignment, method-assign]
    with pytest.raises(type(error)) as raised:
        refuse(group, "host", "barrier: wrong")
    assert raised.value is error
    with pytest.raises(GroupBrokenError):
        group.health.check_usable("barrier")


@pytest.mark.guarantee("D69")
@pytest.mark.parametrize("kind", [Interrupt, IndexError, ClosedError])
def test_a_strike_at_the_end_of_a_call_loses_no_refusal_of_another_thread(kind: type[BaseException]) -> None:
    """It is told, still waits for the next call, or the group is broken with that reason."""

    def strike() -> None:
        raise kind("struck")

    for step in count():
        group, store = Group(), FakeRefusalStore()
        group.health.refusals.use(store)
        turns, refused = Turns(group.health, "host"), list[str]()

        def stages(_operation: object, _end: float) -> None:
            thread = threading.Thread(target=turns.refuse, args=("reason",))  # noqa: B023 - called within the round
            thread.start()
            thread.join()
            refused.append("reason")  # noqa: B023

        places = ("device_comm/stages.py", "reports/refusals.py")
        try:
            # Nothing that a handler raises is lost.
            assert not handling_at(step, lambda: turns.make("barrier", stages, LONG_S), strike, places)  # noqa: B023
            has_come = False
        except kind:
            has_come = True
        try:
            turns.make("barrier", lambda _operation, _end: None, LONG_S)
        except GroupBrokenError as error:
            assert isinstance(error.__cause__, kind)  # noqa: PT017 - it need not be raised
        else:
            assert [told[3] for told in store.told] == refused, step
        if not has_come:
            assert refused
            return
