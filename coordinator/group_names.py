"""Names that tell groups apart, equal on all ranks that create their groups in the same order."""

from __future__ import annotations

from collections import Counter

from shm_broadcast.errors import UsageError

_created: Counter[str] = Counter()


def unique_name(name: str | None) -> str:
    """Return `name` with how many groups of that name this process has created before: `tp:0`, `tp:1`."""
    base = "group" if name is None else name
    if not isinstance(base, str) or not base.isprintable() or not base or ":" in base:
        raise UsageError(f"group_name must be printable text without a colon, not {name!r}")
    number = _created[base]
    _created[base] += 1
    return f"{base}:{number}"
