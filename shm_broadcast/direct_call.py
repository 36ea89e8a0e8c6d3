"""A group's `broadcast_object` as one native call into the end of its queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shm_broadcast.errors import CommError
from shm_broadcast.legs import NoRemote
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.ring_reader import RingReader


def direct_call(
    end: QueueWriter | QueueReader,
    source: int,
    general: Callable[..., Any],
    check: Callable[[str], None],
    blame: Callable[[CommError], NoReturn],
) -> Callable[..., Any] | None:
    """Return the call, with the parameters of `GroupCoordinator.broadcast_object`; None where the queue crosses hosts.

    Args:
        end: The group's own; it serves one group.
        source: The writer's rank in the group.
        general: What makes the calls that are not ordinary ones.
        check: Raises if the group cannot be used.
        blame: Raises what an error of the queue is to the group.
    """
    if isinstance(end, QueueWriter):
        is_local = isinstance(end._remote, NoRemote)  # noqa: SLF001 - part of the ends
        return end._ring.direct_call(source, general) if is_local else None  # noqa: SLF001 - part of the ends
    ring = end._ring  # noqa: SLF001 - part of the ends
    return ring.direct_call(source, general, check, blame) if isinstance(ring, RingReader) else None


__all__ = ["direct_call"]
