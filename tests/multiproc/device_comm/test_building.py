"""What a group needs is made, and given up, beside kernels of other groups, which may wait for a rank that is here."""

import time
from pathlib import Path

import pytest
import torch

from device_comm.cuda.custom.peer_memory import PeerMemory
from shm_broadcast.errors import CapabilityError
from tests.cuda_worlds import cuda_world
from tests.custom_ranks import CustomRank
from tests.fake_cuda import FakeFaults
from tests.harness import RankPool
from tests.waiting import wait_until

# Less than the fake kernel may spin, and more than any wait for an idle device takes together with all exchanges.
WITHIN_S = 8.0


def builds(rank: int, world_size: int, directory: Path, native: str, ipc: bool) -> tuple[float, int]:
    kept = 1 if ipc else 0
    with cuda_world(rank, world_size, directory, native, FakeFaults(ipc=ipc), kept=kept) as (
        group,
        communicator,
        driver,
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
        unmapped = "ipc_close" if ipc else "vmm_unmap"
        wait_until(lambda: driver.calls.get(unmapped, 0) >= 1, "the tested memory to be unmapped", 10.0, 0.01)
        return took_s, driver.calls.get("mem_free", 0)


@pytest.mark.guarantee("D75")
@pytest.mark.parametrize("ipc", [True, False])
def test_a_group_is_built_beside_another_groups_kernel(ranks2: RankPool, native: str, ipc: bool) -> None:
    """The memory of the test of writes is unmapped behind that kernel. What a peer may have open by IPC is kept."""
    for took_s, freed in ranks2.run(builds, native, ipc):
        assert took_s < WITHIN_S
        assert freed == 0


def builds_on_an_idle_device(rank: int, world_size: int, directory: Path, native: str) -> int:
    with cuda_world(rank, world_size, directory, native) as (_, communicator, driver):
        communicator.prepare_kernels()
        return driver.calls["mem_free"]


def test_on_an_idle_device_the_tested_memory_is_freed_at_once(ranks2: RankPool, native: str) -> None:
    """All ranks have unmapped it before any frees it, which the fake driver checks."""
    assert ranks2.run(builds_on_an_idle_device, native) == [1, 1]


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
