"""Ranks of torch's world that others have reported as lost, for whoever waits for them in this process.

A process sees the end of another one by the kernel that both share. Of a rank on another host a driver may know, such
as Ray, whose agents watch their processes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from typing import Final

from shm_broadcast.errors import UsageError
from shm_broadcast.liveness import PeerWatch

__all__ = ["forget_losses", "listen_for_losses", "report_loss"]

_lost: Final[dict[int, str]] = {}
# An entry ends with its watch; the callback runs no Python code, for the reason that `host/process_groups.py` gives.
_watches: Final[dict[weakref.ref[PeerWatch], frozenset[int]]] = {}
# A signal handler that runs while this thread holds it may report a loss, too, or create or destroy a group.
_lock: Final = threading.RLock()


def report_loss(rank: int, how: str) -> None:
    """Say that a rank of torch's world has died. From any thread; not collective; sends nothing itself.

    Calls of this process that wait for the rank raise `PeerLostError` within 0.1 s, whose text ends with `how`, and
    publish that to the other ranks of their groups. If the rank is on another host, they first wait until that host
    answers a heartbeat, for at most `remote.lost_after_s`; if it answers none, all of its ranks are lost. The groups of
    lost ranks break; others are as they were. Later groups of this world fail at once if the rank is in them. A rank
    that has destroyed a group before is not missed in it.

    Args:
        rank: Its rank in the world.
        how: What is known, in a few words, for errors.

    Raises:
        UsageError: `rank` is no rank, or `how` no text.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 or not isinstance(how, str):
        raise UsageError(f"report_loss takes a rank and a text, not {rank!r} and {how!r}")
    with _lock:
        _lost.setdefault(rank, how)
        watches = [watch() for watch, ranks in _watches.copy().items() if rank in ranks]
    for watch in watches:
        if watch is not None:
            watch.report(rank, how)


def listen_for_losses(watch: PeerWatch, ranks: Collection[int]) -> None:
    """Report to `watch` which of `ranks` are lost or will be, until it is collected."""
    with _lock:
        _watches[weakref.ref(watch, _watches.pop)] = frozenset(ranks)
        known = {rank: how for rank, how in _lost.items() if rank in ranks}
    watch.report_each(known)


def forget_losses() -> None:
    """Forget everything, as a world begins or ends: the next one has other processes."""
    with _lock:
        _lost.clear()
        _watches.clear()
