"""Objects to frames and back, without pickle: one tree of values and the buffers that stand outside it.

A frame, offsets in bytes, integers of the frame itself little-endian:

| offset | bytes | field |
|---|---|---|
| 0 | 4 | magic, `GCBC` |
| 4 | 1 | version, 1 |
| 5 | 3 | flags, 0 |
| 8 | 8 | length of the whole frame |
| 16 | 8 | length of the tree, T |
| 24 | 8 | number of buffers, N |
| 32 | T | the tree: one msgpack value |
| next multiple of 8 | 8 N | of each buffer: length (low 7 bytes), kind (top byte: 0 data, 1 bytes, 2 bytearray) |
| next multiple of 64 | each | the buffers, each at a multiple of 64 |

Padding is zero, and nothing follows the last buffer. The tree uses these parts of msgpack and no others: nil,
bool, integers, float 64, str, bin 8/16, array, map, and ext 32 for what msgpack cannot tell apart. A buffer has
no number: the tree uses them in order, each once.

| ext | type | payload |
|---|---|---|
| 1, 2, 3 | tuple, set, frozenset | an array |
| 4 | bytearray | its bytes |
| 5, 6 | bytes, bytearray out of band | nothing: the next buffer |
| 7 | str with lone surrogates | UTF-8 with surrogates encoded |
| 16 - 63 | see `wire_format.Code` | the pair [meta, body], two values |
| 64 - 127 | arrays and tensors | the pair [meta, data]: bin 16, or nil for the next buffer |

The decoder trusts nothing: a length is compared with what is left before memory is taken, depth is limited,
keys must be hashable and distinct, and only registered classes and those of registered packages are built.

What arrives equals what was sent, in value and type, with these exceptions: a memoryview arrives as bytes, an
`nn.Parameter` as the tensor that it holds, an exception as a `CarriedError` that names its class; strides,
`requires_grad` and the identity of objects that stand in two places are not kept; attributes that a class does not
declare do not travel (`register_package` refuses objects that have some).

| carried | how |
|---|---|
| None, bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset | as they are |
| OrderedDict, Counter, deque, defaultdict of a builtin factory, SimpleNamespace | as they are |
| range, slice, `array.array` of numbers, `...`, NotImplemented, UNSET | as they are |
| datetime, date, time, timedelta, timezone, ZoneInfo, UUID, Decimal, paths of `pathlib` | as they are |
| members of Enums and Flags that the receiver has imported | by name |
| arrays, scalars and dtypes of numpy; tensors in host memory, dtypes, Sizes and devices of torch | as they are |
| memoryview; `nn.Parameter` | as bytes; as a tensor |
| exceptions | as `CarriedError`: name of the class, text and notes |
| classes of `register_type` and `register_package` | by their declared fields, or the application's functions |
| functions, partial, classes, modules, generators, views of dicts, `torch.Generator` | refused |
"""

import builtins
import importlib
import struct
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, NoReturn

import msgspec

from shm_broadcast import _core
from shm_broadcast.codec import adapters, plain_adapter
from shm_broadcast.codec.carried_error import CarriedError, build_exception, describe_exception
from shm_broadcast.codec.enum_adapter import build_enum, describe_enum
from shm_broadcast.codec.object_path import Step, render, repeated
from shm_broadcast.codec.records import ENUM
from shm_broadcast.codec.refused_types import reason_for
from shm_broadcast.codec.registry import (
    Entry,
    build_registered,
    by_class,
    find_entry,
    register_package,
    register_type,
    unregister_package,
    unregister_type,
)
from shm_broadcast.codec.wire_format import Builder, Code, DataBuilder, Describer, Description, Refusal
from shm_broadcast.errors import CapabilityError, DecodeError, UsageError
from shm_broadcast.interruption import raised_by_handler, tolerating
from shm_broadcast.threads import ImportingError, import_aside

__all__ = [
    "MAX_DEPTH",
    "CarriedError",
    "Message",
    "decode",
    "encode",
    "frame_length",
    "register_package",
    "register_type",
    "unregister_package",
    "unregister_type",
]

