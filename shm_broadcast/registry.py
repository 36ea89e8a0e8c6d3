"""The classes that the application allows to be carried, by class and by name.

Only a class in this table is ever built from a message, Enums excepted: those are looked up among the
modules that are already loaded (see `enum_adapter`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

from shm_broadcast.adapters import DESCRIBERS
from shm_broadcast.errors import DecodeError, UsageError
from shm_broadcast.records import CUSTOM, ENUM, Kind, custom_kind, kind_of
from shm_broadcast.wire import Code, Description

__all__ = [
    "Entry",
    "build_registered",
    "describe_registered",
    "entry_of",
    "named",
    "register_type",
    "unregister_type",
]

T = TypeVar("T")

_NATIVE = frozenset(
    {
        bool,
        bytearray,
        bytes,
        complex,
        dict,
        float,
        frozenset,
        int,
        list,
        memoryview,
        object,
        set,
        str,
        tuple,
        type,
    }
    | {type(None)}
)


class Entry(NamedTuple):
    """One registered class: its name in messages, how it is carried, and who gave the functions."""

    cls: type
    name: str
    kind: Kind


_by_class: dict[type, Entry] = {}
_by_name: dict[str, Entry] = {}


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
    """Allow objects of a class to be carried; usable as a decorator.

    Sender and receiver must both register the class, under the same name. Subclasses are not included.
    Registering a class again under its name replaces its functions.

    Args:
        cls: A dataclass, NamedTuple, msgspec.Struct, Enum or subclass of a builtin type; any other class
            with `encode` and `decode`.
        name: Its name in messages; the module and qualified name by default.
        encode: Returns what to send for an object: a tree of anything that the codec carries.
        decode: Returns the object of such a tree. It gets data from a peer: check it.

    Returns:
        The class, or a decorator when no class is given.

    Raises:
        UsageError: Not a class, a type that is carried anyway, a kind that needs functions, or another
            class has this name, or this class another name. Nothing is registered.
    """
    if cls is None:
        return lambda later: register_type(later, name=name, encode=encode, decode=decode)
    if not isinstance(cls, type):
        raise UsageError(f"register_type needs a class, got {cls!r}")
    if cls in DESCRIBERS or cls.__module__ in ("numpy", "torch"):
        raise UsageError(f"register_type({cls.__qualname__}): this type is carried anyway, or never")
    if cls in _NATIVE or issubclass(cls, type):
        raise UsageError(f"register_type({cls.__qualname__}): this type cannot be registered")
    wire_name = f"{cls.__module__}.{cls.__qualname__}" if name is None else name
    if type(wire_name) is not str or not wire_name or not wire_name.isprintable():
        raise UsageError(f"register_type({cls.__qualname__}): {wire_name!r} is no name")
    taken, known = _by_name.get(wire_name), _by_class.get(cls)
    if taken is not None and taken.cls is not cls:
        raise UsageError(f"register_type: the name {wire_name!r} belongs to another class, {taken.cls!r}")
    if known is not None and known.name != wire_name:
        raise UsageError(f"register_type: {cls!r} is registered as {known.name!r} already")
    functions = encode is not None or decode is not None
    entry = Entry(cls, wire_name, custom_kind(cls, encode, decode) if functions else kind_of(cls))
    _by_class[cls] = _by_name[wire_name] = entry
    return cls


def unregister_type(cls: type) -> None:
    """Forget a class. Messages that hold it are refused from now on.

    Raises:
        UsageError: The class is not registered.
    """
    entry = _by_class.pop(cls, None)
    if entry is None:
        raise UsageError(f"unregister_type: {cls!r} is not registered")
    del _by_name[entry.name]


def entry_of(cls: type) -> Entry | None:
    """Return the entry of a class, None when it is not registered."""
    return _by_class.get(cls)


def named(name: str) -> Entry | None:
    """Return the entry with a name, None when there is none."""
    return _by_name.get(name)


def describe_registered(entry: Entry, obj: object) -> Description:
    """Return the description of an object of a registered class that is no plain Enum."""
    return Code.REGISTERED, entry.name, entry.kind.take(obj)


def build_registered(meta: object, body: object) -> object:
    """Build an object of the registered class named `meta`."""
    entry = _by_name.get(meta) if type(meta) is str else None
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
