"""Interface of the CUDA driver functions that this package uses; implemented by `CudaDriver` and by the tests' fake.

Addresses, handles and streams are integers. A failure is a `CudaError` with the library, the function and the code.
An implementation serves one device in the context that torch uses for it, and leaves the calling thread's current
device unchanged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from shm_broadcast.errors import UsageError

__all__ = ["IPC_HANDLE_BYTES", "Driver", "LaunchConfiguration", "PreparedLaunch"]

IPC_HANDLE_BYTES: Final = 64
"""CU_IPC_HANDLE_SIZE in cuda.h: the bytes of a CUDA IPC handle."""


class PreparedLaunch:
    """The arguments of a kernel, packed once; a call rewrites only the words that changed.

    The driver takes an array of pointers, one per argument, and copies the arguments before the launch returns. The
    array and the storage keep their addresses, so nothing is packed per call. Use it from one thread at a time.

    Attributes:
        words: The storage as 64-bit words. `words[word_of[i]] = value` rewrites argument i if it is an address or an
            integer of up to 64 bits; a write costs about 0.1 us.
        word_of: Index in `words` where each argument begins.
        pointers: Address of the array of pointers, for the driver.
    """

    __slots__ = ("_array", "_storage", "pointers", "word_of", "words")

    def __init__(self, arguments: Sequence[bytes]) -> None:
        """Pack `arguments`, each in its type's memory representation and at a multiple of 8 bytes.

        Raises:
            UsageError: An argument is empty.
        """
        if not all(arguments):
            raise UsageError("an argument of a kernel has at least one byte")
        places: list[int] = []
        total = 0
        for argument in arguments:
            places.append(total)
            total += -(-len(argument) // 8)
        self._storage = (ctypes.c_uint64 * max(total, 1))()
        base = ctypes.addressof(self._storage)
        for place, argument in zip(places, arguments, strict=True):
            ctypes.memmove(base + 8 * place, argument, len(argument))
        self._array = (ctypes.c_void_p * max(len(places), 1))(*(base + 8 * place for place in places))
        self.word_of: tuple[int, ...] = tuple(places)
        self.words: memoryview[int] = memoryview(self._storage).cast("B").cast("Q")
        self.pointers: int = ctypes.addressof(self._array)


class LaunchConfiguration:
    """A kernel with the shape and the attributes of its launches, made once by `Driver.configure`.

    Attributes:
        function: The driver's handle of the kernel.
        grid: Blocks of the grid.
        threads: Threads of a block.
        cluster: Blocks of a cluster.
        is_dependent: Whether the kernel may begin while the one before it on the stream still runs.
        stream: The stream of the last launch, or -1. Only the driver uses this and the next attribute.
        native: What the driver needs for a launch.
    """

    __slots__ = ("cluster", "function", "grid", "is_dependent", "native", "stream", "threads")

    def __init__(self, function: int, grid: int, threads: int, cluster: int, is_dependent: bool) -> None:
        """Use `Driver.configure`."""
        self.function: int = function
        self.grid: int = grid
        self.threads: int = threads
        self.cluster: int = cluster
        self.is_dependent: bool = is_dependent
        self.stream: int = -1
        self.native: Any = None


class Driver(Protocol):
    """One device, as its driver presents it to this process.

    Every method can raise `CudaError`, and `CapabilityError` where the driver or the device is too old.
    """

    # --- the device -------------------------------------------------------------------------------------------

    def driver_version(self) -> int:
        """Return the driver's CUDA version as one number: 13000 is CUDA 13.0."""

    def device_count(self) -> int:
        """Return the number of devices that this process sees."""

    def device_uuids(self) -> list[str]:
        """Return the UUIDs of all devices that this process sees, by ordinal."""

    def device_index(self) -> int:
        """Return the ordinal of this device in this process."""

    def device_name(self) -> str:
        """Return the name of the device's model."""

    def compute_capability(self) -> tuple[int, int]:
        """Return (major, minor)."""

    def multiprocessors(self) -> int:
        """Return the number of multiprocessors."""

    def total_memory(self) -> int:
        """Return the device's memory in bytes."""

    def uuid(self) -> str:
        """Return the UUID: 8-4-4-4-12 lower-case hex digits, no `GPU-` or `MIG-`. A MIG instance has its own."""

    def pci_bus_id(self) -> str:
        """Return `domain:bus:device.function` in lower case."""

    def ipc_supported(self) -> bool:
        """Return whether other processes can map memory of `mem_alloc`."""

    def vmm_supported(self) -> bool:
        """Return whether virtual memory management with POSIX descriptors is supported."""

    def can_access_peer(self, other: int) -> bool:
        """Return whether this device can access the memory of the device with ordinal `other`."""

    def native_atomics(self, other: int) -> bool:
        """Return whether atomics work on `other`'s memory: they do over NVLink, not over PCIe."""

    def all_links(self) -> dict[str, tuple[bool, bool]]:
        """Return, by UUID, whether this device can access each other one of the host, and whether that is over NVLink.

        Unlike the two questions above it is also about devices that are hidden from this process.
        """

    def enable_peer_access(self, other: int) -> None:
        """Let this device access memory of `other` that was allocated in this process. Idempotent."""

    # --- memory -----------------------------------------------------------------------------------------------

    def mem_alloc(self, nbytes: int) -> int:
        """Return the address of new device memory, which `ipc_get_handle` can export to other processes."""

    def mem_free(self, address: int) -> None:
        """Free memory of `mem_alloc`."""

    def memset_d32(self, address: int, value: int, count: int, stream: int) -> None:
        """Store `value` in `count` 32-bit words, queued on `stream`."""

    def memcpy_dtoh(self, address: int, nbytes: int, stream: int = 0) -> bytes:
        """Return bytes of device memory. Blocks until work on `stream` is done, by default the legacy stream."""

    def memcpy_htod(self, address: int, data: bytes, stream: int = 0) -> None:
        """Write bytes to device memory. Blocks until work on `stream` is done, by default the legacy stream."""

    def memcpy_dtod(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between addresses that this device can access, queued on `stream`."""

    def host_alloc_mapped(self, nbytes: int) -> tuple[int, int]:
        """Return (host address, device address) of zeroed host memory that kernels can access."""

    def host_free(self, host_address: int) -> None:
        """Free memory of `host_alloc_mapped`."""

    def address_range(self, address: int) -> tuple[int, int]:
        """Return (base, bytes) of the allocation that contains `address`."""

    def is_legacy_ipc_capable(self, address: int) -> bool:
        """Return whether `ipc_get_handle` can export the memory; it cannot export expandable segments."""

    def ipc_get_handle(self, address: int) -> bytes:
        """Return the 64-byte handle by which other processes map the allocation with base `address`."""

    def ipc_open_handle(self, handle: bytes) -> int:
        """Map another process's allocation; return its base address in this process."""

    def ipc_close(self, address: int) -> None:
        """Unmap memory of `ipc_open_handle`."""

    def vmm_granularity(self) -> int:
        """Return the bytes of which sizes for `vmm_create` must be a multiple."""

    def vmm_create(self, nbytes: int) -> int:
        """Return a handle of new memory that can be exported as a POSIX descriptor."""

    def vmm_export(self, handle: int) -> int:
        """Return a new descriptor of the memory; the caller owns it."""

    def vmm_import(self, descriptor: int) -> int:
        """Return a handle of the memory behind `descriptor`, which the caller still owns."""

    def vmm_map(self, handle: int, nbytes: int) -> int:
        """Map memory for this device with read and write access; return its address."""

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        """Undo `vmm_map`."""

    def vmm_release(self, handle: int) -> None:
        """Release a handle; the memory is freed when no process holds a handle or mapping of it."""

    # --- multicast --------------------------------------------------------------------------------------------

    def multicast_supported(self) -> bool:
        """Return whether this device can be of the team of a multicast object."""

    def multicast_granularity(self, devices: int, nbytes: int) -> int:
        """Return the bytes of which the size of a multicast object of `devices` must be a multiple."""

    def multicast_create(self, devices: int, nbytes: int) -> int:
        """Return a handle of a new multicast object, for a team of `devices` with `nbytes` of memory each.

        `vmm_export` and `vmm_import` pass it to other processes, `vmm_map` maps it at a multimem address once all
        devices have bound memory, and `vmm_release` releases the handle.
        """

    def multicast_add_device(self, handle: int) -> None:
        """Add this device to the team, for the life of the object."""

    def multicast_bind(self, handle: int, memory: int, nbytes: int) -> None:
        """Bind memory of `vmm_create` on this device to the whole object.

        *Blocks* until the whole team was added, without a deadline: ask the other ranks before.
        """

    def multicast_unbind(self, handle: int, nbytes: int) -> None:
        """Undo `multicast_bind`. Nothing may be in flight that uses the multimem address, on any device."""

    # --- modules and launches ---------------------------------------------------------------------------------

    def module_load(self, cubin: bytes) -> int:
        """Load a compiled module; return its handle."""

    def module_unload(self, module: int) -> None:
        """Unload a module; its functions become invalid."""

    def module_function(self, module: int, name: str) -> int:
        """Return the function with this name. It is loaded, from CUDA 12.4 on: its first launch waits for nothing."""

    def launch(
        self, function: int, grid_x: int, block_x: int, stream: int, arguments: PreparedLaunch
    ) -> None:
        """Launch a one-dimensional grid on `stream`; allowed during capture."""

    def configure(
        self, function: int, grid: int, threads: int, *, cluster: int = 1, is_dependent: bool = False
    ) -> LaunchConfiguration:
        """Return a configuration for `launch_configured`.

        Args:
            function: The kernel.
            grid: Blocks of the one-dimensional grid, a multiple of `cluster`.
            threads: Threads of a block.
            cluster: Blocks that run at the same time and reach each other's shared memory; above 1 from sm_90 on.
            is_dependent: Let the kernel begin before the previous one on its stream has ended: programmatic dependent
                launch. The kernel waits for that end itself (`griddepcontrol.wait`). Ignored where
                `supports_dependent_launch` is false.
        """

    def launch_configured(
        self, configuration: LaunchConfiguration, stream: int, arguments: PreparedLaunch
    ) -> None:
        """Launch a kernel as it was configured, on `stream`; allowed during capture. For one thread at a time."""

    def supports_dependent_launch(self) -> bool:
        """Return whether device and driver know programmatic dependent launch, also in captures."""

    # --- streams and events -----------------------------------------------------------------------------------

    def stream_create(self) -> int:
        """Return a new stream that neither waits for the legacy stream nor makes that wait."""

    def stream_destroy(self, stream: int) -> None:
        """Destroy a stream of `stream_create`; what was queued on it is still done."""

    def stream_synchronize(self, stream: int) -> None:
        """Block until all work queued on `stream` is done."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Make later work on `stream` wait for `event`."""

    def stream_is_capturing(self, stream: int) -> bool:
        """Return whether `stream` is being captured into a graph, or was until the capture became invalid.

        An invalid capture goes on until it is ended. The legacy stream cannot be captured.
        """

    def capture_id(self, stream: int) -> int:
        """Return the number of the valid capture that `stream` takes part in, unique in this process; 0 if in none."""

    def event_create(self) -> int:
        """Return a new event without timing."""

    def event_record(self, event: int, stream: int) -> None:
        """Record `event` behind all work queued on `stream` so far."""

    def event_query(self, event: int) -> bool:
        """Return whether all work before the last record of `event` is done. Spoils no capture of another stream."""

    def event_destroy(self, event: int) -> None:
        """Destroy an event."""

    def context_synchronize(self) -> None:
        """Block until all work of this process on this device that was queued before is done.

        While a stream of the process is captured this fails, and makes the capture invalid.
        """

    def relaxed_capture(self) -> AbstractContextManager[None]:
        """Return a context in which this thread may query events and streams while any thread of the process captures.

        torch captures in the global mode, in which such a query, from whatever thread, would make the capture invalid.
        """

    def relax_capture(self) -> None:
        """Let the calling thread free memory while another thread captures, without spoiling that capture."""

    def close(self) -> None:
        """Release the context. Free all allocations before. Idempotent."""