MAX_DEPTH: Final = _core.MAX_DEPTH
"""Levels of containers at most, on either side."""

# The start of a frame: magic, version, flags (which the decoder checks), length of the whole.
_START: Final = struct.Struct("<4sB3xQ")
_MAGIC: Final = b"GCBC"
_VERSION: Final = 1
_PREFIX_BYTES: Final = 32

_PADDING: Final = memoryview(bytes(_core.ALIGNMENT))
# Packages whose adapters are loaded at the first use, with what their import needs of the others and itself.
_LAZY: Final = {"numpy": ("numpy",), "torch": ("numpy", "torch"), "zoneinfo": ("zoneinfo",)}
_LAZY_CODES: Final = {
    **dict.fromkeys((Code.NUMPY_DTYPE, Code.NUMPY_TEXT, Code.NUMPY_ARRAY, Code.NUMPY_SCALAR), "numpy"),
    **dict.fromkeys((Code.TORCH_DTYPE, Code.TORCH_SIZE, Code.TORCH_DEVICE, Code.TORCH_TENSOR), "torch"),
    Code.ZONE_INFO: "zoneinfo",
}

_describers: dict[type, Describer] = {**adapters.DESCRIBERS, **plain_adapter.DESCRIBERS}
_builders: dict[int, Builder] = {
    **adapters.BUILDERS,
    **plain_adapter.BUILDERS,
    Code.EXCEPTION: build_exception,
    Code.ENUM: build_enum,
    Code.REGISTERED: build_registered,
}
_data_builders: dict[int, DataBuilder] = {}
_adapters: dict[str, Any] = {}
"""The adapters that are loaded, by package."""


class Message(msgspec.Struct, frozen=True, eq=False):
    """One encoded object, not yet laid out as a frame.

    The buffers view the memory of the objects: lay the frame out before you change them.

    Attributes:
        header: Prefix, tree and table.
        buffers: What stands out of band, as flat views of bytes that keep their owners alive.
        nbytes: Exact size of the frame.
    """

    header: bytes
    buffers: tuple[memoryview, ...]
    nbytes: int

    def write_into(self, target: memoryview | bytearray) -> int:
        """Lay the frame out at the start of `target` and return its size.

        Raises:
            UsageError: The target is read-only, not contiguous or too small; its content is undefined.
        """
        try:
            return _core.write_frame(target, self.header, self.buffers)
        except (BufferError, TypeError, ValueError) as error:
            raise UsageError(f"cannot write a frame of {self.nbytes} bytes: {error}") from error

    def to_bytes(self) -> bytes:
        """Return the frame in one piece."""
        return b"".join(self.segments()) if self.buffers else self.header

    def segments(self) -> list[memoryview]:
        """Return the pieces of the frame in order, padding included."""
        pieces = [memoryview(self.header)]
        offset = len(self.header)
        for buffer in self.buffers:
            gap = -offset % _core.ALIGNMENT
            if gap:
                pieces.append(_PADDING[:gap])
            pieces.append(buffer)
            offset += gap + buffer.nbytes
        return pieces


def encode(obj: object, *, device_tensor: Callable[[Any], object] | None = None) -> Message:
    """Encode an object tree.

    Args:
        obj: Anything made of builtin types, the standard library's common ones, numpy arrays and scalars,
            CPU tensors, Enums and registered classes.
        device_tensor: Returns what is sent in place of a tensor that is not in host memory; such a tensor
            is refused when this is None.

    Raises:
        UsageError: Something in the tree cannot be carried, the tree contains itself or is deeper than
            `MAX_DEPTH`; the text says where. Nothing was sent.
    """
    fallback = describe if device_tensor is None else partial(_describe_device, device_tensor)
    try:
        header, buffers, nbytes = _core.encode(obj, fallback)
    except Exception as error:  # noqa: BLE001 - raises
        raise_usage_error(error)
    return Message(header, buffers, nbytes)


def raise_usage_error(error: Exception) -> NoReturn:
    """Raise what `encode` raises for an exception of the native encoder."""
    if isinstance(error, MemoryError) or raised_by_handler(error):
        raise error
    raise UsageError(f"{_problem(error)}; nothing was sent") from error


