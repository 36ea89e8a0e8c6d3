"""A rank of a stateless group that dies, forks or ends is told and cleaned up as that of any group."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import CoordinatorSettings, GroupCoordinator, create_stateless_group
from tests.handlers import raising_at
from tests.harness import RankPool, run_ranks
from tests.ports import free_port, listening_ports
from tests.waiting import has_ended, wait_until
from tests.worlds import meet, outcome_of

ROOT = Path(__file__).parents[2]
SETTINGS = CoordinatorSettings(create_timeout_s=60.0)


def survivors_of(rank: int, world_size: int, directory: Path, port: int, culprit: int) -> Any:
    group = create_stateless_group("127.0.0.1", port, rank, world_size, backend="gloo", settings=SETTINGS)
    pids = group.all_gather_object(os.getpid())
    meet(rank, range(world_size), directory, "ready")
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    found = [outcome_of(lambda: group.all_reduce(torch.ones(4))), outcome_of(group.barrier)]
    wait_until(lambda: has_ended(pids[culprit]), "the end of the culprit")
    # Leave only after all have their error, or the others might see the leaving instead.
    meet(rank, [other for other in range(world_size) if other != culprit], directory, "told")
    group.destroy()
    return found


@pytest.mark.guarantee("G36")
@pytest.mark.parametrize("culprit", [0, 2])
def test_survivors_name_the_dead_rank(culprit: int) -> None:
    """Also rank 0, with which the store ends."""
    found = run_ranks(survivors_of, 3, free_port(), culprit, expect_dead=[culprit])
    for rank, outcomes in enumerate(found):
        if rank != culprit:
            first, second = outcomes
            assert (first["kind"], first["peers"]) == ("PeerLostError", [culprit]), (rank, first)
            assert (second["kind"], second["cause"]) == ("GroupBrokenError", "PeerLostError"), (rank, second)


def use_in_child(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    with create_stateless_group(
        "127.0.0.1", port, rank, world_size, backend="gloo", settings=SETTINGS
    ) as group:
        group.barrier()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                inert = outcome_of(group.barrier)["kind"] == "UsageError"
                group.destroy()
                code = 0 if inert else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        # The end of the child disturbs neither the group nor its store.
        part = group.create_subgroup([1, 0])
        assert part is not None
        total = part.all_reduce(torch.ones(1)).item()
        part.destroy()
        return [os.waitstatus_to_exitcode(status), total]


@pytest.mark.guarantee("G36")
def test_a_forked_child_is_inert(ranks2: RankPool) -> None:
    """It can use nothing, and its end takes nothing from its parent."""
    assert ranks2.run(use_in_child, free_port()) == [[0, 2.0]] * 2


PROGRAM = """
    import sys, torch
    from coordinator import create_stateless_group
    group = create_stateless_group("127.0.0.1", int(sys.argv[1]), int(sys.argv[2]), 2, backend="gloo")
    assert group.all_reduce(torch.ones(1)).item() == 2.0
    group.barrier()
"""


CREATING = ("coordinator/stateless.py", "coordinator/group.py", "bootstrap/world.py")


def interrupt_creation(rank: int, world_size: int, directory: Path) -> list[int]:
    """Interrupt the creation of a group of one at every place; return the places, and behind which the store serves."""
    serving = list[int]()
    for step in count() if rank == 0 else ():
        port, made = free_port(), list[GroupCoordinator]()

        def create(port: int = port, made: list[GroupCoordinator] = made) -> None:
            made.append(create_stateless_group("127.0.0.1", port, 0, 1, backend="gloo", settings=SETTINGS))

        comes = raising_at(step, create, CREATING)
        for group in made:
            group.destroy()
        if port in listening_ports():
            gc.collect()  # a store of torch's ends with the last reference, and tracebacks may hold some
            serving += [step] if port in listening_ports() else []
        if not comes:
            return [step, *serving]
    return serving


@pytest.mark.guarantee("G35")
def test_an_interrupted_creation_leaves_the_address(ranks2: RankPool) -> None:
    """Wherever it comes, also when the group is ready: nobody gets it, so nobody could destroy it."""
    (steps, *serving), _ = ranks2.run(interrupt_creation)
    assert steps > 20
    assert serving == []


def test_a_program_that_destroys_nothing_ends_quietly() -> None:
    """The interpreter's end releases the store and the group."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(free_port())]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environ, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    ends = [rank.communicate(timeout=100.0)[1] for rank in ranks]
    assert [(rank.returncode, end) for rank, end in zip(ranks, ends, strict=True)] == [(0, "")] * 2
