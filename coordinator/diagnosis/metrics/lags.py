"""Tell how far the readers of a host's queues and channels are behind, by the ranks and groups that have them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from coordinator.diagnosis.pages import Found
from coordinator.diagnosis.queues import Reader, Ring, read_rings

__all__ = ["Lag", "QueueReader", "lags_of"]

# A group numbers its queues, and names its channels after the ranks at both ends: "tp:0/1" and "tp:0 3 to 2". Its own
# name ends with its epoch once its members have changed: "tp:0@2/1".
_EPOCH: Final = r"(?:@[0-9]+)?"
_QUEUE: Final = re.compile(rf"(?P<group>.*?){_EPOCH}/[0-9]+")
_CHANNEL: Final = re.compile(rf"(?P<group>.*?){_EPOCH} (?P<writer>[0-9]+) to (?P<reader>[0-9]+)")


class QueueReader(NamedTuple):
    """A reader of a group's queues.

    Attributes:
        rank: Of the writer in its world; empty if no page shows it.
        group: Unique name of the group, or of the queue if it belongs to none.
        reader: Rank of the reader; if no page shows it "#" and its place among the readers.
    """

    rank: str
    group: str
    reader: str


class Lag(NamedTuple):
    """How far a reader is behind.

    Attributes:
        messages: Whole messages that it has not given back.
        nbytes: Bytes of the records of these.
    """

    messages: int
    nbytes: int


def lags_of(found: Iterable[Found]) -> dict[QueueReader, Lag]:
    """Return how far each attached reader is behind, for a group in the queue where that is most."""
    lags: dict[QueueReader, Lag] = {}
    for ring in read_rings((each.page, each.pid) for each in found):
        for reader in ring.readers:
            if reader.state == "attached":
                key = _key(ring, reader)
                known = lags.get(key, Lag(0, 0))
                lags[key] = Lag(
                    max(known.messages, reader.behind_messages), max(known.nbytes, reader.behind_bytes)
                )
    return lags


def _key(ring: Ring, reader: Reader) -> QueueReader:
    channel = _CHANNEL.fullmatch(ring.name) if ring.is_channel else None
    if channel is not None:
        return QueueReader(channel["writer"], channel["group"], channel["reader"])
    queue = _QUEUE.fullmatch(ring.name)
    return QueueReader(
        "" if ring.rank is None else str(ring.rank),
        ring.name if queue is None else queue["group"],
        f"#{reader.place}" if reader.rank is None else str(reader.rank),
    )