def decode(frame: bytes | bytearray | memoryview, type: Any = None, *, copy: bool = True) -> Any:  # noqa: A002
    """Return the object of a frame.

    The frame must not change meanwhile.

    Args:
        frame: Exactly one frame.
        type: What the result must be, in any form that `msgspec.convert` knows; a mapping then becomes a
            Struct or dataclass, for example. None returns the object as it was sent.
        copy: Whether arrays and tensors have memory that nothing else uses; not all can be resized. If it is
            false, those that stand out of band alias `frame` and keep it alive; treat them as read-only
            (numpy enforces it). They are aligned to 64 bytes when the frame is.

    Raises:
        DecodeError: The bytes are no valid frame, hold a type that is unknown here, or are not of `type`.
        UsageError: `frame` is no contiguous buffer, or `type` is no type that msgspec can convert to. Or this thread is
            importing a module that the object needs, as in a signal handler.
    """
    _check_frame(frame)
    try:
        value = _core.decode(frame, build_owned if copy else _build_aliased, copy)
    except Exception as error:
        fault = decode_error(error)
        if fault is None or fault is error:
            raise
        raise fault from error
    return value if type is None or type is Any else convert(value, type)


def decode_error(error: Exception) -> DecodeError | MemoryError | None:
    """Return what `decode` raises for an exception of the native decoder; None if the bytes are not at fault.

    They are not if a signal handler has raised it, or if this thread is importing a module that the object needs.
    """
    if isinstance(error, ImportingError) or raised_by_handler(error):
        return None
    if isinstance(error, (DecodeError, MemoryError)):
        return error
    fault = DecodeError(f"no valid frame: {error}")
    fault.__cause__ = error
    return fault


def _check_frame(frame: object) -> None:
    cls = builtins.type(frame)
    if cls is bytes or cls is bytearray:
        return
    try:
        if isinstance(frame, (bytes, bytearray)) or (isinstance(frame, memoryview) and frame.c_contiguous):
            return
    except ValueError as error:
        if raised_by_handler(error):
            raise
        raise UsageError(f"decode: {error}") from error
    raise UsageError(f"decode needs one contiguous buffer of bytes, got a {cls.__qualname__}")


def convert(value: Any, wanted: Any) -> Any:
    """Return a decoded value as `decode` does for the type `wanted`; raises as it does."""
    if builtins.type(value) is wanted:
        return value
    try:
        return msgspec.convert(value, wanted)
    except TypeError as error:
        if raised_by_handler(error):
            raise
        raise UsageError(f"decode to {_name_of(wanted)}: {error}") from error
    except MemoryError:
        raise  # the message is not at fault
    except Exception as error:
        if raised_by_handler(error):
            raise
        raise DecodeError(f"the message is no {_name_of(wanted)}: {error}") from error


def _name_of(wanted: Any) -> str:
    return wanted.__qualname__ if builtins.type(wanted) is builtins.type else repr(wanted)


def _load(package: str) -> None:
    """Load the adapter of `package`; it may have been loaded before, as a whole or in part.

    Those of arrays and tensors also teach the native core the dtypes that it can handle itself.
    """
    adapter = _adapter_of(package)
    _describers.update(adapter.DESCRIBERS)
    _builders.update(adapter.BUILDERS)
    _data_builders.update(adapter.DATA_BUILDERS)


def _adapter_of(package: str) -> Any:
    """Return the adapter of `package`, imported where no signal handler can raise.

    `importlib` takes a `ValueError` of a handler for its own, and then says that there is no such module. Where no
    thread can be had, as when the interpreter is about to exit, this thread imports it.
    """
    name = f"shm_broadcast.codec.{package}_adapter"
    with tolerating(CapabilityError):
        import_aside(name, *_LAZY[package])
    adapter = _adapters[package] = importlib.import_module(name)
    return adapter


