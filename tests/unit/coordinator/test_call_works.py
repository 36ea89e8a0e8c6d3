"""The works that torch gets for calls of a group on an accelerator."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import pytest
import torch

from coordinator.torch_interop.works import AnyWork, CallWork
from device_comm.works import WaiterThreads
from shm_broadcast.errors import CommError, CommTimeoutError, DisagreementError, PeerLostError
from tests.unit.device_comm.test_async_marks import Device, line_of
from tests.waiting import sleeping_in, wait_until

PROMPT_S = 20.0
IN_CAPTURE = "operation not permitted when stream is capturing"


class TorchError(Exception):
    """What torch's callers get."""


def translate(error: CommError) -> Exception:
    """Return torch's error."""
    return TorchError(str(error))


@pytest.mark.guarantee("D40")
def test_whether_a_call_has_failed_is_told_during_a_capture() -> None:
    """The outcome is recorded, so the device, which refuses every question then, is not asked."""
    device = Device()
    line = line_of(device)

    def fail() -> None:
        raise PeerLostError("rank 1 is gone", peers=[1])

    made = CallWork(line.submit("all_reduce", lambda: device.queue("sum"), at_once=True), (), None, translate)
    failed = CallWork(line.submit("all_reduce", fail, at_once=True), (), None, translate)
    device.refusal = IN_CAPTURE
    assert made.exception() is None
    error = failed.exception()
    assert isinstance(error, TorchError)
    assert "rank 1 is gone" in str(error)
    assert not failed.is_success()
    # Success needs the device's answer.
    with pytest.raises(RuntimeError, match=IN_CAPTURE):
        made.is_success()
    device.refusal = ""
    assert not made.is_success()
    device.done.add(1)
    assert made.is_success()
    assert made.is_completed()
    assert failed.is_completed()


def test_an_error_that_is_none_of_ours_is_told_as_it_is() -> None:
    """It is neither raised nor translated."""
    line = line_of(Device())
    refusal = ValueError("no such tensor")

    def fail() -> None:
        raise refusal

    work = CallWork(line.submit("all_reduce", fail, at_once=True), (), None, translate)
    assert work.exception() is refusal
    assert not work.is_success()


def test_a_work_without_a_call_has_succeeded() -> None:
    """It was made before."""
    work = CallWork(None, (), None)
    assert work.is_success()
    assert work.exception() is None


@pytest.mark.guarantee("D91")
def test_a_receive_from_any_rank_that_has_failed_can_be_waited_for_again() -> None:
    """It is not complete, and its next wait receives; a wait behind that does nothing."""
    senders: list[int] = []

    def receive(timeout_s: float | None) -> int:
        senders.append(2 + len(senders))
        if timeout_s is not None:
            raise CommTimeoutError("nothing has come", missing=())
        return senders[-1]

    work = AnyWork(receive, translate)
    with pytest.raises(TorchError, match="nothing has come"):
        work.wait(timedelta(seconds=1))
    assert not work.is_completed()
    assert work.source_rank() == -1
    assert work.wait()
    assert work.wait()
    assert work.is_completed()
    assert work.source_rank() == 3
    assert senders == [2, 3]


def test_a_receive_from_any_rank_whose_message_did_not_fit_takes_no_other() -> None:
    """That message is gone, and the next one belongs to another receive."""
    senders: list[int] = []

    def receive(_timeout_s: float | None) -> int:
        senders.append(2)
        raise DisagreementError("another size", views={})

    work = AnyWork(receive, translate)
    for _ in range(2):
        with pytest.raises(TorchError, match="another size"):
            work.wait()
    assert senders == [2]


def test_threads_that_wait_for_one_receive_take_one_message() -> None:
    """A second message would come into the same tensor, and the first one would be lost."""
    senders: list[int] = []
    has_come = threading.Event()

    def receive(_timeout_s: float | None) -> int:
        assert has_come.wait(PROMPT_S)
        senders.append(2 + len(senders))
        return senders[-1]

    work = AnyWork(receive, translate)
    waits = [threading.Thread(target=work.wait) for _ in range(2)]
    for waiter in waits:
        waiter.start()
    wait_until(lambda: sleeping_in("wait") == 2, "both threads")
    has_come.set()
    for waiter in waits:
        waiter.join()
    assert work.source_rank() == 2
    assert senders == [2]


def test_a_wait_for_the_receive_of_another_thread_has_a_deadline() -> None:
    """The receive goes on, and its thread completes it."""
    has_come = threading.Event()
    work = AnyWork(lambda _timeout_s: 2 if has_come.wait(PROMPT_S) else 3, translate)
    receiver = threading.Thread(target=work.wait)
    receiver.start()
    wait_until(lambda: sleeping_in("wait"), "the other thread")
    start = time.monotonic()
    with pytest.raises(TorchError, match="another thread was in this receive"):
        work.wait(timedelta(seconds=0.3))
    assert time.monotonic() - start >= 0.3
    assert not work.is_completed()
    has_come.set()
    receiver.join()
    assert work.wait()
    assert work.source_rank() == 2


@pytest.mark.guarantee("D10")
def test_a_handler_cannot_wait_for_the_receive_that_it_interrupts() -> None:
    """It would take a message of its own into the same tensor; the interrupted wait goes on."""
    senders: list[int] = []

    def receive(_timeout_s: float | None) -> int:
        with pytest.raises(TorchError, match="that it has interrupted"):
            work.wait()
        senders.append(2)
        return 2

    work = AnyWork(receive, translate)
    assert work.wait()
    assert work.wait()
    assert senders == [2]


class NoThreads:
    """Threads of which none can be started, or none is known to be."""

    def __init__(self, *, runs: bool) -> None:
        self._runs = runs

    def submit(self, job: Callable[[], None]) -> None:
        """Raise as the system's refusal; the job may have run nevertheless."""
        if self._runs:
            job()
        raise RuntimeError("can't start new thread")


@pytest.mark.guarantee("G41")
@pytest.mark.parametrize("runs", [False, True])
def test_a_future_is_completed_where_no_thread_can_be_had(runs: bool) -> None:
    """Its callbacks then run where the call has ended; torch would drop the error, and the future never come."""
    line = line_of(Device(), torch.device("cpu"))
    threads = cast("WaiterThreads", NoThreads(runs=runs))
    work = CallWork(line.submit("all_reduce", lambda: None, at_once=True), ["result"], threads)
    future = work.get_future()
    assert future.done()
    assert future.value() == ["result"]
