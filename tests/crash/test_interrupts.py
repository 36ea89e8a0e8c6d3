"""Ctrl-C ends every wait at once, whatever the rank waits for and whatever its deadline."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coordinator import GroupCoordinator, ParallelGroups, ParallelLayout, groups
from coordinator import group as group_module
from coordinator.bootstrap import creation
from coordinator.bootstrap.group_builder import GroupBuilder
from coordinator.bootstrap.group_parts import GroupProcessGroups
from coordinator.group import logger
from coordinator.parallel_state import init_distributed_environment
from coordinator.settings import CoordinatorSettings
from device_comm.cpu.shared_memory import Preparation
from tests.harness import RankPool, run_ranks
from tests.ports import free_port
from tests.samples import sampled
from tests.waiting import wait_until
from tests.worlds import WAITS, meet, new_group, outcome_of, run_at, world

# Ctrl-C interrupts within 0.2 s; a busy machine may take this long. Every deadline here is a minute or more.
PROMPT_S = 5.0


@contextmanager
def interrupted_after(seconds: float, sent: list[float]) -> Iterator[None]:
    """Send SIGINT to this process's main thread after a delay; store the time in `sent`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def send() -> None:
        sent.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    timer = threading.Timer(seconds, send)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def interrupt(call: Callable[[], Any]) -> dict[str, Any]:
    """Interrupt `call` half a second after its start; add the time from signal to return to its outcome."""
    sent: list[float] = []
    with interrupted_after(0.5, sent):
        found = outcome_of(call)
        found["late_by_s"] = time.monotonic() - sent[0] if sent else -1.0
    return found


def assert_interrupted(found: dict[str, Any]) -> None:
    assert found["kind"] == "KeyboardInterrupt", found
    assert 0.0 <= found["late_by_s"] < PROMPT_S, found


def interrupt_wait(rank: int, world_size: int, directory: Path, name: str) -> list[dict[str, Any]]:
    with world(rank, world_size, directory) as first, new_group(first) as group:
        found = []
        if rank == 0:
            found.append(interrupt(lambda: WAITS[name](group, 1, None)))
        meet(rank, range(world_size), directory, "interrupted")
        found.append(outcome_of(group.barrier))
        meet(rank, range(world_size), directory, "told")
        first.barrier()
        return found


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("name", sampled(2, WAITS))
def test_every_wait_of_a_group_can_be_interrupted(ranks2: RankPool, name: str) -> None:
    """An interrupt breaks the group, the other rank learns which rank caused it, other groups go on."""
    (found, again), (other,) = ranks2.run(interrupt_wait, name)
    assert_interrupted(found)
    assert (again["kind"], again["cause"]) == ("GroupBrokenError", "KeyboardInterrupt")
    assert (other["kind"], other["peers"]) == ("PeerLostError", [0])


