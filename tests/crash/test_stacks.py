"""A time-out comes with the stacks of all ranks, and asking for them changes nothing else."""

import asyncio
import ctypes
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import CommTimeoutError, GroupCoordinator, UsageError
from shm_broadcast.errors import CommError
from shm_broadcast.stacks.asking import ask
from shm_broadcast.stacks.offered import DEFAULT_SIGNAL, handles, offer_stacks, offered_signal
from tests.asked import identity_of, write_once
from tests.harness import RankPool, run_ranks
from tests.queue_ranks import Marks, offer, take
from tests.waiting import wait_until
from tests.worlds import ApartPool, join_world, meet, new_group, world

DEADLINE_S = 0.5
DELAY_S = 1.0

Told = dict[str, Any]


def told_by(call: Callable[[], object], deadline_s: float = DEADLINE_S) -> Told:
    """Return what the time-out of `call` says, and by how much it was late."""
    start = time.monotonic()
    with pytest.raises(CommTimeoutError) as caught:
        call()
    error = caught.value
    return {
        "late_s": time.monotonic() - start - deadline_s,
        "missing": list(error.missing),
        "stacks": {str(rank): text for rank, text in error.stacks.items()},
        "notes": list(getattr(error, "__notes__", [])),
        "text": str(error),
    }


def hangs_asleep(end: Callable[[], bool]) -> None:
    while not end():
        time.sleep(0.02)


def hangs_in_a_loop(end: Callable[[], bool]) -> None:
    while not end():
        pass


def hangs_in_native_code(end: Callable[[], bool]) -> None:
    sleep = ctypes.PyDLL(None).usleep  # holds the GIL
    while not end():
        sleep(300_000)


HANGS = {each.__name__: each for each in (hangs_asleep, hangs_in_a_loop, hangs_in_native_code)}


def one_hangs(rank: int, world_size: int, directory: Path, where: str) -> Told | None:
    """The last rank hangs; the others wait for it in a barrier."""
    culprit = world_size - 1
    with world(rank, world_size, directory) as group:
        group.barrier()
        others = [each for each in range(world_size) if each != culprit]
        if rank == culprit:
            HANGS[where](lambda: all((directory / f"told-{other}").exists() for other in others))
            return None
        found = told_by(lambda: group.barrier(DEADLINE_S))
        meet(rank, others, directory, "told")
        return found


@pytest.mark.guarantee("S12")
@pytest.mark.guarantee("S14")
@pytest.mark.parametrize("where", HANGS)
def test_the_first_to_judge_has_the_stacks_of_all_ranks(ranks4: RankPool, where: str) -> None:
    """One of three ranks has asked. The hanging function is in the text, and in the note; nobody raises late."""
    found = ranks4.run(one_hangs, where)[:3]
    assert [each["missing"] for each in found] == [[3]] * 3
    assert all(each["late_s"] <= DELAY_S for each in found), found
    (first,) = [each for each in found if each["stacks"]]
    assert sorted(first["stacks"]) == ["0", "1", "2", "3"]
    assert f"in {where}\n" in first["stacks"]["3"]
    assert all("in one_hangs\n" in first["stacks"][rank] for rank in "012"), first["stacks"]
    (note,) = first["notes"]
    assert note.startswith("stacks of rank 3:\n")
    assert f"in {where}\n" in note
    assert [each["notes"] for each in found if each is not first] == [[], []]
    assert not any("most recent call" in each["text"] for each in found)


@pytest.mark.guarantee("S12")
def test_gloo_planes_ask_too(ranks2: RankPool) -> None:
    """Ranks that meet over Gloo are asked if they are on one host."""
    found = ApartPool(ranks2).run(one_hangs, "hangs_asleep")[0]
    assert found["missing"] == [1]
    assert "in hangs_asleep\n" in found["stacks"]["1"]


def one_creates_no_group(rank: int, world_size: int, directory: Path) -> Told | None:
    """The last rank hangs; the others wait for it in the creation of another group."""
    culprit = world_size - 1
    with world(rank, world_size, directory) as group:
        others = [each for each in range(world_size) if each != culprit]
        if rank == culprit:
            hangs_asleep(lambda: all((directory / f"told-{other}").exists() for other in others))
            return None
        found = told_by(lambda: new_group(group, create_timeout_s=1.0), 1.0)
        meet(rank, others, directory, "told")
        return found


@pytest.mark.guarantee("S21")
def test_a_creation_that_times_out_has_the_stacks_too(ranks4: RankPool) -> None:
    """The rank that lists who is missing asks: where rank 3 hangs is in its note, and in the error of no other rank."""
    found = ranks4.run(one_creates_no_group)[:3]
    assert [each["missing"] for each in found] == [[3]] * 3
    (first,) = [each for each in found if each["stacks"]]
    assert sorted(first["stacks"]) == ["0", "1", "2", "3"]
    assert "in hangs_asleep\n" in first["stacks"]["3"]
    (note,) = first["notes"]
    assert note.startswith("stacks of rank 3:\n")
    assert "in hangs_asleep\n" in note
    # The others read who is missing before that rank asks.
    assert all(each["late_s"] <= DELAY_S for each in found), found


