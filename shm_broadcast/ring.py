"""The two ends of one ring: records in, records out, and waiting that always ends.

The protocol is in the native core (`csrc/ring.hpp`) and explained in `DESIGN.md`; here are deadlines,
dead peers, signals, `close` from another thread, and errors that name who is behind.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from shm_broadcast import _core, codec
from shm_broadcast.errors import ClosedError, CommTimeoutError, GroupBrokenError, PeerLostError, UsageError
from shm_broadcast.liveness import PeerWatch, fork_count
from shm_broadcast.segment import Segment
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.wait import SHORT_SPIN_NS, SLICE_NS, Pacer

logger = logging.getLogger(__name__)

_LEFT: Final = 2  # ring::kLeft
_DATA, _ENDED = 1, 2

# Takes the place of the mapping of a closed end; every native function refuses it.
_NOTHING: Final = mmap.mmap(-1, mmap.PAGESIZE)


class ReaderStatistics(msgspec.Struct, frozen=True):
    """How far one reader is.

    Attributes:
        rank: Its rank.
        behind_messages: Messages that it has not given back.
        behind_bytes: Bytes that it has not given back.
        progress_s: Seconds since it last gave a message back; None if it never has.
        is_attached: Whether it has come and not left.
    """

    rank: int
    behind_messages: int
    behind_bytes: int
    progress_s: float | None
    is_attached: bool


class QueueStatistics(msgspec.Struct, frozen=True):
    """What one end of a queue has done so far.

    Attributes:
        messages: Messages written or read by this end.
        nbytes: Bytes of their frames.
        waits: Calls that had to wait.
        waited_s: Seconds that they waited.
        capacity_bytes: Size of the ring.
        readers: Every reader, as the shared memory shows it.
    """

    messages: int
    nbytes: int
    waits: int
    waited_s: float
    capacity_bytes: int
    readers: tuple[ReaderStatistics, ...]


class RingEnd:
    """What both ends share."""

    role: str

    def __init__(
        self,
        name: str,
        segment: Segment,
        ranks: tuple[int, ...],
        watch: PeerWatch,
        settings: BroadcastSettings,
    ) -> None:
        """Use a formatted segment.

        Args:
            name: The queue's name, for texts.
            segment: Owned by this object from now on.
            ranks: The readers' ranks, in the order of their places in the ring.
            watch: The other end's processes, by rank; the writer's may be -1.
            settings: How to wait.
        """
        self.name = name
        self.ranks = ranks
        self._segment = segment
        self._memory = segment.memory
        self._watch = watch
        self._settings = settings
        self._closing = False
        self._cause: BaseException | None = None
        self._forks = fork_count()
        # Held by every call, so that `close` from another thread lets the memory go behind them; re-entrant,
        # as a lease may be closed from inside.
        self._calls = threading.RLock()
        self._messages = 0
        self._nbytes = 0
        self._waits = 0
        self._waited_ns = 0

    def _where(self, call: str) -> str:
        return f"{call} on queue {self.name!r} ({self.role}, message #{self._messages + 1})"

    def check(self, call: str) -> None:
        """Raise unless this end can be used by this process now."""
        if self._forks != fork_count():
            raise UsageError(f"{self._where(call)}: the queue belongs to the process that forked this one")
        if self._closing:
            raise ClosedError(f"{self._where(call)}: the queue was closed")
        if self._cause is not None:
            raise GroupBrokenError(
                f"{self._where(call)}: an earlier failure made the queue unusable, close it: {self._cause}"
            ) from self._cause

    def _readers(self) -> tuple[ReaderStatistics, ...]:
        published, messages, _, _, readers = _core.ring_state(self._memory)
        now = time.monotonic_ns()
        return tuple(
            ReaderStatistics(
                rank,
                max(messages - read, 0),
                max(published - consumed, 0),
                (now - progress) / 1e9 if progress else None,
                state == 1,
            )
            for rank, (consumed, read, progress, _, state) in zip(self.ranks, readers, strict=True)
        )

    def statistics(self) -> QueueStatistics:
        """Return what this end has done, and how far each reader is; also when the queue is broken."""
        if self._closing or self._forks != fork_count():
            self.check("statistics")
        _, _, capacity, _ = _core.ring_facts(self._memory)
        return QueueStatistics(
            self._messages, self._nbytes, self._waits, self._waited_ns / 1e9, capacity, self._readers()
        )

    def _describe_reader(self, reader: ReaderStatistics) -> str:
        progress = (
            "never read" if reader.progress_s is None else f"last progress {reader.progress_s:.1f} s ago"
        )
        state = self._watch.describe(reader.rank)
        if not reader.is_attached and reader.progress_s is None:
            state = "has not come"
        return f"rank {reader.rank} ({state}, {reader.behind_messages} behind, {progress})"

    def _warn(self, call: str, waited_s: float, text: str) -> None:
        logger.warning("%s: waiting for %.0f s: %s", self._where(call), waited_s, text)

    def _fail(self, error: BaseException) -> None:
        if self._cause is None:
            self._cause = error

    def _release_memory(self) -> None:
        """Let the mapping go; views of it that a lease left behind keep it until they die."""
        self._watch.close()
        self._memory = _NOTHING
        self._segment.close()


class RingWriter(RingEnd):
    """The writing end of a ring."""

    role = "writer"

    def write(self, message: codec.Message, timeout_s: float | None) -> None:
        """Publish a message; return when every byte of it is in the ring."""
        total = message.nbytes
        with self._calls:
            self.check("enqueue")
            done = _core.ring_write(self._memory, message.header, message.buffers, 0, 0, 0)
            if done < total:
                self._write_rest(message, done, timeout_s)
            self._messages += 1
            self._nbytes += total

    def _write_rest(self, message: codec.Message, done: int, timeout_s: float | None) -> None:
        start = time.monotonic()
        deadline = None if timeout_s is None else start + timeout_s
        spin_ns = (
            SLICE_NS
            if self._settings.wait == "spin"
            else SHORT_SPIN_NS
            if self._settings.wait == "adaptive"
            else 0
        )
        next_warning = self._settings.warn_after_s
        self._waits += 1
        try:
            while done < message.nbytes:
                before = done
                park_ns = SLICE_NS
                if deadline is not None:
                    park_ns = max(0, min(SLICE_NS, int((deadline - time.monotonic()) * 1e9)))
                done = _core.ring_write(
                    self._memory, message.header, message.buffers, done, min(spin_ns, park_ns), park_ns
                )
                if done > before:
                    continue
                waited = time.monotonic() - start
                self._look_around(waited)
                if deadline is not None and time.monotonic() >= deadline:
                    self._raise_late(timeout_s or 0.0)
                if waited >= next_warning:
                    self._warn("enqueue", waited, self._laggards())
                    next_warning += self._settings.warn_after_s
        except BaseException as error:
            # With parts of the message in the ring nobody can continue behind them. A message of which
            # nothing was written has merely not been sent.
            if done > 0 or not isinstance(error, CommTimeoutError):
                self._fail(error)
            raise
        finally:
            self._waited_ns += int((time.monotonic() - start) * 1e9)

    def _look_around(self, waited_s: float) -> None:
        del waited_s
        if self._closing:
            raise ClosedError(f"{self._where('enqueue')}: the queue was closed while the call waited")
        lost = self._watch.lost()
        if lost:
            who = ", ".join(
                self._describe_reader(reader) for reader in self._readers() if reader.rank in lost
            )
            raise PeerLostError(f"{self._where('enqueue')}: lost reader {who}; close the queue", peers=lost)
        left = [
            rank
            for rank, (_, _, _, _, state) in zip(self.ranks, _core.ring_state(self._memory)[4], strict=True)
            if state == _LEFT
        ]
        if left:
            raise PeerLostError(f"{self._where('enqueue')}: rank(s) {left} closed the queue", peers=left)

    def _slowest(self) -> list[ReaderStatistics]:
        readers = self._readers()
        most = max(reader.behind_bytes for reader in readers)
        return [reader for reader in readers if reader.behind_bytes == most]

    def _laggards(self) -> str:
        return "no room, behind are " + ", ".join(self._describe_reader(reader) for reader in self._slowest())

    def _raise_late(self, timeout_s: float) -> None:
        slowest = self._slowest()
        raise CommTimeoutError(
            f"{self._where('enqueue')}: {self._laggards()}, within {timeout_s:.1f} s",
            missing=[reader.rank for reader in slowest],
        )

    def close(self) -> None:
        """Tell the readers that nothing follows, and unmap. Idempotent; wakes a waiting call."""
        if self._closing or self._forks != fork_count():
            return
        self._closing = True
        _core.ring_end(self._memory, -1)
        with self._calls:
            self._release_memory()


class RingReader(RingEnd):
    """One reading end of a ring."""

    def __init__(
        self,
        name: str,
        segment: Segment,
        ranks: tuple[int, ...],
        watch: PeerWatch,
        settings: BroadcastSettings,
        index: int,
        writer: int = -1,
    ) -> None:
        """Take place `index` of the ring, whose writer has rank `writer`; see `RingEnd`."""
        super().__init__(name, segment, ranks, watch, settings)
        self.rank = ranks[index]
        self.role = f"reader, rank {self.rank}"
        self._index = index
        self._writer = writer
        self._pacer = Pacer(settings.wait)
        _core.ring_attach(self._memory, index)

    def read(self, timeout_s: float | None, type_: Any) -> Any:
        """Wait for the next message, copy it out and return its object."""
        with self._calls:
            self.check("dequeue")
            memory, index = self._memory, self._index
            if _core.ring_wait(memory, index, 0, 0) != _DATA:
                self._await("dequeue", timeout_s)
            window, flags, _, total = _core.ring_take(memory, index)
            self._messages += 1
            self._nbytes += total
            if flags == 0:
                try:
                    return codec.decode(memoryview(window), type_)
                finally:
                    _core.ring_release(memory, index)
            return codec.decode(self._assemble(window, flags, total), type_)

    @contextmanager
    def lease(self, timeout_s: float | None) -> Iterator[Any]:
        """Yield the next object without copying its arrays and tensors, which alias the ring until the end."""
        with self._calls:
            self.check("lease")
            memory, index = self._memory, self._index
            if _core.ring_wait(memory, index, 0, 0) != _DATA:
                self._await("lease", timeout_s)
            window, flags, _, total = _core.ring_take(memory, index)
            self._messages += 1
            self._nbytes += total
            if flags != 0:
                # It came in parts, so there is one copy already, which nothing else uses.
                yield codec.decode(self._assemble(window, flags, total), copy=False)
                return
            try:
                yield codec.decode(memoryview(window), copy=False)
            finally:
                _core.ring_release(memory, index)

    def _assemble(self, window: _core.Window, flags: int, total: int) -> bytearray:
        """Copy a message that came in parts; the writer fills the next part meanwhile."""
        frame = bytearray(total)
        done = 0
        try:
            while True:
                part = len(window)
                frame[done : done + part] = memoryview(window)
                done += part
                del window
                _core.ring_release(self._memory, self._index)
                if flags != _core.RING_PART:
                    return frame
                if _core.ring_wait(self._memory, self._index, SHORT_SPIN_NS * 4, 0) != _DATA:
                    self._await("dequeue", None)
                window, flags, _, _ = _core.ring_take(self._memory, self._index)
        except BaseException as error:
            self._fail(error)
            raise

    def place(self) -> tuple[mmap.mmap, int]:
        """Return the mapping and this reader's place in it, for waiting on several rings at once."""
        return self._memory, self._index

    def poll(self) -> bool:
        """Return whether a message is there. Does not wait."""
        return _core.ring_wait(self._memory, self._index, 0, 0) == _DATA

    def _await(self, call: str, timeout_s: float | None) -> None:
        start = time.monotonic_ns()
        limit = None if timeout_s is None else start + int(timeout_s * 1e9)
        next_warning = self._settings.warn_after_s
        now = start
        self._waits += 1
        while True:
            spin_ns, park_ns = self._pacer.next_stage(now)
            if limit is not None:
                left = max(limit - now, 0)
                spin_ns, park_ns = min(spin_ns, left), min(park_ns, left)
            status = _core.ring_wait(self._memory, self._index, spin_ns, park_ns)
            now = time.monotonic_ns()
            if status == _DATA:
                self._waited_ns += now - start
                self._pacer.arrived(now)
                return
            if self._closing:
                raise ClosedError(f"{self._where(call)}: the queue was closed while the call waited")
            if status == _ENDED:
                raise ClosedError(f"{self._where(call)}: the writer closed the queue")
            self.raise_if_lost(call)
            if limit is not None and now >= limit:
                raise CommTimeoutError(
                    f"{self._where(call)}: no message from {self._describe_writer()} within "
                    f"{timeout_s:.1f} s",
                    missing=() if self._writer < 0 else (self._writer,),
                )
            waited_s = (now - start) / 1e9
            if waited_s >= next_warning:
                self._warn(call, waited_s, f"no message from {self._describe_writer()}")
                next_warning += self._settings.warn_after_s

    def _describe_writer(self) -> str:
        rank = "" if self._writer < 0 else f"rank {self._writer}, "
        return f"the writer ({rank}{self._watch.describe(self._writer)})"

    def raise_if_lost(self, call: str) -> None:
        """Raise `PeerLostError` if the writer died and nothing is left of what it wrote."""
        if not self._watch.lost() or self.poll():
            # What a writer published before it died is still read.
            return
        error = PeerLostError(
            f"{self._where(call)}: lost {self._describe_writer()}; close the queue",
            peers=() if self._writer < 0 else (self._writer,),
        )
        self._fail(error)
        raise error

    def close(self) -> None:
        """Leave, so that the writer does not wait for this reader, and unmap. Idempotent; wakes a waiting call."""
        if self._closing or self._forks != fork_count():
            return
        self._closing = True
        _core.ring_end(self._memory, self._index)
        with self._calls:
            self._release_memory()


def await_any(readers: Sequence[RingReader], timeout_s: float | None) -> int:
    """Return the index of a reader that has a message, or whose queue has ended; raises as a read would."""
    start = time.monotonic()
    for reader in readers:
        reader.check("dequeue_any")
    places = [reader.place() for reader in readers]
    memories, indices = tuple(memory for memory, _ in places), tuple(index for _, index in places)
    first = 0
    while True:
        # Each turn begins behind the last that was served, so that a busy writer cannot starve the others.
        for offset in range(len(readers)):
            index = (first + offset) % len(readers)
            status = _core.ring_wait(memories[index], indices[index], 0, 0)
            if status != 0:
                return index
            readers[index].raise_if_lost("dequeue_any")
        waited = time.monotonic() - start
        if timeout_s is not None and waited >= timeout_s:
            names = ", ".join(reader.name for reader in readers)
            raise CommTimeoutError(f"dequeue_any on {names}: no message within {timeout_s:.1f} s")
        park_ns = SLICE_NS if timeout_s is None else min(SLICE_NS, int((timeout_s - waited) * 1e9))
        _core.ring_wait_any(memories, indices, SHORT_SPIN_NS, park_ns)
