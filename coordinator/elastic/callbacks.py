"""What a rank does with the groups of the next epoch before it goes on: the callbacks of `on_rebuild`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.elastic.revoking import revoke
from device_comm.health import GroupHealth

__all__ = ["break_groups", "call_back"]


def call_back(callbacks: Sequence[Callable[[], object]], healths: Sequence[GroupHealth]) -> None:
    """Call `callbacks` in order. An error in one breaks the new groups, as other ranks may wait in its calls.

    Args:
        callbacks: Equal on all ranks, as they may make collective calls of the new groups.
        healths: Those of all of the new groups, the world's first.

    Raises:
        Others: Whatever a callback raises.
    """
    try:
        for callback in callbacks:
            callback()
    except BaseException as error:
        break_groups(error, healths, "on_rebuild")
        raise


def break_groups(error: BaseException, healths: Sequence[GroupHealth], call: str) -> None:
    """Break all groups of an epoch that `error` has kept from a caller, as other ranks may wait in them."""
    if not any(health.is_broken for health in healths):
        healths[0].fail(error, call)
    revoke(healths)
