"""A process that can have no further thread says so, and takes no store for lost."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from coordinator.bootstrap.agreement import agreeing, outcomes
from coordinator.bootstrap.agreement.agreeing import agree, decline
from coordinator.bootstrap.agreement.views import View
from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.bootstrap.connections import open_tcp_store
from coordinator.bootstrap.status_store import WorldStatusStore
from coordinator.bootstrap.world import Line, World
from coordinator.elastic.exclusion import exclusion_in
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CapabilityError
from shm_broadcast.liveness import this_process
from shm_broadcast.reports.refusals import Refusal
from shm_broadcast.threads import DaemonThread


@contextmanager
def without_threads(monkeypatch: pytest.MonkeyPatch, starts: int = 1 << 30) -> Iterator[None]:
    """Let the kernel refuse this thread that many threads in the block."""
    start, refused, here = DaemonThread.start, itertools.count(), threading.current_thread()

    def refuse(thread: DaemonThread) -> None:
        if threading.current_thread() is here and next(refused) < starts:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(DaemonThread, "start", refuse)
        yield


def test_a_process_without_a_thread_does_not_blame_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a `NativeError` about the store, and a raw `RuntimeError` where it connects."""
    connect = partial(open_tcp_store, "127.0.0.1", 1, 1, 2, False, CoordinatorSettings(), None)
    calls: list[Callable[[], Any]] = [lambda: ask_store(lambda: 1, "here", 1.0), connect]
    with without_threads(monkeypatch):
        for call in calls:
            with pytest.raises(CapabilityError, match="can't start new thread"):
                call()


def test_a_status_store_is_asked_again_once_there_is_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One refusal of the kernel made it unreachable for ever."""
    store, other = dist.HashStore(), 1
    WorldStatusStore(store, other, [0, other]).refuse("host", 1, 1, "reason")
    own = WorldStatusStore(store, 0, [0, other])
    with without_threads(monkeypatch):
        assert own.refusal("host", 1) is None
    assert own.is_reachable
    assert own.refusal("host", 1) == Refusal(other, "reason")


@pytest.mark.guarantee("G8")
def test_a_rank_without_a_thread_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They waited for it until the deadline of the creation."""
    store, errors = dist.HashStore(), list[Exception]()

    def other() -> None:
        try:
            agree(store, "group 'tp:0'", 1, [0, 1], View({}, this_process(), "127.0.0.1"), 60.0)
        except CapabilityError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    with without_threads(monkeypatch, 1), pytest.raises(CapabilityError, match="can't start new thread"):
        agree(store, "group 'tp:0'", 0, [0, 1], View({}, this_process(), "127.0.0.1"), 60.0)
    thread.join(20.0)
    assert not thread.is_alive()
    assert "rank 0 cannot take part: no thread could be started" in str(errors[0])


def test_a_rank_that_can_tell_nobody_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any thread the others notice only that it has ended."""
    with without_threads(monkeypatch), pytest.raises(CapabilityError, match="can't start new thread"):
        agree(dist.HashStore(), "group 'tp:0'", 0, [0, 1], View({}, this_process(), "127.0.0.1"), 60.0)


def test_a_failed_call_keeps_its_error_where_nobody_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the others go on without this rank is asked beside that error."""
    store = dist.HashStore()
    world = World(0, 2, store, line=Line(store, 0, 0, (0, 1), (0, 1), 2))
    with without_threads(monkeypatch):
        assert exclusion_in(world)("here") is None


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), CapabilityError("no descriptor")])
def test_a_rank_that_cannot_tell_who_serves_the_store_lingers(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whoever has no descriptor left cannot look for its own listeners. The raw error replaced that of the rank."""

    def refuse(_path: str) -> list[str]:
        raise error

    slept, store = list[float](), dist.HashStore()
    monkeypatch.setattr(agreeing, "is_served_here", lambda _store: os.listdir("/proc/self/fd"))
    monkeypatch.setattr(time, "sleep", slept.append)
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refuse)
        decline(store, "group 'tp:0'", 0, CapabilityError("no descriptor"))
    assert slept[-1:] == [agreeing.LINGER_S]
    assert outcomes.read(store) == outcomes.Refused(0, 0, "no descriptor")
