"""Multicast memory for kernels that g++ compiles, and for the tests' CUDA driver, which `tests.fake_cuda` describes.

A multimem address lies in a protected window: any access to it but by a multimem instruction ends the process. The
first page of its aligned range names the memory of each rank; `tests/native/cuda/shim.hpp` reads it.

The driver's multicast object is a file in the directory that the ranks share. Markers beside it tell which devices were
added, what each rank has bound, and who has it mapped.
"""

import ctypes
import json
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from tests.fake_device import (
    GRANULARITY,
    INVALID_DEVICE,
    INVALID_VALUE,
    NOT_SUPPORTED,
    FakeMemory,
    Memory,
    libc,
    map_memory,
    unmap,
)

__all__ = ["FakeMulticast", "Window"]

_MAGIC = 0x4D554C54494D454D
_RANGE = 1 << 32
_WINDOW = 1 << 31
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_NO_RESERVE, _FIXED = 0x4000, 0x10
_HEADER = struct.Struct("<11Q")


class Window:
    """A multimem address of memory of several ranks.

    Attributes:
        address: The multimem address.
    """

    def __init__(self, memory: Sequence[int], nbytes: int) -> None:
        """Make a window of `nbytes` over the addresses of the ranks' memory."""
        assert 1 <= len(memory) <= 8
        assert nbytes <= _WINDOW
        self._base = int(libc.mmap(None, 2 * _RANGE, 0, _PRIVATE | _NO_RESERVE, -1, 0))
        start = -(-self._base // _RANGE) * _RANGE
        libc.mmap(start, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE | _FIXED, -1, 0)
        padded = [*memory, *(0,) * (8 - len(memory))]
        ctypes.memmove(start, _HEADER.pack(_MAGIC, len(memory), nbytes, *padded), _HEADER.size)
        self.address = start + _WINDOW

    def close(self) -> None:
        """Remove the window; the ranks' memory stays."""
        unmap(self._base, 2 * _RANGE)


class _Object:
    """A multicast object by one of its handles.

    Attributes:
        path: The object's file.
        descriptor: An open descriptor of it.
        devices: How many devices take part.
        nbytes: Bytes of memory of each.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.devices, self.nbytes = json.loads(path.read_text())

    @property
    def name(self) -> str:
        return self.path.name

    def marker(self, kind: str, rank: int | str) -> Path:
        """Return the path of a marker: of a device that was added, memory that was bound, or a mapping."""
        return self.path.with_name(f"{self.name}.{kind}-{rank}")

    def markers(self, kind: str) -> list[Path]:
        """Return all markers of a kind, by rank."""
        return sorted(self.path.parent.glob(f"{self.name}.{kind}-*"))


class FakeMulticast(FakeMemory):
    """The multicast calls of the tests' driver.

    It is stricter than CUDA: it refuses a bind before all devices were added and a mapping before all memory was bound,
    both of which CUDA waits for or leaves undefined, and it convicts whoever unbinds its memory before it has unmapped
    the object, or gives up memory or an object while the memory is bound.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self._objects: dict[int, _Object] = {}
        # By object: the memory's handle, and a descriptor that peers open through /proc.
        self._bound: dict[str, tuple[int, int]] = {}
        self._windows: dict[int, tuple[Window, list[int]]] = {}

    def multicast_supported(self) -> bool:
        self._enter("multicast_supported")
        return self.faults.multicast

    def multicast_granularity(self, devices: int, nbytes: int) -> int:
        self._enter("multicast_granularity")
        if devices < 1 or nbytes < 1:
            raise self._error("multicast_granularity", INVALID_VALUE)
        return 2 * GRANULARITY

    def multicast_create(self, devices: int, nbytes: int) -> int:
        self._enter("multicast_create", in_capture=False)
        if not self.faults.multicast:
            raise self._error("multicast_create", NOT_SUPPORTED)
        if nbytes <= 0 or nbytes % (2 * GRANULARITY):
            raise self._error("multicast_create", INVALID_VALUE)
        path = self.directory / f"multicast-{self.rank}-{os.getpid()}-{self._number()}"
        path.write_text(json.dumps([devices, nbytes]))
        return self._keep_object(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def _keep_object(self, path: Path, descriptor: int) -> int:
        handle = self._number()
        self._objects[handle] = _Object(path, descriptor)
        return handle

    def _object(self, function: str, handle: int) -> _Object:
        if handle not in self._objects:
            raise self._error(function, INVALID_VALUE)
        return self._objects[handle]

    def multicast_add_device(self, handle: int) -> None:
        self._enter("multicast_add_device", in_capture=False)
        made = self._object("multicast_add_device", handle)
        if len(made.markers("added")) >= made.devices:
            raise self._error("multicast_add_device", INVALID_DEVICE, "the team is full")
        try:
            made.marker("added", self.device.uuid).touch(exist_ok=False)
        except FileExistsError:
            raise self._error("multicast_add_device", INVALID_DEVICE, "the device was added before") from None

    def multicast_bind(self, handle: int, memory: int, nbytes: int) -> None:
        self._enter("multicast_bind", in_capture=False)
        made = self._object("multicast_bind", handle)
        added = len(made.markers("added"))
        if added < made.devices:
            self._violation(f"bound memory when {added} of {made.devices} devices had been added")
            raise self._error("multicast_bind", INVALID_VALUE, "CUDA would wait")
        if not made.marker("added", self.device.uuid).exists():
            raise self._error("multicast_bind", INVALID_DEVICE)
        descriptor, owner = self._handle("multicast_bind", memory)
        if owner != self.rank or nbytes > made.nbytes or nbytes > os.fstat(descriptor).st_size:
            raise self._error("multicast_bind", INVALID_VALUE)
        kept = os.dup(descriptor)
        self._bound[made.name] = memory, kept
        made.marker("bound", self.rank).write_text(f"{os.getpid()} {kept}")

    def multicast_unbind(self, handle: int, nbytes: int) -> None:
        self._enter("multicast_unbind", in_capture=False)
        made = self._object("multicast_unbind", handle)
        if made.name not in self._bound or nbytes != made.nbytes:
            raise self._error("multicast_unbind", INVALID_VALUE)
        if any(each.name == made.name for address, each in self._memory.items() if address in self._windows):
            self._violation(f"unbound memory of {made.name} while it was mapped here")
        made.marker("bound", self.rank).unlink()
        os.close(self._bound.pop(made.name)[1])

    def vmm_export(self, handle: int) -> int:
        if handle not in self._objects:
            return super().vmm_export(handle)
        self._enter("vmm_export")
        return os.dup(self._objects[handle].descriptor)

    def vmm_import(self, descriptor: int) -> int:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.name.startswith("multicast-"):
            return super().vmm_import(descriptor)
        self._enter("vmm_import", in_capture=False)
        return self._keep_object(path, os.dup(descriptor))

    def vmm_map(self, handle: int, nbytes: int) -> int:
        if handle not in self._objects:
            return super().vmm_map(handle, nbytes)
        self._enter("vmm_map", in_capture=False)
        made = self._objects[handle]
        bound = made.markers("bound")
        if len(bound) < made.devices:
            self._violation(f"mapped {made.name} when {len(bound)} of {made.devices} ranks had bound memory")
            raise self._error("vmm_map", INVALID_VALUE)
        if nbytes != made.nbytes:
            raise self._error("vmm_map", INVALID_VALUE)
        memory = []
        for each in bound:
            pid, number = each.read_text().split()
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
            memory.append(map_memory(descriptor, nbytes, mmap.MAP_SHARED))
            os.close(descriptor)
        window = Window(memory, nbytes)
        marker = made.marker("mapped", self.rank)
        marker.write_text(str(os.getpid()))
        self._windows[window.address] = window, memory
        self._memory[window.address] = Memory("window", made.name, nbytes, marker)
        return window.address

    def vmm_unmap(self, address: int, nbytes: int) -> None:
        if address not in self._windows:
            super().vmm_unmap(address, nbytes)
            return
        self._enter("vmm_unmap", in_capture=False)
        if self._own("vmm_unmap", address, "window").nbytes != nbytes:
            raise self._error("vmm_unmap", INVALID_VALUE)
        self._unmap(address)

    def _unmap(self, address: int) -> None:
        if address not in self._windows:
            super()._unmap(address)
            return
        gone = self._memory.pop(address)
        window, memory = self._windows.pop(address)
        window.close()
        for each in memory:
            unmap(each, gone.nbytes)
        if gone.marker is not None:
            gone.marker.unlink(missing_ok=True)

    def vmm_release(self, handle: int) -> None:
        if any(memory == handle for memory, _ in self._bound.values()):
            self._violation(f"released handle {handle}, whose memory is bound to a multicast object")
        if handle not in self._objects:
            super().vmm_release(handle)
            return
        self._enter("vmm_release")
        made = self._objects.pop(handle)
        if made.name in self._bound:
            self._violation(f"released {made.name}, to which memory of this rank is bound")
        os.close(made.descriptor)

    def release(self) -> None:
        """Release everything that is left without reporting it."""
        for made in self._objects.values():
            os.close(made.descriptor)
        for _, descriptor in self._bound.values():
            os.close(descriptor)
        self._objects.clear()
        self._bound.clear()
