"""Collectives over Gloo that two threads of a rank make, or that a signal handler makes inside of another one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from coordinator import GroupCoordinator, UsageError
from tests.harness import RankPool
from tests.waiting import wait_until
from tests.worlds import ApartPool, meet, tell_when_waiting, world

# An object whose frame takes a second round.
LARGE = bytes(20_000)

Call = Callable[..., Any]

CALLS: dict[str, Call] = {
    "barrier": lambda group, **how: group.barrier(**how),
    "all_gather_object": lambda group, **how: group.all_gather_object(LARGE, **how) == [LARGE] * 2,
    "all_sum": lambda group, **how: group.all_sum(group.rank, **how).item() == 1,
    "all_reduce": lambda group, **how: group.all_reduce(torch.ones(3), **how).tolist() == [2.0] * 3,
    "all_to_all": lambda group, **how: group.all_to_all(torch.ones(4), **how).tolist() == [1.0] * 4,
}


def plain_group(everyone: GroupCoordinator) -> GroupCoordinator:
    """Return a group of two hosts, or of one without shared memory, whose two planes are Gloo's."""
    return GroupCoordinator([everyone.ranks], everyone.local_rank, "gloo", False, group_name="g")


def in_turn(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let two threads of rank 0 make a call each while rank 1 is away, which makes both in one thread."""
    call = CALLS[name]
    with world(rank, world_size, directory) as everyone:
        group = plain_group(everyone)
        if rank:
            meet(rank, range(world_size), directory, "both wait")
            for _ in range(2):
                assert call(group) in (None, True)
        else:
            found: list[Any] = []
            threads = [threading.Thread(target=lambda: found.append(call(group))) for _ in range(2)]
            tell_when_waiting(group, directory, "first waits")
            threads[0].start()
            wait_until((directory / "first waits-0").exists, "the first thread waits")
            start = time.monotonic()
            # The collective that waits for its turn: a sum is an all-gather of the ranks' numbers.
            waiting = "all_gather_object" if name == "all_sum" else name
            with pytest.raises(
                UsageError, match=f"^{waiting} .*another thread of this rank is in a collective"
            ):
                call(group, timeout_s=0.3)
            assert time.monotonic() - start >= 0.3
            threads[1].start()
            time.sleep(0.1)  # it may also come later, but usually waits by now
            meet(rank, range(world_size), directory, "both wait")
            for thread in threads:
                thread.join()
            assert found in ([None] * 2, [True] * 2)
        assert call(group) in (None, True)
        group.destroy()


@pytest.mark.guarantee("D66")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_second_thread_over_gloo_waits_for_its_turn(ranks2: RankPool, name: str) -> None:
    """It is made when the first thread's call is done; its deadline passes meanwhile, and leaves the group intact."""
    ApartPool(ranks2).run(in_turn, name, timeout_s=60.0)


def nested(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let a handler of rank 0 make the call in which it runs, and a wrong one; neither is made."""
    call, refused = CALLS[name], list[str]()
    with world(rank, world_size, directory) as everyone:
        group = plain_group(everyone)

        def handle(_number: int, _frame: FrameType | None) -> None:
            with pytest.raises(UsageError) as caught:
                call(group)
            refused.append(str(caught.value))
            # A wrong call of the same plane.
            wrong: Call = group.all_reduce if name in ("all_reduce", "all_to_all") else group.all_sum
            with pytest.raises(UsageError):
                wrong("no number")
            (directory / "handled").touch()

        if rank == 0:
            before = signal.signal(signal.SIGALRM, handle)
            tell_when_waiting(group, directory)
            own = threading.get_ident()

            def interrupt() -> None:
                wait_until((directory / "waits-0").exists, "the call waits")
                signal.pthread_kill(own, signal.SIGALRM)

            interrupter = threading.Thread(target=interrupt)
            interrupter.start()
        else:
            wait_until((directory / "handled").exists, "the handler has come")
        assert call(group) in (None, True)
        if rank == 0:
            interrupter.join()
            signal.signal(signal.SIGALRM, before)
            assert len(refused) == 1
            assert "inside of a collective of this group on the same thread" in refused[0]
            assert refused[0].startswith(f"{name} "), refused
        # A call that was counted on one rank, or paired wrongly, would be in the way of these.
        for step in range(3):
            assert group.all_gather_object(step) == [step] * 2
            assert group.all_reduce(torch.tensor(float(step))).item() == 2 * step
        group.destroy()


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_over_gloo_inside_of_another_is_refused(ranks2: RankPool, name: str) -> None:
    """The outer call goes on, and the refused one takes no number."""
    ApartPool(ranks2).run(nested, name, timeout_s=60.0)
