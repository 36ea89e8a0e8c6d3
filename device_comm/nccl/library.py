"""Load NCCL and declare its functions for ctypes.

NVIDIA's nccl4py has compiled calls that cost half a microsecond less each (0.1 against 0.65 us for an all-reduce), but
it finds a library by itself, once per process: it accepts no path and ignores the library that torch has loaded. The
wrong library file causes many NCCL problems, so here a documented rule chooses the file and every error names it.
The all-reduce, where speed matters most, passes arguments that are converted in advance (`Prepared`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shm_broadcast.errors import CapabilityError, NcclError

UNIQUE_ID_BYTES: Final = 128
SUCCESS: Final = 0
IN_PROGRESS: Final = 7
NO_COLOR: Final = -1
SUSPEND_MEMORY: Final = 1

# 2.18 is the oldest version with ncclCommSplit and the fields of `Config`.
OLDEST_VERSION: Final = 21800

RESULT_NAMES: Final = (
    *("ncclSuccess", "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "ncclInvalidArgument"),
    *("ncclInvalidUsage", "ncclRemoteError", "ncclInProgress", "ncclTimeout"),
)

_UNDEFINED: Final = -(2**31)
_CONFIG_MAGIC: Final = 0xCAFEBEEF


class UniqueId(ctypes.Structure):
    """ncclUniqueId: the id that all ranks of a new communicator share."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """The fields of ncclConfig_t as of 2.18. A newer library reads no more than `size` bytes."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    )


def new_config(*, share_resources: bool = False) -> Config:
    """Return the configuration of a nonblocking communicator, whose calls never wait for a peer in the library."""
    config = Config(blocking=0, netName=None, splitShare=int(share_resources))
    config.size, config.magic, config.version = ctypes.sizeof(Config), _CONFIG_MAGIC, OLDEST_VERSION
    config.cgaClusterSize = config.minCTAs = config.maxCTAs = _UNDEFINED
    return config


_PTR, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_OUT: Final = ctypes.c_void_p

# Function: (argument types, first version that has it). A communicator and a stream are pointers.
FUNCTIONS: Final[dict[str, tuple[tuple[type, ...], int]]] = {
    "ncclGetVersion": ((_OUT,), 20000),
    "ncclGetUniqueId": ((_OUT,), 20000),
    "ncclGetErrorString": ((_INT,), 20000),
    "ncclGetLastError": ((_PTR,), 21300),
    "ncclCommInitRankConfig": ((_OUT, _INT, UniqueId, _INT, _PTR), 21400),
    "ncclCommSplit": ((_PTR, _INT, _INT, _OUT, _PTR), 21800),
    "ncclCommFinalize": ((_PTR,), 21400),
    "ncclCommDestroy": ((_PTR,), 20000),
    "ncclCommAbort": ((_PTR,), 20400),
    "ncclCommGetAsyncError": ((_PTR, _OUT), 20400),
    "ncclCommCount": ((_PTR, _OUT), 20000),
    "ncclCommUserRank": ((_PTR, _OUT), 20000),
    "ncclCommCuDevice": ((_PTR, _OUT), 20000),
    "ncclCommSuspend": ((_PTR, _INT), 22907),
    "ncclCommResume": ((_PTR,), 22907),
    "ncclCommMemStats": ((_PTR, _INT, _OUT), 22907),
    "ncclGroupStart": ((), 20000),
    "ncclGroupEnd": ((), 20000),
    "ncclAllReduce": ((_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR), 20000),
    "ncclReduce": ((_PTR, _PTR, _SIZE, _INT, _INT, _INT, _PTR, _PTR), 20000),
    "ncclReduceScatter": ((_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR), 20000),
    "ncclAllGather": ((_PTR, _PTR, _SIZE, _INT, _PTR, _PTR), 20000),
    "ncclBroadcast": ((_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR), 20200),
    "ncclSend": ((_PTR, _SIZE, _INT, _INT, _PTR, _PTR), 20700),
    "ncclRecv": ((_PTR, _SIZE, _INT, _INT, _PTR, _PTR), 20700),
}

# These return text; all others return a status.
_TEXTS: Final = frozenset({"ncclGetErrorString", "ncclGetLastError"})

# An argument that was converted to C in advance: an int or a pointer.
Prepared = ctypes.c_int | ctypes.c_void_p


