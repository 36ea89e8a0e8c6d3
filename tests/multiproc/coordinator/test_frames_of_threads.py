"""Objects over Gloo that take two messages each, from and to several threads of a rank, and in a signal handler."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coordinator import GroupCoordinator, UsageError
from coordinator.host.gloo import FIRST_BYTES
from device_comm.health import GroupHealth
from tests.harness import RankPool
from tests.waiting import sleeping_in, wait_until
from tests.worlds import ApartPool, world

COUNT = 8


class SlowBackend:
    """A Gloo backend that calls `between` behind every send and receive that it posts."""

    def __init__(self, backend: Any, between: Callable[[], None]) -> None:
        self._backend = backend
        self._between = between

    def __getattr__(self, name: str) -> Any:
        """Return what the backend has."""
        return getattr(self._backend, name)

    def send(self, *args: Any) -> Any:
        """Post a send."""
        work = self._backend.send(*args)
        self._between()
        return work

    def recv(self, *args: Any) -> Any:
        """Post a receive."""
        work = self._backend.recv(*args)
        self._between()
        return work


def slow(group: GroupCoordinator, between: Callable[[], None]) -> None:
    """Let the group's host plane call `between` behind whatever it posts."""
    plane: Any = group._host
    plane._open_backend = SlowBackend(plane._open_backend, between)


def in_threads(*targets: Callable[[], None]) -> None:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def exchange(rank: int, world_size: int, directory: Path) -> None:
    """Send from two threads, and receive in two threads; each object is longer than a first message."""
    with world(rank, world_size, directory) as group:
        group.barrier()
        slow(group, lambda: time.sleep(0.002))
        got: list[bytes] = []

        def send(value: int) -> None:
            for _ in range(COUNT):
                group.send_object(bytes([value]) * (FIRST_BYTES + 1000 * value), 1, timeout_s=60.0)

        def receive() -> None:
            got.extend(group.recv_object(0, timeout_s=60.0) for _ in range(COUNT))

        if rank == 0:
            in_threads(lambda: send(1), lambda: send(2))
        else:
            in_threads(receive, receive)
            assert sorted(each[0] for each in got) == [1] * COUNT + [2] * COUNT
            assert all(each == bytes([each[0]]) * (FIRST_BYTES + 1000 * each[0]) for each in got)


def test_long_objects_of_several_threads_do_not_mix(ranks2: RankPool) -> None:
    """Each arrives whole, with two threads that send to one rank and two that receive there."""
    ApartPool(ranks2).run(exchange)


def within(rank: int, world_size: int, directory: Path) -> None:
    """Make a call where a signal handler would, between the two messages of an object."""
    with world(rank, world_size, directory) as group:
        group.barrier()
        struck: list[bool] = []

        def strike() -> None:
            if not struck:
                struck.append(True)
                with pytest.raises(UsageError, match=f"a signal handler cannot .* rank {1 - rank}"):
                    group.send_object(b"x", 1) if rank == 0 else group.recv_object(0)

        slow(group, strike)
        for value in (b"1", b"2"):
            if rank == 0:
                group.send_object(value * 2 * FIRST_BYTES, 1)
            else:
                assert group.recv_object(0) == value * 2 * FIRST_BYTES
        assert struck
        group.barrier()


def test_a_signal_handler_within_an_object_is_refused(ranks2: RankPool) -> None:
    """It raises `UsageError`; the object that it interrupted arrives, and so does the next one."""
    ApartPool(ranks2).run(within)


def shared_deadline(rank: int, world_size: int, directory: Path) -> None:
    """Let each wait of an object take some time, and look at what the next one may take."""
    limits: list[float] = []
    wait, slow_s = GroupHealth.wait, 0.3

    def slow_wait(health: GroupHealth, operation: Any, work: Any, timeout_s: float | None) -> None:
        wait(health, operation, work, timeout_s)
        time.sleep(slow_s)
        assert timeout_s is not None
        limits.append(timeout_s)

    with world(rank, world_size, directory) as group:
        group.barrier()
        turns = (group._host._receiving if rank else group._host._sending)._turns  # type: ignore[attr-defined]
        held = threading.Event()

        def hold() -> None:
            """Do as a thread that is between the two messages of its own object."""
            [turn] = turns.values()
            with turn.lock:
                held.set()
                wait_until(lambda: sleeping_in("poll"), "the call")

        # The turns are made by the first object.
        message = bytes(2 * FIRST_BYTES)
        for _ in range(2):
            with mock.patch.object(GroupHealth, "wait", slow_wait):
                if turns:
                    holder = threading.Thread(target=hold)
                    holder.start()
                    assert held.wait(20.0)
                    limits.clear()
                if rank:
                    assert group.recv_object(0, timeout_s=30.0) == message
                else:
                    group.send_object(message, 1, timeout_s=30.0)
        holder.join()
        # A sender waits for its turn and for the receiver; a receiver for its turn, the first message and the rest.
        assert len(limits) == 2 + rank
        assert all(after <= before - slow_s for before, after in itertools.pairwise(limits))
        group.barrier()


def test_the_waits_of_an_object_share_its_deadline(ranks2: RankPool) -> None:
    """A call that waits for its turn, and then for the other rank, does not begin its deadline again."""
    ApartPool(ranks2).run(shared_deadline)
