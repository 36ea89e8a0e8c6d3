"""The question whether a signal handler has raised an error, which is asked wherever an error is caught."""

import gc
import signal
import time
import weakref
from collections.abc import Callable
from types import FrameType

import pytest

from shm_broadcast.interruption import is_interrupting, raised_by_handler, tolerating
from tests.handlers import alarm


class Held:
    """What a caller has in a variable, such as a store."""


def asked(handled: list[bool]) -> weakref.ref[Held]:
    """Ask from a function that holds something; return a reference to that."""
    held = Held()
    try:
        int("no number")
    except ValueError as caught:
        handled.append(raised_by_handler(caught))
    return weakref.ref(held)


def test_the_question_keeps_nothing_of_its_callers() -> None:
    """Without a garbage collection, what they hold is let go when they return: a store, whose port is then free."""
    handled: list[bool] = []
    gc.collect()
    gc.disable()
    try:
        assert asked(handled)() is None
    finally:
        gc.enable()
    assert handled == [False]


def test_a_handler_is_recognised_in_a_caller_of_a_caller() -> None:
    """Its frame lies above the one that it has interrupted."""

    def handler() -> None:
        raise RuntimeError("a handler's")

    def wait() -> None:
        while True:
            pass

    with pytest.raises(RuntimeError) as caught, alarm(0.01, handler):
        wait()
    assert raised_by_handler(caught.value)


class Finalized:
    """What asks as its memory is freed."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask

    def __del__(self) -> None:
        self._ask()


def test_a_block_tolerates_its_own_errors_and_no_other() -> None:
    """A handler may raise the same type, which must arrive."""

    def lose(*_: object) -> None:
        raise FileNotFoundError("of the handler")

    with tolerating(OSError, ValueError):
        raise FileNotFoundError("of the block")
    with pytest.raises(KeyError), tolerating(OSError, ValueError):
        raise KeyError
    before = signal.signal(signal.SIGALRM, lose)
    try:
        with pytest.raises(FileNotFoundError, match="of the handler"), tolerating(OSError):
            signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_who_calls_from_a_handler_or_a_finalizer_inside_of_a_function_is_told() -> None:
    """A plain call is none of these, and neither is one whose handler has come before the function began."""
    found: list[bool] = []
    mine = object()

    def ask(count: int = 1) -> None:
        found.append(is_interrupting(inside.__code__, "owner", mine, count))

    def inside(owner: object, act: Callable[[], object]) -> object:
        act()
        return owner

    def struck(act: Callable[[], object]) -> None:
        before = len(found)
        with alarm(0.01, act):
            # On a busy machine Python 3.11 sometimes never runs the handler in a loop that does not let go of the GIL.
            while len(found) == before:
                time.sleep(0.001)

    inside(mine, ask)
    struck(lambda: inside(mine, ask))
    inside(object(), lambda: struck(ask))
    assert found == [False] * 3
    inside(mine, lambda: struck(ask))
    inside(mine, lambda: Finalized(ask))
    inside(mine, lambda: struck(lambda: inside(mine, lambda: ask(2))))

    def forgetful(number: int, frame: FrameType | None) -> None:
        del number, frame
        ask()

    before = signal.signal(signal.SIGALRM, forgetful)
    try:
        inside(mine, lambda: signal.raise_signal(signal.SIGALRM))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert found[3:] == [True] * 4
