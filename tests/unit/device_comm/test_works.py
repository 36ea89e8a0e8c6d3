"""Threads that wait in a transport."""

import threading
import time
from typing import Any

import pytest

from device_comm.works import ExchangeWorks, PointToPointWorks, WaiterThreads
from shm_broadcast.errors import ClosedError
from tests.handlers import alarm, handling_at
from tests.waiting import running, wait_until


def test_closing_while_a_thread_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` joins only threads that have started, whenever it is called."""
    threads = WaiterThreads("test")
    is_starting = threading.Event()
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        if thread.name.startswith("group-coordinator"):
            is_starting.set()
            time.sleep(0.05)  # `close` comes meanwhile
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    ran = threading.Event()
    submitter = threading.Thread(target=lambda: threads.submit(ran.set))
    submitter.start()
    assert is_starting.wait(5)
    threads.close(timeout_s=5)
    submitter.join()
    assert ran.wait(5)
    assert not [t for t in threading.enumerate() if t.name.startswith("group-coordinator-test")]


def test_an_interrupt_while_a_thread_starts_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new thread has its job already, and `close` joins it though the caller never heard of it."""
    threads, ran = WaiterThreads("interrupted"), threading.Event()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        threads.submit(ran.set)
    monkeypatch.undo()
    threads.close(5.0)
    assert ran.is_set()
    assert not any("interrupted" in thread.name for thread in threading.enumerate())


def test_no_thread_starts_once_all_are_ended() -> None:
    """Nobody would join it: a wait that a group's end has overtaken gets no thread, and says so."""
    threads, ran = WaiterThreads("ended"), threading.Event()
    threads.close(5.0)
    with pytest.raises(ClosedError, match="ended"):
        threads.submit(ran.set)
    assert not any("ended" in thread.name for thread in threading.enumerate())
    assert not ran.is_set()


def test_a_wait_that_goes_on_behind_the_end_starts_no_thread() -> None:
    """`poll` gives each transfer a thread of its own, but not when the threads have ended meanwhile."""
    threads = WaiterThreads("polled")
    blocked = threading.Event()
    waiting = [FakeWork(blocked), FakeWork(blocked)]
    works = PointToPointWorks(threads, list(enumerate(waiting)), None)  # type: ignore[arg-type]
    threads.close(0.0)
    before = [thread for thread in threading.enumerate() if "polled" in thread.name]
    assert not works.poll(0.01)
    assert [thread for thread in threading.enumerate() if "polled" in thread.name] == before
    blocked.set()
    assert works.poll(5.0)


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("fails", [False, True])
def test_a_message_is_unfinished_until_the_last_of_its_works_ends(*, fails: bool) -> None:
    """The group waits for it meanwhile, whether or not anybody has its handle; a failed one is waited for no more."""
    threads, unfinished = WaiterThreads("unfinished"), set[object]()
    first, last = threading.Event(), threading.Event()
    waiting: Any = [(1, FakeWork(first)), (2, FakeWork(last, fails=fails))]
    works = PointToPointWorks(threads, waiting, None, unfinished)
    assert unfinished == {works}
    first.set()
    wait_until(lambda: works.pending() == (2,), "the end of the first work")
    assert unfinished == {works}
    last.set()
    wait_until(lambda: not unfinished, "the end of the last work")
    threads.close(5.0)


@pytest.mark.guarantee("G9")
def test_a_message_that_no_thread_waits_for_is_not_unfinished() -> None:
    """A group without threads would wait for it in vain. One without works is finished at once."""
    threads, unfinished = WaiterThreads("none"), set[object]()
    PointToPointWorks(threads, [], None, unfinished)
    threads.close(0.0)
    waiting: Any = [(1, FakeWork(threading.Event()))]
    with pytest.raises(ClosedError):
        PointToPointWorks(threads, waiting, None, unfinished)
    assert unfinished == set()


class FakeWork:
    """A transfer that ends when an event is set."""

    def __init__(self, done: threading.Event, *, fails: bool = False) -> None:
        self._done = done
        self._fails = fails

    def wait(self, *_: object) -> bool:
        """Wait for the event."""
        is_done = self._done.wait(10.0)
        if self._fails:
            raise RuntimeError("the connection is closed")
        return is_done


class Waiting:
    """A work that is complete when the test says so."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def wait(self, _timeout: object) -> bool:
        """Block as torch's work does."""
        return self.is_over.wait(20.0)


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("asked", ["is_complete", "pending"])
def test_a_handler_may_ask_for_transfers_that_it_interrupts_in_a_question(asked: str) -> None:
    """Such as one that destroys the group, which waits for what is still being sent."""
    threads, works = WaiterThreads("asked"), [Waiting(), Waiting()]
    transfers = PointToPointWorks(threads, [(1, works[0]), (2, works[1])], None)  # type: ignore[list-item]
    found: list[Any] = []

    def ask() -> None:
        found.append(getattr(transfers, asked)())

    step, comes = 0, True
    with alarm(20.0, lambda: pytest.fail("the question waits for itself")):
        while comes:
            comes = handling_at(step, ask, ask, ("device_comm/works.py",))
            step += 1
    assert set(found) == {False if asked == "is_complete" else (1, 2)}
    for work in works:
        work.is_over.set()
    wait_until(transfers.is_complete, "the transfers")
    threads.close(5.0)


@pytest.mark.guarantee("D7")
def test_a_lost_rank_is_noticed_behind_one_that_is_late() -> None:
    """Only its own transfers fail, and the first thread of a collective waits for those of the late one."""
    threads, late, lost = WaiterThreads("behind"), threading.Event(), threading.Event()
    waiting: Any = [(1, FakeWork(late)), (2, FakeWork(lost, fails=True)), (1, FakeWork(late))]
    works = ExchangeWorks(threads, waiting, None, lambda _: False)
    lost.set()
    with pytest.raises(RuntimeError, match="the connection is closed"):
        wait_until(lambda: works.poll(0.1), "the error", timeout_s=5.0)
    assert not late.is_set()
    late.set()
    threads.close(5.0)


def test_a_long_wait_takes_no_thread_for_a_peer_that_is_watched() -> None:
    """With many ranks on a host there would be hundreds, and the group notices the end of these peers anyhow."""
    threads, done = WaiterThreads("watched"), threading.Event()
    waiting: Any = [(rank, FakeWork(done)) for rank in range(6)]
    works = ExchangeWorks(threads, waiting, None, lambda rank: rank < 4)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert not works.poll(0.1)
    assert len(running("group-coordinator-watched")) == 2
    done.set()
    wait_until(lambda: works.poll(0.1), "the end of the collective")
    threads.close(5.0)


def test_a_collective_that_is_soon_over_takes_one_thread() -> None:
    """Each of its transfers would take one otherwise."""
    threads, done = WaiterThreads("soon"), threading.Event()
    waiting: Any = [(rank, FakeWork(done)) for rank in range(4)]
    works = ExchangeWorks(threads, waiting, None, lambda _: False)
    assert not works.poll(0.2)
    assert len(running("group-coordinator-soon")) == 1
    done.set()
    wait_until(lambda: works.poll(0.1), "the end of the collective")
    threads.close(5.0)


def test_a_long_wait_goes_on_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits already, and tries again after a while to get more."""
    threads, late, first = WaiterThreads("scarce"), threading.Event(), threading.Event()
    waiting: Any = [(1, FakeWork(late)), (2, FakeWork(first))]
    works = PointToPointWorks(threads, waiting, None)
    first.set()

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(threads, "submit", refuse)
        assert not works.poll(0.01)
    wait_until(lambda: works.poll(0.01) or works.pending() == (1,), "the end of the second work")
    late.set()
    assert works.poll(5.0)
    threads.close(5.0)
