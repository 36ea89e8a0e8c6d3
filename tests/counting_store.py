"""A store that counts what one rank asks of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

__all__ = ["CountingStore", "Traffic"]


@dataclasses.dataclass
class Traffic:
    """What a rank has asked.

    Attributes:
        names: The operations, in their order.
        keys: The first key of each.
        sent: Bytes of the arguments.
        received: Bytes of the answers.
    """

    names: list[str] = dataclasses.field(default_factory=list)
    keys: list[str] = dataclasses.field(default_factory=list)
    sent: int = 0
    received: int = 0

    @property
    def wrote_outcome(self) -> bool:
        """Return whether it was this rank that ended an agreement."""
        return self.names.count("compare_set") > 2


class CountingStore:
    """Passes operations on to a store of torch, and counts them.

    Both of its connections are opened at once: torch looks up a name for each, which takes seconds here if many threads
    do it together.
    """

    def __init__(self, connect: Callable[[], Any], traffic: Traffic) -> None:
        self._store = connect()
        self._other = connect()
        self._traffic = traffic

    def clone(self) -> CountingStore:
        return CountingStore(lambda: self._other, self._traffic)

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            self._traffic.names.append(name)
            self._traffic.keys.append(args[0] if isinstance(args[0], str) else args[0][0])
            self._traffic.sent += sum(map(_size_of, args))
            answer = getattr(self._store, name)(*args)
            self._traffic.received += _size_of(answer)
            return answer

        return ask


def _size_of(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_size_of, value))
    return len(value) if isinstance(value, str | bytes) else 8
