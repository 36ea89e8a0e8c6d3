"""The end of the device plane of an epoch: abort, rest, let go of the peers' memory, meet, free."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.errors import CommError, CommTimeoutError, CudaError, GroupBrokenError
from coordinator.group import GroupCoordinator
from device_comm.cuda.communicator import CudaCommunicator
from device_comm.cuda.kernels import FAMILIES
from device_comm.cuda_settings import CudaSettings
from device_comm.nccl.library import NcclLibrary
from tests.fake_cuda import FakeDriver, FakeFaults, violations
from tests.harness import RankPool
from tests.native.nccl_stub.build import build_stub
from tests.nccl_ranks import HostStreams, context_of, stub_of
from tests.worlds import meet, world

SECONDS = 10.0
WATCHED = ("context_synchronize", "ipc_close", "vmm_unmap", "mem_free")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_stub(tmp_path_factory.mktemp("nccl")))


class Ordered(FakeDriver):
    """A device without kernels that notes the order of the calls by which an epoch ends."""

    def __init__(self, directory: Path, rank: int, faults: FakeFaults) -> None:
        names = (name for each in FAMILIES.values() for name in each)
        super().__init__(directory, rank, faults=faults, kernels=dict.fromkeys(names))
        self.order: list[str] = []
        self.communicator: CudaCommunicator | None = None

    def _enter(self, function: str, *, in_capture: bool = True) -> None:
        if function in WATCHED and self.communicator is not None:
            told = all(not each._record.is_clear for each in self.communicator._kernels())
            self.order.append(function if told else f"{function} before the abort")
        super()._enter(function, in_capture=in_capture)


@contextmanager
def a_broken_group(
    rank: int, world_size: int, directory: Path, stub: str, **faults: Any
) -> Iterator[tuple[GroupCoordinator, CudaCommunicator, Ordered, NcclLibrary]]:
    """Yield a group that both planes have been used in and that is broken by now, on all ranks."""
    shared = directory / "device"
    shared.mkdir(exist_ok=True)
    settings = CudaSettings(arena_bytes=1 << 16, staging_bytes=1 << 16, kernel_cache=str(directory / "cache"))
    with world(rank, world_size, directory) as group:
        driver, library = Ordered(shared, rank, FakeFaults(**faults)), NcclLibrary(stub)
        communicator = CudaCommunicator(
            context_of(group, cuda=settings),
            open_driver=lambda: driver,
            library=library,
            streams=HostStreams(),
            cubin=lambda _family, _dtype: b"",
        )
        communicator.prepare_buffers(0)
        assert communicator.all_reduce(torch.ones(1, dtype=torch.int64)).item() == world_size
        meet(rank, range(world_size), directory, "used")
        driver.communicator = communicator
        group._health.fail(GroupBrokenError("rank 9 is lost"))
        try:
            yield group, communicator, driver, library
        finally:
            communicator.destroy()
            meet(rank, range(world_size), directory, "destroyed")
            driver.release()


def ends_in_order(rank: int, world_size: int, directory: Path, stub: str, vmm: bool) -> list[Any]:
    with a_broken_group(rank, world_size, directory, stub, vmm=vmm) as (_, it, driver, library):
        calls = stub_of(library).stub_calls
        finalized = calls(2)
        it.end_calls(SECONDS)
        it.quiesce(SECONDS)
        it.quiesce(SECONDS)
        before = list(driver.order)
        meet(rank, range(world_size), directory, "let go")
        it.met(range(world_size))
        driver.order.clear()
        it.destroy()
        assert driver.leaks() == []
        assert violations(driver.directory) == []
        return [before, driver.order, calls(0) > 0, calls(2) - finalized]


@pytest.mark.guarantee("D88")
@pytest.mark.guarantee("D89")
@pytest.mark.parametrize(
    ("vmm", "unmaps"), [(False, "ipc_close"), pytest.param(True, "vmm_unmap", marks=pytest.mark.thorough)]
)
def test_an_epoch_ends_by_abort_rest_letting_go_meeting_and_freeing(
    ranks2: RankPool, stub: str, vmm: bool, unmaps: str
) -> None:
    """In this order on each rank, whichever way the workspaces are shared; then nothing is left."""
    for before, after, was_aborted, finalized in ranks2.run(ends_in_order, stub, vmm):
        assert before == ["context_synchronize", unmaps, "context_synchronize"]
        assert after[0] == "context_synchronize"
        assert set(after[1:]) <= {"mem_free", "vmm_unmap"}
        assert "mem_free" in after
        assert (was_aborted, finalized) == (True, 0), "NCCL's communicator"


def frees_too_soon(rank: int, world_size: int, directory: Path, stub: str) -> list[str]:
    with a_broken_group(rank, world_size, directory, stub, vmm=False) as (_, it, driver, _library):
        if rank == 0:
            it.quiesce(SECONDS)
            it.met(range(world_size))
            it.destroy()
        meet(rank, range(world_size), directory, "freed")
        return violations(driver.directory)


@pytest.mark.guarantee("D89")
def test_memory_that_is_freed_before_the_ranks_have_met_is_noticed(ranks2: RankPool, stub: str) -> None:
    """The seeded mistake: rank 0 frees while rank 1 has its workspace open, which the fake driver reports."""
    found, _ = ranks2.run(frees_too_soon, stub)
    assert any("rank 0" in each and "open" in each for each in found), found


def nobody_met(rank: int, world_size: int, directory: Path, stub: str) -> list[str]:
    with a_broken_group(rank, world_size, directory, stub, vmm=False) as (_, it, driver, _library):
        it.end_calls(SECONDS)
        it.quiesce(SECONDS)
        it.met([rank])
        it.destroy()
        assert violations(driver.directory) == []
        return driver.leaks()


@pytest.mark.guarantee("D89")
def test_what_a_living_rank_may_have_open_stays_allocated(ranks2: RankPool, stub: str) -> None:
    """A rank that is no member of the next epoch, and has not ended, may still use the workspace of IPC."""
    for left in ranks2.run(nobody_met, stub):
        assert len(left) == 1
        assert left[0].startswith("memory memory-")


def cannot_rest(rank: int, world_size: int, directory: Path, stub: str, why: str) -> list[Any]:
    with a_broken_group(rank, world_size, directory, stub, vmm=False) as (_, it, driver, _library):
        it.end_calls(SECONDS)
        caught: CommError | None = None
        if why == "failed":
            driver.faults.fail["context_synchronize"] = (driver.calls["context_synchronize"] + 1, 700)
            with pytest.raises(CudaError, match="context_synchronize") as error:
                it.quiesce(SECONDS)
            caught = error.value
        else:
            with driver.hang(), pytest.raises(CommTimeoutError, match="has not come to rest") as late:
                it.quiesce(0.2)
            caught = late.value
        found = [type(caught).__name__, "ipc_close" in driver.order]
        meet(rank, range(world_size), directory, "found")
        assert violations(driver.directory) == []
        return found


@pytest.mark.guarantee("D88")
@pytest.mark.parametrize(("why", "error"), [("failed", "CudaError"), ("spins", "CommTimeoutError")])
def test_a_device_that_does_not_come_to_rest_keeps_the_memory_of_peers(
    ranks2: RankPool, stub: str, why: str, error: str
) -> None:
    """It has failed, or a kernel still runs: the rank gets a typed error, and nothing is unmapped under the kernel."""
    assert ranks2.run(cannot_rest, stub, why) == [[error, False]] * 2
