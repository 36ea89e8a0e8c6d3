"""Encode and decode the standard library's types that the native core does not handle.

A describer returns (code, meta, body). A builder checks the type of every part, because the parts come from a
peer.
"""

import datetime as dt
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

import msgspec

from shm_broadcast.codec.wire_format import Builder, Code, Describer, Description, Refusal
from shm_broadcast.errors import DecodeError

__all__ = ["BUILDERS", "DESCRIBERS", "expect", "integers"]

_FACTORIES: Final[dict[str, Callable[[], object]]] = {
    cls.__name__: cls for cls in (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)
}
_FACTORY_NAMES: Final = {factory: name for name, factory in _FACTORIES.items()}
_SINGLETONS: Final = {"Ellipsis": ..., "NotImplemented": NotImplemented, "UNSET": msgspec.UNSET}


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


def _describe_datetime(obj: dt.datetime) -> Description:
    parts = [obj.year, obj.month, obj.day, obj.hour, obj.minute, obj.second, obj.microsecond, obj.fold]
    return Code.DATETIME, obj.tzinfo, parts


def _zone(value: object) -> Any:
    if value is not None and not isinstance(value, dt.tzinfo):
        raise DecodeError(f"a tzinfo needs a time zone, the message has a {type(value).__name__}")
    return value


def _build_datetime(meta: object, body: object) -> dt.datetime:
    *parts, fold = integers(body, 8, "a datetime")
    return dt.datetime(*parts, tzinfo=_zone(meta), fold=fold)  # type: ignore[arg-type, misc]


def _describe_date(obj: dt.date) -> Description:
    return Code.DATE, None, [obj.year, obj.month, obj.day]


def _build_date(_meta: object, body: object) -> dt.date:
    return dt.date(*integers(body, 3, "a date"))


def _describe_time(obj: dt.time) -> Description:
    return Code.TIME, obj.tzinfo, [obj.hour, obj.minute, obj.second, obj.microsecond, obj.fold]


def _build_time(meta: object, body: object) -> dt.time:
    *parts, fold = integers(body, 5, "a time")
    return dt.time(*parts, tzinfo=_zone(meta), fold=fold)  # type: ignore[arg-type, misc]


def _describe_timedelta(obj: dt.timedelta) -> Description:
    return Code.TIMEDELTA, None, [obj.days, obj.seconds, obj.microseconds]


def _build_timedelta(_meta: object, body: object) -> dt.timedelta:
    return dt.timedelta(*integers(body, 3, "a timedelta"))


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


_TABLE: Final[tuple[tuple[type, int, Callable[[Any], Description], Builder], ...]] = (
    (int, Code.BIG_INT, _describe_big_int, _build_big_int),
    (complex, Code.COMPLEX, _describe_complex, _build_complex),
    (deque, Code.DEQUE, _describe_deque, _build_deque),
    (defaultdict, Code.DEFAULT_DICT, _describe_default_dict, _build_default_dict),
    (dt.datetime, Code.DATETIME, _describe_datetime, _build_datetime),
    (dt.date, Code.DATE, _describe_date, _build_date),
    (dt.time, Code.TIME, _describe_time, _build_time),
    (dt.timedelta, Code.TIMEDELTA, _describe_timedelta, _build_timedelta),
    (dt.timezone, Code.TIMEZONE, _describe_timezone, _build_timezone),
    (uuid.UUID, Code.UUID, _describe_uuid, _build_uuid),
    (Decimal, Code.DECIMAL, _describe_decimal, _build_decimal),
)

DESCRIBERS: Final[dict[type, Describer]] = {
    **{cls: describe for cls, _, describe, _ in _TABLE},
    **{type(single): _describe_singleton for single in _SINGLETONS.values()},
    memoryview: _describe_view,  # type: ignore[dict-item]
}
BUILDERS: Final[dict[int, Builder]] = {
    **{code: build for _, code, _, build in _TABLE},
    Code.SINGLETON: _build_singleton,
}
