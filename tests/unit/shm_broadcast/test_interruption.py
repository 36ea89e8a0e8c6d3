"""The question whether a signal handler has raised an error, which is asked wherever an error is caught."""

import gc
import weakref

import pytest

from shm_broadcast.interruption import raised_by_handler
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
