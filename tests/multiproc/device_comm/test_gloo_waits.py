"""Waits for messages over Gloo that end although Gloo tells them nothing: those whose bytes were being copied."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from coordinator import CommError, GroupCoordinator, NativeError
from coordinator.host.open_sends import OpenSends
from device_comm.gloo import waits
from device_comm.gloo.waits import end_wait
from device_comm.handles import PointToPointHandle
from device_comm.works import WaiterThreads
from tests.handlers import Interrupt, alarm
from tests.harness import RankPool
from tests.waiting import sleeping_in, wait_until
from tests.worlds import ApartPool, meet, new_group, world

# A message whose copy takes a tenth of a second or more.
LONG = 1 << 26
SENT = 1.0
ROUNDS = 4
HANG_S = 60.0
DEADLINE_S = 5.0
TAG = 7
FOREVER = timedelta(hours=1)


def ended_waits(rank: int, world_size: int, directory: Path) -> list[list[bool]]:
    """Wait for messages that the other rank never takes or sends; return who was told, and what the waits returned."""
    told: list[bool] = []
    returned: list[bool] = []
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 0:
            works = [
                dist.irecv(torch.empty(4), 1, group.cpu_group, TAG),
                dist.isend(torch.ones(LONG), 1, group.cpu_group, TAG + 1),
            ]
            for work in works:
                assert work is not None

                def wait(work: dist.Work = work) -> None:
                    returned.append(work.wait(FOREVER))

                waiter = threading.Thread(target=wait)
                waiter.start()
                wait_until(lambda: sleeping_in("wait"), "the wait")
                told.append(end_wait(work))
                waiter.join()
            gathered = dist.all_reduce(torch.ones(1), group=group.cpu_group, async_op=True)
            told.append(end_wait(gathered))
        else:
            dist.all_reduce(torch.ones(1), group=group.cpu_group)
        meet(rank, range(world_size), directory, "end")
    return [told, returned]


def test_a_wait_for_a_message_can_be_ended(ranks2: RankPool) -> None:
    """It returns that there was none, whether it sends or receives. What is no message of Gloo's is left alone."""
    assert ApartPool(ranks2).run(ended_waits)[0] == [[True, True, False], [False, False]]


def broken_in_a_copy(rank: int, world_size: int, directory: Path, struck: int) -> list[bool]:
    """Let a handler of one rank raise while a long message is copied; return for each round whether it came so."""
    found: list[bool] = []
    with world(rank, world_size, directory) as everyone:
        pids = everyone.all_gather_object(os.getpid())
        for round_ in range(ROUNDS):
            group = new_group(everyone, f"g{round_}")
            content = torch.full((LONG,), float(rank == 0))
            lasts: list[float] = []

            def strike_in_the_copy(content: torch.Tensor = content, lasts: list[float] = lasts) -> None:
                ends = content[:: LONG - 1]  # its first element and its last one
                while ends[0] != SENT:
                    pass
                os.kill(pids[struck], signal.SIGALRM)
                lasts.append(float(ends[1]))

            def transfer(group: GroupCoordinator = group, content: torch.Tensor = content) -> None:
                if rank == 0:
                    group.send(content, 1)
                else:
                    group.irecv(content, 0).wait()
                # One whose call was over before it was told is told here.
                group.recv((1,), torch.float32, 1 - rank)

            with alarm(HANG_S, strikes):  # this sets the handler; the signal comes earlier
                everyone.barrier()
                watch = threading.Thread(target=strike_in_the_copy)
                if rank == 1:
                    watch.start()
                with pytest.raises((Interrupt, CommError)):
                    transfer()
                if rank == 1:
                    watch.join()
            found += [last != SENT for last in lasts]
            group.destroy()
            meet(rank, range(world_size), directory, f"end-{round_}")
    return found


def strikes() -> None:
    """Do what a handler of the application may do."""
    raise Interrupt


@pytest.mark.guarantee("G9")
@pytest.mark.slow
@pytest.mark.parametrize("struck", [0, 1])
def test_a_group_that_breaks_while_a_message_is_copied_leaves_nothing(ranks2: RankPool, struck: int) -> None:
    """No thread waits for the rest of the message, and no memory or connection is kept."""
    found = ApartPool(ranks2).run(broken_in_a_copy, struck, timeout_s=240.0)[1]
    assert any(found)


def call(group: GroupCoordinator, *arguments: Any) -> None:
    """Exchange; raise also if that is over before the strike."""
    group.all_to_all_single(*arguments)
    group.barrier()


