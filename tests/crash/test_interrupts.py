"""Ctrl-C ends every wait at once, whatever the rank waits for and whatever its deadline."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.parallel_state import init_distributed_environment
from coordinator.settings import CoordinatorSettings
from tests.harness import RankPool, run_ranks
from tests.ports import free_port
from tests.worlds import WAITS, meet, new_group, outcome_of, world

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
@pytest.mark.parametrize("name", WAITS)
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
