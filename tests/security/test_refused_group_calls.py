"""A group of two ranks where a filter refuses the system calls that it uses, or a limit its descriptors."""

import errno
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import GroupCoordinator
from coordinator.errors import CapabilityError, CommError
from coordinator.parallel_state import destroy_distributed_environment, get_world_group
from tests.harness import RankPool, run_ranks
from tests.samples import sampled
from tests.seccomp import NUMBERS, refuse_calls
from tests.worlds import ApartPool, join_world, meet, new_group, world

# Without this call a group of ranks that share memory cannot be made.
NEEDED = ("memfd_create", "pidfd_open")
CREATE_S = 30.0
# Long before that deadline, on a busy machine too.
PROMPT_S = 15.0
# How long a rank waits for one that has no descriptor with which it could tell anything.
UNTOLD_S = 3.0
# More descriptors than any step needs.
ENOUGH = 40


def use(group: GroupCoordinator) -> None:
    """Use the memory, the channels and the queue of a group of two."""
    me = group.rank_in_group
    group.enable_broadcaster()
    for number in range(3):
        group.barrier()
        assert group.all_reduce(torch.full((4,), float(me + number))).tolist() == [2.0 * number + 1] * 4
        assert group.all_gather_object(me) == [0, 1]
        assert group.broadcast_object(number if me == 0 else None) == number
        if me == 0:
            group.send(torch.ones(1 << 18), 1)
            assert group.recv_object(1) == number
        else:
            assert group.recv_any((1 << 18,), torch.float32)[0].sum() == 1 << 18
            group.send_object(number, 0)


def create_and_use(
    rank: int, world_size: int, directory: Path, name: str, number: int, who: list[int]
) -> dict[str, Any]:
    """Join a world, make a group and use both, where the call fails on the ranks `who`; return what was raised."""
    if rank in who:
        refuse_calls(name, number)
    began = time.monotonic()
    try:
        with world(rank, world_size, directory, create_timeout_s=CREATE_S) as everyone:
            use(everyone)
            with new_group(everyone) as group:
                use(group)
    except Exception as error:
        return {
            "kind": type(error).__name__,
            "requirement": error.requirement if isinstance(error, CapabilityError) else "",
            "text": str(error),
            "seconds": time.monotonic() - began,
        }
    return {"kind": ""}


@pytest.mark.parametrize(
    ("name", "who", "number"),
    sampled(4, product(NUMBERS, ([0], [1], [0, 1]), (errno.ENOSYS, errno.EPERM))),
)
def test_a_group_says_which_call_the_filter_refuses(name: str, who: list[int], number: int) -> None:
    """It works without the call, or the rank says what is to be allowed; never by an `OSError`, on the others neither.

    A rank that cannot make shared memory, or watch the others, tells them before they wait for it.
    """
    outcomes = run_ranks(create_and_use, 2, name, number, who, check_leaks=False, timeout_s=60.0)
    if name not in NEEDED:
        assert [each["kind"] for each in outcomes] == ["", ""], outcomes
        return
    for rank, each in enumerate(outcomes):
        assert each["kind"] == "CapabilityError", each
        assert name in each["text"], (rank, each)
        if rank in who:
            assert each["requirement"] == f"the system call {name}", each
        assert each["seconds"] < PROMPT_S, each


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Let this process open `count` more descriptors in the block, and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as filled:
        last = max(map(int, os.listdir("/proc/self/fd")))
        while (number := os.dup(0)) < last:
            filled.callback(os.close, number)
        os.close(number)
        filled.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (number + count, hard))
        yield


def start(rank: int, world_size: int, directory: Path, deadline_s: float) -> None:
    """Join the world, and create its group."""
    join_world(rank, world_size, directory, create_timeout_s=deadline_s)


def of_group(action: Callable[[GroupCoordinator, float], object]) -> Callable[..., None]:
    """Return a step that takes a group, which exists before the step."""

    def step(rank: int, _size: int, _directory: Path, deadline_s: float) -> None:
        action(get_world_group(), deadline_s)

    return step


def exchange(group: GroupCoordinator, deadline_s: float) -> None:
    """Send a message that streams through a channel, then receive one."""
    peer = 1 - group.rank_in_group
    handle = group.isend_object(bytes(3 << 20), peer, timeout_s=deadline_s)
    group.recv_object(peer, timeout_s=deadline_s)
    handle.wait()


def create(group: GroupCoordinator, deadline_s: float) -> None:
    """Create another group of the same ranks."""
    with new_group(group, create_timeout_s=deadline_s):
        pass


def split(group: GroupCoordinator, _deadline_s: float) -> None:
    """Create a sub-group of the same ranks."""
    part = group.split_group([[0, 1]])
    assert part is not None
    part.destroy()


STEPS = {
    "start": start,
    "group": of_group(create),
    "sub-group": of_group(split),
    "messages": of_group(exchange),
    "objects": of_group(lambda group, s: group.all_gather_object("x", timeout_s=s)),
    "broadcaster": of_group(lambda group, _: group.enable_broadcaster()),
    "queue": of_group(lambda group, _: group.create_mq_broadcaster(0)),
}


def take(rank: int, world_size: int, directory: Path, name: str, poor: int, free: int) -> dict[str, Any]:
    """Return how a step ends in which rank `poor` may open `free` descriptors; afterwards all must work."""
    deadline_s = UNTOLD_S if free < ENOUGH else CREATE_S
    if name != "start":
        join_world(rank, world_size, directory, create_timeout_s=deadline_s)
    meet(rank, range(world_size), directory, "begun")
    began, found = time.monotonic(), {"kind": "", "text": "", "is_ours": True}
    try:
        with free_descriptors(free) if rank == poor else nullcontext():
            STEPS[name](rank, world_size, directory, deadline_s)
    except Exception as error:
        found = {"kind": type(error).__name__, "text": str(error), "is_ours": isinstance(error, CommError)}
    seconds = time.monotonic() - began
    meet(rank, range(world_size), directory, "over")
    destroy_distributed_environment()
    # In a directory of its own: in the same one a rank that has not come before may find the start that has failed.
    with world(rank, world_size, directory / "next", create_timeout_s=CREATE_S) as group:
        group.barrier()
    return {**found, "seconds": seconds}


@pytest.mark.guarantee("B14")
@pytest.mark.parametrize(
    ("name", "place", "poor", "free"),
    sampled(17, product(STEPS, ("near", "far"), (0, 1), (*range(14), ENOUGH))),
)
def test_a_group_says_that_too_few_descriptors_are_free(
    ranks2: RankPool, name: str, place: str, poor: int, free: int
) -> None:
    """The rank that has too few says so, the other one gets an error of ours too, and the next world works.

    A rank that has none at all cannot open a store that is a file, and so tells nothing; nor is the other one told of a
    message that is refused.
    """
    pool = ranks2 if place == "near" else ApartPool(ranks2)
    outcomes = pool.run(take, name, poor, free, timeout_s=60.0)
    for rank, each in enumerate(outcomes):
        assert each["is_ours"], each
        assert each["seconds"] < PROMPT_S, each
        if free == ENOUGH:
            assert each["kind"] == "", each
        elif rank == poor:
            assert each["kind"] in ("", "CapabilityError"), each
        elif free > 0 and name != "messages":
            assert each["kind"] != "CommTimeoutError", each
