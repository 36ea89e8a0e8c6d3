"""Wait on both transports of a queue, shared memory and TCP, and provide null objects for a missing transport."""

from __future__ import annotations

import mmap
import select
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from shm_broadcast import _core, codec
from shm_broadcast.errors import CommTimeoutError, UsageError
from shm_broadcast.guard import QueueGuard
from shm_broadcast.reports.log_fields import LogFields
from shm_broadcast.reports.statistics import QueueStatistics
from shm_broadcast.ring.reader import RingReader
from shm_broadcast.ring.wait import SHORT_SPIN_NS, SLICE_NS
from shm_broadcast.ring.writer import RingWriter

if TYPE_CHECKING:
    from shm_broadcast.remote.reader import RemoteReader

# A call that waits for rings and connections sleeps on the rings and checks the connections between naps. Naps double
# from 50 us up to 2 ms, which costs half a percent of a core.
_LONGEST_NAP_NS: Final = 2_000_000
_SHORTEST_NAP_NS: Final = 50_000
# How long such a call sleeps if the only queues with a message are being read by other threads.
_BUSY_NAP_NS: Final = 1_000_000
# How often such a call, and any that waits for several rings, looks for dead writers.
_LOOK_S: Final = 0.4
# The system call futex_waitv takes at most this many words; there is one for each ring.
_MOST_RINGS: Final = 128


class RemoteTransport(Protocol):
    """The remote transport of a `QueueWriter`; `RemoteWriter` implements it.

    Attributes:
        fields: What every log record of this transport says.
        guard: What the owner of the queue knows, if it has one.
        is_asking: Whether the last call has ended because of what the owner has raised when it was asked.
        look_here: Called in each wait with the name of the call; raises if a reader on this host is gone.
    """

    fields: LogFields
    guard: QueueGuard | None
    is_asking: bool
    look_here: Callable[[str], None] | None

    def reserve(
        self, message: codec.Message, timeout_s: float | None, written: Callable[[], int]
    ) -> float | None:
        """Wait until `message` may be published; return what is left of `timeout_s` (seconds).

        `written` returns how many messages the local transport has. Once that includes `message`, it is sent here too,
        whatever happens to the call that writes it.
        """

    def publish(self) -> None:
        """Send the message for which `reserve` made room, and which the local transport has."""

    def complete(self) -> bool:
        """Send that message if the local transport has it; return whether it was sent."""

    def look_around(self, call: str) -> None:
        """Raise if a remote reader is gone or the owner has failed: the local transport waits in `call`."""

    def await_readers(self, timeout_s: float | None) -> None:
        """Wait until every remote reader has opened its end."""

    def absent(self) -> list[int]:
        """Return the ranks that have not opened their end."""

    def added_to(self, local: QueueStatistics) -> QueueStatistics:
        """Return `local` combined with the statistics of this transport."""

    def close(self, timeout_s: float | None = None) -> None:
        """Close the transport; wait at most about `timeout_s` seconds if given."""


class NoRemote:
    """The remote transport of a queue whose readers are all on this host: every call does nothing."""

    def __init__(self) -> None:
        """Log nothing, and ask nobody."""
        self.fields: LogFields = {}
        self.guard: QueueGuard | None = None
        self.is_asking: bool = False
        self.look_here: Callable[[str], None] | None = None

    def reserve(
        self, message: codec.Message, timeout_s: float | None, written: Callable[[], int]
    ) -> float | None:
        """Return `timeout_s` unchanged."""
        return timeout_s

    def publish(self) -> None:
        """Do nothing."""

    def complete(self) -> bool:
        """Do nothing."""
        return True

    def look_around(self, call: str) -> None:
        """Do nothing."""

    def await_readers(self, timeout_s: float | None) -> None:
        """Do nothing."""

    def absent(self) -> list[int]:
        """Return no rank."""
        return []

    def added_to(self, local: QueueStatistics) -> QueueStatistics:
        """Return `local` unchanged."""
        return local

    def close(self, timeout_s: float | None = None) -> None:
        """Do nothing."""


class NoRing(RingWriter):
    """The local transport of a queue whose readers are all on other hosts: it owns no memory."""

    def __init__(self) -> None:
        """Create no ring."""
        self._written = 0
        self.fields: LogFields = {}

    @property
    def messages(self) -> int:
        """Number of messages that were written."""
        return self._written

    def write(self, message: codec.Message, timeout_s: float | None) -> None:
        """Count the message."""
        self._written += 1

    def note_refusal(self) -> None:
        """Do nothing: no message is cut here."""

    def await_readers(self, timeout_s: float | None) -> None:
        """Do nothing."""

    def statistics(self) -> QueueStatistics:
        """Return how many messages were written; the rest is zeros.

        A message counts once it is written: if a handler interrupts its sending, the thread sends it soon.
        """
        return QueueStatistics(self._written, 0, 0, 0.0, 0, ())

    def close(self) -> None:
        """Do nothing."""


