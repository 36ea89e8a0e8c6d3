"""What a group needs is made, and given up, beside kernels of other groups, which may wait for a rank that is here."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from device_comm.cuda.custom import release
from device_comm.cuda.custom.peer_memory import PeerMemory
from shm_broadcast.errors import CapabilityError
from tests.cuda_worlds import cuda_world
from tests.custom_ranks import CustomRank
from tests.fake_cuda import FakeFaults
from tests.harness import RankPool
from tests.queues import background
from tests.waiting import wait_until

# Less than the fake kernel may spin, and more than any wait for an idle device takes together with all exchanges.
WITHIN_S = 8.0


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yield a list that receives what the host side of our kernels logs within the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("device_comm.cuda.custom")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def builds(
    rank: int, world_size: int, directory: Path, native: str, ipc: bool
) -> tuple[float, int, str, list[str]]:
    kept = 1 if ipc else 0
    with (
        cuda_world(rank, world_size, directory, native, FakeFaults(ipc=ipc), kept=kept) as (
            group,
            communicator,
            driver,
        ),
        logged() as lines,
    ):
        start = time.monotonic()
        if rank == 0:
            with driver.hang():
                communicator.prepare_kernels()
                took_s = time.monotonic() - start
                group.barrier()
        else:
            communicator.prepare_kernels()
            took_s = time.monotonic() - start
            group.barrier()
        assert communicator.all_reduce(torch.ones(4))[0] == world_size
        if ipc:
            wait_until(lambda: len(lines) == 2 - rank, "the tested memory to be given up", 10.0, 0.01)
            assert driver.calls["ipc_close"] == 1
            assert any(each.endswith("of 2048 bytes") for each in driver.leaks())
        else:
            # That of the peer, and the own one.
            wait_until(
                lambda: driver.calls.get("vmm_unmap", 0) == 2, "the tested memory to be freed", 10.0, 0.01
            )
        return took_s, driver.calls.get("mem_free", 0), group.unique_name, list(lines)


KEPT = "teardown of peer memory: 2048 bytes stay allocated until this process ends: a peer may have them open"


@pytest.mark.guarantee("D75")
@pytest.mark.parametrize("ipc", [True, False])
def test_a_group_is_built_beside_another_groups_kernel(ranks2: RankPool, native: str, ipc: bool) -> None:
    """The memory of the test of writes is unmapped behind that kernel. What a peer may have open by IPC is kept.

    On the rank with that kernel a line says that it takes longer; on every rank one says how much memory is kept.
    """
    results = ranks2.run(builds, native, ipc)
    for took_s, freed, _, lines in results:
        assert took_s < WITHIN_S
        assert freed == 0
        assert lines[-1:] == [KEPT] if ipc else KEPT not in lines
    _, _, name, lines = results[0]
    assert lines[0] == (
        f"the test of peer access on {name!r} (rank 0, 0 of 2): other work on the device takes longer than 1 s; "
        "memory is freed behind it, but for what peers may have open by CUDA IPC"
    )
    assert [len(each[3]) for each in results] == ([2, 1] if ipc else [1, 0])


def builds_on_an_idle_device(rank: int, world_size: int, directory: Path, native: str) -> int:
    with cuda_world(rank, world_size, directory, native) as (_, communicator, driver):
        communicator.prepare_kernels()
        return driver.calls["mem_free"]


def test_on_an_idle_device_the_tested_memory_is_freed_at_once(ranks2: RankPool, native: str) -> None:
    """All ranks have unmapped it before any frees it, which the fake driver checks."""
    assert ranks2.run(builds_on_an_idle_device, native) == [1, 1]


def builds_on_a_device_that_becomes_idle(
    rank: int, world_size: int, directory: Path, native: str
) -> tuple[int, list[str]]:
    with (
        patch.object(release, "IDLE_S", 30.0),
        cuda_world(rank, world_size, directory, native) as (_, communicator, driver),
        logged() as lines,
    ):

        def spin() -> None:
            with driver.hang():
                wait_until(
                    lambda: driver.calls.get("context_synchronize", 0), "the wait for the device", 10.0
                )
                time.sleep(0.2)

        if rank == 0:
            with background(spin):
                communicator.prepare_kernels()
        else:
            communicator.prepare_kernels()
        return driver.calls["mem_free"], list(lines)


def test_a_device_that_becomes_idle_in_time_keeps_no_tested_memory(ranks2: RankPool, native: str) -> None:
    """A kernel that ends within the time is waited for, and nothing is logged."""
    for freed, lines in ranks2.run(builds_on_a_device_that_becomes_idle, native):
        assert freed == 1
        assert lines == []


def fails(rank: int, world_size: int, directory: Path, libraries: str) -> tuple[float, str, list[str]]:
    faults = {"fail": {"module_load": (1, 2)}} if rank == 1 else {}
    me = CustomRank(rank, world_size, directory, libraries, faults=faults)
    with me.driver.hang():
        start = time.monotonic()
        with pytest.raises(CapabilityError) as raised:
            me.create()
        took_s, left = time.monotonic() - start, me.driver.leaks()
        me.meet()
    wait_until(lambda: me.driver.leaks() == [], "everything to be freed", 10.0, 0.01)
    me.finish()
    return took_s, str(raised.value), left


@pytest.mark.guarantee("D75")
def test_kernels_that_one_rank_cannot_load_are_given_up_beside_another_groups_kernel(
    ranks2: RankPool, libraries: str
) -> None:
    """All ranks raise in time with that rank's reason, and free what they have made when the device is idle."""
    for took_s, text, left in ranks2.run(fails, libraries):
        assert took_s < WITHIN_S
        assert "rank 5: module_load" in text
        assert left != []


def falls_back(rank: int, world_size: int, directory: Path, libraries: str) -> tuple[float, str]:
    faults = {"fail": {"ipc_open_handle": (1, 2)}} if rank == 1 else {}
    me = CustomRank(rank, world_size, directory, libraries, faults=faults)
    with me.driver.hang():
        start = time.monotonic()
        memory = PeerMemory.create(me.driver, me.peers(), 4096, me.health.lost)
        took_s, kind = time.monotonic() - start, memory.kind
        me.meet()
    wait_until(lambda: me.driver.calls.get("ipc_close", 0) == 1 - rank, "unmapping", 10.0, 0.01)
    memory.close(me.meet)
    # Rank 0 may have had rank 1's memory open while that was given up, and the other way round.
    assert [each.split()[0] for each in me.driver.leaks()] == ["memory"]
    me.driver.release()
    me.finish()
    return took_s, kind


@pytest.mark.guarantee("D75")
def test_another_kind_of_memory_is_tried_beside_another_groups_kernel(
    ranks2: RankPool, libraries: str
) -> None:
    """What was mapped of the kind that failed is unmapped behind that kernel."""
    for took_s, kind in ranks2.run(falls_back, libraries):
        assert took_s < WITHIN_S
        assert kind == "vmm"
