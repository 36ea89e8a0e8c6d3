"""The CUDA driver, called through NVIDIA's bindings (`cuda.bindings.driver`).

Written for cuda-bindings 12.9 and 13, tested with 13.4. They are imported when the first `CudaDriver` is created.

Launches use the bindings too. Measured against a libcuda whose cuLaunchKernel is empty, a launch costs 0.6 to 0.7 us
when function and stream are existing objects, 1.1 to 1.3 us when they are integers, and 1.4 to 4.2 us through ctypes,
which converts eleven arguments one by one (two runs on one machine; the bare call without `CudaDriver.launch`).
Therefore functions and streams are kept as objects (`_functions`, `_streams`), and the arguments are passed as one
address (`PreparedLaunch`). The bindings release the GIL during a launch, which blocks when the stream's queue is full.
"""

# ruff: noqa: D102 - `Driver` declares the methods and documents them.

from __future__ import annotations

import ctypes
import importlib
import threading
import uuid
from collections.abc import Callable
from typing import Any, Final

from device_comm.cuda.driver import IPC_HANDLE_BYTES, Driver, LaunchConfiguration, PreparedLaunch
from device_comm.cuda.driver_parts import MulticastCalls, StreamCalls
from device_comm.cuda.nvml import links_of
from shm_broadcast.errors import CapabilityError, ClosedError, CudaError, UsageError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["CudaDriver", "Driver", "PreparedLaunch", "bindings"]

_INSTALL: Final = "pip install group-coordinator[cu13] (or [cu12], as your torch was built for)"
_UPDATE_FOR_NVML: Final = "update it, for example to 12.9.10 or 13.4.4"
_NO_DEVICE: Final = 100
# The thread has no context, or another one, to which our streams and functions do not belong.
_OTHER_CONTEXT: Final = (201, 400)
_NOT_READY: Final = 600
_PEER_ACCESS_ALREADY_ENABLED: Final = 704
# The two handles of the legacy stream, 0 and CU_STREAM_LEGACY. It cannot be captured, and while any blocking
# stream is captured, every query about the legacy stream fails with error 906. The per-thread stream,
# CU_STREAM_PER_THREAD (2), can be captured.
_LEGACY: Final = (0, 1)
_CAPTURE_ACTIVE: Final = 1

# Hopper is the first with programmatic dependent launch; CUDA 12.3 the first driver that captures it into a graph.
_DEPENDENT_MAJOR: Final = 9
_DEPENDENT_DRIVER: Final = 12030

# The first driver with cuFuncLoad.
_LOADING_DRIVER: Final = 12040

# Bounds the kept stream objects, for applications that keep creating streams. An engine uses a few.
_MOST_STREAMS: Final = 256


def bindings(name: str) -> Any:
    """Return NVIDIA's bindings `cuda.bindings.NAME`.

    Raises:
        CapabilityError: The package is not installed, or its version does not have these.
    """
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        remedy = _UPDATE_FOR_NVML if name == "nvml" else f"install it with {_INSTALL}"
        raise CapabilityError(
            f"CUDA is called through the package cuda-bindings, whose {name} cannot be imported ({error}); {remedy}",
            # Programs compare this field, and the compiler's package has always been called by this name in it.
            requirement="cuda-python" if name == "nvrtc" else "cuda-bindings",
        ) from error


