"""Encode and decode plain data of the standard library that engines send: paths, ranges, slices, arrays, namespaces."""

from array import array
from collections.abc import Callable
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, Final

from shm_broadcast.codec.adapters import expect, integers
from shm_broadcast.codec.wire_format import Builder, Code, Describer, Description, Refusal
from shm_broadcast.errors import DecodeError

__all__ = ["BUILDERS", "DESCRIBERS"]

_PATHS: Final[dict[str, Callable[[str], PurePath]]] = {
    cls.__name__: cls for cls in (PosixPath, PurePosixPath, PureWindowsPath)
}
_NUMBERS: Final = "bBhHiIlLqQfd"
"""Type codes of arrays of numbers. Arrays of characters may hold what is no character."""


def _describe_path(obj: PurePath) -> Description:
    return Code.PATH, type(obj).__name__, str(obj)


def _build_path(meta: object, body: object) -> PurePath:
    cls = _PATHS.get(expect(str, meta, "the class of a path"))
    if cls is None:
        raise DecodeError(f"{meta!r:.200} is not a supported class of paths")
    path = cls(expect(str, body, "a path"))
    if str(path) != body:
        raise DecodeError("a path is not in its normal form")
    return path


def _describe_range(obj: range) -> Description:
    return Code.RANGE, None, [int(obj.start), int(obj.stop), int(obj.step)]


def _build_range(_meta: object, body: object) -> range:
    return range(*integers(body, 3, "a range"))


def _describe_slice(obj: slice) -> Description:
    return Code.SLICE, None, [obj.start, obj.stop, obj.step]


def _build_slice(_meta: object, body: object) -> slice:
    parts = expect(list, body, "a slice")
    if len(parts) != 3:
        raise DecodeError(f"a slice has 3 parts, the message has {len(parts)}")
    return slice(*parts)


def _describe_namespace(obj: SimpleNamespace) -> Description:
    return Code.NAMESPACE, None, dict(vars(obj))


def _build_namespace(_meta: object, body: object) -> SimpleNamespace:
    values = expect(dict, body, "a SimpleNamespace")
    if any(type(name) is not str for name in values):
        raise DecodeError("a name in a SimpleNamespace is no str")
    return SimpleNamespace(**values)


def _describe_array(obj: "array[Any]") -> Description:
    if obj.typecode not in _NUMBERS:
        raise Refusal("it holds characters; send its .tounicode(), a str")
    return Code.PACKED_ARRAY, obj.typecode, obj.tobytes()


def _build_array(meta: object, body: object) -> "array[Any]":
    typecode = expect(str, meta, "the type of an array.array")
    if len(typecode) != 1 or typecode not in _NUMBERS:
        raise DecodeError(f"{typecode!r:.200} is not a supported type of an array.array")
    values: array[Any] = array(typecode)
    values.frombytes(expect(bytes, body, "an array.array"))
    return values


DESCRIBERS: Final[dict[type, Describer]] = {
    **dict.fromkeys((PosixPath, PurePosixPath, PureWindowsPath), _describe_path),
    range: _describe_range,
    slice: _describe_slice,
    SimpleNamespace: _describe_namespace,
    array: _describe_array,
}
BUILDERS: Final[dict[int, Builder]] = {
    Code.PATH: _build_path,
    Code.RANGE: _build_range,
    Code.SLICE: _build_slice,
    Code.NAMESPACE: _build_namespace,
    Code.PACKED_ARRAY: _build_array,
}
