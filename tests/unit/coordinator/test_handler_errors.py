"""What a signal handler raises arrives as it is, also where the interrupted call raises errors of that kind itself."""

import itertools
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from coordinator.addresses.interfaces import interface_address, routed_address
from coordinator.addresses.names import addresses_of
from coordinator.bootstrap.blocking_calls import ask_store, connect_watched, finish_calls, no_check
from coordinator.bootstrap.connections import open_tcp_store
from coordinator.bootstrap.methods.directory import DirectoryRendezvous
from coordinator.bootstrap.serving import listen_at
from coordinator.bootstrap.status_store import WorldStatusStore
from coordinator.heartbeats.joining import join_heartbeats
from coordinator.heartbeats.watching import Heartbeats
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.free_memory import free_memory_bytes
from shm_broadcast.liveness import PeerWatch, keep_pidfd, this_process
from shm_broadcast.segment import Segment
from shm_broadcast.status.failure_dump import Dumps, QueueDump
from shm_broadcast.status.layout import PAGE_BYTES
from shm_broadcast.status.record_file import RunFolder
from tests.handlers import alarm, handling_at
from tests.ports import free_port

BLOCKING = "coordinator/bootstrap/blocking_calls.py"
# A call with an alarm waits for longer than the alarm takes.
ALARM_S, WAIT_S = 0.2, 20.0


def arrives_everywhere(
    call: Callable[[], object], error: type[Exception], places: tuple[str, ...], least: int
) -> None:
    """Assert that `error` arrives unchanged wherever a handler raises it in files that end with `places`."""
    for step in itertools.count():
        fault, struck = error("a handler's"), list[Exception]()

        def strike(fault: Exception = fault, struck: list[Exception] = struck) -> None:
            # Python drops what is raised while it closes a generator.
            if sys._getframe(2).f_code.co_name != "<genexpr>":
                struck.append(fault)
                raise fault

        has_come, arrived = False, None
        try:
            has_come = handling_at(step, call, strike, places)
        except Exception as raised:
            has_come, arrived = True, raised
        if not has_come:
            assert step >= least
            return
        assert struck in ([], [arrived]), step


def arrives_in_a_wait(call: Callable[[], object], error: Exception) -> None:
    """Assert that `error` arrives unchanged if a signal handler raises it while `call` waits."""

    def strike() -> None:
        raise error

    with alarm(ALARM_S, strike), pytest.raises(type(error)) as raised:
        call()
    assert raised.value is error


@pytest.mark.parametrize("error", [RuntimeError, CommTimeoutError, OSError])
def test_an_error_of_a_handler_is_no_loss_of_the_store(error: type[Exception]) -> None:
    """It became a `NativeError` about the store, or about a connection."""
    arrives_everywhere(lambda: ask_store(lambda: 1, "here", 10.0), error, (BLOCKING,), 3)
    with closing(PeerWatch(this_process(), {})) as watch:
        arrives_everywhere(lambda: connect_watched(lambda: 1, "test", "here", watch), error, (BLOCKING,), 2)


@pytest.mark.parametrize("error", [RuntimeError, CommTimeoutError])
def test_a_status_store_stays_in_reach_when_a_handler_raises(error: type[Exception]) -> None:
    """The error was swallowed, and the store was never asked again."""
    store = WorldStatusStore(dist.HashStore(), 0, [0, 1])
    places = (BLOCKING, "coordinator/bootstrap/status_store.py")
    arrives_everywhere(lambda: store.refusal("host", 1), error, places, 6)
    assert store.is_reachable


