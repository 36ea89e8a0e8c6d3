"""Load NCCL and declare its functions for ctypes.

NVIDIA's nccl4py has compiled calls that cost half a microsecond less each (0.1 against 0.65 us for an all-reduce), but
it finds a library by itself, once per process: it accepts no path and ignores the library that torch has loaded. The
wrong library file causes many NCCL problems, so here a documented rule chooses the file and every error names it.
The all-reduce, where speed matters most, passes arguments that are converted in advance.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from shm_broadcast.errors import CapabilityError, NcclError
from shm_broadcast.interruption import raised_by_handler

UNIQUE_ID_BYTES: Final = 128
SUCCESS: Final = 0
IN_PROGRESS: Final = 7

# 2.18 is the oldest version with the fields of `Config`; it has all of `FUNCTIONS`.
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


def new_config() -> Config:
    """Return the configuration of a blocking communicator: `background` tells why. NCCL_COMM_BLOCKING overrides it."""
    config = Config(blocking=1, netName=None, splitShare=0)
    config.size, config.magic, config.version = ctypes.sizeof(Config), _CONFIG_MAGIC, OLDEST_VERSION
    config.cgaClusterSize = config.minCTAs = config.maxCTAs = _UNDEFINED
    return config


_PTR, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_OUT: Final = ctypes.c_void_p

# The argument types of each function. A communicator and a stream are pointers.
FUNCTIONS: Final[dict[str, tuple[type, ...]]] = {
    "ncclGetVersion": (_OUT,),
    "ncclGetUniqueId": (_OUT,),
    "ncclGetErrorString": (_INT,),
    "ncclGetLastError": (_PTR,),
    "ncclCommInitRankConfig": (_OUT, _INT, UniqueId, _INT, _PTR),
    "ncclCommFinalize": (_PTR,),
    "ncclCommDestroy": (_PTR,),
    "ncclCommAbort": (_PTR,),
    "ncclCommGetAsyncError": (_PTR, _OUT),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR),
    "ncclReduce": (_PTR, _PTR, _SIZE, _INT, _INT, _INT, _PTR, _PTR),
    "ncclReduceScatter": (_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR),
    "ncclAllGather": (_PTR, _PTR, _SIZE, _INT, _PTR, _PTR),
    "ncclBroadcast": (_PTR, _PTR, _SIZE, _INT, _INT, _PTR, _PTR),
    "ncclSend": (_PTR, _SIZE, _INT, _INT, _PTR, _PTR),
    "ncclRecv": (_PTR, _SIZE, _INT, _INT, _PTR, _PTR),
}

# NCCL 2.27 has these four; an older library does without. The window is a pointer too.
WINDOW_FUNCTIONS: Final[dict[str, tuple[type, ...]]] = {
    "ncclMemAlloc": (_OUT, _SIZE),
    "ncclMemFree": (_PTR,),
    "ncclCommWindowRegister": (_PTR, _PTR, _SIZE, _OUT, _INT),
    "ncclCommWindowDeregister": (_PTR, _PTR),
}

# NCCL 2.23 has it; an older library lets all ranks meet at one root. The ids are an array.
ROOTS_FUNCTIONS: Final[dict[str, tuple[type, ...]]] = {
    "ncclCommInitRankScalable": (_OUT, _INT, _INT, _INT, _PTR, _PTR),
}
_LATER: Final = {**WINDOW_FUNCTIONS, **ROOTS_FUNCTIONS}

# These return text; all others return a status.
_TEXTS: Final = frozenset({"ncclGetErrorString", "ncclGetLastError"})


def version_text(code: int) -> str:
    """Return `2.32.3` for 23203. Codes up to 2.8 have one digit fewer: 2804 is 2.8.4."""
    major, rest = divmod(code, 10000) if code >= 10000 else divmod(code, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def init_function(unique_ids: Sequence[bytes]) -> str:
    """Return the name of the function that joins a communicator of these ids."""
    return "ncclCommInitRankConfig" if len(unique_ids) == 1 else "ncclCommInitRankScalable"


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
        version: NCCL's version code: 23203 is 2.32.3.
        functions: The bare functions, which return a status, by name: `FUNCTIONS`, and what there is of
            `WINDOW_FUNCTIONS` and `ROOTS_FUNCTIONS`.
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
        file = _choose() if path is None else os.fspath(path)
        library, oldest = _open(file), version_text(OLDEST_VERSION)
        self.functions: dict[str, ctypes._NamedFuncPointer] = {}
        for name, arguments in {**FUNCTIONS, **_LATER}.items():
            function = getattr(library, name, None)
            if function is None and name in _LATER:
                continue
            if function is None:
                # Every NCCL has `ncclGetVersion`, the first of them; one that lacks another function is too old.
                is_nccl = bool(self.functions)
                raise CapabilityError(
                    f"{file} is no NCCL of version {oldest} or newer: it has no {name}",
                    requirement=f"NCCL >= {oldest}" if is_nccl else "libnccl",
                )
            function.argtypes = arguments
            function.restype = ctypes.c_char_p if name in _TEXTS else ctypes.c_int
            self.functions[name] = function
        self.path: str = _file_of(self.functions["ncclGetVersion"]) or file
        self.version: int = 0
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        if self.version < OLDEST_VERSION:
            raise CapabilityError(
                f"{self} is too old: NCCL {oldest} or newer is needed", requirement=f"NCCL >= {oldest}"
            )

    def __str__(self) -> str:
        """Return `NCCL 2.32.3 (FILE)`."""
        return f"NCCL {version_text(self.version)} ({self.path})"

    # ------------------------------------------------------------------ calling

    def call(self, name: str, *arguments: object, comm: int = 0) -> int:
        """Call a function; return 0 or `IN_PROGRESS`. An error quotes the library's last error for `comm`."""
        status: int = self.functions[name](*arguments)
        if status not in (SUCCESS, IN_PROGRESS):
            raise self.error(name, status, comm)
        return status

    def error(self, name: str, status: int, comm: int = 0) -> NcclError:
        """Return the error for `status` of function `name`, with the library's texts about it."""
        code = RESULT_NAMES[status] if 0 <= status < len(RESULT_NAMES) else "an unknown code"
        text = f"{name} returned {status}, {code} ({self.error_string(status)})"
        said = _text(self.functions["ncclGetLastError"](comm))
        if said:
            text += f"; it says: {said}"
        return NcclError(f"{text}; {self}", library=str(self), function=name, code=status)

    # ------------------------------------------------------------------ about the library and its communicators

    def error_string(self, status: int) -> str:
        """Return the library's text for a status."""
        return _text(self.functions["ncclGetErrorString"](status))

    def new_unique_id(self) -> bytes:
        """Return a new id. From now on the library listens for ranks that join with it."""
        unique = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique))
        return bytes(unique)

    def init_rank(
        self, world_size: int, unique_ids: Sequence[bytes], rank: int, config: Config
    ) -> tuple[int, int]:
        """Start joining a communicator; return its handle and the status. Each id is that of one of its roots."""
        handle, asked = ctypes.c_void_p(), ctypes.byref(config)
        name, into = init_function(unique_ids), ctypes.byref(handle)
        if name in ROOTS_FUNCTIONS:
            ids = (UniqueId * len(unique_ids))(*map(UniqueId.from_buffer_copy, unique_ids))
            status = self.call(name, into, world_size, rank, len(ids), ids, asked)
        else:
            status = self.call(name, into, world_size, UniqueId.from_buffer_copy(unique_ids[0]), rank, asked)
        return handle.value or 0, status

    def async_error(self, comm: int) -> int:
        """Return the state of a communicator: 0, `IN_PROGRESS`, or the status of a failure."""
        state = ctypes.c_int()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(state), comm=comm)
        return state.value


# ------------------------------------------------------------------ finding the file


def _choose() -> str:
    return next(chain(loaded_libraries(), _of_wheels()), "libnccl.so.2")


def _open(file: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(file)
    except OSError as error:
        if raised_by_handler(error):
            raise
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


def _file_of(function: ctypes._NamedFuncPointer) -> str:
    """Return the file that contains a function, as the loader reports it."""
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
    "SUCCESS",
    "WINDOW_FUNCTIONS",
    "Config",
    "NcclLibrary",
    "UniqueId",
    "loaded_libraries",
    "new_config",
    "version_text",
]
