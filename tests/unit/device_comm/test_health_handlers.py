"""With the fakes of `test_health`: signal handlers that raise while a call waits, and while its failure is handled."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from device_comm import health as health_module
from shm_broadcast.errors import CommError, CommTimeoutError, GroupBrokenError, PeerLostError, UsageError
from shm_broadcast.reports.failure_record import FailureRecord
from tests.unit.device_comm.test_health import LONG_S, OPERATION, FakeWork, Group

# What a handler may raise. Errors of this package are those of a call that the handler makes itself.
RAISED: list[Callable[[], BaseException]] = [
    lambda: UsageError("called by the handler"),
    lambda: CommTimeoutError("of another group", missing=(5,)),
    lambda: RuntimeError("of the handler"),
    lambda: ValueError("of the handler"),
]


@contextmanager
def handler_of(error: BaseException) -> Iterator[Callable[[], None]]:
    """Yield a function that lets a signal handler raise `error`."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield lambda: signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)


class StruckWork(FakeWork):
    """Work during whose first wait a handler runs."""

    def __init__(self, strike: Callable[[], None]) -> None:
        super().__init__()
        self._strike = strike

    def poll(self, slice_s: float) -> bool:
        self._strike()
        return super().poll(slice_s)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Return a healthy group that soon gives up looking for the reason of a failure."""
    monkeypatch.setattr(health_module, "EXPLAIN_S", 0.2)
    return Group()


def assert_interrupted(group: Group, error: BaseException) -> None:
    """Check that `error` has broken the group, once, and that the other ranks can learn of it."""
    with pytest.raises(GroupBrokenError) as again:
        group.health.check_usable("barrier")
    assert again.value.__cause__ is error
    assert group.aborts == 1
    record = group.status_store.failure_records[0]
    assert (record.kind, record.ranks, record.by) == ("interrupted", (4,), 4)
    assert type(error).__name__ in record.detail


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("make", RAISED)
def test_what_a_handler_raises_inside_of_a_wait_breaks_the_group(
    group: Group, make: Callable[[], BaseException]
) -> None:
    """Also an error of this package: the call that waited is halfway, whatever the handler did."""
    error = make()
    with handler_of(error) as strike, pytest.raises(type(error)) as caught:
        group.health.wait(OPERATION, StruckWork(strike), LONG_S)
    assert caught.value is error
    assert_interrupted(group, error)


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("make", RAISED)
def test_what_a_handler_raises_while_a_call_is_posted_breaks_the_group(
    group: Group, make: Callable[[], BaseException]
) -> None:
    """What was posted to some ranks is not posted to the others."""
    error = make()
    with (
        handler_of(error) as strike,
        pytest.raises(type(error)) as caught,
        group.health.transport(OPERATION),
    ):
        strike()
    assert caught.value is error
    assert_interrupted(group, error)


def test_an_error_that_a_handler_catches_is_the_calls_own_business(group: Group) -> None:
    """A call of this package that fails inside of a handler does nothing to the call that it interrupts."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        with pytest.raises(UsageError):
            group.health.wait(OPERATION, FakeWork(0.0, UsageError("inner")), LONG_S)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(UsageError, match="outer"):
            group.health.wait(
                OPERATION,
                EndingWork(lambda: signal.raise_signal(signal.SIGALRM), UsageError("outer")),
                LONG_S,
            )
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not group.health.is_broken
    assert group.status_store.failure_records == []


def test_an_error_that_a_handler_has_met_before_is_the_calls_own(group: Group) -> None:
    """A handle raises the same error again in each wait, also if a handler was the first to wait for it."""
    work = FakeWork(0.0, UsageError("of the message"))
    met: list[BaseException] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        with pytest.raises(UsageError) as caught:
            group.health.wait(OPERATION, work, LONG_S)
        met.append(caught.value)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(UsageError, match="of the message") as again:
        group.health.wait(OPERATION, work, LONG_S)
    assert met == [again.value]
    assert not group.health.is_broken


