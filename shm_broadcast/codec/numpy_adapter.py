"""Encode and decode numpy's types. Imported only when an object or a message holds one.

An array is sent as its dtype, shape and elements in C order; strides are lost. A dtype is sent as a name that
matches a pattern, or as the list of its fields. A dtype that holds Python objects is refused.

Once this module is loaded, the native core handles contiguous arrays of common dtypes and produces the same bytes.
This module handles the rest, and gives the reason when an array cannot be sent.
"""

import math
import re
from typing import Any, Final

import numpy as np

from shm_broadcast import _core
from shm_broadcast.codec.adapters import checked_shape, expect, integers
from shm_broadcast.codec.wire_format import Builder, Code, DataBuilder, Describer, Description, Refusal
from shm_broadcast.errors import DecodeError

__all__ = ["BUILDERS", "DATA_BUILDERS", "DESCRIBERS"]

_SIMPLE: Final = re.compile(
    r"[|<>=]?(?:b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|[SUV][0-9]{1,9}|[qQ]"
    r"|[mM]8(?:\[[0-9]{0,9}[a-zA-Zμ]{1,7}\])?)"
)
_LARGEST_ITEM = (1 << 31) - 1
_MAX_NESTING = 32


def _dtype_tree(dtype: np.dtype[Any], nesting: int = 0) -> object:
    """Return the tree that describes a dtype: a name, or a list with its fields or its subarray."""
    if dtype.hasobject:
        raise Refusal(f"its dtype {dtype} holds Python objects; send lists")
    if nesting > _MAX_NESTING:
        raise Refusal(f"its dtype is nested deeper than {_MAX_NESTING} levels")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ["array", _dtype_tree(base, nesting + 1), list(shape)]
    if dtype.names is not None:
        if dtype.type is not np.void:
            raise Refusal(
                f"its dtype has the scalar type {dtype.type.__name__}; send a plain structured array"
            )
        fields = []
        for name in dtype.names:
            field, offset, *title = dtype.fields[name]  # type: ignore[index]
            if title and type(title[0]) is not str:
                raise Refusal(f"the title of its field {name!r} is not a string")
            fields.append([name, _dtype_tree(field, nesting + 1), offset, title[0] if title else None])
        return ["fields", fields, dtype.itemsize, dtype.isalignedstruct]
    name = dtype.str
    if dtype.char in "qQ" and np.dtype(name).type is not dtype.type:
        # `long long` is a type of its own where it is as wide as `long`.
        name = dtype.char if dtype.isnative else dtype.byteorder + dtype.char
    if _SIMPLE.fullmatch(name) is None or np.dtype(name) != dtype or np.dtype(name).type is not dtype.type:
        raise Refusal(f"its dtype {dtype} is not supported")
    return name


def _dtype_of(tree: object, nesting: int = 0) -> np.dtype[Any]:
    """Return the dtype that a peer's tree describes."""
    if type(tree) is str:
        if _SIMPLE.fullmatch(tree) is None:
            raise DecodeError(f"{tree!r:.100} is not a supported dtype")
        return np.dtype(tree)
    if type(tree) is not list or not tree or nesting > _MAX_NESTING:
        raise DecodeError("a dtype is neither a name nor a list")
    match tree:
        case ["array", base, shape] if type(shape) is list and len(shape) <= _MAX_NESTING:
            sizes = integers(shape, len(shape), "the shape of a subarray")
            inner = _dtype_of(base, nesting + 1)
            if any(not 0 <= size <= _LARGEST_ITEM for size in sizes) or (
                math.prod(sizes) * inner.itemsize > _LARGEST_ITEM
            ):
                raise DecodeError("an element of an array is too large")
            return np.dtype((inner, tuple(sizes)))
        case ["fields", fields, itemsize, aligned] if type(fields) is list and type(aligned) is bool:
            return _struct_of(fields, itemsize, aligned, nesting)
    raise DecodeError("a dtype is neither fields nor a subarray")


