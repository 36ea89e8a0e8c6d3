"""Processes that wait to join: how they are numbered, and who of them still waits."""

from __future__ import annotations

from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.bootstrap.world import Line
from coordinator.elastic.part import note_of
from coordinator.elastic.protocol import Presence
from shm_broadcast.liveness import process_state, this_process

__all__ = ["new_line", "pending"]

# Members of the first epoch are numbered from 0, those that join from here on.
_FIRST: Final = 1 << 31

_presence_decoder: Final = msgspec.json.Decoder(Presence)


def new_line(store: dist.Store, where: str, timeout_s: float) -> Line:
    """Return the line of a process that is to join: it has a number, and knows no members yet."""
    elastic = dist.PrefixStore("group_coordinator/elastic", store)
    number = ask_store(lambda: elastic.add("joiners", 1), where, timeout_s)
    return Line(elastic, _FIRST + number - 1, 0, ())


def pending(store: dist.Store, where: str, timeout_s: float) -> tuple[int, ...]:
    """Return the members that wait to join, in the order in which they came, without those that have ended."""

    def question() -> tuple[int, ...]:
        members = range(_FIRST, _FIRST + store.add("joiners", 0))
        return tuple(member for member in members if _waits(store, member))

    return ask_store(question, where, timeout_s)


def _waits(store: dist.Store, member: int) -> bool:
    # Who was invited takes part in one change. If that is given up, it joins anew, as another member.
    if store.check([f"invited/{member}"]) or not store.check([f"joining/{member}"]):
        return False
    note = note_of(_presence_decoder.decode(store.get(f"joining/{member}")).note)
    return not this_process().sees(note.process) or process_state(note.process) != "dead"
