"""The GPU as the tests use it: the product's driver, with graphs, clocks, memory and programs of the tests."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from device_comm.cuda.driver import Driver, PreparedLaunch
from device_comm.cuda.driver_bindings import CudaDriver
from device_comm.cuda.kernels import DTYPES, FAMILIES

__all__ = [
    "Gpu",
    "GpuDriver",
    "Memory",
    "arch_of",
    "compile_mutant",
    "compile_text",
    "measured_us",
    "program_source",
    "to_bytes",
    "u32",
    "u64",
]


def u32(value: int) -> bytes:
    """Return an argument of 32 bits."""
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    """Return an argument of 64 bits: an address or a count."""
    return struct.pack("<Q", value)


class Gpu(Driver, Protocol):
    """What the tests need beyond `Driver`. A fake device has it too."""

    def begin_capture(self, stream: int) -> None: ...

    def end_capture(self, stream: int) -> Any: ...

    def replay(self, graph: Any, stream: int) -> None: ...

    def forget(self, graph: Any) -> None: ...

    def launch_cooperative(
        self, function: int, grid: tuple[int, int], block_x: int, stream: int, arguments: PreparedLaunch
    ) -> None: ...


class GpuDriver(CudaDriver):
    """The product's driver of a real device, with graphs and events that record the time."""

    def attribute(self, name: str) -> int:
        """Return CU_DEVICE_ATTRIBUTE_`name`."""
        return self._attribute(name)

    def launch_cooperative(
        self, function: int, grid: tuple[int, int], block_x: int, stream: int, arguments: PreparedLaunch
    ) -> None:
        """Launch a two-dimensional grid whose blocks all run at once, or fail."""
        sizes = (*grid, 1, block_x, 1, 1, 0)
        kernel, queue = self._functions[function], self._stream(stream)
        self._in_context("cuLaunchCooperativeKernel", kernel, *sizes, queue, arguments.pointers)

    def begin_capture(self, stream: int) -> None:
        # For this thread alone: other ranks of this process go on allocating and synchronizing.
        mode = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._in_context("cuStreamBeginCapture", self._stream(stream), mode)

    def end_capture(self, stream: int) -> Any:
        graph = self._in_context("cuStreamEndCapture", self._stream(stream))
        try:
            executable = self._in_context("cuGraphInstantiate", graph, 0)
        finally:
            self._in_context("cuGraphDestroy", graph)
        # Else the first launch uploads it, while kernels of other ranks may wait for it.
        self._in_context("cuGraphUpload", executable, self._stream(stream))
        self.stream_synchronize(stream)
        return executable

    def replay(self, graph: Any, stream: int) -> None:
        self._in_context("cuGraphLaunch", graph, self._stream(stream))

    def forget(self, graph: Any) -> None:
        self._in_context("cuGraphExecDestroy", graph)

    def timed_event(self) -> Any:
        """Return an event that records when the stream reached it."""
        return self._in_context("cuEventCreate", 0)

    def mark(self, event: Any, stream: int) -> None:
        """Record `event` on the stream."""
        self._in_context("cuEventRecord", event, self._stream(stream))

    def microseconds(self, start: Any, end: Any) -> float:
        """Return the time between two events that were reached."""
        return float(self._in_context("cuEventElapsedTime", start, end)) * 1e3

    def drop(self, event: Any) -> None:
        """Give an event of `timed_event` back."""
        self._in_context("cuEventDestroy", event)


def measured_us(driver: GpuDriver, stream: int, queue: Callable[[], None]) -> float:
    """Return how long the device takes for what `queue` puts on the stream."""
    start, end = driver.timed_event(), driver.timed_event()
    driver.mark(start, stream)
    queue()
    driver.mark(end, stream)
    driver.stream_synchronize(stream)
    spent = driver.microseconds(start, end)
    driver.drop(start)
    driver.drop(end)
    return spent


class Memory:
    """One allocation, handed out in parts, so that nothing is allocated while kernels wait for each other.

    An allocation may wait for all kernels of the process, and a kernel may wait for a launch that comes later.
    """

    def __init__(self, driver: Gpu, nbytes: int) -> None:
        self.driver = driver
        self.base = driver.mem_alloc(nbytes)
        self.nbytes = nbytes
        self._used = 0

    def room(self, nbytes: int) -> int:
        """Return the address of `nbytes`, a multiple of 256."""
        address = self.base + self._used
        self._used += -(-max(nbytes, 1) // 256) * 256
        if self._used > self.nbytes:
            raise MemoryError(f"{self._used} bytes of {self.nbytes}")
        return address

    def mark(self) -> int:
        """Return a position for `back_to`."""
        return self._used

    def back_to(self, mark: int) -> None:
        """Take back everything handed out since `mark`."""
        self._used = mark

    def put(self, data: torch.Tensor | bytes) -> int:
        """Copy data in; return its address."""
        raw = data if isinstance(data, bytes) else to_bytes(data)
        address = self.room(len(raw))
        self.driver.memcpy_htod(address, raw)
        # A copy from pageable memory may return before the data has arrived, and our streams do not wait for it.
        self.driver.stream_synchronize(0)
        return address

    def table(self, values: Sequence[int]) -> int:
        """Copy a table of addresses in; return its own."""
        return self.put(struct.pack(f"<{len(values)}Q", *values))

    def get(self, address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of `count` elements."""
        if not count:
            return torch.empty(0, dtype=dtype)
        raw = bytearray(self.driver.memcpy_dtoh(address, count * dtype.itemsize))
        return torch.frombuffer(raw, dtype=dtype)

    def free(self) -> None:
        """Give everything back."""
        if self.base:
            self.driver.mem_free(self.base)
            self.base = 0


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of the CPU, of any dtype."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def arch_of(driver: Driver) -> int:
    """Return the compute capability times ten."""
    major, minor = driver.compute_capability()
    return 10 * major + minor


def program_source() -> str:
    """Return the source of the programs that the tests launch beside the kernels."""
    return (Path(__file__).parent / "test_programs.cu").read_text()


def compile_mutant(source: str, arch: int, world_size: int, dtype: str, family: str, *options: str) -> bytes:
    """Compile a changed source of the kernels as `device_comm.cuda.kernels` compiles the right one."""
    number = 1 + list(FAMILIES).index(family)
    defines = (f"-DWORLD_SIZE={world_size}", f"-DFAMILY={number}", *options)
    return compile_text(source, arch, dtype, *defines, "-fmad=false")


def compile_text(source: str, arch: int, dtype: str, *options: str) -> bytes:
    """Compile a source without headers; return the machine code."""
    from cuda.bindings import nvrtc

    def call(function: str, *arguments: Any) -> Any:
        code, *results = getattr(nvrtc, function)(*arguments)
        if int(code) != 0:
            raise RuntimeError(f"{function}: {code}")
        return results[0] if results else None

    program = call("nvrtcCreateProgram", source.encode(), b"text.cu", 0, None, None)
    chosen = [f"--gpu-architecture=sm_{arch}", f"-DDTYPE={DTYPES[dtype]}", "--std=c++17", *options]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(chosen), [each.encode() for each in chosen])
    if int(code) != 0:
        log = bytes(call("nvrtcGetProgramLogSize", program))
        call("nvrtcGetProgramLog", program, log)
        raise RuntimeError(log.decode(errors="replace"))
    cubin = bytes(call("nvrtcGetCUBINSize", program))
    call("nvrtcGetCUBIN", program, cubin)
    return cubin
