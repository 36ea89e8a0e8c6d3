"""A process joins by a store object, which a process outside of the ranks serves."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from coordinator.elastic.joining import join_distributed_environment
from coordinator.errors import PeerLostError
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment
from coordinator.settings import CoordinatorSettings
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import failing, use
from tests.waiting import wait_until

TIMEOUT_S = 20.0
RANKS = 2
AGENT = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_RUN_ID": "a run",
}


def connected(port: int) -> dist.Store:
    """Return a connection to the store of the test's process."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def in_a_world_of_torch(rank: int, store: dist.Store) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    init_distributed_environment(RANKS, rank, backend="gloo", timeout=10.0, elastic=True)


def under_an_agent(rank: int, port: int) -> None:
    launched = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **AGENT}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launched.items():
            patch.setenv(name, str(value))
        init_distributed_environment(backend="gloo", timeout=10.0, elastic=True)


START: dict[str, Callable[[int, int], None]] = {
    "the store": lambda rank, port: in_a_world_of_torch(rank, connected(port)),
    "a prefix of it": lambda rank, port: in_a_world_of_torch(rank, dist.PrefixStore("mine", connected(port))),
    "an agent's store": under_an_agent,
}
"""How the first ranks start."""

JOIN: dict[str, Callable[[int], dist.Store]] = {
    "the store": connected,
    "a prefix of it": lambda port: dist.PrefixStore("mine", connected(port)),
    "an agent's store": lambda port: dist.PrefixStore("a run/1/0", connected(port)),
}
"""What the process that joins passes then."""


def joins_and_goes_on(rank: int, world_size: int, directory: Path, way: str, port: int) -> list[object]:
    if rank == RANKS:
        wait_until((directory / "serving").exists, "the others")
        settings = CoordinatorSettings.resolve(timeout_s=10.0)
        groups = join_distributed_environment(JOIN[way](port), settings=settings, timeout_s=TIMEOUT_S)
    else:
        START[way](rank, port)
        before = ParallelGroups.from_sizes()
        (directory / "serving").touch()
        if rank == 0:
            wait_until(lambda: before.pending_members() == 1, "a process that joins")
        before.world.barrier()
        committed = before.prepare(join=1, timeout_s=TIMEOUT_S).commit()
        assert committed is not None
        groups = committed
    found: list[object] = [groups.world.rank, groups.world.world_size, *use(groups)]
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    assert failing(groups) is PeerLostError
    groups = groups.rebuild(timeout_s=TIMEOUT_S)
    found += [groups.world.rank, groups.world.world_size, *use(groups)]
    groups.destroy()
    if rank < RANKS:
        destroy_distributed_environment()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that this process serves."""
    # libuv, torch's other implementation, leaves a pipe open.
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    yield served.port
    del served


@pytest.mark.guarantee("E5", "E8")
@pytest.mark.parametrize("way", START)
def test_a_process_joins_by_a_store_that_no_rank_serves(way: str, port: int) -> None:
    """It is taken in, and when rank 0 is killed, the rank that is left of the first ones and it go on together."""
    found = run_ranks(joins_and_goes_on, RANKS + 1, way, port, expect_dead=[0])
    assert found == [
        None,
        [1, 3, 3.0, 1.0, 3.0, 0, 2, 1.0, 0.0, 1.0],
        [2, 3, 3.0, 2.0, 3.0, 1, 2, 1.0, 1.0, 1.0],
    ]
