"""Say how to send objects of classes of a registered package that nobody has registered one by one.

Stricter than `records`, because nobody has looked at the class: it is refused if building it may run its code, or if
its state may be more than its fields. An object is refused if it has attributes that would be lost.
"""

import dataclasses
from collections import UserDict, UserList
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cached_property
from types import FunctionType, MemberDescriptorType
from typing import Any, Final

import msgspec

from shm_broadcast.codec.loaded import class_dict, find_member
from shm_broadcast.codec.records import CONTENT, RECORD, Kind, kind_of, record
from shm_broadcast.codec.wire_format import Refusal
from shm_broadcast.errors import UsageError

__all__ = ["kind_in_package"]

_OWN_STATE: Final = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__", "__del__")
"""Methods by which a class says that its state is more than its fields, or that run when an object comes or goes."""

_HEAP_TYPE: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: in `__flags__` of each class that a class statement has made."""

_SET_CLASS: Final[Any] = vars(object)["__class__"].__set__


def kind_in_package(cls: type) -> Kind:
    """Return the kind of a class that nobody has registered by itself.

    Raises:
        Refusal: The codec cannot build it, or its state may be more than its fields; the text completes "it".
    """
    is_struct = issubclass(cls, msgspec.Struct)
    native = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    if issubclass(cls, (Enum, type)) or (native not in (object, *CONTENT) and not is_struct):
        raise Refusal(f"its base {native.__qualname__} is not supported")
    for base, name in _own_state(cls):
        raise Refusal(f"{base.__qualname__} defines {name}")
    if is_struct and type(cls) is not type(msgspec.Struct):
        raise Refusal(f"its metaclass {type(cls).__qualname__} may run code")
    try:
        kind = kind_of(cls)
    except UsageError as error:
        raise Refusal(
            "it is no dataclass, NamedTuple, Struct, Enum or plain subclass of a builtin type"
        ) from error
    if kind.name != RECORD:
        return kind
    if issubclass(cls, msgspec.Struct) and hasattr(cls, "__post_init__"):
        kind = record(cls, cls.__struct_fields__, _builder_without_post_init(cls))
    elif dataclasses.is_dataclass(cls):
        _check_fields(cls, {field.name for field in dataclasses.fields(cls)})
    elif issubclass(cls, (UserDict, UserList)):
        _check_fields(cls, {"data"})
    return _complete(cls, kind) if cls.__dictoffset__ else kind


def _own_state(cls: type) -> Iterator[tuple[type, str]]:
    """Yield the base and the name of each method of `_OWN_STATE` that somebody has written."""
    for base in cls.__mro__:
        if base.__flags__ & _HEAP_TYPE:
            members = class_dict(base)
            for name in _OWN_STATE:
                if name in members and not _is_generated(base, members[name]):
                    yield base, name


def _is_generated(base: type, method: object) -> bool:
    """Return whether `dataclasses` (for slots) or `namedtuple` has made this method of `base`."""
    # A class makes its `__new__` a staticmethod.
    function = method.__func__ if type(method) is staticmethod else method
    if type(function) is not FunctionType:
        return False
    where = function.__globals__
    return where is vars(dataclasses) or where.get("__name__") == f"namedtuple_{base.__name__}"


def _check_fields(cls: type, names: set[str]) -> None:
    """Refuse a class whose fields are not plain attributes, or that has slots which are no fields."""
    for name in names:
        member = find_member(cls, name)
        if hasattr(type(member), "__set__") and type(member) is not MemberDescriptorType:
            raise Refusal(f"setting its field {name!r} runs a {type(member).__name__}")
    for base in cls.__mro__:
        for name, member in class_dict(base).items():
            if type(member) is MemberDescriptorType and base.__flags__ & _HEAP_TYPE and name not in names:
                raise Refusal(f"its slot {name!r} is no field")


def _complete(cls: type, kind: Kind) -> Kind:
    """Return a kind that also refuses objects with an attribute that the class does not declare.

    What a `cached_property` has stored is left out, because it is computed again.
    """
    inner = kind.take
    plain = tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()

    def take(obj: object) -> object:
        attributes = obj.__dict__
        if not attributes:
            return inner(obj)
        if len(attributes) == len(plain):
            # Nearly every dataclass: if each field is there, nothing else is.
            with_all = {name: attributes[name] for name in plain if name in attributes}
            if len(with_all) == len(plain):
                return with_all
        body: Any = inner(obj)
        for name in attributes.keys() - body.keys() - {"__orig_class__"}:  # parameters of a generic class
            if not isinstance(find_member(cls, name), cached_property):
                raise Refusal(
                    f"its attribute {name!r} is no field of the class and would be lost; make it one, or call "
                    f"register_type({cls.__qualname__}) in every process, with encode= and decode= to keep it"
                )
        return body

    return Kind(kind.name, take, kind.build)


class _WithoutPostInit:
    """First base of a class that msgspec builds without running code of the other bases."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Keep the other base's method from running."""

    def __post_init__(self) -> None:
        """Do nothing in place of the other base's method."""


def _builder_without_post_init(cls: type) -> Callable[[dict[str, Any]], object]:
    """Return a function that builds a Struct from all of its fields and leaves its `__post_init__` out.

    msgspec has no constructor for that. So a subclass of the same layout is built, whose `__post_init__` does nothing,
    and its object is then given the class that was asked for. Python checks that the two classes have one layout.
    """
    metaclass: Any = type(msgspec.Struct)
    twin: Any = metaclass(cls.__name__, (_WithoutPostInit, cls), {"__module__": cls.__module__})

    def build(values: dict[str, Any]) -> object:
        obj: object = twin(**values)
        _SET_CLASS(obj, cls)
        return obj

    return build
