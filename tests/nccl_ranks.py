"""Run NcclCommunicator on CPU tensors over a stub of NCCL, in the ranks of a test."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from coordinator.group import GroupCoordinator
from device_comm.base import CommunicatorContext
from device_comm.nccl.communicator import NcclCommunicator
from device_comm.nccl.library import NcclLibrary
from device_comm.nccl.streams import Progress
from tests.fake_cuda import FakeDriver
from tests.worlds import world

__all__ = ["DeviceStreams", "FakeEvent", "FakeProgress", "HostStreams", "context_of", "nccl_world", "stub_of"]


class HostStreams:
    """A stand-in for CUDA streams; a stream is a plain number."""

    def __init__(self) -> None:
        self.number = 7
        self.waits: list[tuple[int, int]] = []

    @property
    def current(self) -> Callable[[], int]:
        return lambda: self.number

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before, self.number = self.number, stream
        try:
            yield
        finally:
            self.number = before

    @contextmanager
    def on_device(self) -> Iterator[None]:
        yield

    def wait(self, waiter: int, on: int) -> None:
        self.waits.append((waiter, on))

    def is_idle(self, stream: int) -> bool:
        return True

    def create(self) -> int:
        return 900

    def record(self, stream: int) -> Any:
        raise NotImplementedError

    def is_captured(self) -> bool:
        return False

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        raise NotImplementedError


class DeviceStreams(HostStreams):
    """The streams of a fake device: waits and events become part of its order, and what must be kept is noted.

    Attributes:
        kept: Address of each tensor that was kept, and the stream for which.
    """

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__()
        self.driver = driver
        self.kept: list[tuple[int, int]] = []
        self._numbers = itertools.count(900)

    def wait(self, waiter: int, on: int) -> None:
        self.driver.wait_for(waiter, self.driver.point(on))

    def create(self) -> int:
        return next(self._numbers)

    def record(self, stream: int) -> FakeEvent:
        return FakeEvent(self.driver, stream)

    def is_captured(self) -> bool:
        return self.driver.stream_is_capturing(self.number)

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        self.kept.append((tensor.data_ptr(), stream))


class FakeEvent:
    """An event of `DeviceStreams`."""

    def __init__(self, driver: FakeDriver, stream: int) -> None:
        self._driver, self._point = driver, driver.point(stream)

    def wait(self, stream: int) -> None:
        self._driver.wait_for(stream, self._point)

    def is_done(self) -> bool:
        return self._driver.is_done(self._point)


class FakeProgress:
    """A stand-in for the progress of queued work, which is unfinished while `stuck` is true."""

    def __init__(self) -> None:
        self.stuck = False
        self.marks = 0

    def mark(self, stream: int) -> None:
        self.marks += 1

    def is_done(self) -> bool:
        return not self.stuck


def stub_of(library: NcclLibrary) -> ctypes.CDLL:
    """Return the stub library, which has functions that control it."""
    return ctypes.CDLL(library.path)


def context_of(group: GroupCoordinator, **changes: Any) -> CommunicatorContext:
    """Return the context for a device communicator of `group`."""
    context = CommunicatorContext(
        name=group.unique_name,
        rank_in_group=group.rank_in_group,
        ranks=tuple(group.ranks),
        device=torch.device("cpu"),
        process_group=None,
        health=group._health,
        timeout_s=20.0,
        exchange=group._host.exchange,
    )
    return dataclasses.replace(context, **changes)


@contextmanager
def nccl_world(
    rank: int,
    world_size: int,
    directory: Path,
    stub: str,
    progress: Progress | None = None,
    **changes: Any,
) -> Iterator[tuple[GroupCoordinator, NcclCommunicator]]:
    """Join a world; yield its group and a communicator of its ranks over the stub."""
    with world(rank, world_size, directory) as group:
        library = NcclLibrary(stub)
        communicator = NcclCommunicator(
            context_of(group, **changes), library=library, streams=HostStreams(), progress=progress
        )
        try:
            yield group, communicator
        finally:
            communicator.destroy()
