"""A question to a store whose caller was interrupted is not asked once the store's directory has gone."""

import os
import threading
import time
from pathlib import Path

import pytest

from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.bootstrap.methods.directory import DirectoryRendezvous
from shm_broadcast.threads import DaemonThread
from tests.waiting import wait_until


@pytest.mark.guarantee("G9")
def test_a_question_is_not_asked_if_its_caller_was_interrupted_before_its_thread_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that finds no core may begin at any time: also when the store has gone."""
    begins, run, asked = threading.Event(), DaemonThread.run, list[DaemonThread]()

    def run_later(self: DaemonThread) -> None:
        asked.append(self)
        assert begins.wait(10.0)
        run(self)

    def interrupt() -> None:
        raise KeyboardInterrupt

    rendezvous = DirectoryRendezvous(tmp_path / "rendezvous", 0, 1)
    store = rendezvous.join(10.0)
    monkeypatch.setattr(DaemonThread, "run", run_later)
    with pytest.raises(KeyboardInterrupt):
        ask_store(lambda: store.compare_set("key", "", "value"), "a question", 10.0, interrupt)
    rendezvous.leave()
    begins.set()
    asked[0].join(1.0)
    assert not asked[0].is_alive()
    assert os.listdir(tmp_path) == []


@pytest.mark.guarantee("G9")
def test_a_question_whose_caller_was_interrupted_ends_before_the_store_goes(tmp_path: Path) -> None:
    """Behind it, it would make the file anew, or wait for five minutes for the directory."""
    asked = threading.Event()

    def ask() -> bytes:
        asked.set()
        time.sleep(0.3)  # as a thread that finds no core
        return store.compare_set("key", "", "value")

    def interrupt() -> None:
        assert asked.wait(10.0)
        raise KeyboardInterrupt

    rendezvous = DirectoryRendezvous(tmp_path / "rendezvous", 0, 1)
    store = rendezvous.join(10.0)
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask_store(ask, "a question", 10.0, interrupt)
    rendezvous.leave()
    assert 0.3 <= time.monotonic() - before < 1.0
    assert os.listdir(tmp_path) == []
    name = "group-coordinator-store"
    wait_until(lambda: name not in {each.name for each in threading.enumerate()}, "the thread's end", 1.0)
