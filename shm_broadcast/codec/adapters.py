"""Encode and decode the standard library's types that the native core does not handle.

A describer returns (code, meta, body). A builder checks the type of every part, because the parts come from a
peer; the functions for these checks serve the adapters of other libraries too.
"""

import datetime as dt
import math
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Final

import msgspec

from shm_broadcast.codec.wire_format import MAX_DIMENSIONS, Builder, Code, Describer, Description, Refusal
from shm_broadcast.errors import DecodeError

__all__ = ["BUILDERS", "DESCRIBERS", "checked_shape", "expect", "integers"]

_FACTORIES: Final[dict[str, Callable[[], object]]] = {
    cls.__name__: cls for cls in (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)
}
_FACTORY_NAMES: Final = {factory: name for name, factory in _FACTORIES.items()}
_DATE: Final = ("year", "month", "day")
_TIME: Final = ("hour", "minute", "second", "microsecond", "fold")
# Types that are sent as integers, and perhaps a time zone: the code, and the names of the integers as attributes and as
# parameters of the constructor.
_MOMENTS: Final[dict[type, tuple[int, tuple[str, ...]]]] = {
    dt.datetime: (Code.DATETIME, (*_DATE, *_TIME)),
    dt.date: (Code.DATE, _DATE),
    dt.time: (Code.TIME, _TIME),
    dt.timedelta: (Code.TIMEDELTA, ("days", "seconds", "microseconds")),
}
_SINGLETONS: Final = {"Ellipsis": ..., "NotImplemented": NotImplemented, "UNSET": msgspec.UNSET}
_LARGEST = (1 << 63) - 1


def expect(kind: type, value: object, what: str) -> Any:
    """Return `value` if its type is exactly `kind`.

    Raises:
        DecodeError: `value` has another type; the text names `what`.
    """
    if type(value) is not kind:
        raise DecodeError(f"{what} needs a {kind.__name__}, the message has a {type(value).__name__}")
    return value


def integers(value: object, count: int, what: str) -> list[int]:
    """Return `value` if it is a list of exactly `count` integers.

    Raises:
        DecodeError: `value` is anything else; the text names `what`.
    """
    numbers = expect(list, value, what)
    if len(numbers) != count or any(type(number) is not int for number in numbers):
        raise DecodeError(f"{what} needs {count} integers")
    return list(numbers)


