"""Collectives of torch over our groups that a signal handler, or a second thread, makes inside of another one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coordinator.errors import UsageError
from shm_broadcast.interruption import is_held
from tests.handlers import alarm
from tests.harness import RankPool
from tests.torch_groups import torch_world
from tests.waiting import wait_until
from tests.worlds import meet

CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(8)),
    "barrier": dist.barrier,
    "all_gather": lambda: dist.all_gather([torch.ones(8), torch.ones(8)], torch.ones(8)),
}


def refusal(call: Callable[[], Any]) -> str:
    """Return with which words a call is refused."""
    with pytest.raises(UsageError) as caught:
        call()
    return str(caught.value)


def is_taken(lock: Any) -> bool:
    """Return whether another thread holds a lock."""
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def nested(rank: int, world_size: int, directory: Path) -> None:
    """Let a handler of rank 0 make calls of the group in whose call it runs."""
    found: list[str] = []

    def handler() -> None:
        if not is_held(group._turn):
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # the call has not begun
            return
        found.extend(refusal(call) for call in CALLS.values())
        (directory / "handled").touch()

    with torch_world(rank, world_size, directory):
        group: Any = dist.group.WORLD
        if rank == 0:
            with alarm(0.3, handler):
                dist.all_reduce(torch.ones(8))
            assert len(found) == len(CALLS)
            assert all("inside of a collective of this group on the same thread" in text for text in found)
            for name, text in zip(CALLS, found, strict=True):
                assert text.startswith(f"{name} "), found
        else:
            wait_until((directory / "handled").exists, "the handler has come")
            dist.all_reduce(torch.ones(8))
        total = torch.ones(8)
        dist.all_reduce(total)
        assert total.tolist() == [world_size] * 8


@pytest.mark.guarantee("D10")
def test_a_call_of_torch_inside_of_another_is_refused(ranks2: RankPool) -> None:
    """It would wait for ever for its own thread; the outer call goes on."""
    ranks2.run(nested, timeout_s=60.0)


def in_turn(rank: int, world_size: int, directory: Path) -> None:
    """Let a thread of rank 0 make a call while another one waits in one."""
    with torch_world(rank, world_size, directory):
        if rank == 0:
            first = threading.Thread(target=lambda: dist.all_reduce(torch.ones(8)))
            first.start()
            group: Any = dist.group.WORLD
            wait_until(lambda: is_taken(group._turn), "the thread is in its call")
            short = dist.AllreduceOptions()
            short.timeout = timedelta(seconds=0.3)
            short.asyncOp = False
            start = time.monotonic()
            text = refusal(lambda: group.allreduce([torch.ones(8)], short))
            assert "another thread of this rank is in a collective" in text
            assert text.startswith("all_reduce "), text
            assert time.monotonic() - start >= 0.3
            meet(rank, range(world_size), directory, "refused")
            first.join()
        else:
            meet(rank, range(world_size), directory, "refused")
            dist.all_reduce(torch.ones(8))
        dist.barrier()


@pytest.mark.guarantee("D66")
def test_a_call_of_torch_waits_for_its_turn_within_its_own_deadline(ranks2: RankPool) -> None:
    """Not for as long as the call of the other thread may take."""
    ranks2.run(in_turn, timeout_s=60.0)
