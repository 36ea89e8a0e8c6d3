"""Say why types that are met often are not carried, and what to send instead."""

import functools
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Final

__all__ = ["reason_for"]

_CALLABLES: Final = (FunctionType, BuiltinFunctionType, MethodType, functools.partial, type)
_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.values()), type({}.items()))
_PASSING: Final = (GeneratorType, CoroutineType, AsyncGeneratorType)


def reason_for(cls: type) -> str | None:
    """Return why objects of this class are not carried, if there is more to say than that it is unknown."""
    if issubclass(cls, _CALLABLES):
        return (
            "functions, classes and other callables are not carried; send a name that the receiver looks up, or bytes "
            "that it turns into a callable by itself"
        )
    if issubclass(cls, _VIEWS):
        return "a view of a dict is not carried; send a list or set of it"
    if issubclass(cls, MappingProxyType):
        return "a view of a mapping is not carried; send a dict of it"
    if issubclass(cls, _PASSING):
        return "what runs in this process cannot be sent; send what it yields, as a list"
    if issubclass(cls, ModuleType):
        return "modules are not carried; send the name"
    return None
