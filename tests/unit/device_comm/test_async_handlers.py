"""Asynchronous calls whose waits and futures signal handlers interrupt, on one thread or beside another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from device_comm import async_calls
from device_comm.async_calls import CallHandle
from shm_broadcast.errors import UsageError
from tests.handlers import Interrupt, alarm, handling_at, raising_at
from tests.unit.device_comm.test_health import Group

PLACES = ("device_comm/async_calls.py",)
PROMPT_S = 20.0
VALUE = 7


@pytest.fixture
def handle() -> CallHandle[int]:
    """Return the handle of a call that has not been made yet."""
    return handle_of(lambda: VALUE)


def handle_of(call: Callable[[], int]) -> CallHandle[int]:
    """Return a handle for `call`."""
    return CallHandle(Group().health, "all_reduce", call, torch.device("cpu"))


def finished() -> CallHandle[int]:
    """Return the handle of a call that is over."""
    handle = handle_of(lambda: VALUE)
    handle.perform()
    handle.finish()
    return handle


@pytest.mark.guarantee("D42")
def test_a_wait_that_an_interrupt_ends_when_the_call_is_over_holds_up_no_other() -> None:
    """The interrupted wait has taken the lock that wakes the waiters, and gives it back to nobody."""
    handle = finished()
    handle._done.acquire()  # what a handler that raises behind the acquire of another wait leaves
    waiter = threading.Thread(target=handle.join, daemon=True)
    waiter.start()
    waiter.join(PROMPT_S)
    assert not waiter.is_alive()
    assert handle.join(1.0)


@pytest.mark.guarantee("D42")
def test_a_future_is_complete_wherever_a_handler_raises_while_it_is_made() -> None:
    """Asked for again, it is that of the call."""
    step, comes = 0, True
    while comes:
        handle = finished()
        comes = raising_at(step, handle.get_future, PLACES)
        future = handle.get_future()
        assert future.done(), step
        assert future.value() == VALUE
        step += 1
    assert step > 4


class Passed:
    """A mark whose work is complete; see `Mark`."""

    def wait(self) -> None:
        """Order nothing."""

    def is_reached(self) -> bool:
        """Return True."""
        return True

    def behind(self) -> AbstractContextManager[object]:
        """Change nothing."""
        return nullcontext()


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("kind", [IndexError, RuntimeError, ValueError])
def test_no_error_of_a_handler_is_taken_for_one_of_the_future(kind: type[Exception]) -> None:
    """It arrives wherever it is raised, and whoever asks for the future next completes it with the result."""
    step, comes = 0, True

    def strike() -> None:
        raise kind("of a handler")

    while comes:
        handle = finished()
        handle._mark = Passed()
        try:
            comes = handling_at(step, handle.get_future, strike, (*PLACES, "/contextlib.py", __file__))
        except kind:
            pass
        else:
            assert not comes, step
        future = handle.get_future()
        assert future.done(), step
        assert future.value() == VALUE, step
        step += 1
    assert step > 8


@pytest.mark.guarantee("D42")
def test_a_handler_may_ask_for_the_future_that_it_interrupts() -> None:
    """Wherever it comes, both get one future, and no lock is waited for."""
    step, comes = 0, True
    while comes:
        handle = finished()
        asked: list[object] = []

        def ask(handle: CallHandle[int] = handle, asked: list[object] = asked) -> None:
            asked.append(handle.get_future())

        with alarm(PROMPT_S, lambda: pytest.fail("the call waits for itself")):
            comes = handling_at(step, ask, ask, PLACES)
        assert len(set(map(id, asked))) == 1, step
        assert handle.get_future().value() == VALUE
        step += 1
    assert step > 4


def test_a_future_of_an_open_call_is_completed_by_its_end(handle: CallHandle[int]) -> None:
    """Only once, whoever else asks for it."""
    future = handle.get_future()
    assert not future.done()
    handle.perform()
    handle.finish()
    assert handle.get_future() is future
    assert future.value() == VALUE


def test_a_blocking_call_waits_for_open_ones_within_its_deadline() -> None:
    """It raises when that is over, with no number taken; the open call goes on."""
    health = Group().health
    line = async_calls.CallLine(health, torch.device("cpu"))
    go = threading.Event()
    open_call = line.submit("all_reduce", lambda: go.wait(PROMPT_S))
    start = time.monotonic()
    with pytest.raises(UsageError, match="another thread of this rank is in a collective"):
        line.settle("barrier", 0.2)
    assert time.monotonic() - start >= 0.2
    go.set()
    assert open_call.wait() is True
    line.settle("barrier", 0.2)
    line.close(PROMPT_S)


def test_a_deadline_that_is_over_at_once_is_no_wrong_one() -> None:
    """It may also pass between two looks at the line: the call has no place, and the reason is the open one."""
    health = Group().health
    line = async_calls.CallLine(health, torch.device("cpu"))
    go = threading.Event()
    open_call = line.submit("all_reduce", lambda: go.wait(PROMPT_S))
    with pytest.raises(UsageError, match="another thread of this rank is in a collective"):
        line.settle("barrier", 1e-9)
    go.set()
    assert open_call.wait() is True
    line.close(PROMPT_S)


def test_an_interrupted_wait_of_the_main_thread_leaves_the_call_open(handle: CallHandle[int]) -> None:
    """It can be waited for again."""

    def interrupt() -> None:
        raise Interrupt

    with pytest.raises(Interrupt), alarm(0.05, interrupt):
        handle.join()
    assert not handle.is_completed()
    handle.perform()
    handle.finish()
    assert handle.wait() == VALUE
