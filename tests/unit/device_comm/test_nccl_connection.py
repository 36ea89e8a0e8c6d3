"""The end of an NCCL communicator, whatever happens meanwhile: it is freed once, and never used by two threads then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest
import torch

from device_comm.base import CommunicatorContext
from device_comm.health import GroupHealth, StatusStore
from device_comm.nccl import connection as module
from device_comm.nccl.connection import Call, NcclConnection
from device_comm.nccl.library import IN_PROGRESS, NcclLibrary
from shm_broadcast.errors import ClosedError, NcclError, PeerLostError
from shm_broadcast.liveness import PeerWatch
from shm_broadcast.reports.failure_record import FailureRecord
from tests.channels import QuietStore, QuietWatch
from tests.handlers import alarm_in
from tests.nccl_ranks import FakeProgress, HostStreams
from tests.queues import background
from tests.unit.shm_broadcast.test_signal_handlers import AlarmError
from tests.waiting import wait_until

COMM = 7
LIMIT_S = 10.0


class Library:
    """Stands for NCCL with one communicator. It notes what is asked of it, and who uses what is freed or in use."""

    version = 22809

    def __init__(self, *, is_blocking: bool = True) -> None:
        self.is_blocking = is_blocking
        self.calls: list[str] = []
        self.functions: dict[str, object] = {}
        self.faults: list[str] = []
        # Cleared by a test that keeps the library in a call, or the communicator from being finalized.
        self.may_join, self.may_finalize = threading.Event(), threading.Event()
        self.may_join.set()
        self.may_finalize.set()
        self.state = 0
        self._inside: dict[str, int] = {}
        self._is_freed = False

    @contextmanager
    def _use(self, function: str) -> Iterator[None]:
        """Note a call; NCCL allows one thread at a time."""
        self.calls.append(function)
        me = threading.get_ident()
        if self._is_freed:
            self.faults.append(f"{function} of a communicator that was freed")
        self.faults.extend(f"{function} beside {other}" for other, who in self._inside.items() if who != me)
        self._inside[function] = me
        try:
            yield
        finally:
            del self._inside[function]

    def new_unique_id(self) -> bytes:
        """Return an id."""
        return bytes(128)

    def init_rank(self, *_: object) -> tuple[int, int]:
        """Join."""
        self.calls.append("ncclCommInitRankConfig")
        assert self.may_join.wait(LIMIT_S)
        return COMM, 0

    def async_error(self, comm: int) -> int:
        """Return the state."""
        assert comm == COMM
        with self._use("ncclCommGetAsyncError"):
            return self.state

    def call(self, name: str, comm_: int, comm: int = 0) -> int:
        """Finalize or free the communicator."""
        assert comm_ == COMM
        assert comm in (0, COMM)
        with self._use(name):
            if name == "ncclCommFinalize":
                if not self.is_blocking:
                    self.state = 0 if self.may_finalize.is_set() else IN_PROGRESS
                    return self.state
                assert self.may_finalize.wait(LIMIT_S)
                return 0
            self._is_freed = True
            return 0

    def error(self, name: str, status: int, _comm: int = 0) -> NcclError:
        """Return an error."""
        return NcclError(f"{name} returned {status}", library="fake", function=name, code=status)

    def count(self, name: str) -> int:
        """Return how often a function was called."""
        return self.calls.count(name)

    @property
    def is_freed(self) -> bool:
        """Return whether the communicator was freed."""
        return self._is_freed


def connection_of(library: Library, progress: FakeProgress | None = None) -> NcclConnection:
    """Return the connection of rank 0 of two over `library`, not connected yet."""
    watch, store = cast("PeerWatch", QuietWatch()), cast("StatusStore", QuietStore())
    health = GroupHealth("tp:0", 0, (0, 1), watch, store)
    context = CommunicatorContext(
        name="tp:0",
        rank_in_group=0,
        ranks=(0, 1),
        device=torch.device("cpu"),
        process_group=None,
        health=health,
        timeout_s=LIMIT_S,
        exchange=lambda own: [own, own],
    )
    return NcclConnection(context, cast("NcclLibrary", library), HostStreams(), progress)


def health_of(connection: NcclConnection) -> GroupHealth:
    """Return the state of the connection's group."""
    return connection.context.health


