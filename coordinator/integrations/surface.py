"""Compare a class of an engine with the class that shall take its place: what callers would miss."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

Signatures = Mapping[str, Sequence[str] | None]
"""For each name of a class the names of its parameters, without `self`; None for what cannot be called."""

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
    """Return whether a call with the parameters `wanted`, by position or by name, fits `own`."""
    return list(own[: len(wanted)]) == list(wanted)


def _listed(parameters: Sequence[str]) -> str:
    return f"({', '.join(parameters)})"


def _is_callable(member: object) -> bool:
    return isinstance(member, (classmethod, staticmethod)) or inspect.isfunction(member)


def _parameters(function: Any, member: object) -> list[str]:
    names = [
        each.name for each in inspect.signature(function).parameters.values() if each.kind not in _VARIABLE
    ]
    return names[1:] if inspect.isfunction(member) else names