def wait_for_the_stopped(rank: int, world_size: int, directory: Path) -> Told | None:
    with world(rank, world_size, directory) as group:
        marks = Marks(directory)
        group.barrier()
        if rank == 1:
            marks.mark("pid", str(os.getpid()))
            os.kill(os.getpid(), 19)
            return None
        pid = int(marks.wait("pid"))
        wait_until(lambda: " T " in Path(f"/proc/{pid}/stat").read_text(), "the stop")
        found = told_by(lambda: group.barrier(DEADLINE_S))
        os.kill(pid, 18)
        return found


@pytest.mark.guarantee("S14")
def test_a_stopped_rank_says_so(ranks2: RankPool) -> None:
    """It is not waited for."""
    found = ranks2.run(wait_for_the_stopped)[0]
    assert "stopped" in found["stacks"]["1"]
    assert "stopped" in found["notes"][0]
    assert found["late_s"] <= DELAY_S


def wait_for_the_late(rank: int, world_size: int, directory: Path, signals: list[int]) -> Any:
    with world(rank, world_size, directory, stack_signal=signals[rank]) as group:
        kept = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        state = [
            offered_signal(),
            handles(os.getpid(), DEFAULT_SIGNAL),
            sum("-stacks-" in each for each in kept),
        ]
        group.barrier()
        found = told_by(lambda: group.barrier(DEADLINE_S)) if rank == 0 else None
        meet(rank, range(world_size), directory, "end")
        return [state, found]


@pytest.mark.guarantee("S16")
def test_0_turns_it_off() -> None:
    """No handler, no memory, no stacks, and no rank is asked."""
    (state, found), (second, _) = run_ranks(wait_for_the_late, 2, [0, 0])
    assert state == second == [0, False, 0]
    assert (found["stacks"], found["notes"]) == ({}, [])


@pytest.mark.guarantee("S16")
def test_ranks_may_use_other_signals() -> None:
    """Each page announces its own; who offers none says so."""
    (state, found), (second, _), (third, _) = run_ranks(
        wait_for_the_late, 3, [DEFAULT_SIGNAL, DEFAULT_SIGNAL + 3, 0]
    )
    assert (state, second[0], third[0]) == ([DEFAULT_SIGNAL, True, 1], DEFAULT_SIGNAL + 3, 0)
    assert "in meet\n" in found["stacks"]["1"]
    assert "announces no signal" in found["stacks"]["2"]


def start_with_a_handler(rank: int, world_size: int, directory: Path) -> list[str]:
    if rank == 0:
        faulthandler.register(DEFAULT_SIGNAL)
    with pytest.raises(CommError) as caught:
        join_world(rank, world_size, directory)
    if rank == 0:
        faulthandler.unregister(DEFAULT_SIGNAL)
    return [type(caught.value).__name__, str(caught.value)]


@pytest.mark.guarantee("S16")
def test_a_world_is_refused_where_the_signal_has_a_handler() -> None:
    """The error says what to set, and the others are told at once."""
    own, other = run_ranks(start_with_a_handler, 2)
    assert own[0] == UsageError.__name__
    assert "GROUP_COORDINATOR_STACK_SIGNAL" in own[1]
    assert f"stack_signal is {DEFAULT_SIGNAL}" in other[1], other


def queues_run_dry(rank: int, world_size: int, directory: Path) -> list[Told] | None:
    marks = Marks(directory)
    with world(rank, world_size, directory):
        if rank == 0:
            with offer(marks, [1], ring_bytes=1 << 16) as writer:
                writer.wait_until_ready()
                marks.wait("dry")

                def fill() -> None:
                    while True:
                        writer.enqueue(bytes(20_000), 1.0)

                found = [told_by(fill, 1.0)]
                marks.mark("full")
                return found
        with take(marks, 1) as reader:
            found = [told_by(lambda: asyncio.run(reader.adequeue(1.0)), 1.0)]
            found += [told_by(lambda: reader.dequeue(1.0), 1.0) for _ in range(2)]
            found.append(told_by(lambda: reader.dequeue(0.2), 0.2))
            marks.mark("dry")
            marks.wait("full")
            return found


@pytest.mark.guarantee("S12")
def test_queues_ask_the_other_end_once_for_each_message(ranks2: RankPool) -> None:
    """A reader its writer, a writer the reader that is behind; again, or within less than a second, nobody is asked.

    And neither in an event loop, which would stand still meanwhile.
    """
    writers, readers = ranks2.run(queues_run_dry)
    assert list(writers[0]["stacks"]) == ["1"]
    assert list(readers[1]["stacks"]) == ["0"]
    assert all("in wait\n" in text for text in (writers[0]["stacks"]["1"], readers[1]["stacks"]["0"]))
    assert [readers[number]["stacks"] for number in (0, 2, 3)] == [{}, {}, {}]
    assert all(each["late_s"] <= DELAY_S for each in writers + readers)