def keepers() -> list[threading.Thread]:
    """Return the threads that watch or end a communicator."""
    return [each for each in threading.enumerate() if each.name.startswith("group-coordinator-nccl")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Every test ends with its threads gone."""
    yield
    wait_until(lambda: not keepers(), "the end of the threads", LIMIT_S)


def error_of(call: Callable[[], object]) -> BaseException | None:
    """Return what a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


# --- orderly ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_close_finalizes_and_frees_behind_the_queued_work(is_blocking: bool) -> None:
    """The library is not entered before the device is done, because nothing could end that call then."""
    library, progress = Library(is_blocking=is_blocking), FakeProgress()
    connection = connection_of(library, progress)
    connection.connect()
    progress.stuck = True
    with background(connection.close):
        time.sleep(0.1)
        assert "ncclCommFinalize" not in library.calls
        progress.stuck = False
    assert library.calls[-2:] == ["ncclCommFinalize", "ncclCommDestroy"]
    connection.close()
    assert (library.count("ncclCommDestroy"), library.count("ncclCommAbort")) == (1, 0)
    assert not library.faults


def test_the_end_of_a_healthy_group_aborts_no_communicator() -> None:
    """A group that is destroyed first lets all that waits end. What NCCL has queued counts nevertheless."""
    library = Library()
    connection = connection_of(library)
    connection.connect()
    health_of(connection).close()
    health_of(connection).abort()
    connection.close()
    assert library.calls[-2:] == ["ncclCommFinalize", "ncclCommDestroy"]
    assert library.count("ncclCommAbort") == 0
    assert not library.faults


def test_a_failure_that_shows_while_the_group_closes_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record would end calls that the other ranks can still finish without this one."""
    monkeypatch.setattr(module, "KEEP_EVERY_S", 0.01)
    library = Library()
    connection = connection_of(library)
    published: list[FailureRecord] = []

    def publish(failure_record: FailureRecord, within_s: float = 2.0) -> FailureRecord:
        published.append(failure_record)
        return failure_record

    cast("Any", health_of(connection))._status_store.publish = publish
    connection.connect()
    health_of(connection).close()
    library.state = 6
    before = library.count("ncclCommGetAsyncError")
    wait_until(
        lambda: library.count("ncclCommGetAsyncError") > before + 2, "two looks of the keeper", LIMIT_S
    )
    connection.close()
    assert published == []
    assert library.calls[-1] == "ncclCommDestroy"


def test_work_that_does_not_end_is_aborted_and_never_finalized(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort while no thread is in the library is what ends its kernels."""
    monkeypatch.setattr(module, "FLUSH_S", 0.2)
    library, progress = Library(), FakeProgress()
    connection = connection_of(library, progress)
    connection.connect()
    progress.stuck = True
    connection.close()
    assert library.count("ncclCommAbort") == 1
    assert "ncclCommFinalize" not in library.calls
    assert not library.faults


def test_a_peer_that_has_died_is_not_waited_for() -> None:
    """Its kernels would not end, so nothing is finalized."""
    library = Library()
    connection = connection_of(library)
    connection.connect()
    cast("Any", health_of(connection)).watch.lost = lambda: (1,)
    connection.close()
    assert library.count("ncclCommAbort") == 1
    assert "ncclCommFinalize" not in library.calls


# --- a library that does not come to its end ------------------------------------------------------------------


def test_a_call_that_finalizes_is_never_aborted_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` ends without it. When the library returns, the same thread frees the communicator, once."""
    monkeypatch.setattr(module, "FLUSH_S", 0.2)
    library = Library()
    library.may_finalize.clear()
    connection = connection_of(library)
    connection.connect()
    start = time.monotonic()
    connection.close()
    health_of(connection).fail(PeerLostError("rank 1 is gone", peers=[1]))
    connection.close()
    assert time.monotonic() - start < LIMIT_S / 2
    assert library.calls[-1] == "ncclCommFinalize"
    library.may_finalize.set()
    wait_until(lambda: library.is_freed, "the abort", LIMIT_S)
    assert library.calls[-1] == "ncclCommAbort"
    assert not library.faults


@pytest.mark.parametrize("why", ["late", "broken", "failed"])
def test_finalizing_in_the_background_that_is_given_up_asks_nothing_that_was_freed(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL_COMM_BLOCKING=0: the communicator is polled, and freed by the thread that polls it."""
    monkeypatch.setattr(module, "FLUSH_S", 0.1 if why == "late" else LIMIT_S)
    for _ in range(10):
        library = Library(is_blocking=False)
        library.may_finalize.clear()
        connection = connection_of(library)
        connection.connect()
        with background(connection.close):
            wait_until(lambda: library.state == IN_PROGRESS, "the polls", LIMIT_S)  # noqa: B023
            if why == "broken":
                health_of(connection).fail(PeerLostError("rank 1 is gone", peers=[1]))
            elif why == "failed":
                library.state = 6
        assert library.calls[-1] == "ncclCommAbort"
        assert library.count("ncclCommAbort") == 1
        time.sleep(2 * module.FINALIZE_POLL_S)
        assert not library.faults


# --- an end in the middle of something ------------------------------------------------------------------------


def test_an_abort_waits_for_a_call_that_may_hold_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call reads the handle behind its entry, so it could pass on one that has been freed."""
    monkeypatch.setattr(module, "CALL_S", LIMIT_S)
    library = Library()
    connection = connection_of(library)
    connection.connect()
    with connection.calling(Call("all_reduce", None, LIMIT_S)):
        health_of(connection).fail(PeerLostError("rank 1 is gone", peers=[1]))
        wait_until(lambda: not connection._comm, "the keeper to begin the end", LIMIT_S)
        time.sleep(0.1)
        assert not library.is_freed
    wait_until(lambda: library.is_freed, "the abort", LIMIT_S)
    assert library.count("ncclCommAbort") == 1
    connection.close()


def test_an_abort_ends_a_call_that_is_stuck_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would end it, so the abort does not wait for it for long."""
    monkeypatch.setattr(module, "CALL_S", 0.01)
    library = Library()
    connection = connection_of(library)
    connection.connect()
    with connection.calling(Call("all_reduce", None, LIMIT_S)):
        health_of(connection).fail(PeerLostError("rank 1 is gone", peers=[1]))
        wait_until(lambda: library.is_freed, "the abort", LIMIT_S)
    connection.close()


@pytest.mark.parametrize("is_broken", [True, False])
def test_what_ends_behind_the_communicator_does_not_open_the_fast_path(is_broken: bool) -> None:
    """A context that collects calls, or a deferred receive, may end when the handle has been freed."""
    library = Library()
    connection = connection_of(library)
    connection.connect()
    assert connection.hot is not None
    if is_broken:
        health_of(connection).fail(PeerLostError("rank 1 is gone", peers=[1]))
    else:
        connection.close()
    connection.rearm()
    assert connection.hot is None
    connection.close()


def test_a_join_in_vain_ends_when_a_rank_has_left() -> None:
    """That rank destroyed the group before it ended, so its process is not missed; but it will never join."""
    library = Library()
    library.may_join.clear()
    connection = connection_of(library)
    health = cast("Any", health_of(connection))
    health.watch.lost = health._status_store.left = lambda: (1,)
    error = error_of(connection.connect)
    library.may_join.set()
    assert isinstance(error, PeerLostError), error
    assert error.peers == (1,)
    wait_until(lambda: library.is_freed, "the abort of what was joined in the end", LIMIT_S)
    connection.close()


@pytest.mark.parametrize("is_destroyed", [True, False])
def test_a_close_while_another_thread_joins_frees_what_is_joined(is_destroyed: bool) -> None:
    """The library returns before the thread that connects looks whether the group still is."""
    library = Library()
    library.may_join.clear()
    connection = connection_of(library)
    with background(lambda: error_of(connection.connect)) as found:
        wait_until(lambda: library.calls, "the join", LIMIT_S)
        if is_destroyed:
            health_of(connection).close()
        connection.close()
        library.may_join.set()
    assert isinstance(found[0], ClosedError)
    wait_until(lambda: library.is_freed, "the abort", LIMIT_S)
    assert library.count("ncclCommAbort") == 1
    assert not connection.is_connected
    assert connection.hot is None
    assert not library.faults


def test_a_close_that_a_handler_interrupts_is_done_nevertheless() -> None:
    """`destroy` does not come here twice, so the rest must not depend on it."""
    library, progress = Library(), FakeProgress()
    connection = connection_of(library, progress)
    connection.connect()
    progress.stuck = True

    def strike() -> None:
        raise AlarmError("struck")

    with pytest.raises(AlarmError), alarm_in("close", strike):
        connection.close()
    assert not library.is_freed
    progress.stuck = False
    wait_until(lambda: library.is_freed, "the end", LIMIT_S)
    assert library.calls[-2:] == ["ncclCommFinalize", "ncclCommDestroy"]
    connection.close()
    assert not library.faults


def test_a_second_close_waits_for_what_the_first_has_left() -> None:
    """The communicator is freed when it returns."""
    library, progress = Library(), FakeProgress()
    connection = connection_of(library, progress)
    connection.connect()
    progress.stuck = True

    def strike() -> None:
        raise AlarmError("struck")

    with suppress(AlarmError), alarm_in("close", strike):
        connection.close()

    def finish() -> None:
        time.sleep(0.1)
        progress.stuck = False

    with background(finish):
        connection.close()
        assert library.is_freed
    assert not library.faults


def test_a_communicator_without_a_keeper_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no thread to give, or a handler strikes before one is started."""
    library = Library()
    connection = connection_of(library)
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if not thread.name.endswith("join"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_others)
        assert isinstance(error_of(connection.connect), RuntimeError)
    assert library.count("ncclCommAbort") == 1
    connection.close()
    assert not library.faults


def test_a_close_frees_what_an_interrupted_connect_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts the keeper that the connect did not come to start."""
    library = Library()
    connection = connection_of(library)

    def strike() -> None:
        raise AlarmError("struck")

    with monkeypatch.context() as patch:
        patch.setattr(connection, "_start_keeper", strike)
        with pytest.raises(AlarmError):
            connection.connect()
    assert not library.is_freed
    connection.close()
    assert library.count("ncclCommAbort") == 1
    assert not library.faults
