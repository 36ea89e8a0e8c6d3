"""Threads of one rank that call a group's collectives at the same time: one waits for the other."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import DisagreementError, GroupCoordinator, UsageError
from tests.harness import RankPool
from tests.waiting import wait_until
from tests.worlds import meet, new_group, tell_when_waiting, world

CALLS: dict[str, Callable[[GroupCoordinator, float | None], Any]] = {
    "all_reduce": lambda group, limit_s: group.all_reduce(torch.tensor([2.0]), timeout_s=limit_s).tolist(),
    "all_reduce_": lambda group, limit_s: group.all_reduce_(torch.tensor([2.0]), timeout_s=limit_s).tolist(),
    "all_gather": lambda group, limit_s: group.all_gather(torch.tensor([2.0]), timeout_s=limit_s).tolist(),
    "broadcast": lambda group, limit_s: group.broadcast(torch.tensor([2.0]), timeout_s=limit_s).tolist(),
    "barrier": lambda group, limit_s: group.barrier(timeout_s=limit_s),
}
RESULTS = {
    "all_reduce": [4.0],
    "all_reduce_": [4.0],
    "all_gather": [2.0, 2.0],
    "broadcast": [2.0],
    "barrier": None,
}


def in_turn(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let two threads of rank 0 make a call each while rank 1 is away; rank 1 makes both in one thread."""
    # Barriers and tensors have a plane each: a call waits only for one on its own plane.
    begin = "barrier" if name == "barrier" else "all_reduce"
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 1:
            meet(rank, range(world_size), directory, "both wait")
            assert CALLS[begin](group, None) == RESULTS[begin]
            assert CALLS[name](group, None) == RESULTS[name]
            return
        first: list[Any] = []
        tell_when_waiting(group, directory, "first waits")
        thread = threading.Thread(target=lambda: first.append(CALLS[begin](group, None)))
        thread.start()
        wait_until((directory / "first waits-0").exists, "the first thread waits")
        start = time.monotonic()
        with pytest.raises(UsageError, match=f"^{name} .*another thread of this rank is in a collective"):
            CALLS[name](group, 0.3)
        assert 0.3 <= time.monotonic() - start < 5.0
        second: list[Any] = []
        other = threading.Thread(target=lambda: second.append(CALLS[name](group, None)))
        other.start()
        time.sleep(0.1)  # it may also come later, but usually waits by now
        meet(rank, range(world_size), directory, "both wait")
        thread.join()
        other.join()
        assert (first, second) == ([RESULTS[begin]], [RESULTS[name]])


@pytest.mark.guarantee("D66")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_second_thread_waits_for_its_turn(ranks2: RankPool, name: str) -> None:
    """It is made when the first thread's call is done; its deadline passes meanwhile, and leaves the group intact."""
    ranks2.run(in_turn, name)


REFUSED: dict[str, Callable[[GroupCoordinator], Any]] = {
    "all_reduce": lambda group: group.all_reduce("tensor"),  # type: ignore[call-overload]
    "barrier": lambda group: group.barrier(-1.0),
}


def refuse_beside(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let a second thread of rank 0 refuse two calls while the first is in one; then rank 1 makes all three."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 1:
            meet(rank, range(world_size), directory, "refused")
            assert CALLS[name](group, None) == RESULTS[name]
            for _ in range(2):
                with pytest.raises(DisagreementError, match=f"rank 0 refused {name}: ") as told:
                    CALLS[name](group, None)
                assert list(told.value.views) == [0, 1]
        else:
            first: list[Any] = []
            tell_when_waiting(group, directory, "first waits")
            thread = threading.Thread(target=lambda: first.append(CALLS[name](group, None)))
            thread.start()
            wait_until((directory / "first waits-0").exists, "the first thread waits")
            for _ in range(2):
                with pytest.raises(UsageError):
                    REFUSED[name](group)
            # A turn that did not come is no call: it takes no number.
            with pytest.raises(UsageError, match=f"^{name} .*another thread of this rank is in a collective"):
                CALLS[name](group, 0.1)
            meet(rank, range(world_size), directory, "refused")
            thread.join()
            assert first == [RESULTS[name]]
        for step in range(3):
            assert group.all_reduce(torch.tensor(float(step))).item() == 2.0 * step
            assert group.all_gather_object(step) == [step] * world_size


@pytest.mark.guarantee("D66")
@pytest.mark.guarantee("D69")
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_beside_a_call_of_another_thread_takes_the_next_number(ranks2: RankPool, name: str) -> None:
    """The other rank raises in the same calls, with the reason; every later call has the right result."""
    ranks2.run(refuse_beside, name)


def one_after_the_other(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        results: list[float] = []

        def call(step: int) -> None:
            results.append(group.all_reduce(torch.tensor(float(step))).item())
            group.barrier()

        for step in range(20):
            thread = threading.Thread(target=call, args=(step,))
            thread.start()
            thread.join()
        assert results == [2.0 * step for step in range(20)]


@pytest.mark.guarantee("D66")
def test_successive_calls_may_come_from_different_threads(ranks2: RankPool) -> None:
    """No thread owns a group."""
    ranks2.run(one_after_the_other)
