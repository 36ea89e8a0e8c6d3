"""Whether the others have gone on without a member, as the store's keys say."""

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.elastic.protocol import (
    Choose,
    Chosen,
    Dead,
    Excluded,
    Get,
    Pause,
    Put,
    Swap,
    agree_on_members,
    decided_without,
)

ME, LEFT = 2, (0, 1)


def decided(store: dict[str, str], number: int, upto: str) -> dict[str, str]:
    """Let member 0 decide on members 0 and 1, up to the key that ends with `upto`, in an attempt of that number."""
    steps = agree_on_members(0, number - 1, (0, 1, ME))
    answer: Any = None
    while f"{number}/{upto}" not in store:
        wants: Any = steps.send(answer)
        answer = None
        if isinstance(wants, Put):
            store[wants.key] = wants.value
        elif isinstance(wants, Get):
            answer = {key: store[key] for key in wants.keys if key in store}
        elif isinstance(wants, Swap):
            answer = store.setdefault(wants.key, wants.value)
        elif isinstance(wants, Dead):
            answer = frozenset()
            # Member 1 does the same at this time.
            store.setdefault(f"{number}/present/1", '{"dead":[]}')
            store.setdefault(f"{number}/confirm/1", "ok")
        elif isinstance(wants, Choose):
            answer = Chosen(LEFT)
        elif isinstance(wants, Pause):
            answer = 1
        else:
            answer = ""
    return store


def out(me: int, epoch: int, store: dict[str, str]) -> Excluded | None:
    """Return what the store says to a member that knows `epoch`."""
    known: Callable[[str], str | None] = store.get
    return decided_without(me, epoch, known)


@pytest.mark.guarantee("E3")
@pytest.mark.parametrize("upto", ["members", "go"])
def test_a_member_is_out_once_the_others_have_decided_so(upto: str) -> None:
    """Its own next attempt would end in the same way. A member of the attempt is not out of it."""
    store = decided({}, 1, upto)
    assert out(ME, 0, store) == Excluded(1, LEFT)
    assert out(1, 0, store) is None


@pytest.mark.guarantee("E3")
def test_an_attempt_that_has_failed_leaves_nobody_out() -> None:
    """The next one decides, if there is one; a change that was given up before anybody had decided is none either."""
    store = decided({}, 1, "go")
    store["1/result"] = "lost member(s) 1 ended"
    assert out(ME, 0, store) is None
    store["2/go"] = "late [1]"
    assert out(ME, 0, store) is None
    assert out(ME, 0, decided(store, 3, "go")) == Excluded(3, LEFT)


def test_nothing_is_decided_before_anybody_has_come() -> None:
    """An empty store, or one of which this member knows the last epoch."""
    assert out(ME, 0, {}) is None
    assert out(ME, 1, decided({}, 1, "go")) is None
