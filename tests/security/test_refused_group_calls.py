"""A group of two ranks where a system call filter refuses what it uses, on one of them or on both."""

import errno
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import GroupCoordinator
from coordinator.errors import CapabilityError
from tests.harness import run_ranks
from tests.samples import sampled
from tests.seccomp import NUMBERS, refuse_calls
from tests.worlds import new_group, world

# Without this call a group of ranks that share memory cannot be made.
NEEDED = ("memfd_create", "pidfd_open")
CREATE_S = 30.0
# Long before that deadline, on a busy machine too.
PROMPT_S = 15.0


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
