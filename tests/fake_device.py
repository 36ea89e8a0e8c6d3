"""The memory and the faults of the tests' CUDA driver, which `tests.fake_cuda` describes."""

import ctypes
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device_comm.cuda.driver import IPC_HANDLE_BYTES, Driver
from shm_broadcast.errors import ClosedError, CudaError

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
ALREADY_MAPPED = 208
PEER_ACCESS_UNSUPPORTED = 217
INVALID_HANDLE = 400
NOT_FOUND = 500
LAUNCH_FAILED = 719
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
CAPTURE_UNJOINED, CAPTURE_ISOLATION, CAPTURE_IMPLICIT, CAPTURED_EVENT = 904, 905, 906, 907

_NAMES = {
    INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY",
    INVALID_DEVICE: "CUDA_ERROR_INVALID_DEVICE",
    INVALID_CONTEXT: "CUDA_ERROR_INVALID_CONTEXT",
    ALREADY_MAPPED: "CUDA_ERROR_ALREADY_MAPPED",
    PEER_ACCESS_UNSUPPORTED: "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
    INVALID_HANDLE: "CUDA_ERROR_INVALID_HANDLE",
    NOT_FOUND: "CUDA_ERROR_NOT_FOUND",
    LAUNCH_FAILED: "CUDA_ERROR_LAUNCH_FAILED",
    NOT_SUPPORTED: "CUDA_ERROR_NOT_SUPPORTED",
    CAPTURE_UNSUPPORTED: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    CAPTURE_INVALIDATED: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    CAPTURE_UNJOINED: "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
    CAPTURED_EVENT: "CUDA_ERROR_CAPTURED_EVENT",
    CAPTURE_ISOLATION: "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
    CAPTURE_IMPLICIT: "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
}

MOST_HANG_S = 15.0

_HANDLE_MAGIC = b"FAKE-IPC"
GRANULARITY = 1 << 16

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class FakeDevice:
    """The properties that a device reports."""

    uuid: str
    name: str = "Fake H100"
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    total_memory: int = 80 << 30
    pci_bus_id: str = "0000:00:00.0"


def fake_devices(count: int, **facts: Any) -> list[FakeDevice]:
    """Return devices that differ only in UUID and PCI address."""
    return [
        FakeDevice(
            uuid=str(uuid.UUID(int=0xFA4E << 96 | number)), pci_bus_id=f"0000:{number + 1:02x}:00.0", **facts
        )
        for number in range(count)
    ]


@dataclass
class FakeFaults:
    """The faults of this rank.

    Attributes:
        ipc: Whether the device can export memory from `mem_alloc`.
        vmm: Whether it supports virtual memory management with descriptors.
        multicast: Whether it supports multicast objects.
        expandable_segments: Whether torch's memory (`FakeDriver.tensor`) is of the kind that IPC cannot export.
        blocked: Ordinals of devices whose memory this one cannot access.
        no_nvlink: Whether atomics on other devices' memory are not native.
        lost_writes: Ranks to whose memory this rank writes without effect.
        memory_bytes: Bytes that can be allocated.
        fail: Method name -> (number of the call that fails, from 1; error code).
        version: The driver version that is reported.
        hidden: UUID of a device that the process does not see -> (whether it has access, whether over NVLink).
    """

    ipc: bool = True
    vmm: bool = True
    multicast: bool = True
    expandable_segments: bool = False
    blocked: Iterable[int] = ()
    no_nvlink: bool = False
    lost_writes: Iterable[int] = ()
    memory_bytes: int = 1 << 30
    fail: dict[str, tuple[int, int]] = field(default_factory=dict)
    version: int = 13000
    hidden: dict[str, tuple[bool, bool]] = field(default_factory=dict)


@dataclass
class Memory:
    """One mapping of this process."""

    kind: str
    name: str
    nbytes: int
    marker: Path | None = None
    is_exportable: bool = True