def checked_shape(shape: Sequence[object], itemsize: int, nbytes: int) -> list[int]:
    """Return `shape` if an array of that shape holds exactly `nbytes`.

    Args:
        shape: Dimensions as the peer sent them.
        itemsize: Bytes per element.
        nbytes: Bytes that arrived.

    Raises:
        DecodeError: A dimension is not a non-negative 63-bit integer, there are more than `MAX_DIMENSIONS`, or
            the sizes disagree.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise DecodeError(f"an array has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    sizes = [size for size in shape if type(size) is int and 0 <= size <= _LARGEST]
    if len(sizes) != len(shape):
        raise DecodeError("a dimension of an array is not a natural number")
    if itemsize * math.prod(size for size in sizes if size) > _LARGEST:
        raise DecodeError("an array is larger than the address space")
    if math.prod(sizes) * itemsize != nbytes:
        raise DecodeError(f"an array of shape {sizes} and {itemsize} bytes per element got {nbytes} bytes")
    return sizes


def _describe_big_int(obj: int) -> Description:
    return Code.BIG_INT, None, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)


def _build_big_int(_meta: object, body: object) -> int:
    return int.from_bytes(expect(bytes, body, "an integer"), "little", signed=True)


def _describe_complex(obj: complex) -> Description:
    return Code.COMPLEX, obj.real, obj.imag


def _build_complex(meta: object, body: object) -> complex:
    return complex(expect(float, meta, "a complex number"), expect(float, body, "a complex number"))


def _describe_view(obj: memoryview) -> Description:
    return Code.SUBSTITUTE, None, obj.tobytes()


def _describe_deque(obj: deque[object]) -> Description:
    return Code.DEQUE, obj.maxlen, list(obj)


def _build_deque(meta: object, body: object) -> deque[object]:
    items = expect(list, body, "a deque")
    if meta is None:
        return deque(items)
    limit = expect(int, meta, "the maxlen of a deque")
    if len(items) > limit:
        raise DecodeError("a deque is longer than its maxlen")
    return deque(items, limit)


def _describe_default_dict(obj: defaultdict[object, object]) -> Description:
    factory: Any = obj.default_factory
    if factory is None:
        return Code.DEFAULT_DICT, None, dict(obj)
    name = _FACTORY_NAMES.get(factory) if isinstance(factory, type) else None
    if name is None:
        raise Refusal(f"its default_factory must be None or one of {', '.join(_FACTORIES)}")
    return Code.DEFAULT_DICT, name, dict(obj)


def _build_default_dict(meta: object, body: object) -> defaultdict[object, object]:
    content = expect(dict, body, "a defaultdict")
    if meta is None:
        return defaultdict(None, content)
    factory = _FACTORIES.get(expect(str, meta, "the factory of a defaultdict"))
    if factory is None:
        raise DecodeError(f"{meta!r:.200} is not a supported default_factory")
    return defaultdict(factory, content)


def _describe_moment(obj: Any) -> Description:
    code, names = _MOMENTS[type(obj)]
    return code, getattr(obj, "tzinfo", None), [getattr(obj, name) for name in names]


def _build_moment(cls: type, meta: object, body: object) -> object:
    _, names = _MOMENTS[cls]
    numbers = integers(body, len(names), f"a {cls.__name__}")
    if meta is None:
        return cls(**dict(zip(names, numbers, strict=True)))
    if not isinstance(meta, dt.tzinfo):
        raise DecodeError(f"a tzinfo needs a time zone, the message has a {type(meta).__name__}")
    return cls(**dict(zip(names, numbers, strict=True)), tzinfo=meta)


def _describe_timezone(obj: Any) -> Description:
    offset, *name = obj.__getinitargs__()
    return Code.TIMEZONE, name[0] if name else None, offset


def _build_timezone(meta: object, body: object) -> dt.timezone:
    offset = expect(dt.timedelta, body, "a time zone")
    return dt.timezone(offset) if meta is None else dt.timezone(offset, expect(str, meta, "a time zone"))


def _describe_uuid(obj: uuid.UUID) -> Description:
    return Code.UUID, None, obj.bytes


def _build_uuid(_meta: object, body: object) -> uuid.UUID:
    return uuid.UUID(bytes=expect(bytes, body, "a UUID"))


def _describe_decimal(obj: Decimal) -> Description:
    return Code.DECIMAL, None, str(obj)


def _build_decimal(_meta: object, body: object) -> Decimal:
    number = Decimal(expect(str, body, "a Decimal"))
    if str(number) != body:
        raise DecodeError("a Decimal is not in its canonical notation")
    return number


def _describe_singleton(obj: object) -> Description:
    return Code.SINGLETON, None, next(name for name, single in _SINGLETONS.items() if single is obj)


def _build_singleton(_meta: object, body: object) -> object:
    name = expect(str, body, "a singleton")
    if name not in _SINGLETONS:
        raise DecodeError(f"{name!r:.200} is not a supported singleton")
    return _SINGLETONS[name]


_TABLE: Final[tuple[tuple[type, int, Describer, Builder], ...]] = (
    (int, Code.BIG_INT, _describe_big_int, _build_big_int),
    (complex, Code.COMPLEX, _describe_complex, _build_complex),
    (deque, Code.DEQUE, _describe_deque, _build_deque),
    (defaultdict, Code.DEFAULT_DICT, _describe_default_dict, _build_default_dict),
    (dt.timezone, Code.TIMEZONE, _describe_timezone, _build_timezone),
    (uuid.UUID, Code.UUID, _describe_uuid, _build_uuid),
    (Decimal, Code.DECIMAL, _describe_decimal, _build_decimal),
)

DESCRIBERS: Final[dict[type, Describer]] = {
    **{cls: describe for cls, _, describe, _ in _TABLE},
    **{type(single): _describe_singleton for single in _SINGLETONS.values()},
    **dict.fromkeys(_MOMENTS, _describe_moment),
    memoryview: _describe_view,
}
BUILDERS: Final[dict[int, Builder]] = {
    **{code: build for _, code, _, build in _TABLE},
    **{code: partial(_build_moment, cls) for cls, (code, _) in _MOMENTS.items()},
    Code.SINGLETON: _build_singleton,
}
