"""Worlds with a `CudaCommunicator` over a driver that needs no GPU, kernels from g++ and a stub of NCCL."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.group import GroupCoordinator
from device_comm.cuda.communicator import CudaCommunicator
from device_comm.cuda_settings import CudaSettings
from device_comm.nccl.library import NcclLibrary
from tests.fake_cuda import FakeDevice, FakeDriver, FakeFaults, fake_cubin, violations
from tests.nccl_ranks import HostStreams, context_of
from tests.worlds import world

STREAM = 7


@contextmanager
def cuda_world(
    rank: int,
    world_size: int,
    directory: Path,
    native: str,
    faults: FakeFaults | None = None,
    meets: bool = True,
    devices: Sequence[FakeDevice] | None = None,
    kept: int = 0,
    **settings: Any,
) -> Iterator[tuple[GroupCoordinator, CudaCommunicator, FakeDriver]]:
    """Join a world; yield its group, a communicator over the fake driver, and the driver.

    Check at the end that nothing is left but `kept` allocations, which peers may have had open.
    """
    shared = directory / "device"
    shared.mkdir(exist_ok=True)
    chosen = {"arena_bytes": 1 << 16, "staging_bytes": 1 << 16, "kernel_cache": str(directory / "cache")}
    with world(rank, world_size, directory) as group:
        driver = FakeDriver(shared, rank, faults=faults, devices=devices)
        communicator = CudaCommunicator(
            context_of(group, cuda=CudaSettings(**{**chosen, **settings})),
            open_driver=lambda: driver,
            library=NcclLibrary(f"{native}/libnccl-stub.so"),
            streams=HostStreams(),
            cubin=lambda _family, dtype: fake_cubin(f"{native}/kernels_{world_size}_{dtype}.so"),
        )
        try:
            yield group, communicator, driver
        finally:
            communicator.destroy()
            if meets:
                group.barrier()
            left = driver.leaks()
            assert len(left) == kept, left
            assert all(each.startswith("memory memory-") for each in left), left
            driver.release()
            assert violations(shared) == []
