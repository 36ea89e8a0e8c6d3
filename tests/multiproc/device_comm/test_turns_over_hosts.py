"""Collectives of CPU tensors over several hosts: of two threads, inside of each other, and refused by one rank."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest import mock

import pytest
import torch

from coordinator import DisagreementError, GroupBrokenError, UsageError
from device_comm.stages import Turns, _Claim
from shm_broadcast.errors import CommError
from tests.harness import RankPool
from tests.unit.device_comm.test_health import Group
from tests.waiting import wait_until
from tests.worlds import ApartPool, HostsPool, meet, new_group, tell_when_waiting, world

LARGE = 400_001  # elements, of which leaders swap several pieces


def in_turn(rank: int, world_size: int, directory: Path, elements: int) -> None:
    """Let two threads of rank 0 make a call each while the others are away; those make both in one thread."""
    total = float(sum(range(1, world_size + 1)))
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:

        def add(limit_s: float | None = None) -> list[float]:
            tensor = torch.full((elements,), float(rank + 1))
            found: list[float] = group.all_reduce(tensor, timeout_s=limit_s).unique().tolist()
            return found

        if rank:
            meet(rank, range(world_size), directory, "both wait")
            assert [add(), add()] == [[total], [total]]
            return
        results: list[list[float]] = []
        threads = [threading.Thread(target=lambda: results.append(add())) for _ in range(2)]
        tell_when_waiting(group, directory, "first waits")
        threads[0].start()
        wait_until((directory / "first waits-0").exists, "the first thread waits")
        start = time.monotonic()
        with pytest.raises(UsageError, match="^all_reduce .*another thread of this rank is in a collective"):
            add(0.3)
        assert time.monotonic() - start >= 0.3
        threads[1].start()
        time.sleep(0.1)  # it may also come later, but usually waits by now
        meet(rank, range(world_size), directory, "both wait")
        for thread in threads:
            thread.join()
        assert results == [[total], [total]]


@pytest.mark.guarantee("D66")
@pytest.mark.parametrize("places", ["AB", pytest.param("AAB", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("elements", [1, pytest.param(LARGE, marks=pytest.mark.thorough)])
def test_a_call_of_a_second_thread_waits_for_its_turn(places: str, elements: int) -> None:
    """It is made when the first thread's call is done; its deadline passes meanwhile, and leaves the group intact."""
    with RankPool(len(places), brief=True) as pool:
        HostsPool(pool, places).run(in_turn, elements)


def nested(rank: int, world_size: int, directory: Path) -> None:
    """Let a handler of rank 0 make calls of the group whose call it interrupts; none of them is made."""
    refused: list[str] = []
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:

        def handle(_number: int, _frame: FrameType | None) -> None:
            arguments: tuple[Any, ...] = (torch.ones(2), "no tensor")
            for argument in arguments:
                with pytest.raises(UsageError) as caught:
                    group.all_reduce(argument)
                refused.append(str(caught.value))

        if rank == 0:
            signal.signal(signal.SIGALRM, handle)
            tell_when_waiting(group, directory, "waits")
            interrupter = threading.Thread(
                target=_interrupt, args=(directory / "waits-0", threading.get_ident())
            )
            interrupter.start()
        else:
            wait_until((directory / "told-0").exists, "the handler has come")
        assert group.all_reduce(torch.full((LARGE,), 1.0)).unique().tolist() == [world_size]
        if rank == 0:
            interrupter.join()
            assert "inside of a collective of this group on the same thread" in refused[0]
            assert refused[0].startswith("all_reduce "), refused
            assert "str" in refused[1]
        for step in range(3):
            assert group.all_reduce(torch.tensor(float(step))).item() == world_size * step


def _interrupt(mark: Path, thread: int) -> None:
    """Send a signal to `thread` once it waits, and let the others come then."""
    wait_until(mark.exists, "the call waits")
    signal.pthread_kill(thread, signal.SIGALRM)
    (mark.parent / "told-0").touch()


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("places", ["AAB", pytest.param("AB", marks=pytest.mark.thorough)])
def test_a_call_inside_of_another_is_refused_and_the_outer_one_goes_on(places: str) -> None:
    """Neither a call that would be right nor one that is refused anyway takes a place among the calls."""
    with RankPool(len(places), brief=True) as pool:
        HostsPool(pool, places).run(nested)


