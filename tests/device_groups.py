"""Groups of an elastic world whose tensors go through NCCL's stub, or through CUDA's fake driver as well."""

import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.cuda.communicator import CudaCommunicator
from device_comm.cuda.kernels import FAMILIES
from device_comm.cuda_settings import CudaSettings
from device_comm.nccl.communicator import NcclCommunicator
from device_comm.nccl.library import NcclLibrary
from device_comm.registry import register_communicator, unregister_communicator
from tests.fake_cuda import FakeDriver, FakeFaults
from tests.nccl_ranks import HostStreams

__all__ = ["STEPS", "NotingLibrary", "OrderedDriver", "over", "over_cuda", "over_nccl", "stub_faults"]


class NotingLibrary(NcclLibrary):
    """The stub, with the ids by which this process has joined communicators, and how these have ended.

    Attributes:
        ids: One for each communicator, in order.
        ends: The functions that have ended communicators, and their ids, in order.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.ids: list[bytes] = []
        self.ends: list[tuple[str, str]] = []
        self._id_of: dict[int, str] = {}

    def init_rank(
        self, world_size: int, unique_ids: Sequence[bytes], rank: int, config: object
    ) -> tuple[int, int]:
        (unique_id,) = unique_ids
        self.ids.append(unique_id)
        comm, status = super().init_rank(world_size, unique_ids, rank, config)  # type: ignore[arg-type]
        self._id_of[comm] = unique_id.hex()
        return comm, status

    def call(self, name: str, *arguments: Any, comm: int = 0) -> int:
        if name in ("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"):
            self.ends.append((name, self._id_of[arguments[0]]))
        return super().call(name, *arguments, comm=comm)


@contextmanager
def over(factory: Callable[[CommunicatorContext], DeviceCommunicator]) -> Iterator[None]:
    """Let groups that are created in the block have communicators of `factory`."""
    register_communicator("cpu", factory)
    try:
        yield
    finally:
        unregister_communicator("cpu")


@contextmanager
def over_nccl(stub: str) -> Iterator[NotingLibrary]:
    """Let groups that are created in the block use NCCL's stub; yield the library."""
    library = NotingLibrary(stub)
    with over(lambda context: NcclCommunicator(context, library=library, streams=HostStreams())):
        yield library


def stub_faults(stub: str) -> str:
    """Return what the stub has found wrong in the calls of this process."""
    found = ctypes.CDLL(stub).stub_faults
    found.restype = ctypes.c_char_p
    return str(found().decode())


class OrderedDriver(FakeDriver):
    """A device without kernels that notes, beside those of the other ranks, when the steps of an epoch's end come."""

    def __init__(self, directory: Path, rank: int, log: Path, faults: FakeFaults) -> None:
        names = (name for each in FAMILIES.values() for name in each)
        super().__init__(directory, rank, faults=faults, kernels=dict.fromkeys(names))
        self._log = log

    def _enter(self, function: str, *, in_capture: bool = True) -> None:
        if function in STEPS:
            with self._log.open("a") as log:  # in one piece: lines of several ranks do not mix
                log.write(f"{self.rank} {function}\n")
        super()._enter(function, in_capture=in_capture)


STEPS = ("context_synchronize", "ipc_close", "mem_alloc", "mem_free")
"""The calls of the driver that are noted."""


@contextmanager
def over_cuda(
    rank: int, directory: Path, stub: str, faults: FakeFaults
) -> Iterator[tuple[OrderedDriver, Path]]:
    """Let groups that are created in the block use CUDA's fake driver and NCCL's stub; yield the driver and the log.

    All groups of the process share the driver, as they share the device. The workspaces go through CUDA IPC.
    """
    shared, library = directory / "device", NotingLibrary(stub)
    shared.mkdir(exist_ok=True)
    driver = OrderedDriver(shared, rank, directory / "order", faults)
    settings = CudaSettings(arena_bytes=1 << 16, staging_bytes=1 << 16, kernel_cache=str(directory / "cache"))
    # A group that ends closes its driver; the device goes on.
    setattr(driver, "close", lambda: None)  # noqa: B010 - a method
    with over(
        lambda context: CudaCommunicator(
            dataclasses.replace(context, cuda=settings),
            open_driver=lambda: driver,
            library=library,
            streams=HostStreams(),
            cubin=lambda _family, _dtype: b"",
        )
    ):
        yield driver, directory / "order"
    driver.release()
