"""Signal handlers that raise, or close what is in use, at any step of a call that takes a lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import cast

import pytest
import torch

from device_comm import async_calls, works
from device_comm import health as health_module
from device_comm.async_calls import CallLine
from device_comm.health import GroupHealth, StatusStore
from device_comm.works import WaiterThreads
from shm_broadcast import liveness
from shm_broadcast.errors import ClosedError, UsageError
from shm_broadcast.liveness import PeerWatch, this_process
from tests.channels import QuietStore, QuietWatch
from tests.multiproc.device_comm.test_channel_opening import Strikes, strike
from tests.unit.shm_broadcast.test_signal_handlers import AlarmError
from tests.waiting import wait_until

# What takes a millisecond may take this long on a busy machine.
SOON_S = 20.0


def at_every_step(once: Callable[[Strikes], None], module: ModuleType) -> None:
    """Run `once` for every step of `module`, on a thread; fail if a call waits for itself."""
    errors: list[BaseException] = []

    def run() -> None:
        strikes = Strikes(strike, module)
        try:
            while not strikes.is_over:
                once(strikes)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive(), "the call waits for itself"
    for error in errors:
        raise error


def struck(strikes: Strikes, call: Callable[[], object]) -> bool:
    """Make a call, struck at one step; return whether it returned, and did not raise what the strike raises."""
    try:
        with strikes.run():
            call()
    except AlarmError:
        return False
    return True


def descriptors() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def ended(name: str) -> bool:
    """Return whether no thread with `name` in its name is left."""
    return not any(name in thread.name for thread in threading.enumerate())


def quiet() -> GroupHealth:
    """Return the state of a group whose other rank lives."""
    watch, store = cast("PeerWatch", QuietWatch()), cast("StatusStore", QuietStore())
    return GroupHealth("locks", 0, (0, 1), watch, store)


@pytest.mark.guarantee("L1")
@pytest.mark.parametrize("call", ["lost", "close"])
@pytest.mark.parametrize("inner", ["lost", "close", "raises"])
def test_a_handler_may_close_a_watch_or_look_at_it_at_any_step(call: str, inner: str) -> None:
    """Each descriptor is closed once, and only who has ended is lost."""

    def once(strikes: Strikes) -> None:
        before = descriptors()
        watch = PeerWatch(this_process(), {})
        # A pipe without a writer looks like the descriptor of a process that has ended.
        (gone, writer), (lives, keeps) = os.pipe(), os.pipe()
        os.close(writer)
        watch.adopt(1, this_process(), gone)
        watch.adopt(2, this_process(), lives)
        strikes.strike = strike if inner == "raises" else getattr(watch, inner)
        struck(strikes, getattr(watch, call))
        if "close" not in (call, inner):
            assert watch.lost() == (1,)
        assert watch.lost() in ((), (1,))
        watch.close()
        os.close(keeps)
        assert descriptors() == before

    at_every_step(once, liveness)


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("call", ["fail", "close"])
def test_a_group_that_a_handler_destroys_while_it_breaks_or_closes_is_closed_once(call: str) -> None:
    """The handler's call or the one that it interrupts releases what belongs to the group, not both."""

    def once(strikes: Strikes) -> None:
        health, closed = quiet(), list[bool]()
        strikes.strike = lambda: closed.append(health.close())
        if call == "fail":
            struck(strikes, lambda: health.fail(UsageError("broken")))
        else:
            struck(strikes, lambda: closed.append(health.close()))
        closed.append(health.close())
        assert closed.count(True) == 1

    at_every_step(once, health_module)


@pytest.mark.guarantee("D42")
@pytest.mark.parametrize("inner", ["submits", "closes", "raises"])
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_handler_may_use_the_threads_at_any_step_of_handing_them_a_job(
    inner: str, *, is_idle: bool
) -> None:
    """Each job of a call that returns is done, and no thread is left behind. Behind the end of all none is taken."""

    def once(strikes: Strikes) -> None:
        threads, ran, nested = WaiterThreads("locks"), threading.Event(), threading.Event()

        def hand_over() -> None:
            try:
                threads.submit(ran.set)
            except ClosedError:
                assert inner == "closes"
                ran.set()

        if is_idle:
            first = threading.Event()
            threads.submit(first.set)
            assert first.wait(SOON_S)
            wait_until(lambda: not threads.is_busy, "the thread is idle", SOON_S)
        if inner == "submits":
            strikes.strike = lambda: threads.submit(nested.set)
        elif inner == "closes":
            strikes.strike = lambda: threads.close(0.1)
        if struck(strikes, hand_over):
            assert ran.wait(SOON_S)
        if inner == "submits" and not strikes.is_over:
            assert nested.wait(SOON_S)
        threads.close(0.1)
        wait_until(lambda: ended("locks"), "no thread is left", SOON_S)

    at_every_step(once, works)


@pytest.mark.guarantee("D42")
@pytest.mark.parametrize("inner", ["submits", "closes", "raises"])
def test_a_handler_may_use_the_line_of_calls_at_any_step_of_submitting_one(inner: str) -> None:
    """Each call that is open is made, in one order, by one thread; behind a `destroy` there is none."""

    def once(strikes: Strikes) -> None:
        health, made = quiet(), list[str]()
        line = CallLine(health, torch.device("cpu"))

        def destroy() -> None:
            health.close()
            line.close(0.1)

        def nested() -> None:
            line.submit("nested", lambda: made.append("nested"))

        def call() -> None:
            assert line.submit("outer", lambda: made.append("outer")).join(SOON_S)

        if inner == "submits":
            strikes.strike = nested
        elif inner == "closes":
            strikes.strike = destroy
        try:
            if struck(strikes, call):
                assert "outer" in made or health.is_closed
        except ClosedError:
            assert inner == "closes"
        line.settle("settle")
        assert not line.open
        assert len(made) == len(set(made))
        destroy()
        wait_until(lambda: ended("locks"), "no thread is left", SOON_S)

    at_every_step(once, async_calls)