def differ(rank: int, world_size: int, directory: Path, how: str) -> list[str]:
    """Let rank 0 refuse a call, or make it with no elements, and go on as if nothing had been."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 0 and how == "refuses":
            with pytest.raises(UsageError):
                group.all_reduce(torch.ones(4), cast("Any", "bogus"))
        elif rank == 0:
            group.all_reduce(torch.ones(0))
        found: list[str] = []
        for step in range(3):
            try:
                group.all_reduce(torch.full((4,), float(rank + step)))
                found.append("a sum")
            except CommError as error:
                found.append(type(error).__name__)
        return found


@pytest.mark.guarantee("D69")
@pytest.mark.parametrize("how", ["refuses", "makes an empty call"])
def test_calls_of_different_numbers_are_never_combined(ranks2: RankPool, how: str) -> None:
    """Between hosts they break the group: the other rank makes another call than this one, which has gone on."""
    for found in ApartPool(ranks2).run(differ, how):
        assert found == ["DisagreementError", "GroupBrokenError", "GroupBrokenError"]


def refuse_alike(rank: int, world_size: int, directory: Path) -> Any:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        with pytest.raises(UsageError):
            group.all_reduce(torch.ones(4), cast("Any", "bogus"))
        return group.all_reduce(torch.tensor(float(rank))).item()


@pytest.mark.guarantee("D69")
def test_a_call_that_all_ranks_refuse_is_none(ranks3: RankPool) -> None:
    """Those that share a host's memory and those that are alone count it alike."""
    assert HostsPool(ranks3, "AAB").run(refuse_alike) == [3.0] * 3


def test_a_claim_that_a_handler_has_left_behind_holds_up_nobody() -> None:
    """What it raises at the very end of a call, before the claim is gone, leaves that in the line."""
    turns = Turns(Group().health, "device")

    def left_behind() -> None:
        claim = _Claim()
        turns._claims.append(claim)

    left_behind()
    thread = threading.Thread(target=left_behind)
    thread.start()
    thread.join()
    assert len(turns._claims) == 2
    assert turns.make("all_reduce", lambda operation, _end: operation.number, 5.0) == 1
    turns.refuse("reason")
    assert turns.make("all_reduce", lambda operation, _end: operation.number, 5.0) == 3
    assert not turns._claims


def test_a_refusal_beside_a_call_takes_the_number_behind_it() -> None:
    """That of a thread which is in no call; the call itself begins and ends with its own number."""
    turns = Turns(Group().health, "device")

    def stages(operation: Any, _end: float) -> int:
        thread = threading.Thread(target=turns.refuse, args=("reason",))
        thread.start()
        thread.join()
        turns.refuse("of this thread, inside of its call")
        return int(operation.number)

    assert [turns.make("all_reduce", stages, 5.0) for _ in range(2)] == [1, 3]
    assert not turns._claims
    assert not turns._refusals


def test_who_waits_for_a_turn_learns_that_the_group_has_broken() -> None:
    """It does not wait for its deadline."""
    group = Group()
    turns = Turns(group.health, "device")
    found: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(GroupBrokenError) as caught:
            turns.make("all_reduce", lambda _operation, _end: None, 60.0)
        found.append(caught.value)

    def stages(_operation: object, _end: float) -> None:
        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: len(turns._claims) == 2, "the second thread waits")
        group.health.fail(DisagreementError("different calls", views={}))
        thread.join(20.0)
        assert found

    turns.make("all_reduce", stages, 60.0)


def test_a_call_whose_thread_leaves_a_generator_meanwhile_counts_as_going_on() -> None:
    """A generator that has yielded has no calling frame, so whoever walks from it learns nothing of the call."""
    claim = _Claim()
    steps: Any = (step for step in range(2))
    next(steps)
    with mock.patch.object(sys, "_current_frames", return_value={claim.thread: steps.gi_frame}):
        assert claim.is_live()
    assert not claim.is_live()
