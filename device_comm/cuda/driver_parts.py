"""Multicast objects and streams of the CUDA driver, as parts of `CudaDriver`. `Driver` documents the methods."""

# ruff: noqa: D102 - `Driver` declares the methods and documents them.

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

__all__ = ["MulticastCalls", "StreamCalls"]

_NON_BLOCKING: Final = 1


class _Caller(Protocol):
    """What these calls need of `CudaDriver`."""

    _api: Any
    _device: Any
    _streams: dict[int, Any]

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the driver."""

    def _in_context(self, function: str, *arguments: Any) -> Any:
        """Call a function in the device's context."""

    def _stream(self, stream: int) -> Any:
        """Return the bindings' object for a stream."""

    def _attribute(self, name: str) -> int:
        """Return an attribute of the device."""

    def _descriptor_kind(self) -> Any:
        """Return the driver's name for POSIX descriptors."""


class MulticastCalls:
    """The calls about multicast objects. They exist from CUDA 12.1 on; an older driver refuses the attribute."""

    def multicast_supported(self: _Caller) -> bool:
        return self._attribute("MULTICAST_SUPPORTED") == 1

    def multicast_granularity(self: _Caller, devices: int, nbytes: int) -> int:
        flag = self._api.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        properties = _properties(self._api, self._descriptor_kind(), devices, nbytes)
        return int(self._in_context("cuMulticastGetGranularity", properties, flag))

    def multicast_create(self: _Caller, devices: int, nbytes: int) -> int:
        properties = _properties(self._api, self._descriptor_kind(), devices, nbytes)
        return int(self._in_context("cuMulticastCreate", properties))

    def multicast_add_device(self: _Caller, handle: int) -> None:
        self._in_context("cuMulticastAddDevice", handle, self._device)

    def multicast_bind(self: _Caller, handle: int, memory: int, nbytes: int) -> None:
        self._in_context("cuMulticastBindMem", handle, 0, memory, 0, nbytes, 0)

    def multicast_unbind(self: _Caller, handle: int, nbytes: int) -> None:
        self._in_context("cuMulticastUnbind", handle, self._device, 0, nbytes)


class StreamCalls:
    """The calls about streams, copies that are waited for, and captures of other threads."""

    @contextmanager
    def relaxed_capture(self: _Caller) -> Iterator[None]:
        modes = self._api.CUstreamCaptureMode
        before = self._call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", before)

    def relax_capture(self: _Caller) -> None:
        relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call("cuThreadExchangeStreamCaptureMode", relaxed)

    def stream_create(self: _Caller) -> int:
        return int(self._in_context("cuStreamCreate", _NON_BLOCKING))

    def stream_destroy(self: _Caller, stream: int) -> None:
        self._in_context("cuStreamDestroy", self._stream(stream))
        self._streams.pop(stream, None)

    def stream_synchronize(self: _Caller, stream: int) -> None:
        self._in_context("cuStreamSynchronize", self._stream(stream))

    def memcpy_dtoh(self: _Caller, address: int, nbytes: int, stream: int = 0) -> bytes:
        data = ctypes.create_string_buffer(nbytes)
        queue = self._stream(stream)
        self._in_context("cuMemcpyDtoHAsync", ctypes.addressof(data), address, nbytes, queue)
        self._in_context("cuStreamSynchronize", queue)
        return data.raw

    def memcpy_htod(self: _Caller, address: int, data: bytes, stream: int = 0) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        queue = self._stream(stream)
        self._in_context("cuMemcpyHtoDAsync", address, ctypes.addressof(source), len(data), queue)
        # Until then the copy may read `source`, which ends with this function.
        self._in_context("cuStreamSynchronize", queue)


def _properties(api: Any, handle_kind: Any, devices: int, nbytes: int) -> Any:
    properties = api.CUmulticastObjectProp()
    properties.numDevices = devices
    properties.size = nbytes
    properties.handleTypes = int(handle_kind)
    properties.flags = 0
    return properties