def version_text(code: int) -> str:
    """Return `2.32.3` for 23203. Codes up to 2.8 have one digit fewer: 2804 is 2.8.4."""
    major, rest = divmod(code, 10000) if code >= 10000 else divmod(code, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class NcclLibrary:
    """One loaded libnccl. Methods return the status 0 or `IN_PROGRESS`, and raise for any other.

    Attributes:
        path: The library's file, with links resolved.
        origin: How it was chosen: "given", "process" (already loaded, by torch), "wheel" or "system".
        version: NCCL's version code: 23203 is 2.32.3.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Load the library.

        Args:
            path: The file to use. None takes the first of: the library that this process has already loaded (a second
                one would have its own threads, memory and settings), that of the wheel nvidia-nccl-cu*, the one that
                the system's loader finds.

        Raises:
            CapabilityError: No library was found, it is not NCCL, or it is older than 2.18.
        """
        self.origin: str
        library, self.origin = _load(path)
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}
        for name, (arguments, _) in FUNCTIONS.items():
            # A function that this version lacks raises when it is called.
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes = arguments
                function.restype = ctypes.c_char_p if name in _TEXTS else ctypes.c_int
                self._functions[name] = function
        self.path: str = _file_of(self._functions.get("ncclGetVersion")) or str(path)
        if "ncclGetVersion" not in self._functions:
            raise CapabilityError(f"{self.path} is no NCCL: it has no ncclGetVersion", requirement="libnccl")
        self.version: int = 0
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        if self.version < OLDEST_VERSION:
            raise CapabilityError(
                f"{self} is too old: NCCL {version_text(OLDEST_VERSION)} or newer is needed",
                requirement=f"NCCL >= {version_text(OLDEST_VERSION)}",
            )

    def __str__(self) -> str:
        """Return `NCCL 2.32.3 (FILE)`."""
        return f"NCCL {version_text(self.version)} ({self.path})"

    # ------------------------------------------------------------------ calling

    def has(self, name: str) -> bool:
        """Return whether this library has the function `name`."""
        return name in self._functions

    def function(self, name: str) -> ctypes._NamedFuncPointer:
        """Return the bare function, which returns a status that must go through `check`.

        Raises:
            CapabilityError: This library has no such function.
        """
        function = self._functions.get(name)
        if function is None:
            since = version_text(FUNCTIONS[name][1])
            raise CapabilityError(
                f"{name} needs NCCL {since} or newer, this is {self}, chosen by: {self.origin}",
                requirement=f"NCCL >= {since}",
            )
        return function

    def call(self, name: str, *arguments: object, comm: int = 0) -> int:
        """Call a function; return 0 or `IN_PROGRESS`. An error quotes the library's last error for `comm`."""
        status = self.function(name)(*arguments)
        return self.check(name, status, comm)

    def check(self, name: str, status: int, comm: int = 0) -> int:
        """Return `status` if it is 0 or `IN_PROGRESS`, and raise otherwise."""
        if status not in (SUCCESS, IN_PROGRESS):
            raise self.error(name, status, comm)
        return int(status)

    def error(self, name: str, status: int, comm: int = 0) -> NcclError:
        """Return the error for `status` of function `name`, with the library's texts about it."""
        code = RESULT_NAMES[status] if 0 <= status < len(RESULT_NAMES) else "an unknown code"
        text = f"{name} returned {status}, {code} ({self.error_string(status)})"
        said = self.last_error(comm)
        if said:
            text += f"; it says: {said}"
        return NcclError(f"{text}; {self}", library=str(self), function=name, code=status)

    # ------------------------------------------------------------------ about the library and its communicators

    def error_string(self, status: int) -> str:
        """Return the library's text for a status."""
        return _text(self._functions["ncclGetErrorString"](status)) if self.has("ncclGetErrorString") else ""

    def last_error(self, comm: int = 0) -> str:
        """Return the library's text about its last error; empty if there was none."""
        return _text(self._functions["ncclGetLastError"](comm)) if self.has("ncclGetLastError") else ""

    def new_unique_id(self) -> bytes:
        """Return a new id. From now on the library listens for ranks that join with it."""
        unique = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique))
        return bytes(unique)

    def init_rank(self, world_size: int, unique_id: bytes, rank: int, config: Config) -> tuple[int, int]:
        """Start joining a communicator; return its handle and the status."""
        handle = ctypes.c_void_p()
        unique = UniqueId.from_buffer_copy(unique_id)
        status = self.call(
            "ncclCommInitRankConfig", ctypes.byref(handle), world_size, unique, rank, ctypes.byref(config)
        )
        return handle.value or 0, status

    def split(self, comm: int, color: int, key: int, config: Config) -> tuple[ctypes.c_void_p, int]:
        """Start a split; return the place of the new handle (it stays None for `NO_COLOR`) and the status."""
        handle = ctypes.c_void_p()
        status = self.call(
            "ncclCommSplit", comm, color, key, ctypes.byref(handle), ctypes.byref(config), comm=comm
        )
        return handle, status

    def async_error(self, comm: int) -> int:
        """Return the state of a communicator: 0, `IN_PROGRESS`, or the status of a failure."""
        state = ctypes.c_int()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(state), comm=comm)
        return state.value

    def finalize(self, comm: int) -> int:
        """Start flushing the queued calls."""
        return self.call("ncclCommFinalize", comm, comm=comm)

    def destroy(self, comm: int) -> None:
        """Free a communicator that has been flushed."""
        self.call("ncclCommDestroy", comm)

    def abort(self, comm: int) -> None:
        """End the queued calls and free the communicator."""
        self.call("ncclCommAbort", comm)

    def count(self, comm: int) -> int:
        """Return the number of ranks in a communicator."""
        return self._ask("ncclCommCount", comm)

    def user_rank(self, comm: int) -> int:
        """Return this process's rank in a communicator."""
        return self._ask("ncclCommUserRank", comm)

    def device(self, comm: int) -> int:
        """Return the ordinal of a communicator's device."""
        return self._ask("ncclCommCuDevice", comm)

    def suspend(self, comm: int) -> int:
        """Release the device memory of a communicator, which cannot be used until it is resumed."""
        return self.call("ncclCommSuspend", comm, SUSPEND_MEMORY, comm=comm)

    def resume(self, comm: int) -> int:
        """Allocate the device memory of a communicator again."""
        return self.call("ncclCommResume", comm, comm=comm)

    def memory_statistic(self, comm: int, which: int) -> int:
        """Return, by `which`: 0 suspendable bytes, 1 whether they are suspended, 2 other bytes, 3 all bytes."""
        value = ctypes.c_uint64()
        self.call("ncclCommMemStats", comm, which, ctypes.byref(value), comm=comm)
        return value.value

    def group_start(self) -> None:
        """Start collecting the calls of this thread."""
        self.call("ncclGroupStart")

    def group_end(self) -> int:
        """Queue the collected calls."""
        return self.call("ncclGroupEnd")

    def _ask(self, name: str, comm: int) -> int:
        value = ctypes.c_int()
        self.call(name, comm, ctypes.byref(value), comm=comm)
        return value.value