class FakeMemory(Driver):
    """A device and its memory; `FakeDriver` adds kernels and streams."""

    def __init__(
        self, directory: Path, rank: int, devices: Sequence[FakeDevice], index: int, faults: FakeFaults
    ) -> None:
        self.directory = Path(directory)
        self.rank = rank
        self.faults = faults
        self.calls: dict[str, int] = {}
        self._devices = list(devices)
        self._index = index
        self._memory: dict[int, Memory] = {}
        self._host: dict[int, int] = {}
        self._vmm: dict[int, tuple[int, int]] = {}
        self._capturing: dict[int, Any] = {}
        self._next = 1000 * (rank + 1)
        self._closed = False
        self._lock = threading.RLock()
        self._idle = threading.Event()
        self._idle.set()
        self._relaxed: set[int] = set()

    @contextmanager
    def hang(self) -> Iterator[None]:
        """Let a kernel spin within the block, on a stream that nobody here knows.

        Calls that wait, or may wait, for everything on the device return after the block. A call that waits longer than
        `MOST_HANG_S` reports a violation.
        """
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    def _synchronize(self, function: str, stream: int = 0) -> None:
        """Wait for the end of `hang`; a stream other than the legacy one does not wait for those of others."""
        if stream == 0 and not self._idle.wait(MOST_HANG_S):
            self._violation(f"{function} waited for a kernel that does not end")

    def _violation(self, text: str) -> None:
        path = self.directory / f"violation-{self.rank}-{time.monotonic_ns()}"
        path.write_text(f"rank {self.rank}: {text}")

    def _error(self, function: str, code: int, text: str = "") -> CudaError:
        name = _NAMES.get(code, f"error {code}")
        return CudaError(
            f"{function} on device {self._index} failed with {name} ({code}){': ' + text if text else ''} [fake CUDA]",
            library="fake CUDA",
            function=function,
            code=code,
        )

    def _enter(self, function: str, *, in_capture: bool = True) -> None:
        """Count a call; raise an error if the faults name it or if capture forbids it."""
        if self._closed:
            raise ClosedError("the driver was closed")
        with self._lock:
            number = self.calls[function] = self.calls.get(function, 0) + 1
        nth, code = self.faults.fail.get(function, (0, 0))
        if number == nth:
            raise self._error(function, code, "as the test asked")
        if self._capturing and not in_capture and threading.get_ident() not in self._relaxed:
            raise self._error(function, CAPTURE_UNSUPPORTED, "a stream is capturing")

    def _use(self, function: str, stream: int) -> None:
        """Raise an error if nothing can be queued on `stream` now."""

    def _number(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    # --- the device -------------------------------------------------------------------------------------------

    @property
    def device(self) -> FakeDevice:
        return self._devices[self._index]

    def driver_version(self) -> int:
        self._enter("driver_version")
        return self.faults.version

    def device_count(self) -> int:
        self._enter("device_count")
        return len(self._devices)

    def device_uuids(self) -> list[str]:
        self._enter("device_uuids")
        return [device.uuid for device in self._devices]

    def device_index(self) -> int:
        return self._index

    def device_name(self) -> str:
        self._enter("device_name")
        return self.device.name

    def compute_capability(self) -> tuple[int, int]:
        self._enter("compute_capability")
        return self.device.capability

    def multiprocessors(self) -> int:
        self._enter("multiprocessors")
        return self.device.multiprocessors

    def total_memory(self) -> int:
        self._enter("total_memory")
        return self.device.total_memory

    def uuid(self) -> str:
        self._enter("uuid")
        return self.device.uuid

    def pci_bus_id(self) -> str:
        self._enter("pci_bus_id")
        return self.device.pci_bus_id

    def ipc_supported(self) -> bool:
        self._enter("ipc_supported")
        return self.faults.ipc

    def vmm_supported(self) -> bool:
        self._enter("vmm_supported")
        return self.faults.vmm

    def can_access_peer(self, other: int) -> bool:
        self._enter("can_access_peer")
        return other == self._index or other not in self.faults.blocked

    def native_atomics(self, other: int) -> bool:
        self._enter("native_atomics")
        return other == self._index or not self.faults.no_nvlink

    def all_links(self) -> dict[str, tuple[bool, bool]]:
        self._enter("all_links")
        return dict(self.faults.hidden)

    def enable_peer_access(self, other: int) -> None:
        self._enter("enable_peer_access")
        if other != self._index and other in self.faults.blocked:
            raise self._error("enable_peer_access", PEER_ACCESS_UNSUPPORTED)

    # --- memory -----------------------------------------------------------------------------------------------

    def _create(self, kind: str, nbytes: int, *, is_exportable: bool) -> int:
        name = f"{kind}-{self.rank}-{os.getpid()}-{self._number()}"
        descriptor = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, max(nbytes, 1))
            address = map_memory(descriptor, nbytes, mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        self._memory[address] = Memory(kind, name, nbytes, is_exportable=is_exportable)
        return address

    def _unmap(self, address: int) -> None:
        memory = self._memory.pop(address)
        unmap(address, max(memory.nbytes, 1))
        if memory.marker is not None:
            memory.marker.unlink(missing_ok=True)
        if memory.kind in ("memory", "torch"):
            (self.directory / memory.name).unlink(missing_ok=True)

    def _find(self, function: str, address: int) -> int:
        for base, memory in list(self._memory.items()):
            if base <= address < base + max(memory.nbytes, 1):
                return base
        raise self._error(function, NOT_FOUND, f"{address:#x} is no device memory")

    def _own(self, function: str, address: int, kind: str) -> Memory:
        memory = self._memory.get(address)
        if memory is None or memory.kind != kind:
            self._violation(f"{function} of {address:#x}, which is no {kind}")
            raise self._error(function, INVALID_VALUE)
        return memory

    def mem_alloc(self, nbytes: int) -> int:
        self._enter("mem_alloc", in_capture=False)
        if nbytes <= 0:
            raise self._error("mem_alloc", INVALID_VALUE)
        self._take("mem_alloc", nbytes)
        return self._create("memory", nbytes, is_exportable=True)

    def _take(self, function: str, nbytes: int) -> None:
        own = [each for each in self._memory.values() if each.kind in ("memory", "torch")]
        own += [each for each in self._memory.values() if each.name == f"vmm-{self.rank}"]
        if sum(each.nbytes for each in own) + nbytes > self.faults.memory_bytes:
            raise self._error(function, OUT_OF_MEMORY)

    def mem_free(self, address: int) -> None:
        self._enter("mem_free", in_capture=False)
        self._synchronize("mem_free")
        memory = self._own("mem_free", address, "memory")
        users = [
            marker.name
            for marker in self.directory.glob(f"open-{memory.name}-by-*")
            if is_alive(marker.read_text())
        ]
        if users:
            self._violation(f"freed {memory.name} while it was open: {', '.join(sorted(users))}")
        self._unmap(address)

    def _ordered(self, function: str, stream: int, step: Callable[[], None]) -> None:
        self._use(function, stream)
        graph = self._capturing.get(stream)
        if graph is None:
            step()
        else:
            graph.steps.append(step)

    def memset_d32(self, address: int, value: int, count: int, stream: int) -> None:
        self._enter("memset_d32")
        data = value.to_bytes(4, "little") * count
        self._ordered("memset_d32", stream, lambda: _write(address, data))

    def memcpy_dtoh(self, address: int, nbytes: int, stream: int = 0) -> bytes:
        self._enter("memcpy_dtoh", in_capture=False)
        self._synchronize("memcpy_dtoh", stream)
        return ctypes.string_at(address, nbytes)

    def memcpy_htod(self, address: int, data: bytes, stream: int = 0) -> None:
        self._enter("memcpy_htod", in_capture=False)
        self._use("memcpy_htod", stream)
        self._synchronize("memcpy_htod", stream)
        _write(address, data)

    def memcpy_dtod(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._enter("memcpy_dtod")
        self._ordered("memcpy_dtod", stream, lambda: _copy(destination, source, nbytes))

    def host_alloc_mapped(self, nbytes: int) -> tuple[int, int]:
        self._enter("host_alloc_mapped", in_capture=False)
        address = map_memory(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._host[address] = nbytes
        return address, address

    def host_free(self, host_address: int) -> None:
        self._enter("host_free", in_capture=False)
        self._synchronize("host_free")
        nbytes = self._host.pop(host_address, None)
        if nbytes is None:
            raise self._error("host_free", INVALID_VALUE)
        unmap(host_address, nbytes)

    def address_range(self, address: int) -> tuple[int, int]:
        self._enter("address_range")
        base = self._find("address_range", address)
        return base, self._memory[base].nbytes

    def is_legacy_ipc_capable(self, address: int) -> bool:
        self._enter("is_legacy_ipc_capable")
        memory = self._memory[self._find("is_legacy_ipc_capable", address)]
        return self.faults.ipc and memory.is_exportable and memory.kind in ("memory", "torch")

    def ipc_get_handle(self, address: int) -> bytes:
        self._enter("ipc_get_handle")
        memory = self._memory[self._find("ipc_get_handle", address)]
        if not self.faults.ipc or not memory.is_exportable or memory.kind not in ("memory", "torch"):
            self._violation(f"asked for a handle of {memory.name}, which cannot be exported")
            raise self._error("ipc_get_handle", INVALID_VALUE)
        return (_HANDLE_MAGIC + memory.name.encode()).ljust(IPC_HANDLE_BYTES, b"\0")

    def ipc_open_handle(self, handle: bytes) -> int:
        self._enter("ipc_open_handle", in_capture=False)
        if len(handle) != IPC_HANDLE_BYTES or not handle.startswith(_HANDLE_MAGIC):
            raise self._error("ipc_open_handle", INVALID_VALUE)
        name = handle[len(_HANDLE_MAGIC) :].rstrip(b"\0").decode()
        _, owner, process, _ = name.split("-")
        if int(process) == os.getpid():
            raise self._error("ipc_open_handle", INVALID_CONTEXT, "the memory is of this process")
        if int(owner) in self.faults.blocked:
            raise self._error("ipc_open_handle", PEER_ACCESS_UNSUPPORTED)
        if any(memory.kind == "opened" and memory.name == name for memory in self._memory.values()):
            self._violation(f"opened {name} twice")
            raise self._error("ipc_open_handle", ALREADY_MAPPED)
        try:
            descriptor = os.open(self.directory / name, os.O_RDWR)
        except FileNotFoundError:
            raise self._error("ipc_open_handle", INVALID_VALUE, f"{name} was freed") from None
        try:
            nbytes = os.fstat(descriptor).st_size
            address = map_memory(descriptor, nbytes, self._sharing(int(owner)))
        finally:
            os.close(descriptor)
        marker = self.directory / f"open-{name}-by-{self.rank}"
        marker.write_text(str(os.getpid()))
        self._memory[address] = Memory("opened", name, nbytes, marker)
        return address

    def _sharing(self, owner: int) -> int:
        return mmap.MAP_PRIVATE if owner in self.faults.lost_writes else mmap.MAP_SHARED

    def ipc_close(self, address: int) -> None:
        self._enter("ipc_close", in_capture=False)
        self._synchronize("ipc_close")
        self._own("ipc_close", address, "opened")
        self._unmap(address)

    def vmm_granularity(self) -> int:
        self._enter("vmm_granularity")
        return GRANULARITY

    def vmm_create(self, nbytes: int) -> int:
        self._enter("vmm_create", in_capture=False)
        if not self.faults.vmm:
            raise self._error("vmm_create", NOT_SUPPORTED)
        if nbytes <= 0 or nbytes % GRANULARITY:
            raise self._error("vmm_create", INVALID_VALUE)
        self._take("vmm_create", nbytes)
        descriptor = os.memfd_create(f"fake-vmm-{self.rank}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        return self._keep(descriptor, self.rank)

    def _keep(self, descriptor: int, owner: int) -> int:
        handle = self._number()
        self._vmm[handle] = descriptor, owner
        return handle

    def _handle(self, function: str, handle: int) -> tuple[int, int]:
        if handle not in self._vmm:
            raise self._error(function, INVALID_VALUE)
        return self._vmm[handle]

    def vmm_export(self, handle: int) -> int:
        self._enter("vmm_export")
        return os.dup(self._handle("vmm_export", handle)[0])

    def vmm_import(self, descriptor: int) -> int:
        self._enter("vmm_import", in_capture=False)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if not name.startswith("memfd:fake-vmm-"):
            raise self._error("vmm_import", INVALID_VALUE, f"{name} is no memory of a device")
        return self._keep(os.dup(descriptor), int(name.removeprefix("memfd:fake-vmm-").split()[0]))

    def vmm_map(self, handle: int, nbytes: int) -> int:
        self._enter("vmm_map", in_capture=False)
        descriptor, owner = self._handle("vmm_map", handle)
        if nbytes != os.fstat(descriptor).st_size:
            raise self._error("vmm_map", INVALID_VALUE)
        if owner != self.rank and owner in self.faults.blocked:
            raise self._error("vmm_map", PEER_ACCESS_UNSUPPORTED)
        address = map_memory(descriptor, nbytes, self._sharing(owner))
        self._memory[address] = Memory("mapping", f"vmm-{owner}", nbytes)
        return address

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        self._enter("vmm_unmap", in_capture=False)
        self._synchronize("vmm_unmap")
        if self._own("vmm_unmap", address, "mapping").nbytes != nbytes:
            raise self._error("vmm_unmap", INVALID_VALUE)
        self._unmap(address)

    def vmm_release(self, handle: int) -> None:
        self._enter("vmm_release")
        os.close(self._handle("vmm_release", handle)[0])
        del self._vmm[handle]


def map_memory(descriptor: int, nbytes: int, sharing: int) -> int:
    address = libc.mmap(None, max(nbytes, 1), mmap.PROT_READ | mmap.PROT_WRITE, sharing, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    """Remove a mapping."""
    libc.munmap(address, nbytes)


def _write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def _copy(destination: int, source: int, nbytes: int) -> None:
    ctypes.memmove(destination, source, nbytes)


def is_alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
