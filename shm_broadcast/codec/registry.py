"""Register the application's classes that may be sent, by class and by name.

Decoding builds only the classes in this table. Enums are the exception: they are also found in modules that are
already loaded (see `enum_adapter`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, overload

from shm_broadcast.codec.adapters import DESCRIBERS
from shm_broadcast.codec.records import CONTENT, CUSTOM, ENUM, Kind, custom_kind, kind_of
from shm_broadcast.errors import DecodeError, UsageError

__all__ = ["Entry", "build_registered", "by_class", "by_name", "register_type", "unregister_type"]

T = TypeVar("T")

# `DESCRIBERS` has the other types that need no registration. OrderedDict is registered below.
_NATIVE: Final = {*CONTENT, bool, object, type(None)} - {OrderedDict}


class Entry(NamedTuple):
    """One registered class: the class, its name in messages, and how it is sent."""

    cls: type
    name: str
    kind: Kind


by_class: Final[dict[type, Entry]] = {}
"""The registered classes."""

by_name: Final[dict[str, Entry]] = {}
"""The same entries by their names in messages."""


@overload
def register_type(
    cls: type[T],
    *,
    name: str | None = ...,
    encode: Callable[[T], object] | None = ...,
    decode: Callable[[Any], T] | None = ...,
) -> type[T]: ...
@overload
def register_type(
    cls: None = ...,
    *,
    name: str | None = ...,
    encode: Callable[[Any], object] | None = ...,
    decode: Callable[[Any], object] | None = ...,
) -> Callable[[type[T]], type[T]]: ...
def register_type(
    cls: type[Any] | None = None,
    *,
    name: str | None = None,
    encode: Callable[[Any], object] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> Any:
    """Allow objects of a class to be sent; usable as a decorator.

    Every process that sends or receives such objects must register the class under the same name, before the first
    message. Subclasses are not included. Registering a class again under its name replaces its functions.

    Args:
        cls: A dataclass, NamedTuple, msgspec.Struct, Enum or subclass of a builtin type. Any other class needs
            `encode` and `decode`.
        name: The name in messages; by default the module and qualified name.
        encode: Takes an object and returns what to send for it: any object that the codec supports.
        decode: Takes what `encode` returned and rebuilds the object. Its input comes from a peer: check it.

    Returns:
        The class, or a decorator if no class is given.

    Raises:
        UsageError: `cls` is not a class, is supported without registration, or needs `encode` and `decode`; the
            name belongs to another class, or the class has another name. Nothing is registered.
    """
    if cls is None:
        return lambda later: register_type(later, name=name, encode=encode, decode=decode)
    if not isinstance(cls, type):
        raise UsageError(f"register_type needs a class, got {cls!r}")
    if cls in DESCRIBERS or cls.__module__ in ("numpy", "torch"):
        raise UsageError(
            f"register_type({cls.__qualname__}): this type needs no registration, or is never supported"
        )
    if cls in _NATIVE or issubclass(cls, type):
        raise UsageError(f"register_type({cls.__qualname__}): this type cannot be registered")
    wire_name = f"{cls.__module__}.{cls.__qualname__}" if name is None else name
    if type(wire_name) is not str or not wire_name or not wire_name.isprintable():
        raise UsageError(f"register_type({cls.__qualname__}): {wire_name!r} is not a printable name")
    taken, known = by_name.get(wire_name), by_class.get(cls)
    if taken is not None and taken.cls is not cls:
        raise UsageError(f"register_type: the name {wire_name!r} belongs to another class, {taken.cls!r}")
    if known is not None and known.name != wire_name:
        raise UsageError(f"register_type: {cls!r} is already registered as {known.name!r}")
    functions = encode is not None or decode is not None
    entry = Entry(cls, wire_name, custom_kind(cls, encode, decode) if functions else kind_of(cls))
    by_class[cls] = by_name[wire_name] = entry
    return cls


def unregister_type(cls: type) -> None:
    """Remove a class from the table. Messages that hold it are refused from now on.

    Raises:
        UsageError: The class is not registered.
    """
    entry = by_class.pop(cls, None)
    if entry is None:
        raise UsageError(f"unregister_type: {cls!r} is not registered")
    del by_name[entry.name]


def build_registered(meta: object, body: object) -> object:
    """Build an object of the registered class named `meta`.

    Raises:
        DecodeError: The class is not registered here, or refused its data.
    """
    entry = by_name.get(meta) if type(meta) is str else None
    if entry is None or entry.kind.name == ENUM:
        raise DecodeError(
            f"the message holds a {meta if type(meta) is str else '?':.200}, which is not registered here; if "
            f"it belongs to your application, call register_type() for it in this process too"
        )
    try:
        return entry.kind.build(body)
    except DecodeError:
        raise
    except Exception as error:
        source = "the decode function of " if entry.kind.name == CUSTOM else ""
        raise DecodeError(
            f"{source}{entry.name} refused its data: {type(error).__name__}: {error}"
        ) from error


register_type(OrderedDict)
register_type(Counter)
