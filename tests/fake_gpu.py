"""A GPU of `tests/gpu` without one: kernels that g++ compiled, and the tests' programs in Python."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import torch

from device_comm.cuda.driver import PreparedLaunch
from tests.fake_cuda import FakeDriver, FakeGraph, copy_of, fake_devices

__all__ = ["FakeGpu"]


class FakeGpu(FakeDriver):
    """A `Gpu` without one: graphs are lists, the tests' programs are Python, block rows are threads."""

    def __init__(self, directory: Path, rank: int, library: Path | None = None, world: int = 2) -> None:
        devices = fake_devices(1, multiprocessors=4 * world)
        programs = {"fill": self._fill, "check": self._check, "tick": _tick, "spin": None, "empty": None}
        super().__init__(directory, rank, devices=devices, device_index=0, kernels=programs)
        self.library = None if library is None else ctypes.CDLL(str(library))
        self.rows: dict[int, str] = {}

    def module_function(self, module: int, name: str) -> int:
        function = super().module_function(module, name)
        self.rows[function] = name
        return function

    def launch_cooperative(
        self, function: int, grid: tuple[int, int], block_x: int, stream: int, arguments: PreparedLaunch
    ) -> None:
        if grid[0] * grid[1] > self.multiprocessors() or self.library is None:
            raise self._error("launch_cooperative", 720)
        if (graph := self._capturing.get(stream)) is not None:
            then = copy_of(arguments)
            graph.launches.append(self.rows[function])
            graph.steps.append(lambda: self._run_rows(function, grid, block_x, then))
            return
        self._run_rows(function, grid, block_x, arguments)

    def _run_rows(
        self, function: int, grid: tuple[int, int], block_x: int, arguments: PreparedLaunch
    ) -> None:
        assert self.library is not None
        name = self.rows[function].encode()
        sizes = [ctypes.c_uint(each) for each in (*grid, block_x)]
        if self.library.launch_rows(name, *sizes, ctypes.c_void_p(arguments.pointers)):
            raise self._error("launch_cooperative", 719)

    def replay(self, graph: FakeGraph, stream: int = 0) -> None:
        super().replay(graph)

    def forget(self, graph: FakeGraph) -> None:
        graph.steps.clear()

    def timed_event(self) -> list[float]:
        return [0.0]

    def mark(self, event: list[float], stream: int) -> None:
        event[0] = time.perf_counter()

    def microseconds(self, start: list[float], end: list[float]) -> float:
        return (end[0] - start[0]) * 1e6

    def drop(self, event: list[float]) -> None:
        event.clear()

    def _fill(self, grid: int, block: int, arguments: PreparedLaunch) -> None:
        place, count, rank, step = (arguments.words[at] for at in arguments.word_of)
        values = _values(rank & 0xFFFFFFFF, ctypes.c_uint32.from_address(step).value, count)
        ctypes.memmove(place, values.bfloat16().view(torch.uint8).numpy().tobytes(), 2 * count)

    def _check(self, grid: int, block: int, arguments: PreparedLaunch) -> None:
        place, count, world, step, wrong = (arguments.words[at] for at in arguments.word_of)
        number = ctypes.c_uint32.from_address(step).value
        total = sum(_values(rank, number, count) for rank in range(world & 0xFFFFFFFF))
        assert isinstance(total, torch.Tensor)
        found = torch.frombuffer(bytearray(ctypes.string_at(place, 2 * count)), dtype=torch.bfloat16)
        ctypes.c_uint32.from_address(wrong).value += int((found.int() != total).sum())


def _values(rank: int, step: int, count: int) -> torch.Tensor:
    return (torch.arange(count) * 7 + step * 13 + rank * 29) % 61 - 30


def _tick(grid: int, block: int, arguments: PreparedLaunch) -> None:
    ctypes.c_uint32.from_address(arguments.words[0]).value += 1
