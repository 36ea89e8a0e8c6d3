"""All ranks agree on the facts of a group before anything is built, or every one raises.

The first rank proposes, the others compare: whoever holds something else says so in the store and
raises, and those that wait for the others look for such dissent several times a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.settings import differences
from shm_broadcast.errors import CommTimeoutError, DisagreementError, PeerLostError
from shm_broadcast.liveness import PeerWatch, ProcessIdentity

# The pauses between two looks into the store: short while ranks are expected within milliseconds.
FIRST_PAUSE_S: Final = 0.0005
LONGEST_PAUSE_S: Final = 0.02
# A rank that has waited this long looks for peers that died meanwhile, this often.
WATCH_EVERY_S: Final = 0.3


class View(msgspec.Struct, frozen=True):
    """What one rank brings to the creation of a group.

    Attributes:
        facts: What must be equal on all ranks, as text by name.
        process: Who the rank is.
        address: Where it can be reached by the group's other ranks; may differ.
    """

    facts: dict[str, str]
    process: ProcessIdentity
    address: str


_decoder = msgspec.json.Decoder(View)


def agree(
    store: dist.Store, what: str, rank: int, ranks: Sequence[int], view: View, timeout_s: float
) -> dict[int, View]:
    """Exchange views with all of `ranks`.

    Collective over `ranks`; blocks until all have come and hold the same facts.

    Args:
        store: A store whose keys belong to this agreement alone.
        what: What is being created, for errors: "group 'tp:0'".
        rank: This process's global rank.
        ranks: Global ranks that must agree.
        view: What this rank brings.
        timeout_s: Deadline in seconds.

    Returns:
        Every rank's view, by global rank.

    Raises:
        DisagreementError: Two ranks hold different facts, which `.views` shows, or two processes one rank.
        CommTimeoutError: Ranks did not come; `.missing` names them.
        PeerLostError: A rank died meanwhile; `.peers` names it.
    """
    if store.add(f"seat/{rank}", 1) != 1:
        taken = _present(store, [rank]).get(rank)
        by = (
            "another process"
            if taken is None
            else f"pid {taken.process.pid} on host {taken.process.hostname}"
        )
        raise DisagreementError(
            f"creating {what}: two processes say that they are rank {rank}, this one and {by}"
        )
    store.set(f"view/{rank}", msgspec.json.encode(view).decode())
    mine = msgspec.json.encode(view.facts, order="deterministic").decode()
    if store.compare_set("proposal", "", mine).decode() != mine:
        store.set("dissent", str(rank))
        raise _disagreement(store, what, rank, ranks)
    if store.add("agreed", 1) == len(ranks):
        store.set("complete", "1")
    _await_all(store, what, rank, ranks, view, timeout_s)
    values = store.multi_get([f"view/{other}" for other in ranks])
    return {other: _decoder.decode(value) for other, value in zip(ranks, values, strict=True)}


def _await_all(
    store: dist.Store, what: str, rank: int, ranks: Sequence[int], view: View, timeout_s: float
) -> None:
    start = time.monotonic()
    pause, next_watch = FIRST_PAUSE_S, WATCH_EVERY_S
    while not store.check(["complete"]):
        if store.check(["dissent"]):
            raise _disagreement(store, what, rank, ranks)
        waited = time.monotonic() - start
        if waited >= next_watch:
            _raise_if_lost(store, what, rank, ranks, view)
            next_watch = waited + WATCH_EVERY_S
        if waited >= timeout_s:
            missing = tuple(other for other in ranks if not store.check([f"view/{other}"]))
            raise CommTimeoutError(
                f"creating {what} (rank {rank}): no sign of rank(s) {_listed(missing)} within {timeout_s:.1f} s; "
                "were they started, with the same rendezvous, and do they create their groups in the same order?",
                missing=missing,
            )
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_S)


def _raise_if_lost(store: dist.Store, what: str, rank: int, ranks: Sequence[int], view: View) -> None:
    views = _present(store, ranks)
    watch = PeerWatch(view.process, {other: seen.process for other, seen in views.items() if other != rank})
    try:
        lost = watch.lost()
        if lost:
            who = ", ".join(f"{other} ({watch.describe(other)})" for other in lost)
            raise PeerLostError(f"creating {what} (rank {rank}): lost rank(s) {who}", peers=lost)
    finally:
        watch.close()


def _present(store: dist.Store, ranks: Sequence[int]) -> dict[int, View]:
    found = {}
    for other in ranks:
        if store.check([f"view/{other}"]):
            found[other] = _decoder.decode(store.get(f"view/{other}"))
    return found


def _disagreement(store: dist.Store, what: str, rank: int, ranks: Sequence[int]) -> DisagreementError:
    facts = {other: view.facts for other, view in _present(store, ranks).items()}
    lines = differences(facts)
    views = {
        other: msgspec.json.encode(held, order="deterministic").decode() for other, held in facts.items()
    }
    return DisagreementError(
        f"creating {what} (rank {rank}): ranks disagree: {'; '.join(lines)}", views=views
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