def receive(group: GroupCoordinator) -> Any:
    return group.recv((4,), torch.float32, 0).tolist()


CALLS: dict[str, tuple[Callable[[GroupCoordinator], Any], Callable[[GroupCoordinator], Any]]] = {
    "barrier": (lambda group: group.barrier(), lambda group: group.barrier()),
    "all_reduce": (
        lambda group: group.all_reduce(torch.ones(4)).tolist(),
        lambda group: group.all_reduce(torch.ones(4)).tolist(),
    ),
    "all_gather_object": (lambda group: group.all_gather_object(1), lambda group: group.all_gather_object(1)),
    "recv": (receive, lambda group: group.send(torch.ones(4), 1)),
    "recv_object": (lambda group: group.recv_object(0), lambda group: group.send_object("x", 1)),
    "broadcast_object": (
        lambda group: group.broadcast_object(None, 0),
        lambda group: group.broadcast_object("x", 0),
    ),
}
RESULTS = {
    "barrier": None,
    "all_reduce": [2.0] * 4,
    "all_gather_object": [1, 1],
    "recv": [1.0] * 4,
    "recv_object": "x",
    "broadcast_object": "x",
}


def asked_while_it_waits(rank: int, world_size: int, directory: Path, names: list[str]) -> list[Any]:
    """Rank 1 waits in each call, and meanwhile gets the signal thirty times."""
    found = []
    with world(rank, world_size, directory) as group:
        pids = group.all_gather_object(os.getpid())
        for name in names:
            waits, answers = CALLS[name]
            meet(rank, [0, 1], directory, f"begin {name}")
            if rank == 0:
                disturb(pids[1])
                answers(group)
            else:
                found.append(waits(group))
        marks = Marks(directory)
        if rank == 0:
            with offer(marks, [1]) as writer:
                meet(rank, [0, 1], directory, "begin dequeue")
                disturb(pids[1])
                writer.enqueue("x")
                marks.wait("dequeued")
        else:
            with take(marks, 1) as reader:
                meet(rank, [0, 1], directory, "begin dequeue")
                found.append(reader.dequeue(60.0))
                marks.mark("dequeued")
        meet(rank, [0, 1], directory, "end")
    return found


def disturb(pid: int) -> None:
    """Send the signal thirty times, each when the stacks before were written."""
    time.sleep(0.02)
    for _ in range(30):
        write_once(pid)
        time.sleep(0.003)


@pytest.mark.guarantee("S19")
@pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "Gloo"])
def test_the_signal_does_not_change_how_a_call_ends(ranks2: RankPool, apart: bool) -> None:
    """Collectives, receives and a queue, over shared memory and over Gloo."""
    pool = ApartPool(ranks2) if apart else ranks2
    names = list(CALLS)
    assert pool.run(asked_while_it_waits, names)[1] == [*(RESULTS[name] for name in names), "x"]


def asked_while_threads_run(rank: int, world_size: int, directory: Path, seconds: float) -> int:
    """Rank 1 runs functions in three threads, and makes new ones, while rank 0 asks for its stacks."""
    count = 0
    with world(rank, world_size, directory) as group:
        pids = group.all_gather_object(os.getpid())
        if rank == 0:
            end, asked = time.monotonic() + seconds, {1: identity_of(pids[1])}
            while time.monotonic() < end:
                count += "most recent call" in ask(asked)[1]
        else:
            end = time.monotonic() + seconds
            threads = [threading.Thread(target=make_functions, args=(end,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            while time.monotonic() < end:
                offer_stacks(DEFAULT_SIGNAL)  # as the next group does, so that there is room
                time.sleep(0.01)
            for thread in threads:
                thread.join()
        group.barrier()
        return count


def make_functions(end: float) -> None:
    number = 0
    while time.monotonic() < end:
        number += 1
        space: dict[str, Any] = {}
        exec(f"def made(depth):\n    return made(depth - 1) if depth else {number}", space)
        assert space["made"](30) == number


@pytest.mark.guarantee("S19")
@pytest.mark.parametrize(
    "seconds", [1.0, pytest.param(30.0, marks=[pytest.mark.thorough, pytest.mark.proof])]
)
def test_a_process_survives_being_asked_while_its_threads_run(seconds: float) -> None:
    """Each writes its own frames only: with the stacks of all threads a process crashed whose threads came and went."""
    assert run_ranks(asked_while_threads_run, 2, seconds, timeout_s=seconds + 60.0)[0] >= 10


def test_errors_without_stacks_have_none() -> None:
    """What is no time-out has no attribute, and a time-out that nobody has asked for has an empty one."""
    assert CommTimeoutError("late").stacks == {}
    assert not hasattr(CommError("other"), "stacks")
