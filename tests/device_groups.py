"""Groups of an elastic world whose tensors go through NCCL's stub, or through CUDA's fake driver as well."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.nccl.communicator import NcclCommunicator
from device_comm.nccl.library import NcclLibrary
from device_comm.registry import register_communicator, unregister_communicator
from tests.nccl_ranks import HostStreams

__all__ = ["NotingLibrary", "over", "over_nccl", "stub_faults"]


class NotingLibrary(NcclLibrary):
    """The stub, with the ids by which this process has joined communicators.

    Attributes:
        ids: One for each communicator, in order.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.ids: list[bytes] = []

    def init_rank(self, world_size: int, unique_id: bytes, rank: int, config: object) -> tuple[int, int]:
        self.ids.append(unique_id)
        return super().init_rank(world_size, unique_id, rank, config)  # type: ignore[arg-type]


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
