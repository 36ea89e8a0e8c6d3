"""Compare a class of an engine with the class that shall take its place: what callers would miss."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
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


def _written(parameter: inspect.Parameter) -> str:
    by_name = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
    default = "" if parameter.default is parameter.empty else "="
    return f"{by_name}{parameter.name}{default}"