def broken_in_a_collective(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Let a rank's handler raise while it receives a long part; return how long it takes to let the group go."""
    with world(rank, world_size, directory) as everyone:
        group = new_group(everyone, timeout_s=HANG_S)
        pids = everyone.all_gather_object(os.getpid())
        # The receiver sends next to nothing: a part that it still sends would be told of the end, and end the call.
        parts = ([1, LONG], [1, 1]) if rank == 0 else ([1, 1], [LONG, 1])
        result, own = torch.zeros(sum(parts[0])), torch.full((sum(parts[1]),), SENT)
        was_copied: list[bool] = []

        def strike_in_the_copy() -> None:
            while result[1] != SENT:
                pass
            os.kill(pids[1], signal.SIGSTOP)
            was_copied.append(bool(result[-1] == SENT))
            os.kill(pids[0], signal.SIGALRM)

        with alarm(HANG_S, strikes):  # this sets the handler; the signal comes earlier
            everyone.barrier()
            watch = threading.Thread(target=strike_in_the_copy)
            if rank == 0:
                watch.start()
            with pytest.raises((Interrupt, CommError)):
                call(group, result, own, *parts)
            if rank == 0:
                watch.join()
        start = time.monotonic()
        group.destroy()
        del group
        gc.collect()
        took_s = time.monotonic() - start
        if rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        meet(rank, range(world_size), directory, "end")
    return [took_s, was_copied]


@pytest.mark.guarantee("G9")
def test_a_group_that_breaks_in_a_collective_is_let_go_at_once(ranks2: RankPool) -> None:
    """Its end does not wait for the rest of the part that was being copied, which never comes."""
    took_s, was_copied = ApartPool(ranks2).run(broken_in_a_collective, timeout_s=2 * HANG_S)[0]
    assert was_copied == [False]
    assert took_s < DEADLINE_S


SENDS: dict[str, tuple[type, str, Callable[[GroupCoordinator, torch.Tensor], object]]] = {
    "send": (PointToPointHandle, "wait", lambda group, content: group.send(content, 1)),
    "isend": (OpenSends, "keep", lambda group, content: group.isend(content, 1)),
    "isend tagged": (OpenSends, "keep", lambda group, content: group.isend(content, 1, tag=TAG)),
    "send_object": (PointToPointHandle, "wait", lambda group, content: group.send_object(content, 1)),
    "isend_object": (OpenSends, "keep", lambda group, content: group.isend_object(content, 1)),
}
"""Calls that send, and the method that has their handle first. If a handler raises as it begins, the handle is lost."""


def lost_handles(rank: int, world_size: int, directory: Path) -> list[str]:
    """Lose the handle of a long message and leave, before the other rank receives it; return whose message came."""
    came: list[str] = []
    with world(rank, world_size, directory) as everyone:
        for call, (owner, method, send) in SENDS.items():
            group = new_group(everyone, call.replace(" ", "-"))
            is_left = directory / f"{group.unique_name}-left"
            if rank == 0:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(owner, method, lambda *_: strikes())
                    with pytest.raises(Interrupt):
                        send(group, torch.full((LONG // 8,), SENT))
                is_left.touch()
            else:
                wait_until(is_left.exists, "the other rank's destroy")
                time.sleep(0.1)
                if "object" in call:
                    content = group.recv_object(0, timeout_s=DEADLINE_S)
                else:
                    tag = TAG if "tagged" in call else 0
                    content = group.recv((LONG // 8,), torch.float32, 0, tag=tag, timeout_s=DEADLINE_S)
                came += [call] if bool((content == SENT).all()) else []
            group.destroy()
    return came


@pytest.mark.guarantee("G9")
def test_a_message_whose_handle_was_lost_is_sent_before_the_group_ends(ranks2: RankPool) -> None:
    """A handler raised between the beginning of the send and the wait for it, which broke nothing."""
    assert ApartPool(ranks2).run(lost_handles, timeout_s=120.0)[1] == [*SENDS]


def test_a_wait_goes_on_where_it_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the names, or an object that pybind11 did not make, is told nothing, and that is said."""
    work: Any = object()
    assert end_wait(work) is False
    monkeypatch.setattr(waits, "_CLASSES", ("no class of torch",))
    waits._aborts.cache_clear()
    try:
        assert end_wait(work) is False
        assert waits._aborts() is None
    finally:
        waits._aborts.cache_clear()


def without_a_thread(rank: int, world_size: int, directory: Path) -> None:
    """Let rank 0 find no thread that could wait for what it has posted."""
    refused = mock.patch.object(WaiterThreads, "submit", side_effect=RuntimeError("can't start new thread"))
    with world(rank, world_size, directory) as everyone:
        group = new_group(everyone, "g")
        if rank == 0:
            with refused, pytest.raises(NativeError, match="can't start new thread"):
                group.all_gather_object(rank)
            assert group._health.is_broken
        else:
            # What this rank needs in the first call may have come.
            with suppress(CommError):
                group.all_gather_object(rank)
            with pytest.raises(CommError, match="can't start new thread"):
                group.barrier()
        everyone.barrier()
        group.destroy()


@pytest.mark.guarantee("D8")
def test_a_collective_that_finds_no_thread_breaks_the_group(ranks2: RankPool) -> None:
    """What it has posted cannot be taken back; every rank learns why."""
    ApartPool(ranks2).run(without_a_thread, timeout_s=60.0)
