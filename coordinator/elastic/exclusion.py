"""When a call fails in a group of an old epoch, find out whether the others went on without this rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.bootstrap.world import Line, World
from coordinator.elastic.protocol import Excluded, decided_without
from shm_broadcast.errors import CapabilityError, CommTimeoutError, ExcludedError, NativeError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["exclusion_in"]

# If the store does not answer, the error of the failed call is delayed by this long at most.
_ANSWER_S: Final = 0.5


def exclusion_in(world: World) -> Callable[[str], ExcludedError | None]:
    """Return `GroupHealth.exclusion` of groups in `world`, whose members may change."""
    line = world.line()

    def ask(where: str) -> ExcludedError | None:
        try:
            found = ask_store(lambda: _find(line), where, _ANSWER_S)
        except (CapabilityError, CommTimeoutError, NativeError) as error:
            if raised_by_handler(error):
                raise
            return None  # the call that has failed has its own error
        if found is None:
            return None
        members, number = list(found.members), found.number
        return ExcludedError(
            f"{where}: the others have gone on without this rank, as members {members} of epoch {number}"
        )

    return ask


def _find(line: Line) -> Excluded | None:
    def known(key: str) -> str | None:
        return line.store.get(key).decode() if line.store.check([key]) else None

    return decided_without(line.me, line.epoch, known)