def test_an_error_of_a_handler_in_the_wait_for_partners_is_no_loss_of_the_store() -> None:
    """It became a `NativeError` about the store in which the partners for heartbeats meet."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))

    def join() -> None:
        join_heartbeats(
            *(Heartbeats(WAIT_S), 1, [0], store, "127.0.0.1"),
            serves_store=False,
            check=no_check,
            where="here",
            timeout_s=WAIT_S,
        )

    arrives_in_a_wait(join, RuntimeError("a handler's"))


def test_an_alarm_in_the_wait_for_rank_0_does_not_blame_rank_0() -> None:
    """The builtin `TimeoutError` of a usual handler of SIGALRM became a `CommTimeoutError` that names rank 0."""
    settings = CoordinatorSettings(create_timeout_s=3.0)
    port = free_port()
    arrives_in_a_wait(
        lambda: open_tcp_store("127.0.0.1", port, 1, 2, False, settings, None), TimeoutError("a handler's")
    )
    finish_calls(WAIT_S)


def test_an_alarm_in_a_rendezvous_through_a_directory_is_no_trouble_of_the_directory(tmp_path: Path) -> None:
    """Rank 0 raised a `UsageError` about the directory, and another rank took it for a generation that has gone."""
    # The steps in the directory have a thread of their own, for which the caller waits.
    places, numbers = ("bootstrap/methods/directory.py", "shm_broadcast/threads.py"), itertools.count()

    def pass_through() -> None:
        first = DirectoryRendezvous(tmp_path / f"run-{next(numbers)}", 0, 1)
        first.join(WAIT_S)
        first.leave()

    arrives_everywhere(pass_through, TimeoutError, places, 20)
    first = DirectoryRendezvous(tmp_path / "run", 0, 2)
    first.join(WAIT_S)

    def find() -> None:
        second = DirectoryRendezvous(tmp_path / "run", 1, 2)
        with suppress(CommTimeoutError):  # an earlier one has claimed the rank
            second.join(0.0)

    arrives_everywhere(find, OSError, places, 10)
    later = DirectoryRendezvous(tmp_path / "run", -1, 2)
    arrives_everywhere(later.join_later, TimeoutError, places, 20)
    first.leave()


def test_an_alarm_in_a_look_at_addresses_is_no_lack_of_them() -> None:
    """It became an error about a route, an interface or a port."""
    places = ("addresses/interfaces.py", "bootstrap/serving.py")

    def listens() -> None:
        listen_at("127.0.0.1", 0)[0].close()

    here = addresses_of("127.0.0.1", 1)
    arrives_everywhere(lambda: routed_address("here", here), TimeoutError, places, 2)
    arrives_everywhere(lambda: interface_address("lo"), TimeoutError, places, 5)
    arrives_everywhere(listens, TimeoutError, places, 2)


def test_an_alarm_while_a_dump_is_written_is_no_trouble_of_the_file_system(tmp_path: Path) -> None:
    """It was logged as one, and the call went on as if nobody had interrupted it."""

    def record() -> RunFolder:
        return RunFolder(tmp_path, "run-20261126T000000Z-00000001", "rank-0-host-1-1")

    folder = record()
    page = Segment.create(PAGE_BYTES)
    queue = QueueDump(1, 0, 64, b"", b"")

    def dump() -> None:
        dumps = Dumps(folder, page)
        dumps.write("tp:0", CommTimeoutError("no answer"), None, {})
        dumps.write_wait("queue", -1, queue, "", [], [])

    try:
        arrives_everywhere(dump, TimeoutError, ("status/failure_dump.py",), 15)
        arrives_everywhere(record, TimeoutError, ("status/record_file.py",), 5)
    finally:
        page.close()


def test_an_alarm_in_a_look_at_the_kernel_is_no_refusal_of_it() -> None:
    """It became a `CapabilityError` about `pidfd_open`, or a limit of memory was overlooked."""
    arrives_everywhere(free_memory_bytes, TimeoutError, ("shm_broadcast/free_memory.py",), 5)

    def look() -> None:
        kept: dict[str, int] = {}
        try:
            keep_pidfd(os.getpid(), kept, "own")
        finally:
            for descriptor in kept.values():
                os.close(descriptor)

    arrives_everywhere(look, TimeoutError, ("shm_broadcast/liveness.py",), 2)
