"""Ask whether the other ranks have gone on without this one: what a call says that fails in groups of an old epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.bootstrap.world import Line, World
from coordinator.elastic.protocol import Excluded, decided_without
from shm_broadcast.errors import CommTimeoutError, NativeError

__all__ = ["exclusion_in"]

# A call fails this much later at most if the store does not answer.
_ANSWER_S: Final = 0.5


def exclusion_in(world: World) -> Callable[[], str] | None:
    """Return what says that the others have gone on without this rank of `world`, or an empty text.

    None if the members of the world do not change, or its store may end with a rank.
    """
    if not world.is_elastic:
        return None
    line = world.line()

    def ask() -> str:
        try:
            excluded = ask_store(lambda: _find(line), "exclusion", _ANSWER_S)
        except (CommTimeoutError, NativeError):
            return ""  # the call that has failed has its own error
        if excluded is None:
            return ""
        members, number = list(excluded.members), excluded.number
        return f"the others have gone on without this rank, as members {members} of epoch {number}"

    return ask


def _find(line: Line) -> Excluded | None:
    def known(key: str) -> str | None:
        return line.store.get(key).decode() if line.store.check([key]) else None

    return decided_without(line.me, line.epoch, known)
