"""Encode and decode Enum members by name. No code of an Enum class runs: `_missing_` is never called.

An unregistered class is looked up in the dictionaries of the modules that are already loaded. Nothing is
imported, and neither a module's `__getattr__` nor a descriptor runs.
"""

from enum import Enum, EnumType, Flag
from typing import Any

from shm_broadcast.codec.loaded import class_dict, find_class
from shm_broadcast.codec.records import ENUM
from shm_broadcast.codec.registry import by_class, by_name
from shm_broadcast.codec.wire_format import Code, Description, Refusal
from shm_broadcast.errors import DecodeError

__all__ = ["build_enum", "describe_enum"]

_COMPOSE = Flag._missing_.__func__  # type: ignore[attr-defined]
_MAX_COMPOSITE = 1 << 64
# A Flag class keeps each composite that is ever built. Messages add none to a class that has this many: a peer
# could send ever new ones. It is enough for all combinations of twelve members.
_MOST_COMPOSITES = 4096


def describe_enum(obj: Enum) -> Description:
    """Describe a member by its name, or a composite Flag by its value."""
    cls = type(obj)
    entry = by_class.get(cls)
    if entry is not None:
        name = entry.name
    else:
        name = f"{cls.__module__}:{cls.__qualname__}"
        if _loaded(name) is not cls:
            raise Refusal("a receiver cannot find this Enum by its module and name")
    member = obj._name_
    if _members(cls).get(member) is obj:
        return Code.ENUM, name, member
    value = obj._value_
    if not _is_composite(cls, value):
        raise Refusal("it is not a member of its Enum")
    return Code.ENUM, name, value


def build_enum(meta: object, body: object) -> object:
    """Return the member named `body`, or the composite Flag of value `body`, of the Enum class named `meta`.

    Raises:
        DecodeError: The class is neither registered nor loaded, or has no such member, or it has so many composites
            that messages may add none.
    """
    if type(meta) is not str:
        raise DecodeError("an Enum lacks the name of its class")
    entry = by_name.get(meta)
    cls: Any = entry.cls if entry is not None and entry.kind.name == ENUM else _loaded(meta)
    if cls is None:
        raise DecodeError(
            f"the message holds a member of the Enum {meta!r:.200}, which no loaded module of this process has; "
            f"import its module or call register_type() for it"
        )
    if type(body) is str:
        member = _members(cls).get(body)
        if type(member) is cls:
            return member
    elif type(body) is int and _is_composite(cls, body):
        known = cls._value2member_map_.get(body)
        if type(known) is cls:
            return known
        if len(cls._value2member_map_) - len(cls._member_map_) >= _MOST_COMPOSITES:
            raise DecodeError(
                f"{body} is a new value of {meta}, of which this process has {_MOST_COMPOSITES} composites already; "
                f"messages add no more"
            )
        return _COMPOSE(cls, body)
    raise DecodeError(f"{body!r:.200} is not a member of {meta}")


def _members(cls: Any) -> dict[object, object]:
    table = class_dict(cls).get("_member_map_")
    return table if type(table) is dict else {}


def _is_composite(cls: Any, value: object) -> bool:
    """Return whether `value` is a composite that the standard library can build for this Flag class."""
    if not issubclass(cls, Flag) or cls._missing_.__func__ is not _COMPOSE or type(value) is not int:
        return False
    if not 0 <= value < _MAX_COMPOSITE:
        return False
    return bool(value & ~cls._flag_mask_ == 0) or bool(cls._boundary_.name == "KEEP")


def _loaded(name: str) -> type[Any] | None:
    """Return the Enum class that `name` ("module:qualname") means in a loaded module, or None."""
    module_name, _, qualname = name.partition(":")
    found = find_class(module_name, qualname)
    return found if found is not None and issubclass(type(found), EnumType) and found is not Enum else None
