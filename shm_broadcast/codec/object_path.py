"""Render the path to a part of an object as text: `obj["reqs"][3].fn`."""

import json
from collections.abc import Sequence
from typing import Any

from shm_broadcast.codec.records import RECORD
from shm_broadcast.codec.registry import by_class

__all__ = ["render", "repeated"]

Step = tuple[str, Any, Any]
"""(kind, key, container). Kinds: i index, k value at a key, K the key itself, s element of a set, x into a described
object."""

_SIMPLE = (bool, bytes, float, int, type(None))
_LONGEST_KEY = 60
_SHOWN = 12


def render(steps: Sequence[Step]) -> str:
    """Return the path through `steps`, outermost first. A long path keeps its first and last 12 parts."""
    parts = []
    record = False
    for kind, key, container in steps:
        if kind == "x":
            entry = by_class.get(type(container))
            record = entry is not None and entry.kind.name == RECORD
            continue
        if record and kind == "k":
            parts.append(f".{key}")
        elif kind == "K":
            parts.append(f" key {_text(key)}")
        elif kind == "s":
            parts.append(f" element {_text(key)}")
        else:
            parts.append(f"[{_text(key)}]")
        record = False
    if len(parts) > 2 * _SHOWN:
        parts[_SHOWN:-_SHOWN] = [f"…({len(parts) - 2 * _SHOWN} more)…"]
    return "obj" + "".join(parts)


def repeated(steps: Sequence[Step]) -> tuple[int, int] | None:
    """Return the positions of the first two steps with the same container, or None."""
    seen: dict[int, int] = {}
    for position, (_, _, container) in enumerate(steps):
        first = seen.setdefault(id(container), position)
        if first != position:
            return first, position
    return None


def _text(key: object) -> str:
    """Return the text of a key, shortened to 60 characters, without running application code."""
    if type(key) is str:
        text = json.dumps(key, ensure_ascii=not key.isprintable())
    elif type(key) is tuple:
        text = "(" + ", ".join(_text(part) for part in key[:8]) + ("," if len(key) == 1 else "") + ")"
    elif type(key) in _SIMPLE:
        text = repr(key)
    else:
        text = f"<{type(key).__qualname__}>"
    return text if len(text) <= _LONGEST_KEY else text[:_LONGEST_KEY] + "…"