class CudaDriver(MulticastCalls, StreamCalls, Driver):
    """Call the CUDA driver for one device; `Driver` documents the methods.

    The object retains the device's primary context, which torch uses too. Each call makes it current and restores the
    previous context, so torch's current device does not change. Safe to use from several threads.
    """

    def __init__(self, device_index: int) -> None:
        """Retain the primary context of the device with this ordinal among those that this process sees.

        Raises:
            CapabilityError: The package, the driver or the device is missing.
            CudaError: The driver failed.
        """
        self._api = bindings("driver")
        self._library = "libcuda"
        self._index = device_index
        self._closed = False
        self._lock = threading.Lock()
        self._functions: dict[int, Any] = {}
        self._functions_of: dict[int, list[int]] = {}
        self._streams: dict[int, Any] = {}
        self._events: dict[int, Any] = {}
        try:
            self._call("cuInit", 0)
        except CudaError as error:
            if error.code != _NO_DEVICE:
                raise
            raise CapabilityError(f"there is no CUDA device: {error}", requirement="a CUDA device") from error
        self._library = f"libcuda {_version(self.driver_version())}"
        count = self.device_count()
        if not 0 <= device_index < count:
            raise CapabilityError(
                f"there is no CUDA device {device_index}: this process sees {count}",
                requirement=f"CUDA device {device_index}",
            )
        self._device = self._call("cuDeviceGet", device_index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._launch_kernel = self._api.cuLaunchKernel
        self._launch_configured = self._api.cuLaunchKernelEx
        self._is_capturing = self._api.cuStreamIsCapturing
        self._capture_info = self._api.cuStreamGetCaptureInfo
        self._record = self._api.cuEventRecord

    # --- calls ------------------------------------------------------------------------------------------------

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the driver; return its results without the status."""
        try:
            status, *values = getattr(self._api, function)(*arguments)
        except AttributeError as error:
            raise CapabilityError(
                f"the installed cuda-bindings have no {function}; update them: {_INSTALL}",
                requirement="cuda-bindings 12.9 or later",
            ) from error
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            # There is no libcuda, or it is too old to have the function.
            raise CapabilityError(
                f"{function} cannot be called: {error}; is an NVIDIA driver installed, and new enough?",
                requirement="an NVIDIA driver",
            ) from error
        except ValueError as error:
            raise self._newer_error(function, error) from error
        if int(status) != 0:
            raise self._error(function, status)
        return values[0] if len(values) == 1 else values

    def _error(self, function: str, status: Any) -> CudaError:
        code = int(status)
        name, text = f"error {code}", "the driver has no text for it"
        found, said = self._api.cuGetErrorName(status), self._api.cuGetErrorString(status)
        if int(found[0]) == 0 and int(said[0]) == 0:
            name, text = found[1].decode(), said[1].decode()
        return CudaError(
            f"{function} on device {self._index} failed with {name} ({code}): {text} [{self._library}]",
            library=self._library,
            function=function,
            code=code,
        )

    def _newer_error(self, function: str, error: ValueError) -> Exception:
        """Return the error for a status code that is newer than the bindings, which raised ValueError for it."""
        number, _, kind = str(error).partition(" is not a valid ")
        if kind != "CUresult" or not number.isdecimal():
            return error
        return CudaError(
            f"{function} on device {self._index} failed with error {number}, which the installed cuda-bindings do not "
            f"know [{self._library}]",
            library=self._library,
            function=function,
            code=int(number),
        )

    def _in_context(self, function: str, *arguments: Any) -> Any:
        """Call a function in this device's context, and restore the thread's previous one afterwards."""
        if self._closed:
            raise ClosedError(f"the driver of CUDA device {self._index} was closed")
        self._call("cuCtxPushCurrent", self._context)
        try:
            return self._call(function, *arguments)
        finally:
            self._call("cuCtxPopCurrent")

    def _direct(self, function: str, *arguments: Any) -> Any:
        """Call a function on our streams and events in the thread's context; retry in ours if the driver refuses."""
        if not self._closed:
            try:
                return self._call(function, *arguments)
            except CudaError as error:
                if error.code not in _OTHER_CONTEXT:
                    raise
        return self._in_context(function, *arguments)

    def _again(self, status: Any, function: str, *arguments: Any) -> Any:
        """Repeat a failed call in our context if the thread had another. Always pushing ours would cost two calls."""
        if int(status) not in _OTHER_CONTEXT:
            raise self._error(function, status)
        return self._in_context(function, *arguments)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def _stream(self, stream: int) -> Any:
        """Return the bindings' object for a stream. It is kept, because making one costs as much as a launch."""
        found = self._streams.get(stream)
        if found is None:
            if len(self._streams) >= _MOST_STREAMS:
                self._streams.clear()
            found = self._streams[stream] = self._api.CUstream(stream)
        return found

    # --- the device -------------------------------------------------------------------------------------------

    def driver_version(self) -> int:
        return int(self._call("cuDriverGetVersion"))

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def device_uuids(self) -> list[str]:
        return [self._uuid(self._call("cuDeviceGet", index)) for index in range(self.device_count())]

    def device_index(self) -> int:
        return self._index

    def device_name(self) -> str:
        return _text(self._call("cuDeviceGetName", 256, self._device))

    def compute_capability(self) -> tuple[int, int]:
        return self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR")

    def multiprocessors(self) -> int:
        return self._attribute("MULTIPROCESSOR_COUNT")

    def total_memory(self) -> int:
        return int(self._call("cuDeviceTotalMem", self._device))

    def uuid(self) -> str:
        return self._uuid(self._device)

    def _uuid(self, device: Any) -> str:
        # In 12.9 the plain function returns the GPU's UUID for a MIG instance; in 13 both functions are the same.
        name = "cuDeviceGetUuid_v2" if hasattr(self._api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return str(uuid.UUID(bytes=self._call(name, device).bytes))

    def pci_bus_id(self) -> str:
        return _text(self._call("cuDeviceGetPCIBusId", 32, self._device)).lower()

    def ipc_supported(self) -> bool:
        # cudaIpcGetMemHandle requires Linux, unified addressing, and a GPU that is not integrated (Tegra).
        return self._attribute("UNIFIED_ADDRESSING") == 1 and self._attribute("INTEGRATED") == 0

    def vmm_supported(self) -> bool:
        return (
            self._attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED") == 1
            and self._attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED") == 1
        )

    def can_access_peer(self, other: int) -> bool:
        if other == self._index:
            return True
        return bool(self._call("cuDeviceCanAccessPeer", self._device, self._call("cuDeviceGet", other)))

    def native_atomics(self, other: int) -> bool:
        if other == self._index:
            return True
        kind = self._api.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        peer = self._call("cuDeviceGet", other)
        return bool(self._call("cuDeviceGetP2PAttribute", kind, self._device, peer))

    def all_links(self) -> dict[str, tuple[bool, bool]]:
        return links_of(bindings("nvml"), self.uuid())

    def enable_peer_access(self, other: int) -> None:
        if other == self._index:
            return
        peer = self._call("cuDeviceGet", other)
        context = self._call("cuDevicePrimaryCtxRetain", peer)
        try:
            self._in_context("cuCtxEnablePeerAccess", context, 0)
        except CudaError as error:
            if error.code != _PEER_ACCESS_ALREADY_ENABLED:
                raise
        finally:
            self._call("cuDevicePrimaryCtxRelease", peer)

    # --- memory -----------------------------------------------------------------------------------------------

    def mem_alloc(self, nbytes: int) -> int:
        return int(self._in_context("cuMemAlloc", nbytes))

    def mem_free(self, address: int) -> None:
        self._in_context("cuMemFree", address)

    def memset_d32(self, address: int, value: int, count: int, stream: int) -> None:
        self._in_context("cuMemsetD32Async", address, value, count, self._stream(stream))

    def memcpy_dtod(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._in_context("cuMemcpyDtoDAsync", destination, source, nbytes, self._stream(stream))

    def host_alloc_mapped(self, nbytes: int) -> tuple[int, int]:
        portable_and_mapped = 0x1 | 0x2
        host = int(self._in_context("cuMemHostAlloc", nbytes, portable_and_mapped))
        try:
            ctypes.memset(host, 0, nbytes)
            return host, int(self._in_context("cuMemHostGetDevicePointer", host, 0))
        except BaseException:
            self.host_free(host)
            raise

    def host_free(self, host_address: int) -> None:
        self._in_context("cuMemFreeHost", host_address)

    def address_range(self, address: int) -> tuple[int, int]:
        base, nbytes = self._in_context("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def is_legacy_ipc_capable(self, address: int) -> bool:
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        return bool(self._in_context("cuPointerGetAttribute", attribute, address))

    def ipc_get_handle(self, address: int) -> bytes:
        handle = self._in_context("cuIpcGetMemHandle", address)
        # Read by address: 12.9 exposes the bytes as an attribute, 13 does not.
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def ipc_open_handle(self, handle: bytes) -> int:
        if len(handle) != IPC_HANDLE_BYTES:
            raise UsageError(f"an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        native = self._api.CUipcMemHandle()
        ctypes.memmove(native.getPtr(), handle, IPC_HANDLE_BYTES)
        lazily_enable_peer_access = 1
        return int(self._in_context("cuIpcOpenMemHandle", native, lazily_enable_peer_access))

    def ipc_close(self, address: int) -> None:
        self._in_context("cuIpcCloseMemHandle", address)

    def _vmm_properties(self) -> Any:
        api = self._api
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._index
        properties.requestedHandleTypes = self._descriptor_kind()
        return properties

    def _descriptor_kind(self) -> Any:
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def vmm_granularity(self) -> int:
        flag = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._in_context("cuMemGetAllocationGranularity", self._vmm_properties(), flag))

    def vmm_create(self, nbytes: int) -> int:
        return int(self._in_context("cuMemCreate", nbytes, self._vmm_properties(), 0))

    def vmm_export(self, handle: int) -> int:
        return int(self._in_context("cuMemExportToShareableHandle", handle, self._descriptor_kind(), 0))

    def vmm_import(self, descriptor: int) -> int:
        return int(self._in_context("cuMemImportFromShareableHandle", descriptor, self._descriptor_kind()))

    def vmm_map(self, handle: int, nbytes: int) -> int:
        api = self._api
        address = int(self._in_context("cuMemAddressReserve", nbytes, 0, 0, 0))
        undo: list[Callable[[], Any]] = [lambda: self._in_context("cuMemAddressFree", address, nbytes)]
        try:
            self._in_context("cuMemMap", address, nbytes, 0, handle, 0)
            undo.insert(0, lambda: self._in_context("cuMemUnmap", address, nbytes))
            access = api.CUmemAccessDesc()
            access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = self._index
            access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._in_context("cuMemSetAccess", address, nbytes, [access], 1)
        except BaseException:
            for step in undo:
                step()
            raise
        return address

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        self._in_context("cuMemUnmap", address, nbytes)
        self._in_context("cuMemAddressFree", address, nbytes)

    def vmm_release(self, handle: int) -> None:
        self._in_context("cuMemRelease", handle)

    # --- modules and launches ---------------------------------------------------------------------------------

    def module_load(self, cubin: bytes) -> int:
        return int(self._in_context("cuModuleLoadData", cubin))

    def module_unload(self, module: int) -> None:
        self._in_context("cuModuleUnload", self._api.CUmodule(module))
        for function in self._functions_of.pop(module, []):
            self._functions.pop(function, None)

    def module_function(self, module: int, name: str) -> int:
        function = self._in_context("cuModuleGetFunction", self._api.CUmodule(module), name.encode())
        # By default the driver loads a kernel at its first launch, and may then wait for all kernels of the
        # context: one that waits for a peer would have to end first (lazy loading, CUDA's guide).
        if self.driver_version() >= _LOADING_DRIVER:
            self._in_context("cuFuncLoad", function)
        self._functions[int(function)] = function
        self._functions_of.setdefault(module, []).append(int(function))
        return int(function)

    def launch(
        self, function: int, grid_x: int, block_x: int, stream: int, arguments: PreparedLaunch
    ) -> None:
        try:
            kernel = self._functions[function]
        except KeyError:
            raise UsageError(f"{function} is not a function of a module that is loaded here") from None
        queue = self._streams.get(stream) or self._stream(stream)
        try:
            (status,) = self._launch_kernel(
                kernel, grid_x, 1, 1, block_x, 1, 1, 0, queue, arguments.pointers, 0
            )
        except ValueError as error:
            raise self._newer_error("cuLaunchKernel", error) from error
        if status:
            sizes = (grid_x, 1, 1, block_x, 1, 1, 0)
            self._again(status, "cuLaunchKernel", kernel, *sizes, queue, arguments.pointers, 0)

    def configure(
        self, function: int, grid: int, threads: int, *, cluster: int = 1, is_dependent: bool = False
    ) -> LaunchConfiguration:
        if function not in self._functions:
            raise UsageError(f"{function} is not a function of a module that is loaded here")
        is_dependent = is_dependent and self.supports_dependent_launch()
        made = LaunchConfiguration(function, grid, threads, cluster, is_dependent)
        native = self._api.CUlaunchConfig()
        native.gridDimX, native.gridDimY, native.gridDimZ = grid, 1, 1
        native.blockDimX, native.blockDimY, native.blockDimZ = threads, 1, 1
        attributes = []
        if cluster > 1:
            attributes.append(self._attribute_of("CLUSTER_DIMENSION"))
            dimension = attributes[-1].value.clusterDim
            dimension.x, dimension.y, dimension.z = cluster, 1, 1
        if is_dependent:
            attributes.append(self._attribute_of("PROGRAMMATIC_STREAM_SERIALIZATION"))
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        native.attrs = attributes
        native.numAttrs = len(attributes)
        made.native = native, self._functions[function]
        return made

    def _attribute_of(self, name: str) -> Any:
        attribute = self._api.CUlaunchAttribute()
        attribute.id = getattr(self._api.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        return attribute

    def launch_configured(
        self, configuration: LaunchConfiguration, stream: int, arguments: PreparedLaunch
    ) -> None:
        native, kernel = configuration.native
        if stream != configuration.stream:
            native.hStream = self._stream(stream)
            configuration.stream = stream
        try:
            (status,) = self._launch_configured(native, kernel, arguments.pointers, 0)
        except ValueError as error:
            raise self._newer_error("cuLaunchKernelEx", error) from error
        if status:
            self._again(status, "cuLaunchKernelEx", native, kernel, arguments.pointers, 0)

    def supports_dependent_launch(self) -> bool:
        return self.compute_capability()[0] >= _DEPENDENT_MAJOR and self.driver_version() >= _DEPENDENT_DRIVER

    # --- streams and events -----------------------------------------------------------------------------------

    def stream_wait_event(self, stream: int, event: int) -> None:
        # Stream 0, the legacy stream, belongs to the current context, so ours must be current.
        call = self._direct if stream else self._in_context
        call("cuStreamWaitEvent", self._stream(stream), self._api.CUevent(event), 0)

    def stream_is_capturing(self, stream: int) -> bool:
        if stream in _LEGACY:
            return False
        status, capturing = self._is_capturing(self._streams.get(stream) or self._stream(stream))
        if status:
            capturing = self._again(status, "cuStreamIsCapturing", self._stream(stream))
        return int(capturing) != 0

    def capture_id(self, stream: int) -> int:
        if stream in _LEGACY:
            return 0
        # What follows the id differs between the versions of the bindings.
        status, *facts = self._capture_info(self._streams.get(stream) or self._stream(stream))
        if status:
            facts = self._again(status, "cuStreamGetCaptureInfo", self._stream(stream))
        # The id of a capture that has become invalid is undefined.
        return int(facts[1]) if int(facts[0]) == _CAPTURE_ACTIVE else 0

    def event_create(self) -> int:
        without_timing = 2
        event = self._in_context("cuEventCreate", without_timing)
        self._events[int(event)] = event
        return int(event)

    def event_record(self, event: int, stream: int) -> None:
        # Each NCCL call records one; the way through `_direct` takes 0.6 us more.
        kept = self._events[event]
        (status,) = self._record(kept, self._streams.get(stream) or self._stream(stream))
        if status:
            self._again(status, "cuEventRecord", kept, self._stream(stream))

    def event_query(self, event: int) -> bool:
        try:
            with self.relaxed_capture():
                self._direct("cuEventQuery", self._api.CUevent(event))
        except CudaError as error:
            if error.code == _NOT_READY:
                return False
            raise
        return True

    def event_destroy(self, event: int) -> None:
        self._in_context("cuEventDestroy", self._events.pop(event))

    def context_synchronize(self) -> None:
        self._in_context("cuCtxSynchronize")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._call("cuDevicePrimaryCtxRelease", self._device)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(raw: bytes | str) -> str:
    text = raw.decode() if isinstance(raw, bytes) else raw
    return text.partition("\0")[0].strip()
