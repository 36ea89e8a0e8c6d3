"""The two legs of a queue, shared memory and TCP: what stands in for a missing one, and waiting on both kinds."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from shm_broadcast import _core, codec
from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.ring import RingWriter
from shm_broadcast.ring_reader import RingReader
from shm_broadcast.statistics import QueueStatistics
from shm_broadcast.wait import SHORT_SPIN_NS, SLICE_NS

if TYPE_CHECKING:
    from shm_broadcast.remote_reader import RemoteReader

# Who waits for rings and connections at once sleeps on the rings and looks at the connections this often at least:
# half a percent of a core.
_LONGEST_NAP_NS: Final = 2_000_000
_SHORTEST_NAP_NS: Final = 50_000


class RemoteLeg(Protocol):
    """What a `QueueWriter` asks of its remote leg; `RemoteWriter` is one."""

    def reserve(self, nbytes: int, timeout_s: float | None) -> float | None:
        """Return what is left of `timeout_s` when a message of `nbytes` may be published."""

    def publish(self, message: codec.Message) -> None:
        """Send a message for which there is room."""

    def await_readers(self, timeout_s: float | None) -> None:
        """Return when every remote reader has come."""

    def absent(self) -> list[int]:
        """Return the ranks that have not."""

    def added_to(self, local: QueueStatistics) -> QueueStatistics:
        """Return the statistics of the local leg with those of this one."""

    def close(self, timeout_s: float | None = None) -> None:
        """End the leg, within about `timeout_s` if that is given."""


class NoRemote:
    """The remote leg of a queue whose readers are all on this host."""

    def reserve(self, nbytes: int, timeout_s: float | None) -> float | None:
        """Return all of `timeout_s`."""
        return timeout_s

    def publish(self, message: codec.Message) -> None:
        """Send to nobody."""

    def await_readers(self, timeout_s: float | None) -> None:
        """Wait for nobody."""

    def absent(self) -> list[int]:
        """Return nobody."""
        return []

    def added_to(self, local: QueueStatistics) -> QueueStatistics:
        """Return them as they are."""
        return local

    def close(self, timeout_s: float | None = None) -> None:
        """Do nothing."""


class NoRing(RingWriter):
    """The local leg of a queue whose readers are all on other hosts: it has no memory."""

    def __init__(self) -> None:
        """Hold nothing."""

    def write(self, message: codec.Message, timeout_s: float | None) -> None:
        """Write to nobody."""

    def await_readers(self, timeout_s: float | None) -> None:
        """Wait for nobody."""

    def statistics(self) -> QueueStatistics:
        """Return zeros."""
        return QueueStatistics(0, 0, 0, 0.0, 0, ())

    def close(self) -> None:
        """Do nothing."""


def await_any(readers: Sequence[RingReader | RemoteReader], timeout_s: float | None) -> int:
    """Return the index of a reader that has a message, or whose queue is over; raises as a read would."""
    start = time.monotonic()
    poll = select.poll()
    has_remote = False
    places = []
    for reader in readers:
        reader.check("dequeue_any")
        if isinstance(reader, RingReader):
            places.append(reader.place())
        else:
            has_remote = True
            for descriptor in reader.descriptors:
                poll.register(descriptor, select.POLLIN)
    memories, indices = tuple(memory for memory, _ in places), tuple(index for _, index in places)
    # Each call begins one place further, so that a busy writer cannot starve the others.
    first = sum(reader.messages for reader in readers)
    nap_ns = _SHORTEST_NAP_NS if has_remote else SLICE_NS
    while True:
        for offset in range(len(readers)):
            index = (first + offset) % len(readers)
            if readers[index].is_ready():
                return index
        waited = time.monotonic() - start
        if timeout_s is not None and waited >= timeout_s:
            names = ", ".join(reader.name for reader in readers)
            raise CommTimeoutError(f"dequeue_any on {names}: no message within {timeout_s:.1f} s")
        left_ns = SLICE_NS if timeout_s is None else min(SLICE_NS, int((timeout_s - waited) * 1e9))
        if places:
            _core.ring_wait_any(memories, indices, SHORT_SPIN_NS, min(nap_ns, left_ns))
            nap_ns = min(2 * nap_ns, _LONGEST_NAP_NS if has_remote else SLICE_NS)
        else:
            poll.poll(left_ns / 1e6 + 1)
