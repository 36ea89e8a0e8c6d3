"""A real start of a job with a secret, while those who do not belong to it keep connecting to its store."""

import contextlib
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.security.keys import keys_of_rank, keys_of_store
from coordinator.security.records import NO_GENERATION, Kind, pack
from coordinator.security.secret import Secret
from coordinator.settings import CoordinatorSettings
from tests.harness import run_ranks
from tests.ports import free_port
from tests.secured import HERE, SECRET, VALUE
from tests.security.test_store_threats import GARBAGE, STRANGERS, dialled
from tests.waiting import wait_until

# The first start of a process loads what the next ones find; the last one is surrounded.
STARTS = 3
OTHER = Secret(bytes(range(100, 164)))


def surround(stack: ExitStack, port: int) -> None:
    """Open a hundred connections that stay: of each five, two of garbage, one of another secret, two of a rank's key.

    Who holds the right key of a rank says that it is the other one.
    """
    run = f"{HERE}:{port}"
    server_key = keys_of_store(SECRET, run).public
    for number in range(STRANGERS):
        if number % 5 < 2:
            raw = stack.enter_context(socket.create_connection((HERE, port)))
            with contextlib.suppress(OSError):
                raw.sendall(list(GARBAGE.values())[number % len(GARBAGE)])
            continue
        rank = number % 2
        keys = keys_of_rank(OTHER if number % 5 == 2 else SECRET, run, rank)
        stranger = stack.enter_context(dialled(port, keys, server_key))
        stranger.send(pack(Kind.HELLO, 1 - rank, 0, NO_GENERATION))


def start(rank: int, world_size: int, directory: Path, place: str, ports: list[int]) -> list[float]:
    """Start worlds one after the other, rank 1 once it is told to; return how long each took."""
    settings = CoordinatorSettings.resolve({}, secret_file=f"{place}/secret", security="required")
    took = []
    for number, port in enumerate(ports):
        if rank:
            wait_until((Path(place) / f"go-{number}").exists, "the others have connected")
        began = time.monotonic()
        init_distributed_environment(
            world_size, rank, f"tcp://{HERE}:{port}", backend="gloo", settings=settings
        )
        get_world_group().barrier()
        took.append(time.monotonic() - began)
        destroy_distributed_environment()
        (Path(place) / f"over-{number}-{rank}").touch()
    return took


@pytest.mark.guarantee("K4")
@pytest.mark.thorough
def test_a_hundred_strangers_cost_a_start_less_than_a_second(tmp_path: Path) -> None:
    """Two processes make a world, and use it, at most a second later than without a hundred open connections."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(VALUE)
    ports = [free_port() for _ in range(STARTS)]

    def connect(_pids: Sequence[int]) -> None:
        for number, port in enumerate(ports):
            wait_until(lambda port=port: accepts(port), "rank 0 listens")  # type: ignore[misc]
            with ExitStack() as stack:
                if number == STARTS - 1:
                    surround(stack, port)
                (tmp_path / f"go-{number}").touch()
                for rank in range(2):
                    wait_until((tmp_path / f"over-{number}-{rank}").exists, "the start is over")

    took = run_ranks(start, 2, str(tmp_path), ports, timeout_s=120.0, while_running=connect)
    _, alone, surrounded = took[1]
    assert surrounded <= alone + 1.0, took


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HERE, port)) == 0
