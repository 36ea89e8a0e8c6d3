"""Write quantities for people in a few characters."""

from __future__ import annotations

from typing import Final

__all__ = ["in_bytes", "in_number", "in_seconds"]

_STEPS: Final = ("", "k", "M", "G", "T", "P", "E")


def in_number(value: float) -> str:
    """Return a number with three digits, such as "1.2k"."""
    step = 0
    while value >= 999.5 and step < len(_STEPS) - 1:
        value /= 1000
        step += 1
    digits = 0 if value >= 99.5 or (not step and value == int(value)) else 1
    return f"{value:.{digits}f}{_STEPS[step]}"


def in_bytes(nbytes: float) -> str:
    """Return a number of bytes, such as "1.2 GB"."""
    text = in_number(nbytes)
    unit = text[-1] if text[-1].isalpha() else ""
    return f"{text.removesuffix(unit) if unit else text} {unit}B"


def in_seconds(seconds: float) -> str:
    """Return a duration, such as "35 us", "1.2 s", "541 s" or "2h05m"."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{1 if seconds < 0.00995 else 0}f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 999.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60 * 24:
        return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m"
    return f"{minutes // 1440}d{minutes % 1440 // 60}h"
