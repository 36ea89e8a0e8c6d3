"""A CUDA driver that needs no GPU and works across real processes.

It has the interface of `device_comm.cuda.driver` and is as strict as CUDA.

"Device memory" is host memory. Exportable memory is a file in a directory that the ranks share and map; an IPC handle
names that file. Kernels are Python functions, or a shared library that `tests/native/cuda/host_build.py` compiles from
the product's source. Every call completes before it returns, which keeps streams in order. A launch that waits for
peers blocks its thread until they have launched too; ranks in one process therefore need one thread each.

    driver = FakeDriver(directory, rank)
    module = driver.module_load(fake_cubin(library))     # or FakeDriver(..., kernels={"name": function})
    driver.begin_capture(stream); ...; graph = driver.end_capture(stream); driver.replay(graph)
    assert driver.leaks() == [] and violations(directory) == []

A kernel that spins is modelled by `driver.hang()`: calls that wait for the whole device then wait for its end.

It reports errors that crash a real device only sometimes: memory is freed while a peer has it open, a handle is opened
twice, memory is exported that cannot be exported, a call is made that capture forbids, a stream is used that was
destroyed, or a resource is never released.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from device_comm.cuda.driver import LaunchConfiguration, PreparedLaunch
from tests.fake_device import (
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_UNJOINED,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    INVALID_HANDLE,
    INVALID_VALUE,
    LAUNCH_FAILED,
    NOT_FOUND,
    FakeDevice,
    FakeFaults,
    fake_devices,
    unmap,
)
from tests.fake_multicast import FakeMulticast

__all__ = [
    "FakeDevice",
    "FakeDriver",
    "FakeFaults",
    "FakeGraph",
    "StreamPoint",
    "Work",
    "copy_of",
    "fake_cubin",
    "fake_devices",
    "violations",
]

# The handles of the legacy stream.
_LEGACY = (0, 1)

# The first driver that captures programmatic dependent launch into a graph.
_DEPENDENT_SINCE = 12030

_CUBIN_MAGIC = b"host-library:"


class FakeGraph:
    """The calls recorded on the streams of one capture.

    Attributes:
        number: The capture's id.
        is_blocking: Whether its first stream waits for the legacy stream, which nobody can use during the capture then.
        is_invalid: Whether something has made the capture invalid.
        steps: The recorded calls.
        launches: Names of the recorded kernels.
        before: What precedes later work on each stream of the capture; see `FakeDriver.queue`.
    """

    def __init__(self, number: int = 0, *, is_blocking: bool = False) -> None:
        self.number = number
        self.is_blocking = is_blocking
        self.is_invalid = False
        self.before: dict[int, int] = {}
        self.works = 0
        self.steps: list[Callable[[], None]] = []
        self.launches: list[str] = []


class Work(NamedTuple):
    """One piece of work that was queued: its name, its stream, and 1 << number for all work before it."""

    name: str
    stream: int
    before: int

    def follows(self, number: int) -> bool:
        """Return whether this begins only when the work with this number is done."""
        return bool(self.before >> number & 1)


class StreamPoint(NamedTuple):
    """A place in the order of a stream, in a capture or not, and 1 << number for all work before it."""

    stream: int
    graph: FakeGraph | None
    before: int


def fake_cubin(library: Path | str) -> bytes:
    """Return a stand-in for a compiled module: the path of a host library for `FakeDriver.module_load`."""
    return _CUBIN_MAGIC + str(library).encode()


def violations(directory: Path) -> list[str]:
    """Return the errors of all ranks that the driver found, as text."""
    return sorted(path.read_text() for path in Path(directory).glob("violation-*"))


class FakeDriver(FakeMulticast):
    """One rank's device. The module's docstring describes it."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        *,
        devices: Sequence[FakeDevice] | None = None,
        device_index: int | None = None,
        faults: FakeFaults | None = None,
        kernels: Mapping[str, Callable[[int, int, PreparedLaunch], None] | None] | None = None,
        library_of: Callable[[bytes], Path] | None = None,
    ) -> None:
        """Make the driver of a rank.

        Args:
            directory: Shared by all ranks, and new for each test.
            rank: Names this rank's files.
            devices: The devices that this process sees; eight by default.
            device_index: The index of this rank's device; by default its rank.
            faults: The faults to simulate.
            kernels: Python functions of (grid, block, arguments) by name, preferred to any library; None does nothing.
            library_of: Finds the host library of a compiled module that does not come from `fake_cubin`.
        """
        super().__init__(
            directory,
            rank,
            fake_devices(8) if devices is None else devices,
            rank if device_index is None else device_index,
            faults or FakeFaults(),
        )
        self._kernels = dict(kernels or {})
        self._library_of = library_of
        self._modules: dict[int, Any] = {}
        self._functions: dict[int, tuple[int, str, Any]] = {}
        self._streams: set[int] = set()
        self._destroyed: set[int] = set()
        self._events: set[int] = set()
        self._recorded: dict[int, StreamPoint] = {}
        # What precedes later work on each stream, and each piece of work that was queued; see `queue`.
        self._before: dict[int, int] = {}
        self.works: list[Work] = []
        # Work that the device has not done yet, as the test says: 1 << number for each.
        self.unfinished = 0
        # Pairs of streams of which the second waits for what was queued on the first.
        self.orders: list[tuple[int, int]] = []
        # The configurations of all launches, in order.
        self.configured: list[LaunchConfiguration] = []

    # --- for tests --------------------------------------------------------------------------------------------

    def tensor(
        self, shape: Sequence[int] | int, dtype: torch.dtype, *, padding_bytes: int = 0
    ) -> torch.Tensor:
        """Return a zeroed tensor in memory like torch's, `padding_bytes` behind the base of its allocation.

        It is valid until `release`. torch owns the memory, so `leaks` does not count it.
        """
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(torch.Size(dims).numel())
        nbytes = padding_bytes + count * dtype.itemsize
        address = self._create("torch", nbytes, is_exportable=not self.faults.expandable_segments)
        buffer = (ctypes.c_char * nbytes).from_address(address)
        if count == 0:
            return torch.empty(dims, dtype=dtype)
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=padding_bytes).view(dims)

    def queue(self, stream: int, name: str) -> int:
        """Note that work is queued on `stream`; return its number. Kernels note theirs.

        Every call completes before it returns, so a missing wait between streams does not show in results. Each piece
        of work knows instead which others streams and events put in front of it.
        """
        number = len(self.works)
        before = self.point(stream).before
        self.works.append(Work(name, stream, before))
        self._extend(stream, 1 << number)
        graph = self._capturing.get(stream)
        if graph is not None:
            graph.works |= 1 << number
        return number

    def point(self, stream: int) -> StreamPoint:
        """Return the place behind all work that is queued on `stream` by now."""
        graph: FakeGraph | None = self._capturing.get(stream)
        known = self._before if graph is None else graph.before
        return StreamPoint(stream, graph, known.get(stream, 0))

    def wait_for(self, stream: int, point: StreamPoint) -> None:
        """Put `point` in front of later work on `stream`."""
        own = self._capturing.get(stream)
        if point.graph is not own and (own is not None or point.graph is None):
            raise self._error("stream_wait_event", CAPTURE_ISOLATION)
        if point.graph is not None and point.graph not in self._capturing.values():
            raise self._error("stream_wait_event", CAPTURED_EVENT)
        if point.graph is not None:
            self._capturing[stream] = point.graph
        self._extend(stream, point.before)
        self.orders.append((point.stream, stream))

    def _extend(self, stream: int, before: int) -> None:
        graph = self._capturing.get(stream)
        known = self._before if graph is None else graph.before
        known[stream] = known.get(stream, 0) | before

    def is_done(self, point: StreamPoint) -> bool:
        """Return whether the device has done all work before `point`."""
        if point.graph is not None:
            raise self._error("event_query", CAPTURED_EVENT)
        return not point.before & self.unfinished

    def begin_capture(self, stream: int, *, is_blocking: bool = False) -> None:
        """Record the calls on `stream` from now on instead of running them."""
        if stream in self._capturing or stream in _LEGACY:
            raise self._error("begin_capture", INVALID_VALUE)
        self._use("begin_capture", stream)
        self._capturing[stream] = FakeGraph(self._number(), is_blocking=is_blocking)

    def invalidate_capture(self, stream: int) -> None:
        """Make the capture of `stream` invalid, as a forbidden call of other code does. It still has to be ended."""
        self._capturing[stream].is_invalid = True

    def end_capture(self, stream: int) -> FakeGraph:
        """Stop recording, on this stream and those that have joined, and return the graph.

        Raises an error if another stream has work that this one does not wait for.
        """
        graph: FakeGraph = self._capturing[stream]
        self._capturing = {each: other for each, other in self._capturing.items() if other is not graph}
        if graph.is_invalid:
            raise self._error("end_capture", CAPTURE_INVALIDATED)
        if graph.works & ~graph.before.get(stream, 0):
            raise self._error("end_capture", CAPTURE_UNJOINED)
        return graph

    def replay(self, graph: FakeGraph) -> None:
        """Run the recorded calls with their recorded arguments."""
        for step in graph.steps:
            step()

    def leaks(self) -> list[str]:
        """Return what was not released, torch's memory excepted."""
        found = [f"{m.kind} {m.name} of {m.nbytes} bytes" for m in self._memory.values() if m.kind != "torch"]
        found += [f"host memory of {nbytes} bytes" for nbytes in self._host.values()]
        found += [f"VMM handle {handle}" for handle in self._vmm]
        found += [f"multicast object {each.name}" for each in self._objects.values()]
        found += [f"memory bound to {name}" for name in self._bound]
        found += [f"module {module}" for module in self._modules]
        found += [f"stream {stream}" for stream in sorted(self._streams)]
        found += [f"event {event}" for event in sorted(self._events)]
        return sorted(found)

    def release(self) -> None:
        """Release everything that is left, including torch's memory, without reporting it."""
        super().release()
        with self._lock:
            for address in list(self._memory):
                self._unmap(address)
            for address, nbytes in self._host.items():
                unmap(address, nbytes)
            self._host.clear()
            for handle in list(self._vmm):
                os.close(self._vmm.pop(handle)[0])

    # --- modules and launches ---------------------------------------------------------------------------------

    def module_load(self, cubin: bytes) -> int:
        self._enter("module_load", in_capture=False)
        library = None
        if cubin.startswith(_CUBIN_MAGIC):
            library = ctypes.CDLL(cubin[len(_CUBIN_MAGIC) :].decode())
        elif self._library_of is not None:
            library = ctypes.CDLL(str(self._library_of(cubin)))
        if library is not None:
            library.launch_clusters.argtypes = [ctypes.c_char_p, *[ctypes.c_uint] * 3, ctypes.c_void_p]
            library.launch_clusters.restype = ctypes.c_int
        module = self._number()
        self._modules[module] = library
        return module

    def module_unload(self, module: int) -> None:
        self._enter("module_unload")
        self._synchronize("module_unload")
        if module not in self._modules:
            raise self._error("module_unload", INVALID_HANDLE)
        del self._modules[module]
        self._functions = {key: value for key, value in self._functions.items() if value[0] != module}

    def module_function(self, module: int, name: str) -> int:
        self._enter("module_function")
        library = self._modules[module]
        call: Any = None
        if name in self._kernels:
            kernel = self._kernels[name]
            if kernel is not None:

                def call(grid: int, threads: int, _cluster: int, arguments: PreparedLaunch) -> None:
                    kernel(grid, threads, arguments)

        elif library is not None:
            entry, label = library.launch_clusters, name.encode()

            def call(grid: int, threads: int, cluster: int, arguments: PreparedLaunch) -> None:
                status = entry(label, grid, threads, cluster, arguments.pointers)
                if status:
                    raise self._error("launch", LAUNCH_FAILED, f"{name} returned {status}")

        else:
            raise self._error("module_function", NOT_FOUND, name)
        function = self._number()
        self._functions[function] = module, name, call
        return function

    def launch(
        self, function: int, grid_x: int, block_x: int, stream: int, arguments: PreparedLaunch
    ) -> None:
        self._launch(function, (grid_x, block_x, 1), stream, arguments)

    def _launch(
        self, function: int, shape: tuple[int, int, int], stream: int, arguments: PreparedLaunch
    ) -> None:
        if self.faults.fail or self._closed:
            self._enter("launch")
        known = self._functions.get(function)
        if known is None:
            raise self._error("launch", INVALID_HANDLE)
        self._use("launch", stream)
        call = known[2]
        self.queue(stream, known[1])
        if stream in self._capturing:
            graph, then = self._capturing[stream], copy_of(arguments)
            graph.launches.append(known[1])
            if call is not None:
                graph.steps.append(lambda: call(*shape, then))
        elif call is not None:
            call(*shape, arguments)

    def configure(
        self, function: int, grid: int, threads: int, *, cluster: int = 1, is_dependent: bool = False
    ) -> LaunchConfiguration:
        self._enter("configure")
        if function not in self._functions:
            raise self._error("configure", INVALID_HANDLE)
        if grid % cluster:
            raise self._error("configure", INVALID_VALUE)
        is_dependent = is_dependent and self.supports_dependent_launch()
        return LaunchConfiguration(function, grid, threads, cluster, is_dependent)

    def launch_configured(
        self, configuration: LaunchConfiguration, stream: int, arguments: PreparedLaunch
    ) -> None:
        self.configured.append(configuration)
        shape = configuration.grid, configuration.threads, configuration.cluster
        self._launch(configuration.function, shape, stream, arguments)

    def supports_dependent_launch(self) -> bool:
        return self.device.capability >= (9, 0) and self.faults.version >= _DEPENDENT_SINCE

    def launched(self) -> dict[str, bool]:
        """Return the kernels that were launched, and whether each could begin before the end of the one before it.

        Raises an error if that differs between launches of a kernel.
        """
        found: dict[str, bool] = {}
        for each in self.configured:
            name = self._functions[each.function][1]
            if found.setdefault(name, each.is_dependent) is not each.is_dependent:
                raise AssertionError(f"some launches of {name} are dependent")
        return found

    # --- streams and events -----------------------------------------------------------------------------------

    def stream_create(self) -> int:
        self._enter("stream_create")
        stream = self._number()
        self._streams.add(stream)
        return stream

    def stream_destroy(self, stream: int) -> None:
        self._enter("stream_destroy")
        if stream not in self._streams:
            raise self._error("stream_destroy", INVALID_HANDLE)
        self._streams.discard(stream)
        self._destroyed.add(stream)

    def _use(self, function: str, stream: int) -> None:
        self._know(function, stream)
        if stream in _LEGACY and any(graph.is_blocking for graph in self._capturing.values()):
            raise self._error(function, CAPTURE_IMPLICIT)
        if stream in self._capturing and self._capturing[stream].is_invalid:
            raise self._error(function, CAPTURE_INVALIDATED)

    def _know(self, function: str, stream: int) -> None:
        if stream in self._destroyed:
            raise self._error(function, INVALID_HANDLE, f"stream {stream:#x} was destroyed")

    def stream_synchronize(self, stream: int) -> None:
        self._enter("stream_synchronize", in_capture=False)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._enter("stream_wait_event")
        self._use("stream_wait_event", stream)
        self.wait_for(stream, self._recorded.get(event, StreamPoint(0, None, 0)))

    def stream_is_capturing(self, stream: int) -> bool:
        self._know("stream_is_capturing", stream)
        return stream in self._capturing

    def capture_id(self, stream: int) -> int:
        self._know("capture_id", stream)
        graph = self._capturing.get(stream)
        return 0 if graph is None or graph.is_invalid else graph.number

    def event_create(self) -> int:
        self._enter("event_create")
        event = self._number()
        self._events.add(event)
        return event

    def event_record(self, event: int, stream: int) -> None:
        self._enter("event_record")
        if event not in self._events:
            raise self._error("event_record", INVALID_HANDLE)
        self._use("event_record", stream)
        self._recorded[event] = self.point(stream)

    def event_query(self, event: int) -> bool:
        self._enter("event_query")
        return self.is_done(self._recorded.get(event, StreamPoint(0, None, 0)))

    def event_destroy(self, event: int) -> None:
        self._enter("event_destroy")
        if event not in self._events:
            raise self._error("event_destroy", INVALID_HANDLE)
        self._events.discard(event)

    def context_synchronize(self) -> None:
        self._enter("context_synchronize")
        if self._capturing:
            raise self._error("context_synchronize", CAPTURE_UNSUPPORTED, "a stream is capturing")
        self._synchronize("context_synchronize")

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        self._enter("relaxed_capture")
        yield

    def relax_capture(self) -> None:
        self._enter("relax_capture")
        self._relaxed.add(threading.get_ident())

    def close(self) -> None:
        self._closed = True


def copy_of(arguments: PreparedLaunch) -> PreparedLaunch:
    """Return a copy of the arguments, because a graph keeps those of the capture."""
    if not arguments.word_of:
        return PreparedLaunch([])
    ends = [*arguments.word_of[1:], len(arguments.words)]
    return PreparedLaunch(
        [bytes(arguments.words[start:end]) for start, end in zip(arguments.word_of, ends, strict=True)]
    )
