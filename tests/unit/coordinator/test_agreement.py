"""Ranks agree on the facts of a group; threads stand for ranks, over each of torch's stores."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from coordinator.bootstrap.agreement import View, agree
from shm_broadcast.errors import CommTimeoutError, DisagreementError, NativeError, PeerLostError
from shm_broadcast.liveness import this_process

FACTS = {"world_size": "3", "backend": "gloo"}
# What must happen at once may take this long on a busy machine; deadlines that must not matter are a minute.
PROMPT_S = 20.0

StoreOf = Callable[[], dist.Store]


@pytest.fixture(params=["hash", "file"])
def store_of(request: pytest.FixtureRequest, tmp_path: Path) -> StoreOf:
    """Return a function that gives each rank its view of one store."""
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: store
    return lambda: dist.FileStore(str(tmp_path / "store"), -1)


def view(address: str = "127.0.0.1", **facts: str) -> View:
    return View({**FACTS, **facts}, this_process(), address)


def agree_in_threads(
    store_of: StoreOf, views: dict[int, View], ranks: list[int], timeout_s: float = 60.0, delay_s: float = 0.0
) -> dict[int, Any]:
    """Let each rank of `views` agree in a thread, some later; return each result or error."""
    outcomes: dict[int, Any] = {}

    def body(rank: int, number: int) -> None:
        time.sleep(number * delay_s)
        try:
            outcomes[rank] = agree(store_of(), "group 'tp:0'", rank, ranks, views[rank], timeout_s)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=body, args=(rank, number)) for number, rank in enumerate(views)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROMPT_S)
        assert not thread.is_alive()
    return outcomes


def test_ranks_that_hold_the_same_get_everybodys_view(store_of: StoreOf) -> None:
    """Each rank gets all views by rank; facts that may differ do."""
    views = {rank: view(f"10.0.0.{rank}") for rank in (4, 5, 7)}
    outcomes = agree_in_threads(store_of, views, [4, 5, 7])
    for outcome in outcomes.values():
        assert {rank: (seen.process, seen.address) for rank, seen in outcome.items()} == {
            rank: (own.process, own.address) for rank, own in views.items()
        }


def test_ranks_may_come_in_any_order(store_of: StoreOf) -> None:
    """A rank that arrives many polls later is waited for."""
    views = {rank: view() for rank in (2, 0, 1)}
    outcomes = agree_in_threads(store_of, views, [0, 1, 2], delay_s=0.3)
    assert all(outcome.keys() == views.keys() for outcome in outcomes.values())


def test_one_that_holds_something_else_makes_all_raise(store_of: StoreOf) -> None:
    """All ranks raise; the error names the fact, the values, and which ranks hold each."""
    views = {0: view(), 1: view(), 2: view(backend="nccl")}
    outcomes = agree_in_threads(store_of, views, [0, 1, 2], delay_s=0.1)
    for error in outcomes.values():
        assert isinstance(error, DisagreementError)
        assert "backend: 'gloo' (ranks 0, 1), 'nccl' (rank 2)" in str(error)
        assert "world_size" not in str(error)
        assert set(error.views) == {0, 1, 2}
        assert "nccl" in error.views[2]


def test_a_disagreement_does_not_wait_for_ranks_that_are_still_to_come(store_of: StoreOf) -> None:
    """Two ranks that disagree raise although a third never arrives."""
    start = time.monotonic()
    outcomes = agree_in_threads(store_of, {0: view(), 1: view(world_size="2")}, [0, 1, 2])
    assert all(isinstance(error, DisagreementError) for error in outcomes.values())
    assert time.monotonic() - start < PROMPT_S


def test_a_rank_that_comes_after_a_disagreement_is_told_of_it(store_of: StoreOf) -> None:
    """A late rank raises the same error, whatever it holds itself."""
    agree_in_threads(store_of, {0: view(), 1: view(world_size="2")}, [0, 1, 2])
    (error,) = agree_in_threads(store_of, {2: view()}, [0, 1, 2]).values()
    assert isinstance(error, DisagreementError)


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named_by_all_that_came(store_of: StoreOf) -> None:
    """The first deadline holds for all: later ranks blame nobody else and wait no longer."""
    outcomes = agree_in_threads(store_of, {0: view(), 2: view()}, [0, 1, 2, 3], timeout_s=1.0, delay_s=0.5)
    for error in outcomes.values():
        assert isinstance(error, CommTimeoutError)
        assert error.missing == (1, 3)
        assert "group 'tp:0'" in str(error)
        assert "within 1.0 s" in str(error)


def test_a_rank_that_comes_too_late_is_told_so(store_of: StoreOf) -> None:
    """A late rank does not wait for ranks that have given up."""
    agree_in_threads(store_of, {0: view()}, [0, 1], timeout_s=0.2)
    (error,) = agree_in_threads(store_of, {1: view()}, [0, 1]).values()
    assert isinstance(error, CommTimeoutError)
    assert error.missing == (1,)


def test_two_processes_with_one_rank_are_refused(store_of: StoreOf) -> None:
    """The second process raises and names the first, which goes on waiting."""
    agree_in_threads(store_of, {0: view()}, [0, 1], timeout_s=0.2)
    (error,) = agree_in_threads(store_of, {0: view()}, [0, 1]).values()
    assert isinstance(error, DisagreementError)
    assert f"pid {this_process().pid}" in str(error)


def test_a_rank_that_has_died_is_named(store_of: StoreOf) -> None:
    """Ranks that wait for others raise if the process behind a view no longer exists."""
    dead = view()
    dead = msgspec.structs.replace(dead, process=msgspec.structs.replace(dead.process, start_ticks=1))
    store_of().set("view/1", msgspec.json.encode(dead).decode())
    (error,) = agree_in_threads(store_of, {0: view()}, [0, 1, 2]).values()
    assert isinstance(error, PeerLostError)
    assert error.peers == (1,)


class FailingStore:
    """A store whose host disappears after two requests, or hangs once."""

    def __init__(self, hang_s: float | None) -> None:
        self._store = dist.HashStore()
        self._hang_s = hang_s
        self._asked = 0

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            self._asked += 1
            if self._asked > 2 and self._hang_s is None:
                raise RuntimeError("Connection reset by peer")
            if self._asked == 3:
                time.sleep(self._hang_s or 0.0)
            return getattr(self._store, name)(*args)

        return ask


def test_a_store_that_is_gone_is_a_native_error() -> None:
    """The error carries torch's text, as nothing is known about the store's host."""
    store: Any = FailingStore(None)
    with pytest.raises(NativeError, match="Connection reset by peer"):
        agree(store, "group 'tp:0'", 0, [0, 1], view(), 60.0)


@pytest.mark.slow
def test_a_store_that_hangs_does_not_outlast_the_deadline() -> None:
    """The call raises at its deadline although the stopped host never answers."""
    store: Any = FailingStore(4.0)
    start = time.monotonic()
    with pytest.raises(CommTimeoutError, match="did not answer within 0.2 s"):
        agree(store, "group 'tp:0'", 0, [0, 1], view(), 0.2)
    assert time.monotonic() - start >= 0.2
    # The asking thread ends when the store answers.
    for thread in threading.enumerate():
        if thread.name.startswith("group-coordinator"):
            thread.join(PROMPT_S)
