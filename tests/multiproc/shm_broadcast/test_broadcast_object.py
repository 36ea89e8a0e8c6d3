"""`broadcast_object` of a group that has a queue is an ordinary method, with the same results in every form."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator import CoordinatorSettings, GroupCoordinator
from shm_broadcast.errors import ClosedError, CommError, DecodeError, DisagreementError, UsageError
from shm_broadcast.queue import QueueReader
from tests.harness import RankPool, run_ranks
from tests.waiting import sleeping_in, wait_until
from tests.worlds import new_group, run_far, world

STEPS = 200
SOON_S = 20.0


def step_of(number: int) -> Any:
    """Return an object of builtin types, one that is streamed, one that needs Python, or one that comes in parts."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: {"step": number, "reqs": [("a", 1.5)] * (number % 7)},
        lambda: bytes(100_000 + number),
        lambda: Path(f"/step/{number}") if number % 2 else {number, "x"},
        lambda: None,
    )
    return b"x" * (3 << 20) if number % 50 == 49 else kinds[number % len(kinds)]()


class Counting(GroupCoordinator):
    """A group that overrides `broadcast_object`."""

    calls = 0

    def broadcast_object(self, *args: Any, **kwargs: Any) -> Any:
        """Count the call, then make it."""
        self.calls += 1
        return super().broadcast_object(*args, **kwargs)