def interrupt_handle(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as group:
        found = {}
        if rank == 0:
            handles = group.isend_tensor_dict({"x": bytes(64 << 20)}, 1)
            found = interrupt(handles[0].wait)
        meet(rank, range(world_size), directory, "interrupted")
        return found


def test_waiting_for_a_handle_can_be_interrupted(ranks2: RankPool) -> None:
    """`wait` of a handle, including that of `isend_tensor_dict`, can be interrupted."""
    assert_interrupted(ranks2.run(interrupt_handle)[0])


def interrupt_creation(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as group:
        found = interrupt(lambda: new_group(group)) if rank == 0 else {}
        meet(rank, range(world_size), directory, "interrupted")
        group.barrier()
        return found


def test_the_creation_of_a_group_can_be_interrupted(ranks2: RankPool) -> None:
    """An interrupted rank stops waiting for the others to create the group; the world's group goes on."""
    assert_interrupted(ranks2.run(interrupt_creation)[0])


def interrupt_one_of_three(rank: int, world_size: int, directory: Path, waits: bool) -> dict[str, Any]:
    """Interrupt rank 0 while it waits for rank 2 to create a group; rank 1 waits too, or comes later."""
    with world(rank, world_size, directory) as group:
        found = {}
        if rank == 0:
            if waits:
                wait_until((directory / "coming-1").exists, "rank 1")
            found = interrupt(lambda: new_group(group))
        elif rank == 1:
            (directory / "coming-1").touch()
            if not waits:
                wait_until((directory / "interrupted-0").exists, "the interrupt")
            found = outcome_of(lambda: new_group(group))
        meet(rank, range(world_size), directory, "interrupted")
        if rank == 2:
            found = outcome_of(lambda: new_group(group))
        meet(rank, range(world_size), directory, "told")
        group.barrier()
        with new_group(group) as again:
            again.barrier()
        return found


@pytest.mark.guarantee("G37")
def test_ranks_that_wait_for_an_interrupted_one_in_the_creation_learn_of_it() -> None:
    """They raise at once, with its rank and the reason. A rank that comes later learns it too; a retry works."""
    found, *others = run_ranks(interrupt_one_of_three, 3, True)
    assert_interrupted(found)
    for other in others:
        assert (other["kind"], other["peers"]) == ("PeerLostError", [0]), other
        assert "rank 0 was interrupted (KeyboardInterrupt)" in other["text"]
        assert other["seconds"] < PROMPT_S


PLACES: dict[str, tuple[Any, str]] = {
    "as soon as it knows that all agree": (creation, "check_plaintext"),
    "before the first group is built": (creation, "GroupBuilder"),
    "while it maps the memory": (GroupBuilder, "share"),
    "while it waits for all to have mapped it": (GroupBuilder, "confirm"),
    "while it connects": (GroupBuilder, "connect"),
    "while the group is bound": (GroupCoordinator, "_bind"),
}

LATE_PLACES = ["while it connects", "while the group is bound"]


def interrupt_after_the_agreement(
    rank: int, world_size: int, directory: Path, place: str
) -> list[dict[str, Any]]:
    with world(rank, world_size, directory) as group:
        owner, name = PLACES[place]
        layout = ParallelLayout(tensor=2, pipeline=2)
        patch = mock.patch.object(owner, name, side_effect=KeyboardInterrupt)

        def create_and_meet() -> None:
            with ParallelGroups.create(layout, use_message_queue_broadcaster=False) as made:
                made.tp.barrier()
                made.pp.barrier()

        with patch if rank == 1 else nullcontext():
            found = [outcome_of(create_and_meet)]
        meet(rank, range(world_size), directory, "interrupted")
        group.barrier()
        found.append(outcome_of(create_and_meet))
        return found


@pytest.mark.guarantee("G37")
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_after_the_agreement_is_told_to_every_rank(ranks4: RankPool, place: str) -> None:
    """All ranks learn which one was interrupted, one too that is in no group with it. The next creation works."""
    for rank, (found, again) in enumerate(ranks4.run(interrupt_after_the_agreement, place)):
        if rank == 1:
            assert found["kind"] == "KeyboardInterrupt"
        elif rank == 2 and place in LATE_PLACES:
            # Rank 2 has its groups by then, needs rank 1 for none of them, and may see that rank 0 destroys its own.
            assert found["kind"] in ("NoneType", "PeerLostError"), found
        else:
            assert (found["kind"], found["peers"]) == ("PeerLostError", [1]), found
            assert found["seconds"] < PROMPT_S
        assert again["kind"] == "NoneType", again


def interrupt_at_the_end(rank: int, world_size: int, directory: Path, place: str) -> list[dict[str, Any]]:
    owner, name = END_PLACES[place]
    original = getattr(owner, name)

    def raising(*args: Any, **options: Any) -> None:
        original(*args, **options)
        raise KeyboardInterrupt

    def create_and_meet() -> None:
        if owner is groups.logger:
            layout = ParallelLayout(tensor=world_size)
            with ParallelGroups.create(layout, use_message_queue_broadcaster=False) as made:
                made.tp.barrier()
        else:
            with new_group(group) as alone:
                alone.barrier()

    with world(rank, world_size, directory) as group:
        with mock.patch.object(owner, name, raising) if rank == 1 else nullcontext():
            found = [outcome_of(create_and_meet)]
        meet(rank, range(world_size), directory, "interrupted")
        found.append(outcome_of(create_and_meet))
        return found


END_PLACES: dict[str, tuple[Any, str]] = {
    "as soon as it knows that all agree": (creation, "check_plaintext"),
    "while the offers are withdrawn": (Preparation, "close"),
    "as soon as it is ready": (group_module, "create_parts"),
    "while the group is logged": (logger, "info"),
    "while the groups of a layout are logged": (groups.logger, "info"),
}


@pytest.mark.guarantee("G37")
@pytest.mark.parametrize("place", END_PLACES)
def test_an_interrupt_of_a_group_that_is_ready_ends_the_group(ranks2: RankPool, place: str) -> None:
    """Nobody will have it, so the other rank, which has its own already, does not wait for this one."""
    (found, again), (interrupted, _) = ranks2.run(interrupt_at_the_end, place)
    assert interrupted["kind"] == "KeyboardInterrupt"
    assert (found["kind"], found["peers"]) == ("PeerLostError", [1]), found
    assert found["seconds"] < PROMPT_S
    assert again["kind"] == "NoneType", again


def interrupt_while_connecting(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as group:
        patch = mock.patch.object(GroupProcessGroups, "connect_host", side_effect=KeyboardInterrupt)
        with patch if rank == 1 else nullcontext():
            found = outcome_of(lambda: new_group(group, create_timeout_s=20.0))
        meet(rank, range(world_size), directory, "told")
        return found


@pytest.mark.guarantee("G37")
def test_an_interrupt_while_ranks_connect_by_gloo_is_told_to_the_others() -> None:
    """The others stop to wait for connections, which torch would do until its deadline."""
    places = [f"host {rank}" for rank in range(3)]
    body = interrupt_while_connecting
    found = run_ranks(run_at, 3, places, body.__module__, body.__qualname__, check_leaks=False)
    assert found[1]["kind"] == "KeyboardInterrupt"
    for other in found[::2]:
        assert (other["kind"], other["peers"]) == ("PeerLostError", [1]), other
        assert other["seconds"] < 10.0


def interrupt_rendezvous(
    rank: int, world_size: int, directory: Path, method: str, waiting: int, environ: dict[str, str]
) -> dict[str, Any]:
    os.environ.update(environ)
    os.environ.update({"RANK": str(waiting)} if environ else {})
    size, place = (-1, -1) if environ else (2, waiting)
    settings = CoordinatorSettings.resolve({}, create_timeout_s=60.0)
    return interrupt(
        lambda: init_distributed_environment(
            size, place, method.format(directory=directory), backend="gloo", settings=settings
        )
    )


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("way", ["file", "tcp", "env"])
def test_every_rendezvous_can_be_interrupted(way: str, waiting: int) -> None:
    """The rank that creates the rendezvous and the rank that looks for it both stop at once."""
    port = str(free_port())
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if way == "env" else {}
    method = {
        "file": "file://{directory}/rendezvous",
        "tcp": f"tcp://127.0.0.1:{port}",
        "env": "env://",
    }[way]
    # A thread inside torch's connect continues until its deadline.
    held = way != "file" and waiting == 1
    (found,) = run_ranks(interrupt_rendezvous, 1, method, waiting, environ, check_leaks=not held)
    assert_interrupted(found)
