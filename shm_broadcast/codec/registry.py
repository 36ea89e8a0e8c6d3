"""Register the application's classes that may be sent, by class and by name.

Decoding builds only the classes in this table. Enums are the exception: they are also found in modules that are
already loaded (see `enum_adapter`). A class of a registered package enters the table when it is first met; nothing
else does, so no peer can make the table grow beyond the classes that there are.
"""

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar, overload

from shm_broadcast.codec import adapters, packages, plain_adapter
from shm_broadcast.codec.package_records import kind_in_package
from shm_broadcast.codec.records import CONTENT, CUSTOM, ENUM, Kind, custom_kind, kind_of
from shm_broadcast.codec.wire_format import Refusal
from shm_broadcast.errors import DecodeError, UsageError
from shm_broadcast.interruption import raised_by_handler

__all__ = [
    "Entry",
    "build_registered",
    "by_class",
    "by_name",
    "find_entry",
    "register_package",
    "register_type",
    "unregister_package",
    "unregister_type",
]

T = TypeVar("T")

# `DESCRIBERS` of the adapters have the other types that need no registration. OrderedDict is registered below.
_NATIVE: Final = {*CONTENT, bool, object, type(None)} - {OrderedDict}
_DESCRIBED: Final = {*adapters.DESCRIBERS, *plain_adapter.DESCRIBERS}


class Entry(NamedTuple):
    """One class: the class, its name in messages, how it is sent, and whether it was found in a registered package."""

    cls: type
    name: str
    kind: Kind
    found: bool = False


_REMEDY: Final = "with encode= and decode= unless its fields are all that matters"

by_class: Final[dict[type, Entry]] = {}
"""The registered classes."""

by_name: Final[dict[str, Entry]] = {}
"""The same entries by their names in messages."""

# Held while the tables change, never while code of the application runs; readers need no lock. No child is forked
# meanwhile, because it would inherit a lock that nobody releases.
_lock: Final = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


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
    message. Subclasses are not included. Registering a class again under its name replaces its functions. For the
    classes of a whole package, see `register_package`.

    Args:
        cls: A dataclass, NamedTuple, msgspec.Struct, Enum or subclass of a builtin type. Any other class needs
            `encode` and `decode`.
        name: The name in messages; by default the module and qualified name.
        encode: Takes an object and returns what to send for it: any object that the codec supports.
        decode: Takes what `encode` returned and rebuilds the object. Its input comes from a peer: check it. It may
            change its input, but not the arrays and tensors in it if the message is on loan: they are the message. If a
            signal handler raises in it, it is called again with the same input; but if the message came in parts, what
            it has changed in arrays, tensors, bytearrays and objects of registered classes stays changed.

    A call on the queue or the group that carries the object gets `UsageError` in `encode` and `decode`.

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
    if cls in _DESCRIBED or cls.__module__ in ("numpy", "torch") or _is_parameter(cls):
        raise UsageError(
            f"register_type({cls.__qualname__}): this type needs no registration, or is never supported"
        )
    if cls in _NATIVE or issubclass(cls, type):
        raise UsageError(f"register_type({cls.__qualname__}): this type cannot be registered")
    wire_name = f"{cls.__module__}.{cls.__qualname__}" if name is None else name
    if type(wire_name) is not str or not wire_name or not wire_name.isprintable():
        raise UsageError(f"register_type({cls.__qualname__}): {wire_name!r} is not a printable name")
    functions = encode is not None or decode is not None
    entry = Entry(cls, wire_name, custom_kind(cls, encode, decode) if functions else kind_of(cls))
    with _lock:
        # What was only found in a package gives way.
        _forget(each for each in (by_name.get(wire_name), by_class.get(cls)) if each and each.found)
        taken, known = by_name.get(wire_name), by_class.get(cls)
        if taken is not None and taken.cls is not cls:
            raise UsageError(f"register_type: the name {wire_name!r} belongs to another class, {taken.cls!r}")
        if known is not None and known.name != wire_name:
            raise UsageError(f"register_type: {cls!r} is already registered as {known.name!r}")
        by_class[cls] = by_name[wire_name] = entry
    return cls


def _is_parameter(cls: type) -> bool:
    return cls.__module__ == "torch.nn.parameter" and cls.__name__ == "Parameter"


def unregister_type(cls: type) -> None:
    """Remove a class from the table. Messages that hold it are refused from now on.

    If the class belongs to a registered package, it is then sent as such.

    Raises:
        UsageError: The class is not registered by itself.
    """
    with _lock:
        entry = by_class.get(cls)
        if entry is None or entry.found:
            raise UsageError(f"unregister_type: {cls!r} is not registered")
        _forget([entry])