def broadcast_in_all_ways(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Broadcast from both ranks, in every form of the call."""
    with world(rank, world_size, directory) as group, new_group(group) as it:
        before = it.broadcast_object("host plane" if rank == 1 else None, 1)
        it.enable_broadcaster(1)
        for number in range(STEPS):
            src = 1 if number % 5 else 0
            mine = step_of(number) if rank == src else None
            form = number % 3
            if form == 0:
                received = it.broadcast_object(mine, src)
            elif form == 1:
                received = it.broadcast_object(mine, src=src)
            else:
                received = it.broadcast_object(obj=mine, src=src, timeout_s=SOON_S)
            assert received == step_of(number)
            assert rank != src or received is mine
        chosen = CoordinatorSettings.resolve({})
        counting = Counting([group.ranks], rank, "gloo", True, True, group_name="own", settings=chosen)
        with counting:
            assert counting.broadcast_object(["own", rank]) == ["own", 0]
            assert counting.mq_broadcaster is not None
        # A tracer patches the class after groups and their queues have been created.
        traced: list[tuple[Any, ...]] = []
        original = GroupCoordinator.broadcast_object

        def tracing(self: GroupCoordinator, *args: Any, **kwargs: Any) -> Any:
            traced.append(args)
            return original(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GroupCoordinator, "broadcast_object", tracing)
            assert it.broadcast_object("traced" if rank == 1 else None, 1) == "traced"
        return [before, counting.calls, len(traced)]


def test_every_form_of_the_call_gives_the_same(ranks2: RankPool) -> None:
    """The writer broadcasts through the queue, other ranks over the host plane. Overrides and tracers are called."""
    assert ranks2.run(broadcast_in_all_ways) == [["host plane", 1, 1]] * 2


def fail_in_all_ways(rank: int, world_size: int, directory: Path) -> list[str]:
    """Send an object that cannot be encoded or decoded, then destroy the group while another thread waits."""
    with world(rank, world_size, directory) as group:
        it = new_group(group)
        it.enable_broadcaster()
        told: list[str] = []

        def note(kind: type[CommError], call: Callable[[], object]) -> None:
            with pytest.raises(kind) as caught:
                call()
            told.append(f"{kind.__name__}: {caught.value}")

        if rank == 0:
            note(UsageError, lambda: it.broadcast_object(object()))
            it.broadcast_object([1, 2])
            it.broadcast_object(["good"])
        else:
            note(DisagreementError, it.broadcast_object)
            note(DecodeError, lambda: it.broadcast_object(type=dict[str, int]))
            assert it.broadcast_object() == ["good"]
        it.barrier()
        direct = it.broadcast_object
        if rank == 1:
            failures: list[BaseException] = []

            def wait() -> None:
                try:
                    direct()
                except CommError as error:
                    failures.append(error)

            waiting = threading.Thread(target=wait)
            waiting.start()
            reader: Any = it.mq_broadcaster
            wait_until(lambda: reader.endpoint.is_busy and sleeping_in("wait"), "the thread asleep")
            it.destroy()
            waiting.join(SOON_S)
            assert not waiting.is_alive()
            told.append(type(failures[0]).__name__)
        group.barrier()
        it.destroy()
        note(ClosedError, direct)
        note(ClosedError, it.broadcast_object)
        return told


def test_errors_are_those_of_the_slow_path(ranks2: RankPool) -> None:
    """The errors name the group's call, as on the slow path. `destroy` ends the wait of another thread."""
    writer, reader = ranks2.run(fail_in_all_ways)
    assert [text.split(":")[0] for text in writer] == ["UsageError", "ClosedError", "ClosedError"]
    assert [text.split(":")[0] for text in reader] == [
        *("DisagreementError", "DecodeError", "ClosedError", "ClosedError", "ClosedError"),
    ]
    assert all("broadcast_object" in text for text in writer[1:] + reader[3:])


def read_with_two_threads(rank: int, world_size: int, directory: Path) -> tuple[list[int], float]:
    """Read with two threads at once; return their objects and the processor time that the wait took."""
    with world(rank, world_size, directory) as group, new_group(group) as it:
        it.enable_broadcaster()
        if rank == 0:
            time.sleep(1.0)  # the readers measure the processor time of 0.8 s without a message
            for number in range(STEPS):
                it.broadcast_object(number)
            it.barrier()
            return [], 0.0
        got: list[int] = []
        used = time.process_time()

        def read() -> None:
            got.extend(it.broadcast_object() for _ in range(STEPS // 2))

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.8)
        used = time.process_time() - used
        for thread in threads:
            thread.join(SOON_S)
        it.barrier()
        return got, used


def test_a_second_thread_that_reads_waits_for_its_turn(ranks2: RankPool) -> None:
    """No object is lost or doubled, and a waiting thread does not use a whole core."""
    _, (got, used_s) = ranks2.run(read_with_two_threads)
    assert sorted(got) == list(range(STEPS))
    assert used_s < 0.4


PLACES = [["one", "another"], ["one", "one", "another"]]
"""Where the ranks are: all readers of rank 0's queue on another host, or one beside it."""


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_threads_that_read_on_several_hosts_wait_for_their_turns(places: list[str]) -> None:
    """Also where messages carry their numbers, because the queue reaches another host."""
    body = read_with_two_threads
    _, *readers = run_ranks(run_far, len(places), places, body.__module__, body.__qualname__)
    for got, _ in readers:
        assert sorted(got) == list(range(STEPS))


def write_with_two_threads(rank: int, world_size: int, directory: Path) -> list[tuple[int, int]]:
    """Broadcast from two threads of rank 0; return what another rank has got, in order."""
    with world(rank, world_size, directory) as group, new_group(group) as it:
        it.enable_broadcaster()

        def write(thread: int) -> None:
            for number in range(STEPS):
                it.broadcast_object((thread, number))

        got: list[tuple[int, int]] = []
        if rank == 0:
            threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(SOON_S)
        else:
            got = [it.broadcast_object() for _ in range(2 * STEPS)]
        it.barrier()
        return got


@pytest.mark.parametrize("places", [["one", "one"], *PLACES], ids=str)
def test_threads_that_write_take_turns(places: list[str]) -> None:
    """Each message has the number of one call, and those of a thread come in order."""
    body = write_with_two_threads
    _, *readers = run_ranks(run_far, len(places), places, body.__module__, body.__qualname__)
    for got in readers:
        for thread in range(2):
            assert [number for of, number in got if of == thread] == list(range(STEPS))


def lease_beside_a_reader(rank: int, world_size: int, directory: Path) -> list[str]:
    """Take a message on loan while another thread waits in the group's own call; then drop another group."""
    with world(rank, world_size, directory) as group:
        it = new_group(group)
        it.enable_broadcaster()
        told: list[str] = []
        if rank == 0:
            it.barrier()
            it.broadcast_object("for the thread")
            it.broadcast_object([2])
        else:
            assert isinstance(it.mq_broadcaster, QueueReader)
            reader: Any = it.mq_broadcaster
            got: list[Any] = []
            waiting = threading.Thread(target=lambda: got.append(it.broadcast_object()))
            waiting.start()
            wait_until(lambda: reader.endpoint.is_busy, "the thread in its call")

            def borrow() -> None:
                try:
                    with it.mq_broadcaster.loan(SOON_S) as value:  # type: ignore[union-attr]
                        got.append(value)
                except UsageError as error:
                    told.append(str(error))

            borrowing = threading.Thread(target=borrow)
            borrowing.start()
            wait_until(lambda: told or sleeping_in("borrow"), "the second thread asleep or refused")
            it.barrier()
            waiting.join(SOON_S)
            borrowing.join(SOON_S)
            if told:
                assert got == ["for the thread"]
                borrow()
            assert sorted(got, key=str) == ["for the thread", [2]] or sorted(got, key=str) == [
                [2],
                "for the thread",
            ]
        it.barrier()
        it.destroy()
        return [*told, drop_without_collector(group)]


def drop_without_collector(group: GroupCoordinator) -> str:
    """Return whether a group that was destroyed is freed without the garbage collector."""
    it = new_group(group, "dropped")
    it.enable_broadcaster()
    assert it.broadcast_object([7]) == [7]
    it.barrier()
    it.destroy()
    gc.collect()
    gc.disable()
    alive = weakref.ref(it)
    del it
    gone = "collected" if alive() is None else "held"
    gc.enable()
    return gone


@pytest.mark.guarantee("B3")
def test_a_lease_beside_a_waiting_thread_harms_nothing(ranks2: RankPool) -> None:
    """`loan` raises a UsageError or gets its own message. A destroyed group is freed without the collector."""
    writer, reader = ranks2.run(lease_beside_a_reader)
    assert writer == ["collected"]
    assert reader[-1] == "collected"
    assert all("another thread" in text for text in reader[:-1])