def take_any(readers: Sequence[RingReader | RemoteReader], timeout_s: float | None) -> tuple[int, Any]:
    """Wait for several readers; return (index of a reader, its next object).

    If another thread or a signal handler takes a message first, this call goes on waiting for all readers.

    Args:
        readers: The readers of this process, of either transport.
        timeout_s: Deadline in seconds; None waits for ever.

    Raises:
        CommTimeoutError: No reader had a message in time; the queues stay usable.
        PeerLostError: A reader's writer is gone.
        ClosedError, GroupBrokenError: One of the readers cannot be used.
        DecodeError: The message cannot be decoded; the next one can be read.
        UsageError: One of the readers cannot be used here, or more than 128 readers use shared memory.
    """
    start = time.monotonic()
    places, connections = _places(readers)
    memories, indices = tuple(memory for memory, _ in places), tuple(index for _, index in places)
    # Begin one place further with each message read, so that a busy writer cannot starve the others.
    first = sum(reader.messages for reader in readers)
    order = [(first + offset) % len(readers) for offset in range(len(readers))]
    far = [index for index in order if not isinstance(readers[index], RingReader)]
    longest_ns = _LONGEST_NAP_NS if far else SLICE_NS
    nap_ns = _SHORTEST_NAP_NS if far else longest_ns
    writers = _Writers(readers)
    looks_s = _LOOK_S
    is_found = True
    while True:
        # Look at every ring only if the native wait has found something, or after `_LOOK_S` for dead writers.
        looks_at_all = is_found
        waited_s = time.monotonic() - start
        if waited_s >= looks_s:
            looks_s = waited_s + _LOOK_S
            looks_at_all = is_found or writers.have_news()
        is_busy = False
        for index in order if looks_at_all else far:
            if readers[index].is_ready():
                # Between taking a message and returning it no signal handler can run, which might raise.
                is_taken, value = readers[index].try_read("dequeue_any")
                if is_taken:
                    return index, value
                is_busy = is_busy or readers[index].is_busy
        waited_s = time.monotonic() - start
        if timeout_s is not None and waited_s >= timeout_s:
            _raise_late(readers, timeout_s)
        left_ns = SLICE_NS if timeout_s is None else int(min(SLICE_NS, (timeout_s - waited_s) * 1e9))
        if is_busy:
            # The ring shows a message until the other thread is done with it, for example until a loan ends.
            time.sleep(min(_BUSY_NAP_NS, left_ns) / 1e9)
        elif places:
            times = SHORT_SPIN_NS, min(nap_ns, left_ns), int(waited_s * 1e9)
            is_found = _core.ring_wait_any(memories, indices, *times)
            nap_ns = min(2 * nap_ns, longest_ns)
        else:
            connections.poll(left_ns / 1e6 + 1)


def _places(
    readers: Sequence[RingReader | RemoteReader],
) -> tuple[list[tuple[mmap.mmap, int]], select.poll]:
    """Return the places of the readers in rings, and a poll of the connections of the others.

    Raises:
        UsageError: There are more rings than a thread can wait for.
        ClosedError, GroupBrokenError: One of the readers cannot be used.
    """
    connections = select.poll()
    places = []
    for reader in readers:
        reader.check("dequeue_any")
        if isinstance(reader, RingReader):
            places.append(reader.place())
        else:
            for descriptor in reader.descriptors:
                connections.register(descriptor, select.POLLIN)
    if len(places) > _MOST_RINGS:
        raise UsageError(
            f"dequeue_any takes at most {_MOST_RINGS} queues in shared memory, got {len(places)}"
        )
    return places, connections


class _Writers:
    """Tells at the cost of one system call whether a writer of local readers may have ended."""

    def __init__(self, readers: Sequence[RingReader | RemoteReader]) -> None:
        """Do nothing yet: most calls find a message before they look."""
        self._readers = [reader for reader in readers if isinstance(reader, RingReader)]
        self._poll: select.poll | None = None

    def have_news(self) -> bool:
        """Return whether to look at each reader: a process has ended, or the owner of a queue is to be asked."""
        if any(reader.guard is not None for reader in self._readers):
            return True
        if self._poll is None:
            self._poll = select.poll()
            for reader in self._readers:
                for descriptor in reader.writer_descriptors():
                    self._poll.register(descriptor, select.POLLIN)
        return bool(self._poll.poll(0))


def _raise_late(readers: Sequence[RingReader | RemoteReader], timeout_s: float) -> NoReturn:
    for reader in readers:
        if isinstance(reader, RingReader) and reader.endpoint.is_assembling:
            reader.raise_late("dequeue_any", timeout_s)
    names = ", ".join(reader.name for reader in readers)
    raise CommTimeoutError(f"dequeue_any on {names}: no message within {timeout_s:.1f} s")
