"""The symmetric window of a connection: memory of NCCL that all ranks register, and that sums are staged through.

NCCL's symmetric kernels serve a sum only if it reads and writes registered memory, and each rank decides that by itself
from its own addresses. So no caller passes such memory: here every rank stages the same calls, by a rule that knows
only what all ranks share. See `DESIGN.md`, *Symmetric windows*.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from device_comm.nccl.dtypes import DATA_TYPES, SUM
from device_comm.nccl.library import WINDOW_FUNCTIONS, NcclLibrary, version_text
from shm_broadcast.errors import NcclError

# NCCL_WIN_COLL_SYMMETRIC.
SYMMETRIC: Final = 1
# NCCL 2.27 was the first version with windows.
WINDOWS_SINCE: Final = 22700
# Bytes of an element, by NCCL's code. Its symmetric kernels sum these and fp8, which staging has no use for.
_SIZES: Final = {
    DATA_TYPES[dtype]: dtype.itemsize for dtype in (torch.float16, torch.bfloat16, torch.float32)
}

Copy = Callable[[int, int, int, int], None]
"""Queues a copy: destination, source, bytes, stream."""


class Wish(NamedTuple):
    """What one rank wants of a window.

    Attributes:
        nbytes: Its size; 0 for none.
        obstacle: Why this rank can have none, or an empty text.
        copy: Queues the copies; None if there is an obstacle.
    """

    nbytes: int
    obstacle: str
    copy: Copy | None


def obstacle_of(library: NcclLibrary) -> str:
    """Return why this library has no windows, or an empty text."""
    missing = [name for name in WINDOW_FUNCTIONS if name not in library.functions]
    if not missing:
        return ""
    return f"{library} has no {missing[0]}, which needs NCCL {version_text(WINDOWS_SINCE)} or newer"


def fits(function: str, arguments: Sequence[int], nbytes: int) -> bool:
    """Return whether a call is staged through a window of `nbytes`. Equal on all ranks.

    Args:
        function: The function of NCCL.
        arguments: Its arguments: source, result, count, data type, reduction.
        nbytes: Size of the window.
    """
    if function != "ncclAllReduce" or arguments[4] != SUM:
        return False
    size = _SIZES.get(arguments[3])
    return size is not None and 0 < arguments[2] * size <= nbytes


class Window:
    """The window of one rank.

    Attributes:
        nbytes: Its size, equal on all ranks.
        address: Address of its memory; 0 if there is none.
    """

    def __init__(self, library: NcclLibrary, nbytes: int, copy: Copy) -> None:
        """Allocate nothing yet."""
        self.nbytes = nbytes
        self.address: int = 0
        self._library = library
        self._copy = copy
        self._handle = ctypes.c_void_p()

    # ------------------------------------------------------------------ life

    def allocate(self) -> str:
        """Allocate the memory; return why that failed, or an empty text. Local."""
        address = ctypes.c_void_p()
        try:
            self._library.call("ncclMemAlloc", ctypes.byref(address), self.nbytes)
        except NcclError as error:
            return str(error)
        self.address = address.value or 0
        return "" if self.address else f"{self._library} allocated no memory"

    def register(self, comm: int) -> int:
        """Register the memory and return the library's status. Collective; blocks for as long as other ranks take."""
        return self._library.call(
            "ncclCommWindowRegister",
            *(comm, self.address, self.nbytes, ctypes.byref(self._handle), SYMMETRIC),
            comm=comm,
        )

    @property
    def is_registered(self) -> bool:
        """Return whether the memory is registered. NCCL returns no window where it declines one without an error."""
        return bool(self._handle.value)

    def deregister(self, comm: int) -> None:
        """Undo `register`, if it was done. Only when no queued call uses the window. Local."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle.value:
            self._library.call("ncclCommWindowDeregister", comm, handle, comm=comm)

    def free(self) -> None:
        """Free the memory, if there is any. Only when no queued copy uses it. Local."""
        address, self.address = self.address, 0
        if address:
            self._library.call("ncclMemFree", address)

    # ------------------------------------------------------------------ calls

    def carry(
        self,
        function: str,
        arguments: Sequence[int],
        comm: ctypes.c_void_p,
        stream: int,
        settle: Callable[[str, int], None],
    ) -> bool:
        """Queue a call through the window, if it `fits`: copy in, add in place, copy out. Return whether it does.

        Args:
            function: As in `fits`.
            arguments: As in `fits`.
            comm: The communicator.
            stream: The stream, which orders all calls of the group.
            settle: Is called for a status that is not 0; raises, or returns when NCCL has queued the call.
        """
        if not fits(function, arguments, self.nbytes):
            return False
        source, result, count, code, reduction = arguments
        nbytes, address = count * _SIZES[code], self.address
        self._copy(address, source, nbytes, stream)
        status = self._library.functions[function](address, address, count, code, reduction, comm, stream)
        if status:
            settle(function, status)
        self._copy(result, address, nbytes, stream)
        return True


__all__ = ["SYMMETRIC", "WINDOWS_SINCE", "Copy", "Window", "Wish", "fits", "obstacle_of"]