def register_package(name: str) -> None:
    """Allow the data classes of a whole package, without naming each.

    Its dataclasses, msgspec.Structs, NamedTuples, and subclasses of builtin types and of UserDict and UserList can then
    be sent and received. (Members of Enums need no registration.) A class is looked at when it is first met:

    * The name in a message is resolved only in modules that this process has already imported, and only to a class
      whose own module and qualified name are these. Nothing is imported because a message names it. A class inside of
      a function is never found.
    * No code of the class runs when an object is built: no `__init__` and no `__post_init__`, not even of a Struct. A
      class is refused that defines `__reduce__`, `__reduce_ex__`, `__getstate__`, `__setstate__`, `__new__` or
      `__del__`, whose fields are descriptors, or that has slots which are no fields. `__hash__` and `__eq__` of an
      object that is a key or an element of a set do run.
    * The declared fields travel, private ones too; their types are not checked. What a `cached_property` has stored is
      left out and computed again; an object with any other attribute is refused, because it would lose it.

    Every process that sends or receives such objects must register the package and import the modules that define
    their classes, before the first message. The package itself need not be imported yet. A class that is registered
    with `register_type` is sent as it is registered; do so for a class that is refused, with `encode` and `decode`, and
    for a Struct whose `__post_init__` must run on arrival.

    Functions and other callables are never carried. An engine that sends them, as vLLM's `collective_rpc` does with
    cloudpickle, sends the bytes and unpickles them itself: whoever may send it messages may then run code in it.

    Args:
        name: The name of the package or module, such as "vllm" or "vllm.v1"; it and all modules below are meant.

    Raises:
        UsageError: `name` is no name of a package, or is `__main__`, of the standard library, torch, numpy or a package
            that this project consists of or needs.
    """
    with _lock:
        packages.allow(name)


def unregister_package(name: str) -> None:
    """Take the permission for a package back. Messages that hold its classes are refused from now on.

    Classes that `register_type` has registered stay.

    Raises:
        UsageError: The package is not registered.
    """
    with _lock:
        packages.disallow(name)
        _forget(entry for entry in by_class.values() if entry.found)


def find_entry(cls: type) -> Entry | None:
    """Return the entry of a class that is not in the table yet, or None if no registered package has it.

    Raises:
        Refusal: Objects of this class of a registered package cannot be sent.
    """
    name = packages.name_in_package(cls)
    if name is None:
        return None
    try:
        kind = kind_in_package(cls)
    except Refusal as refusal:
        raise Refusal(
            f"{refusal}; call register_type({cls.__qualname__}) in every process, {_REMEDY}"
        ) from refusal
    return _remember(Entry(cls, name, kind, found=True))


def _entry_named(name: str) -> Entry:
    """Return the entry of a class that a message names and that is not in the table under this name.

    Raises:
        DecodeError: No registered package has it, or it cannot be built from its fields.
    """
    cls = packages.class_named(name)
    known = by_class.get(cls)
    if known is None or known.found:
        try:
            return _remember(Entry(cls, name, kind_in_package(cls), found=True))
        except Refusal as refusal:
            raise DecodeError(f"the message holds a {name}, which is not carried: {refusal}") from refusal
    if known.kind.name == CUSTOM:
        raise DecodeError(
            f"the message holds a {name} as a class of its package, but here it is registered as {known.name!r} with "
            f"functions; call register_type() for it in the sender too"
        )
    return known


def _remember(entry: Entry) -> Entry:
    """Enter a class of a registered package, unless it has been registered meanwhile; return the entry that counts."""
    with _lock:
        known = by_class.get(entry.cls)
        if known is not None:
            return known
        taken = by_name.get(entry.name)
        if taken is not None and not taken.found:
            raise Refusal(f"its name {entry.name!r} belongs to another registered class")
        if taken is not None:
            _forget([taken])  # the class of an earlier import of the module
        if packages.name_in_package(entry.cls) is not None:  # not taken back meanwhile
            by_class[entry.cls] = by_name[entry.name] = entry
        return entry


def _forget(entries: Iterable[Entry]) -> None:
    for entry in list(entries):
        by_class.pop(entry.cls, None)
        by_name.pop(entry.name, None)


def build_registered(meta: object, body: object) -> object:
    """Build an object of the registered class named `meta`.

    Raises:
        DecodeError: The class is not registered here, or refused its data.
    """
    if type(meta) is not str:
        raise DecodeError("the message holds a class without a name, which is not registered")
    entry = by_name.get(meta) or _entry_named(meta)
    if entry.kind.name == ENUM:
        raise DecodeError(
            f"the message holds {meta:.200}, an Enum, as an object with fields; it is not registered so"
        )
    try:
        return entry.kind.build(body)
    except DecodeError:
        raise
    except Exception as error:
        if raised_by_handler(error):
            raise
        source = "the decode function of " if entry.kind.name == CUSTOM else ""
        raise DecodeError(
            f"{source}{entry.name} refused its data: {type(error).__name__}: {error}"
        ) from error


register_type(OrderedDict)
register_type(Counter)
