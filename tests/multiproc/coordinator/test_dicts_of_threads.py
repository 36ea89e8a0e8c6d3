"""Threads of a rank that move tensor dicts or broadcast objects at the same time: each call gets what belongs to it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import CommTimeoutError, DisagreementError, UsageError
from tests.harness import RankPool
from tests.waiting import sleeping_in, wait_until
from tests.worlds import ApartPool, new_group, world

COUNT = 150
# Longer than what a message holds over Gloo.
ELEMENTS = 1 << 12
SWITCH_S = 1e-5


@contextmanager
def switching() -> Iterator[None]:
    """Let Python's threads follow each other as often as they can within the block."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def together(calls: list[Callable[[], object]]) -> None:
    """Make each call in a thread of its own; raise the first error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def made(number: int) -> dict[str, Any]:
    """Return a dict all of whose values carry its number."""
    return {"number": number, **{name: torch.full((ELEMENTS,), float(number)) for name in "abc"}}


def number_of(received: Any) -> int:
    """Return the number of a dict all of whose tensors carry it."""
    found = {received["number"], *(float(part) for name in "abc" for part in received[name].unique())}
    [number] = found
    return int(number)


def exchange(rank: int, world_size: int, directory: Path, threads: int) -> list[int] | None:
    """Send dicts, and plain tensors between them, with two threads; return the numbers of those that came."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group, switching():
        group.barrier()
        if rank == 0:

            def send(first: int) -> None:
                for number in range(first, first + COUNT):
                    group.send_tensor_dict(made(number), 1)

            def send_tensors() -> None:
                for number in range(COUNT):
                    group.send(torch.full((ELEMENTS,), -1.0 - number), 1)

            together([lambda: send(0), lambda: send(COUNT), send_tensors])
            group.barrier()
            return None
        numbers: list[int] = []

        def receive() -> None:
            numbers.extend(number_of(group.recv_tensor_dict(0)) for _ in range(2 * COUNT // threads))

        def receive_tensors() -> None:
            for number in range(COUNT):
                assert (group.recv((ELEMENTS,), torch.float32, 0) == -1.0 - number).all()

        together([*[receive] * threads, receive_tensors])
        group.barrier()
        return numbers


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host each"])
def test_dicts_of_two_threads_keep_their_tensors(ranks2: RankPool, apart: bool, threads: int) -> None:
    """Where the tensors follow the message, those of another thread do not come between; nor do plain tensors."""
    numbers = (ApartPool(ranks2) if apart else ranks2).run(exchange, threads, timeout_s=120.0)[1]
    assert numbers is not None
    assert sorted(numbers) == list(range(2 * COUNT))
    if threads == 1:
        for first in (0, COUNT):
            assert [each for each in numbers if first <= each < first + COUNT] == list(
                range(first, first + COUNT)
            )


def broadcast(rank: int, world_size: int, directory: Path) -> list[int]:
    """Broadcast dicts from rank 0 with two threads, received by two threads; return the numbers that came."""
    numbers: list[int] = []
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group, switching():
        group.barrier()

        def run(first: int) -> None:
            mine = (None if rank else made(number) for number in range(first, first + COUNT))
            numbers.extend(number_of(group.broadcast_tensor_dict(each, 0)) for each in mine)

        together([lambda: run(0), lambda: run(COUNT)])
        group.barrier()
    return numbers


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host each"])
def test_dicts_that_two_threads_broadcast_keep_their_tensors(ranks2: RankPool, apart: bool) -> None:
    """As those that go to one rank."""
    for numbers in (ApartPool(ranks2) if apart else ranks2).run(broadcast, timeout_s=120.0):
        assert sorted(numbers) == list(range(2 * COUNT))


def refuse(rank: int, world_size: int, directory: Path) -> list[int]:
    """Broadcast objects with one thread of rank 0, and with another one some that cannot be sent."""
    numbers: list[int] = []
    refused: list[BaseException] = []
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group, switching():
        group.barrier()

        def run(is_refused: bool) -> None:
            for number in range(COUNT):
                obj: Any = None if rank else object() if is_refused else number
                try:
                    numbers.append(group.broadcast_object(obj, 0))
                except (DisagreementError, UsageError) as error:
                    refused.append(error)

        together([lambda: run(False), lambda: run(True)])
        kind = DisagreementError if rank else UsageError
        assert [type(each) for each in refused] == [kind] * COUNT
        group.barrier()
        assert group.broadcast_object(rank, 0) == 0
    return numbers


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host each"])
def test_broadcasts_that_one_thread_refuses_hurt_none_of_another(ranks2: RankPool, apart: bool) -> None:
    """Each refusal takes one number, whatever the other thread calls meanwhile."""
    source, receiver = (ApartPool(ranks2) if apart else ranks2).run(refuse, timeout_s=120.0)
    assert source == list(range(COUNT))
    assert sorted(receiver) == source


def late(rank: int, world_size: int, directory: Path) -> None:
    """Let a second thread of rank 1 give up its turn, while the first one waits for the object of rank 0."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 0:
            wait_until((directory / "late").exists, "the second thread")
            assert group.broadcast_object("first", 0) == "first"
        else:
            found: list[Any] = []
            first = threading.Thread(target=lambda: found.append(group.broadcast_object(None, 0)))
            first.start()
            wait_until(lambda: sleeping_in("receive"), "the first thread")
            start = time.monotonic()
            with pytest.raises(CommTimeoutError, match="another thread is inside of a broadcast") as caught:
                group.broadcast_object(None, 0, timeout_s=0.5)
            assert time.monotonic() - start >= 0.5
            assert caught.value.missing == ()
            (directory / "late").touch()
            first.join()
            assert found == ["first"]
        assert group.broadcast_object("second" if rank == 0 else None, 0) == "second"


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host each"])
def test_a_broadcast_behind_that_of_another_thread_waits_for_its_turn_within_its_deadline(
    ranks2: RankPool, apart: bool
) -> None:
    """It has no number then: the call of the other thread, and the next one, get the right objects."""
    (ApartPool(ranks2) if apart else ranks2).run(late, timeout_s=60.0)