def _struct_of(fields: list[Any], itemsize: Any, aligned: bool, nesting: int) -> np.dtype[Any]:
    parts: dict[str, list[Any]] = {"names": [], "formats": [], "offsets": [], "titles": []}
    for field in fields:
        name, tree, offset, title = field if type(field) is list and len(field) == len(parts) else (None,) * 4
        if type(name) is not str or type(offset) is not int or not (title is None or type(title) is str):
            raise DecodeError("a field of a dtype is malformed")
        for key, part in zip(parts, (name, _dtype_of(tree, nesting + 1), offset, title), strict=True):
            parts[key].append(part)
    if not 0 <= expect(int, itemsize, "a dtype") <= _LARGEST_ITEM:
        raise DecodeError("an element of an array is too large")
    if any(not 0 <= offset <= itemsize for offset in parts["offsets"]):
        raise DecodeError("a field of a dtype lies outside its element")
    if not any(parts["titles"]):
        del parts["titles"]
    return np.dtype({**parts, "itemsize": itemsize}, align=aligned)  # type: ignore[call-overload, no-any-return]


def _describe_array(obj: np.ndarray[Any, Any]) -> Description:
    tree = _dtype_tree(obj.dtype)
    if obj.dtype.itemsize == 0:
        raise Refusal("its elements have no size")
    raw = np.ascontiguousarray(obj).reshape(-1)
    return Code.NUMPY_ARRAY, [tree, *obj.shape], raw.view(np.uint8) if raw.size else b""


def _build_array(meta: object, body: Any, copy: bool) -> np.ndarray[Any, Any]:
    parts = expect(list, meta, "an array")
    dtype = _dtype_of(parts[0] if parts else None)
    if dtype.itemsize == 0 or dtype.subdtype is not None:
        raise DecodeError("the elements of an array need a size above 0")
    shape = checked_shape(parts[1:], dtype.itemsize, len(body))
    if len(body) == 0:
        return np.empty(shape, dtype)
    if not isinstance(body, _core.Window) or (copy and not body.exclusive):
        array: np.ndarray[Any, Any] = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(body, np.uint8)  # copies padding too
    else:
        array = np.ndarray(shape, dtype, buffer=memoryview(body))
        array.flags.writeable = body.exclusive
    return array


def _describe_scalar(obj: np.generic) -> Description:
    if type(obj) is np.str_:
        return Code.NUMPY_TEXT, None, str.__str__(obj)
    if type(obj) is np.bytes_:
        return Code.NUMPY_TEXT, None, bytes(memoryview(obj))
    if obj.dtype.type is not type(obj):
        raise Refusal("its type does not match its dtype")
    tree = _dtype_tree(obj.dtype)
    if obj.dtype.itemsize == 0:
        raise Refusal("it has no size")
    return Code.NUMPY_SCALAR, tree, obj.tobytes()


def _build_scalar(meta: object, body: Any, _copy: bool) -> object:
    dtype = _dtype_of(meta)
    if dtype.itemsize == 0 or dtype.subdtype is not None or dtype.itemsize != len(body):
        raise DecodeError(f"a scalar of {dtype.itemsize} bytes got {len(body)}")
    array: np.ndarray[Any, Any] = np.ndarray((), dtype, buffer=bytearray(body))
    return array[()]


def _build_text(_meta: object, body: object) -> np.generic:
    return np.str_(body) if type(body) is str else np.bytes_(expect(bytes, body, "a numpy string"))


def _describe_dtype(obj: np.dtype[Any]) -> Description:
    return Code.NUMPY_DTYPE, None, _dtype_tree(obj)


def _build_dtype(_meta: object, body: object) -> np.dtype[Any]:
    return _dtype_of(body)


# Dtypes whose buffer format is a single letter: the native core sends and builds arrays of these by itself.
_core.numpy_dtypes(
    np.ndarray,
    tuple((char, dtype.str, dtype, dtype.itemsize) for char in "?bBhHiIlLefd" for dtype in (np.dtype(char),)),
)

_SCALARS: Final = {np.dtype(char).type for char in "?bBhHiIlLqQefdgFDGSUVMm"}
DESCRIBERS: Final[dict[type, Describer]] = {
    np.ndarray: _describe_array,
    **dict.fromkeys(_SCALARS, _describe_scalar),
    **{type(np.dtype(char)): _describe_dtype for char in "?bBhHiIlLqQefdgFDGSUVMm"},
}
BUILDERS: Final[dict[int, Builder]] = {Code.NUMPY_DTYPE: _build_dtype, Code.NUMPY_TEXT: _build_text}
DATA_BUILDERS: Final[dict[int, DataBuilder]] = {
    Code.NUMPY_ARRAY: _build_array,
    Code.NUMPY_SCALAR: _build_scalar,
}
