"""Take apart and rebuild objects of registered classes, by the kind of the class.

Building runs no application code: the builtin `__new__` makes the instance and its declared fields are set, so
neither `__init__` nor `__post_init__` runs. A Struct of `kind_of` is the exception: it is built by its constructor,
so its `__post_init__` runs. Only declared fields are sent, no other attributes.

`package_records` is stricter, for classes that nobody has registered one by one.
"""

import dataclasses
from collections import OrderedDict, UserDict, UserList
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

from shm_broadcast.codec.hooks import marked
from shm_broadcast.codec.wire_format import Refusal
from shm_broadcast.errors import DecodeError, UsageError

__all__ = ["CONTENT", "CUSTOM", "ENUM", "RECORD", "SUBCLASS", "Kind", "custom_kind", "kind_of", "record"]

RECORD = "record"
SUBCLASS = "subclass"
CUSTOM = "custom"
ENUM = "enum"

_MISSING: Any = object()

CONTENT: Final[dict[type, Callable[[Any], object]]] = {
    OrderedDict: lambda obj: dict(OrderedDict.items(obj)),
    dict: lambda obj: dict(dict.items(obj)),
    list: lambda obj: list(list.__iter__(obj)),
    tuple: lambda obj: tuple(tuple.__iter__(obj)),
    set: lambda obj: set(set.__iter__(obj)),
    frozenset: lambda obj: frozenset(frozenset.__iter__(obj)),
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: lambda obj: bytes(memoryview(obj)),
    bytearray: lambda obj: bytearray(memoryview(obj)),
}
"""For each type whose subclasses can be sent, a function that returns the builtin content of an object. It ignores
what the subclass overrides."""


class Kind(NamedTuple):
    """How one class is sent: `take` returns the body of an object, `build` the object of a body."""

    name: str
    take: Callable[[Any], object]
    build: Callable[[Any], object]


def custom_kind(
    cls: type, encode: Callable[[Any], object] | None, decode: Callable[[Any], object] | None
) -> Kind:
    """Return the kind of a class with the application's own `encode` and `decode`.

    Raises:
        UsageError: One of the two functions is missing.
    """
    if encode is None or decode is None:
        raise UsageError(f"register_type({cls.__qualname__}): give both encode= and decode=, or neither")
    function = marked(decode)

    def build(body: object) -> object:
        built = function(body)
        if type(built) is not cls:
            raise DecodeError(
                f"the decode function of {cls.__qualname__} returned a {type(built).__qualname__}"
            )
        return built

    return Kind(CUSTOM, marked(encode), build)


def kind_of(cls: type) -> Kind:
    """Return the kind of a class without functions of the application.

    Raises:
        UsageError: The codec cannot take apart and build this kind of class by itself.
    """
    bases = [base for base in CONTENT if issubclass(cls, base)]
    if issubclass(cls, Enum):
        return Kind(ENUM, _no_body, _no_body)
    if issubclass(cls, msgspec.Struct):
        return record(cls, cls.__struct_fields__, lambda values: cls(**values))
    if dataclasses.is_dataclass(cls) and not bases:
        fields = dataclasses.fields(cls)
        unset = {field.name for field in fields if _may_be_unset(field)}
        return record(
            cls, tuple(field.name for field in fields), lambda values: _with_fields(cls, values), unset
        )
    if issubclass(cls, (UserDict, UserList)):
        content: type = dict if issubclass(cls, UserDict) else list
        return record(cls, ("data",), lambda values: _with_data(cls, content, values))
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return record(cls, tuple(cls._fields), lambda values: tuple.__new__(cls, values.values()))
    if bases and not dataclasses.is_dataclass(cls) and _has_plain_layout(cls):
        return Kind(SUBCLASS, lambda obj: _content(bases[0], obj), lambda body: _refill(cls, bases[0], body))
    raise UsageError(
        f"register_type({cls.__qualname__}): without encode= and decode=, only dataclasses, NamedTuples, "
        f"msgspec.Structs, Enums and plain subclasses of builtin types are supported"
    )


def _no_body(_obj: object) -> object:
    raise Refusal("Enums have no body")


def _has_plain_layout(cls: type) -> bool:
    """Return whether instances hold only their builtin content and a `__dict__`: no class has slots."""
    ours = [base for base in cls.__mro__ if base.__module__ != "builtins" and base is not OrderedDict]
    return not any(vars(base).get("__slots__") for base in ours)


def _may_be_unset(field: "dataclasses.Field[Any]") -> bool:
    """Return whether the constructor may leave a field without a value: it then travels without one."""
    missing = dataclasses.MISSING
    return not field.init and field.default is missing and field.default_factory is missing


def record(
    cls: type,
    names: tuple[str, ...],
    build: Callable[[dict[str, Any]], object],
    unset: Collection[str] = (),
) -> Kind:
    """Return the kind of a class with declared fields; `build` gets them in declared order.

    All of them must have a value, except those in `unset`.
    """
    expected = frozenset(names)

    def take(obj: object) -> dict[str, object]:
        values = {name: getattr(obj, name, _MISSING) for name in names}
        for value in values.values():
            if value is _MISSING:
                return _without_unset(values, unset)
        return values

    def rebuild(body: object) -> object:
        if type(body) is dict and body.keys() == expected:
            return build({name: body[name] for name in names})
        if type(body) is dict and unset and expected.difference(unset) <= body.keys() < expected:
            return build({name: body[name] for name in names if name in body})
        got = sorted(key for key in body if type(key) is str) if type(body) is dict else type(body).__name__
        raise DecodeError(
            f"{cls.__qualname__} has the fields {sorted(expected)}, the message has {got!s:.1000}"
        )

    return Kind(RECORD, take, rebuild)


def _without_unset(values: dict[str, object], unset: Collection[str]) -> dict[str, object]:
    for name, value in values.items():
        if value is _MISSING and name not in unset:
            raise Refusal(f"its field {name!r} has no value")
    return {name: value for name, value in values.items() if value is not _MISSING}


def _with_fields(cls: type, values: dict[str, Any]) -> object:
    obj: object = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(obj, name, value)
    return obj


def _with_data(cls: type, content: type, values: dict[str, Any]) -> object:
    """Return a UserDict or UserList around the builtin container `data`."""
    if type(values["data"]) is not content:
        raise DecodeError(f"{cls.__qualname__} cannot be built around a {type(values['data']).__name__}")
    return _with_fields(cls, values)


def _content(base: type, obj: object) -> object:
    """Return the builtin content of `obj`, a subclass of `base`."""
    if getattr(obj, "__dict__", None):
        raise Refusal("it has attributes besides its builtin content; register it with encode= and decode=")
    return CONTENT[base](obj)


def _refill(cls: type, base: Any, body: object) -> object:
    """Return a new `cls` that holds the builtin content `body`."""
    if type(body) is not (dict if base is OrderedDict else base):
        raise DecodeError(f"{cls.__qualname__} cannot be built from a {type(body).__name__}")
    content: Any = body
    obj = base.__new__(cls, content)  # still empty if `base` is mutable
    if base is OrderedDict:
        # Its `__init__` would call the `__setitem__` of `cls`.
        for key, value in content.items():
            OrderedDict.__setitem__(obj, key, value)
    elif base in (dict, list, set, bytearray):
        base.__init__(obj, content)
    return obj
