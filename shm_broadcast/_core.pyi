"""Types of the native core. Every function checks its arguments and touches no memory outside them."""

from collections.abc import Callable
from typing import final

from typing_extensions import Buffer

MAX_DEPTH: int
MAX_SAME_HASH: int
INLINE_LIMIT: int
ALIGNMENT: int
FIRST_HOOK_CODE: int
FIRST_DATA_CODE: int

@final
class Window:
    """Bytes at an address, kept alive by an owner; exports a flat, writable buffer."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def encode(
    obj: object, fallback: Callable[[object], tuple[int, object, object]], /
) -> tuple[bytes, tuple[memoryview, ...], int]:
    """Return (header, buffers, bytes of the frame); `fallback` describes what is no builtin type."""

def decode(frame: Buffer, hook: Callable[[int, object, object], object], /) -> object:
    """Return the object of `frame`; `hook` builds what is no builtin type. ValueError: no valid frame."""

def write_frame(target: Buffer, header: bytes, buffers: tuple[memoryview, ...], /) -> int:
    """Lay out a frame at the start of `target`; return its bytes. ValueError: it does not fit."""

def window(owner: object, address: int, nbytes: int, /) -> Window:
    """Return a window on `nbytes` at `address`, which `owner` keeps valid."""

def copy_into(address: int, nbytes: int, source: Buffer, /) -> None:
    """Copy all of `source`, which must have `nbytes`, to `address`."""
