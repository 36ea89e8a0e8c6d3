"""Finalizers that call a group inside of a call of their own thread: refused or served, and nothing is lost."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import GroupCoordinator, UsageError
from tests.finalizers import KINDS, collecting, finalize
from tests.harness import RankPool
from tests.multiproc.coordinator.test_receive_handlers import number_of, tensor
from tests.samples import sampled
from tests.waiting import wait_until
from tests.worlds import new_group, world

Call = Callable[[GroupCoordinator, int], Any]
RANKS = range(2)
# A refusal waits for nothing; a busy machine may take this long.
AT_ONCE_S = 2.0
# Elements of a tensor that is longer than a channel.
LONG = 1 << 20
# How many calls wait while the collector runs.
WAITS = 20
# What their calls send where they are served, and what is sent last.
NESTED, END = 1000, 2000


def long(number: int) -> torch.Tensor:
    """Return a long tensor that carries a number."""
    return torch.full((LONG,), float(number))


def summed(group: GroupCoordinator, number: int) -> Any:
    """Return the sum of the numbers of both ranks, halved: each rank passes the same."""
    return group.all_reduce(torch.full((4,), float(number))) / 2


def done(_nothing: None, number: int) -> int:
    """Return the number of a call that returns nothing."""
    return number


# What rank 1 calls, twice where it is not refused, and what rank 0 does for it; and by what name a call is refused.
CALLS: dict[str, tuple[Call, Call, str]] = {
    "recv": (
        lambda group, _: group.recv((4,), torch.float32, 0),
        lambda group, number: group.send(tensor(number), 1),
        "recv",
    ),
    "recv_any": (
        lambda group, _: group.recv_any((4,), torch.float32)[0],
        lambda group, number: group.send(tensor(number), 1),
        "recv_any",
    ),
    "recv_object": (
        lambda group, _: group.recv_object(0),
        lambda group, number: group.send_object(number, 1),
        "recv_object",
    ),
    "recv_tensor_dict": (
        lambda group, _: group.recv_tensor_dict(0),
        lambda group, number: group.send_tensor_dict({"number": number, "tensor": tensor(number)}, 1),
        "recv_tensor_dict",
    ),
    "send": (
        lambda group, number: done(group.send(long(number), 0), number),  # type: ignore[func-returns-value]
        lambda group, number: check(group.recv((LONG,), torch.float32, 1), number),
        "send",
    ),
    "send_object": (
        lambda group, number: done(group.send_object([number, bytes(4 * LONG)], 0), number),
        lambda group, number: check(group.recv_object(1), number),
        "send_object",
    ),
    "broadcast_object": (
        lambda group, _: group.broadcast_object(),
        lambda group, number: group.broadcast_object(number),
        "broadcast_object",
    ),
    "all_reduce": (summed, summed, "all_reduce"),
    "barrier": (
        lambda group, number: done(group.barrier(), number),
        lambda group, _: group.barrier(),
        "barrier",
    ),
    "all_gather_object": (
        lambda group, number: group.all_gather_object(number)[0],
        lambda group, number: group.all_gather_object(number),
        "all_gather_object",
    ),
}


def check(received: Any, number: int) -> None:
    """Check what has come, from its first to its last element."""
    assert number_of(received) == number
    if isinstance(received, torch.Tensor):
        assert (received == float(number)).all()


def refused_in_a_wait(
    rank: int, world_size: int, directory: Path, name: str, kind: str, by_queue: bool
) -> Any:
    """Drop an object in the wait of rank 1, whose finalizer makes the same call; return what that raised, and when."""
    call, other, _ = CALLS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if by_queue:
            group.enable_broadcaster()
        if rank == 0:
            wait_until((directory / "refused").exists, "the finalizer")
            for number in (5, 6):
                other(group, number)
            group.barrier()
            return None
        outcomes: list[Any] = []

        def nested() -> None:
            start = time.monotonic()
            try:
                outcomes.append(f"served: {call(group, 9)}")
            except UsageError as error:
                outcomes.append(str(error))
            outcomes.append(time.monotonic() - start)
            (directory / "refused").touch()

        health: Any = group._health
        look = health.check_peers

        def drop_and_look(operation: Any) -> None:
            if not outcomes:
                finalize(kind, nested)
            look(operation)

        health.check_peers = drop_and_look
        found = [number_of(call(group, number)) for number in (5, 6)]
        group.barrier()
        return [*outcomes, found]


@pytest.mark.guarantee("R15", "D10")
@pytest.mark.parametrize(
    ("name", "kind", "by_queue"),
    sampled(
        2,
        [(*case, False) for case in product(CALLS, KINDS)]
        + [("broadcast_object", kind, True) for kind in KINDS],
    ),
)
def test_a_finalizer_that_calls_inside_of_a_waiting_call_is_refused(
    ranks2: RankPool, name: str, kind: str, by_queue: bool
) -> None:
    """It gets an error that names its call, at once; the call in which it ran goes on, and so does the next one."""
    text, seconds, found = ranks2.run(refused_in_a_wait, name, kind, by_queue)[1]
    where = "dequeue on queue 'tp:0/1'" if by_queue else f"{CALLS[name][2]} "
    assert text.startswith(where), text
    assert (
        "as in a signal handler or a finalizer" in text or "called by a signal handler or a finalizer" in text
    )
    assert seconds < AT_ONCE_S
    assert found == [5, 6]


def refused_by_the_collector(rank: int, world_size: int, directory: Path, name: str) -> Any:
    """Let the collector run as often as it can in the waits of rank 1; return what its finalizers' calls raised."""
    call, other, _ = CALLS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        group.barrier()
        if rank == 0:
            sent: list[int] = []
            for number in range(WAITS):
                time.sleep(0.13)  # longer than a wait goes on before it looks around
                if name == "send_object":
                    sent.append(number_of(group.recv_object(1)))
                else:
                    other(group, number)
            while name == "send_object" and sent[-1] != END:
                sent.append(number_of(group.recv_object(1)))
            group.barrier()
            return sent
        texts: list[str] = []
        served: list[int] = []
        waiting: list[str] = []
        health: Any = group._health
        wait = health.wait

        def mark_and_wait(*arguments: Any, **options: Any) -> None:
            waiting.append("")
            try:
                # A wait for a collective makes too little for the collector of Python 3.12 and later to come by itself.
                gc.collect(0)
                wait(*arguments, **options)
            finally:
                waiting.clear()

        def nested() -> bool:
            # One at a time: what the refused call makes may let the collector run, too.
            if waiting and len(waiting) == 1:
                waiting.append("")
                try:
                    served.append(number_of(call(group, NESTED)))
                except UsageError as error:
                    texts.append(str(error))
                finally:
                    del waiting[1:]
            return True

        health.wait = mark_and_wait
        with collecting(nested):
            found = [number_of(call(group, number)) for number in range(WAITS)]
        health.wait = wait
        if name == "send_object":
            group.send_object([END], 0)
        group.barrier()
        return [texts, found, served]


@pytest.mark.slow
@pytest.mark.guarantee("R15", "D10")
@pytest.mark.parametrize("name", ["recv", "send_object", "all_reduce"])
def test_no_call_of_the_collector_disturbs_the_one_that_waits(ranks2: RankPool, name: str) -> None:
    """Its finalizers are refused while that call goes on, and what is awaited comes once each and in order."""
    sent, (texts, found, served) = ranks2.run(refused_by_the_collector, name)
    assert found == list(range(WAITS))
    if name == "send_object":
        # One that comes behind the last byte, and before the call returns, follows it.
        assert [number for number in sent if number != NESTED] == [*found, END]
        assert sent.count(NESTED) == len(served)
    else:
        assert served == []
    assert len(texts) >= WAITS
    assert all(text.startswith(f"{name} ") and "a finalizer" in text for text in texts), texts
