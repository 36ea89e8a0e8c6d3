"""Slurm's lists of hosts: `n[001-003,007],gpu5`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Final

from shm_broadcast.errors import UsageError

__all__ = ["expand_nodelist"]

# More than any cluster has. A list that names more, which a few bytes can, would only take memory.
_MOST_NAMES: Final = 1 << 20

# A part of a name: brackets with what is in them, or plain characters.
_PIECE: Final = re.compile(r"\[([0-9,-]+)\]|([A-Za-z0-9._-]+)")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the names of a list of hosts as Slurm writes it, in its order.

    A name may have several brackets (`rack[1-2]node[01-16]`); the last one changes fastest. Numbers have the width of
    the first number of their range: `[008-010]` is 008, 009, 010.

    Raises:
        UsageError: The text is no such list, or has more than 2**20 names.
    """
    names = list[str]()
    for item in _items(nodelist):
        choices = _choices(nodelist, item)
        if len(names) + math.prod(map(len, choices)) > _MOST_NAMES:
            raise UsageError(f"the list of hosts {_short(nodelist)} has more than {_MOST_NAMES} names")
        names += map("".join, itertools.product(*choices))
    return names


def _items(nodelist: str) -> Iterator[str]:
    """Yield what is between the commas outside of brackets."""
    start = depth = 0
    for index, character in enumerate(nodelist):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            yield nodelist[start:index]
            start = index + 1
    yield nodelist[start:]


def _choices(nodelist: str, item: str) -> list[list[str]]:
    """Return for each part of a name what may stand there."""
    choices = list[list[str]]()
    at = 0
    while at < len(item):
        piece = _PIECE.match(item, at)
        if piece is None:
            break
        choices.append([piece[2]] if piece[1] is None else _numbers(nodelist, piece[1]))
        at = piece.end()
    if not choices or at < len(item):
        raise UsageError(f"{_short(item)} in {_short(nodelist)} is no list of hosts as Slurm writes it")
    return choices


def _numbers(nodelist: str, ranges: str) -> list[str]:
    """Return the numbers of `001-003,007`."""
    found = list[str]()
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        if match is None:
            raise UsageError(f"[{ranges}] in {_short(nodelist)} is no list of ranges")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or len(found) + int(last) - int(first) >= _MOST_NAMES:
            raise UsageError(f"{each} in {_short(nodelist)} is no range of hosts")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
