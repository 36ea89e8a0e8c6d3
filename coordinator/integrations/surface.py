"""Compare a class of an engine with the class that shall take its place: what callers would miss."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, Final

Signatures = Mapping[str, Sequence[str] | None]
"""For each name of a class its parameters, without `self`; None for what cannot be called.

A parameter is written as its name, with `=` behind it if it has a default, and with `*` before it if it can be passed
by name only.
"""

_VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signatures(cls: type) -> dict[str, list[str] | None]:
    """Return the public names of a class and its bases, with those of the constructor."""
    found: dict[str, list[str] | None] = {}
    for name in dir(cls):
        if name == "__init__" or not name.startswith("_"):
            member: Any = inspect.getattr_static(cls, name)
            found[name] = _parameters(getattr(cls, name), member) if _is_callable(member) else None
    return found


def gaps(wanted: Signatures, cls: type, unused: Collection[str] = ()) -> list[str]:
    """Return what callers of a class with the signatures `wanted` would miss in `cls`, in words.

    Args:
        wanted: The engine's class.
        cls: The class that shall take its place.
        unused: Names that nothing outside of the engine's class uses.
    """
    has = signatures(cls)
    missing = []
    for name, parameters in wanted.items():
        if name in unused:
            continue
        if name not in has:
            missing.append(f"{cls.__name__} has no {name}")
            continue
        own = has[name]
        if (own is None) != (parameters is None):
            missing.append(f"{cls.__name__}.{name} is {'no' if own is None else 'a'} method")
        elif own is not None and parameters is not None and not _accepts(own, parameters):
            missing.append(f"{cls.__name__}.{name} takes {_listed(own)}, not {_listed(parameters)}")
    return missing


def attributes(cls: type) -> set[str]:
    """Return the public names that a class and its bases declare for their objects, or assign to `self` in a method.

    Nothing is called. What other code assigns to an object is not seen.
    """
    found: set[str] = set()
    for base in cls.__mro__[:-1]:
        # Python 3.14 evaluates annotations here; those for type checkers only may name what was not imported.
        with suppress(NameError):
            found |= set(inspect.get_annotations(base))
        for member in vars(base).values():
            # A property or a classmethod holds a function, and a decorator such as `contextmanager` wraps one.
            function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
            if inspect.isfunction(function):
                found |= set(_assigned(function.__code__))
    return {name for name in found if not name.startswith("_")}


def lacking(wanted: Collection[str], cls: type, unused: Collection[str] = ()) -> list[str]:
    """Return which of the names `wanted` the objects of `cls` have neither as attribute nor as method, in words.

    Args:
        wanted: The attributes of the engine's class.
        cls: The class that shall take its place.
        unused: Names that nothing outside of the engine's class uses.
    """
    missing = set(wanted) - set(unused) - attributes(cls) - set(dir(cls))
    return [f"{cls.__name__} has no attribute {name}" for name in sorted(missing)]


def mismatch(function: Any, name: str, parameters: Sequence[str]) -> str | None:
    """Return why a call with `parameters` does not fit a function or method called `name`, in words, or None."""
    own = _parameters(function, None)
    if own[:1] == ["self"]:  # a method that was looked up in its class
        own = own[1:]
    return None if _accepts(own, parameters) else f"{name} takes {_listed(own)}, not {_listed(parameters)}"


def _accepts(own: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether every call that fits the parameters `wanted` fits `own`."""
    own_places, wanted_places = (
        [each for each in names if not each.startswith("*")] for names in (own, wanted)
    )
    if [each.rstrip("=") for each in own_places[: len(wanted_places)]] != [
        each.rstrip("=") for each in wanted_places
    ]:
        return False
    needed = {each.strip("*") for each in own if not each.endswith("=")}
    given = {each.strip("*") for each in wanted if not each.endswith("=")}
    by_name = {each.strip("*=") for each in wanted if each.startswith("*")}
    return needed <= given and by_name <= {each.strip("*=") for each in own}


def _listed(parameters: Sequence[str]) -> str:
    return f"({', '.join(parameters)})"


def _is_callable(member: object) -> bool:
    return isinstance(member, (classmethod, staticmethod)) or inspect.isfunction(member)


def _parameters(function: Any, member: object) -> list[str]:
    found = [
        _written(each)
        for each in inspect.signature(function).parameters.values()
        if each.kind not in _VARIABLE
    ]
    return found[1:] if inspect.isfunction(member) else found


def _assigned(code: CodeType) -> Iterator[str]:
    """Yield the names that a method assigns to `self`."""
    before: dis.Instruction | None = None
    for each in dis.get_instructions(code):
        # Python 3.13 handles two variables by one instruction, whose argument is a pair; the later one is the object.
        if each.opname == "STORE_ATTR" and before is not None and "LOAD_FAST" in before.opname:
            loaded = before.argval
            if (loaded[-1] if isinstance(loaded, tuple) else loaded) == "self":
                yield str(each.argval)
        before = each


def _written(parameter: inspect.Parameter) -> str:
    by_name = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
    default = "" if parameter.default is parameter.empty else "="
    return f"{by_name}{parameter.name}{default}"