def describe(obj: object) -> Description:
    """Return what the native encoder writes for an object that is of no builtin type."""
    cls = type(obj)
    try:
        describer = _describers.get(cls)
        if describer is not None:
            return describer(obj)
        entry = by_class.get(cls)
        if entry is not None and entry.kind.name != ENUM:
            return Code.REGISTERED, entry.name, entry.kind.take(obj)
        return _describer_of(cls)(obj)
    except MemoryError:
        raise
    except Refusal as refusal:
        refusal.cls = cls
        raise
    except Exception as error:
        if raised_by_handler(error):
            raise
        raise Refusal(f"describing it failed: {type(error).__name__}: {error}", cls) from error


def _describe_device(device_tensor: Callable[[Any], object], obj: object) -> Description:
    if type(obj).__module__ == "torch":
        adapter = _adapters.get("torch") or _adapter_of("torch")
        if adapter.is_device_tensor(obj):
            return Code.SUBSTITUTE, None, device_tensor(obj)
    return describe(obj)


def frame_length(start: bytes | bytearray | memoryview) -> int:
    """Return the length in bytes of the frame that begins with `start`, of which 16 bytes are enough.

    For transports that learn from the first part of a frame how much follows.

    Raises:
        DecodeError: These bytes begin no frame of this version.
    """
    if len(start) < _START.size:
        raise DecodeError(f"the start of a frame has {_START.size} bytes, got {len(start)}")
    magic, version, total = _START.unpack_from(start)
    if magic != _MAGIC or version != _VERSION or total < _PREFIX_BYTES:
        raise DecodeError("these bytes begin no frame of this version")
    return int(total)


def _describer_of(cls: type) -> Describer:
    """Return the describer of a class that has none yet."""
    if issubclass(cls, Enum):
        return describe_enum
    root = cls.__module__.partition(".")[0]
    if root in _LAZY:
        # A signal handler or another thread may have loaded it since the caller looked.
        _load(root)
        if cls in _describers:
            return _describers[cls]
    if issubclass(cls, BaseException):
        return describe_exception
    found = find_entry(cls)
    if found is not None:
        return partial(_describe_entry, found)
    reason = reason_for(cls)
    if reason is not None:
        raise Refusal(reason)
    hint = ""
    if any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in cls.__mro__):
        hint = ", or send a plain tensor (its .data)"
    raise Refusal(
        f"this type is not carried; call register_type({cls.__qualname__}) for it in every process, with "
        f"encode= and decode= where it is no dataclass, NamedTuple or msgspec.Struct, or register_package() for all "
        f"such classes of a package{hint}"
    )


def _describe_entry(entry: Entry, obj: object) -> Description:
    return Code.REGISTERED, entry.name, entry.kind.take(obj)


def build_owned(code: int, meta: object, body: object, *, copy: bool = True) -> object:
    """Build an object of extension `code` for the native decoder; it owns its memory unless `copy` is false."""
    # Looked up first, because a message may hold dozens of arrays and tensors.
    data_builder = _data_builders.get(code)
    if data_builder is not None:
        return data_builder(meta, body, copy)
    builder = _builders.get(code)
    if builder is not None:
        return builder(meta, body)
    package = _LAZY_CODES.get(code)
    if package is None:
        raise DecodeError(f"extension {code} is unknown to this version")
    try:
        _load(package)
    except ImportError as error:
        raise DecodeError(f"the message holds a type of {package}, which is not installed here") from error
    return build_owned(code, meta, body, copy=copy)


_build_aliased: Final = partial(build_owned, copy=False)


def _problem(error: Exception) -> str:
    """Return what cannot be sent, and its place in the object."""
    path: Sequence[Step] = error.__dict__.pop("_path", [])
    steps = list(reversed(path))
    if isinstance(error, RecursionError):
        loop = repeated(steps)
        if loop is None:
            return f"{render(steps)}: the object is {error}"
        first, second = loop
        return f"{render(steps[:second])} is {render(steps[:first])} again: the object contains itself"
    cls = error.cls if isinstance(error, Refusal) else None
    name = "" if cls is None else f" is a {cls.__module__}.{cls.__qualname__}"
    return f"{render(steps)}{name}: {error}"
