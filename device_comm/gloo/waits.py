"""Ends a wait for a message over Gloo, which torch can do in C++ and does not offer in Python.

A group that breaks closes its connections. Gloo then tells the waits for messages that have not begun; it forgets the
message whose bytes were just being copied (gloo/transport/tcp/pair.cc, `signalException`), and the thread that waits
for it would wait until its own deadline. torch ends such a wait by `SendWork::abort` and `RecvWork::abort`
(ProcessGroupGloo.cpp, torch 2.13), which are exported from libtorch_cpu and missing in Python. To let go of the work
then is safe: the destructor of Gloo's buffer waits for a copy in progress, and none begins later
(gloo/common/memory.h).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

__all__ = ["end_wait"]

# `PYBIND11_PLATFORM_ABI_ID` of torch's wheels for Linux; pybind11 gives no pointer to who names another one.
_ABI: Final = b"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1"
# By which names pybind11's conduit checks that both sides mean the same type and the same kind of pointer.
_TYPE_INFO: Final = b"St9type_info"
_WORK: Final = b"N4c10d4WorkE"
_POINTER_KIND: Final = b"raw_pointer_ephemeral"
_CLASSES: Final = ("N4c10d16ProcessGroupGloo8SendWork", "N4c10d16ProcessGroupGloo8RecvWork")
# A vtable begins with two words that are not functions (Itanium C++ ABI, 2.5.2); objects point behind them.
_VTABLE_WORDS: Final = 2

_Abort = Callable[[ctypes.c_void_p], None]


def end_wait(work: dist.Work) -> bool:
    """Let the `wait` of another thread for this send or receive over Gloo return False, now or when it begins.

    Only for a group that is broken or over: the message is lost.

    Returns:
        Whether it was told. False if `work` is none of Gloo's, or this torch has other names for what this needs.
    """
    known = _aborts()
    if known is None:
        return False
    work_type, aborts = known
    pointer = _pointer_to(work, work_type)
    if not pointer:
        return False
    # The first word of an object is its vtable's address, which tells its class.
    abort = aborts.get(ctypes.c_size_t.from_address(pointer).value)
    if abort is None:
        return False
    abort(ctypes.c_void_p(pointer))
    return True


@functools.cache
def _aborts() -> tuple[Any, dict[int, _Abort]] | None:
    """Return a capsule of the type `Work`, and by the vtable of each class its function; None if one is missing."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        aborts: dict[int, _Abort] = {}
        for name in _CLASSES:
            abort = library[f"_Z{name}5abortEv"]
            abort.restype, abort.argtypes = None, (ctypes.c_void_p,)
            vtable = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E"))
            aborts[vtable + _VTABLE_WORDS * ctypes.sizeof(ctypes.c_void_p)] = abort
        type_info = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTI{_WORK.decode()}"))
    except (OSError, AttributeError, ValueError):
        return None
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(type_info, _TYPE_INFO, None), aborts


def _pointer_to(work: dist.Work, work_type: Any) -> int:
    """Return the address of the C++ object, for as long as `work` is referred to; 0 if pybind11 does not tell."""
    conduit = getattr(work, "_pybind11_conduit_v1_", None)
    capsule = None if conduit is None else conduit(_ABI, work_type, _POINTER_KIND)
    if capsule is None:
        return 0
    pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_in.restype, pointer_in.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(pointer_in(capsule, _WORK) or 0)
