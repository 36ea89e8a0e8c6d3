"""Classes that a message may name: of a registered package, and registered with functions that refuse some data."""

import dataclasses
import enum
from collections import UserDict
from collections.abc import Iterator
from typing import Any

from shm_broadcast.codec import register_type

__all__ = ["NAME", "Custom", "Found", "Full", "Labels", "Level", "Opaque"]

NAME = "custom"
"""Under which `Custom` is registered."""


@dataclasses.dataclass
class Found:
    """A class that is carried because its package is registered."""

    number: int
    items: list[Any]


class Opaque:
    """A class of the package that is not carried."""

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __getstate__(self) -> object:
        return None


class Custom:
    """A class with functions of its own."""

    def __init__(self, number: int) -> None:
        self.number = number


@register_type
class Level(enum.IntEnum):
    """An Enum under a name of its own."""

    LOW = 1


class Full(enum.IntFlag):
    """A Flag that has so many composites that messages may add none."""

    ONE = 1


register_type(Full, name="full")
for value in range(4100):
    Full(value)


@register_type
class Labels(UserDict[str, int]):
    """A dict of the standard library's, which holds its data in a field."""


def rebuilt(data: Any) -> Custom:
    """Refuse what is no number, with an error that is not the codec's."""
    return Custom(int(data))


register_type(Custom, name=NAME, encode=lambda each: each.number, decode=rebuilt)