# ------------------------------------------------------------------ finding the file


def _load(path: str | os.PathLike[str] | None) -> tuple[ctypes.CDLL, str]:
    if path is not None:
        return _open(os.fspath(path)), "given"
    for loaded in loaded_libraries():
        return _open(loaded), "process"
    for candidate in _of_wheels():
        return _open(candidate), "wheel"
    return _open("libnccl.so.2"), "system"


def _open(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CapabilityError(
            f"NCCL cannot be loaded: {error}; install the extra [cu12] or [cu13], whichever matches torch, or "
            "give the path of a libnccl.so.2",
            requirement="libnccl.so.2",
        ) from error


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the NCCL libraries that this process has mapped, in order of address."""
    pattern = re.compile(r"\s(/.*/libnccl\.so[.\d]*)$", re.MULTILINE)
    return list(dict.fromkeys(pattern.findall(maps.read_text(encoding="utf-8"))))


def _of_wheels() -> Iterator[str]:
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        candidate = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
        if candidate.is_file():
            yield str(candidate)


def _file_of(function: ctypes._NamedFuncPointer | None) -> str:
    """Return the file that contains a function, as the loader reports it."""
    if function is None:
        return ""
    info = _SymbolInfo()
    ask = ctypes.CDLL(None).dladdr
    ask.argtypes, ask.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
    if not ask(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info)) or not info.file:
        return ""
    return os.path.realpath(_text(info.file))


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace").strip()


__all__ = [
    "FUNCTIONS",
    "IN_PROGRESS",
    "NO_COLOR",
    "SUCCESS",
    "Config",
    "NcclLibrary",
    "Prepared",
    "UniqueId",
    "loaded_libraries",
    "new_config",
    "version_text",
]