class EndingWork(StruckWork):
    """Work during whose first wait a handler runs, and that then ends with an error of its own."""

    def __init__(self, strike: Callable[[], None], error: CommError) -> None:
        super().__init__(strike)
        self._at, self._error = 0.0, error


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("make", RAISED)
def test_a_handler_that_raises_while_a_failure_is_explained_breaks_the_group(
    group: Group, monkeypatch: pytest.MonkeyPatch, make: Callable[[], BaseException]
) -> None:
    """The search for the cause of a transport's error takes up to two seconds, in which signals come."""
    error = make()
    with handler_of(error) as strike, monkeypatch.context() as patched:
        patched.setattr(time, "sleep", lambda _: strike())
        with pytest.raises(type(error)) as caught:
            group.health.explain(OPERATION, RuntimeError("connection reset"), None)
    assert caught.value is error
    assert_interrupted(group, error)


@pytest.mark.guarantee("D10")
def test_a_handler_that_raises_while_a_wait_looks_for_the_missing_breaks_the_group(group: Group) -> None:
    """Behind the wait itself: while it asks for which ranks the failed transport had waited."""
    error = ValueError("of the handler")
    with handler_of(error) as strike:
        work = FakeWork(0.0, RuntimeError("connection reset"))
        work.pending = strike  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="of the handler"):
            group.health.wait(OPERATION, work, LONG_S)
    assert_interrupted(group, error)


def strike_in_abort(group: Group, strike: Callable[[], None]) -> None:
    """Call `strike` before the transports are aborted."""
    group.health._aborts.insert(0, strike)


def strike_in_publish(group: Group, strike: Callable[[], None]) -> None:
    """Call `strike` before a failure record is published."""
    publish = group.status_store.publish

    def struck(failure_record: FailureRecord, within_s: float = 2.0) -> FailureRecord:
        strike()
        return publish(failure_record, within_s)

    group.status_store.publish = struck  # type: ignore[method-assign]


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("arrange", [strike_in_abort, strike_in_publish])
def test_a_second_signal_leaves_no_group_half_broken(
    group: Group, arrange: Callable[[Group, Callable[[], None]], None]
) -> None:
    """Every transport is aborted and the others can learn why, also if a handler raises while that is done."""
    second = ValueError("the second")
    strikes: list[int] = []
    with handler_of(second) as strike:

        def strike_once() -> None:
            strikes.append(0)
            if len(strikes) == 1:
                strike()

        arrange(group, strike_once)
        with pytest.raises(ValueError, match="the second"):
            group.health.wait(OPERATION, FakeWork(0.0, KeyboardInterrupt()), LONG_S)
    assert group.health.is_broken
    assert group.aborts == 1
    assert group.status_store.failure_records[0].kind == "interrupted"
    assert group.health.failure_record is group.status_store.failure_records[0]


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("arrange", [strike_in_abort, strike_in_publish])
def test_a_loss_stays_the_reason_though_a_handler_raises_while_it_is_told(
    group: Group, arrange: Callable[[Group, Callable[[], None]], None]
) -> None:
    """A read of a queue has found its writer lost, and is struck: the others must not blame the struck rank."""
    lost, second = PeerLostError("lost rank 6", peers=[6]), ValueError("of the handler")
    strikes: list[int] = []
    with handler_of(second) as strike:

        def strike_once() -> None:
            strikes.append(0)
            if len(strikes) == 1:
                strike()

        arrange(group, strike_once)
        with pytest.raises(ValueError, match="of the handler") as caught:
            group.health.fail(lost, "dequeue")
    assert caught.value is second
    assert group.aborts == 1
    with pytest.raises(GroupBrokenError) as again:
        group.health.check_usable("barrier")
    assert again.value.__cause__ is lost
    record = group.health.failure_record
    assert record is group.status_store.failure_records[0]
    assert record is not None
    assert (record.kind, record.ranks) == ("lost", (6,))


def test_an_interruption_is_published_before_the_transports_end(group: Group) -> None:
    """Whoever finds a connection closed looks for the reason, which must be there by then."""
    known: list[Any] = []
    group.health.on_abort(lambda: known.extend(group.status_store.failure_records))
    with pytest.raises(KeyboardInterrupt):
        group.health.wait(OPERATION, FakeWork(0.0, KeyboardInterrupt()), LONG_S)
    assert [record.kind for record in known] == ["interrupted"]
