"""Processes that wait to join: how they are numbered, which of them still wait, and whose place is free."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import UNREADABLE, ask_store
from coordinator.bootstrap.world import Line
from coordinator.elastic.part import Joiner, note_of
from coordinator.elastic.protocol import Presence
from shm_broadcast.liveness import process_state, this_process

__all__ = ["new_line", "pending"]

# Members of the first epoch are numbered from 0, those that join from here on.
_FIRST: Final = 1 << 31

_presence_decoder: Final = msgspec.json.Decoder(Presence)


def new_line(store: dist.Store, replaces: int | None, where: str, timeout_s: float) -> Line:
    """Return the line of a process that is to join: it has a number and a place, and knows no members yet."""
    elastic = dist.PrefixStore("group_coordinator/elastic", store)
    number = ask_store(lambda: elastic.add("joiners", 1), where, timeout_s)
    me = _FIRST + number - 1
    return Line(elastic, me, 0, (), (me if replaces is None else replaces,), 0)


def pending(line: Line, staying: Collection[int], where: str, timeout_s: float) -> tuple[Joiner, ...]:
    """Return who waits to join and could, in the order in which they came.

    Those that have ended are left out, and those whose place is not free. One that names a place that nobody ever had,
    or whose note cannot be read, is refused.

    Args:
        line: The epochs so far.
        staying: Places that are not free.
        where: Begins the text of an error.
        timeout_s: How long the store may take, in seconds.
    """

    def question() -> tuple[Joiner, ...]:
        store, held, found = line.store, set(staying), []
        ever = range(_FIRST, _FIRST + store.add("joiners", 0))
        for member in ever:
            place = _place_of(store, member)
            if place is None:
                continue
            if not 0 <= place < line.founders and place not in ever:
                store.set(f"refused/{member}", f"there was never a member {place} that it could replace")
            elif place not in held:
                held.add(place)
                found.append(Joiner(member, place))
        return tuple(found)

    return ask_store(question, where, timeout_s)


def _place_of(store: dist.Store, member: int) -> int | None:
    """Return the place of a process that waits; None if it does not."""
    # An invited process takes part in that change only. If this is given up, it joins anew as another member.
    if store.check([f"invited/{member}"]) or store.check([f"refused/{member}"]):
        return None
    if not store.check([f"joining/{member}"]):
        return None
    try:
        note = note_of(_presence_decoder.decode(store.get(f"joining/{member}")).note)
    except UNREADABLE as error:  # it is of another version, and keeps nobody else from joining
        store.set(f"refused/{member}", f"the members cannot read what it says of itself: {error}")
        return None
    has_ended = this_process().sees(note.process) and process_state(note.process) == "dead"
    return None if has_ended else note.place
