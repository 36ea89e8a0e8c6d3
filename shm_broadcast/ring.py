"""What both ends of one ring share, and the writing one: records in, and waiting that always ends.

The protocol is in the native core (`csrc/ring.hpp`) and explained in `DESIGN.md`; here are deadlines,
dead peers, signals, `close` from another thread, and errors that name who is behind. `ring_reader.py` is the other end.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

from shm_broadcast import _core, codec
from shm_broadcast.errors import (
    ClosedError,
    CommError,
    CommTimeoutError,
    GroupBrokenError,
    InternalError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.liveness import PeerWatch, fork_count
from shm_broadcast.segment import Segment
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.statistics import QueueStatistics, ReaderStatistics
from shm_broadcast.wait import SHORT_SPIN_NS, SLICE_NS

logger: logging.Logger = logging.getLogger(__name__)

_LEFT: Final = 2  # ring::kLeft
_LINE: Final = 64  # ring::kLine: records and their headers are multiples of it

# Takes the place of the mapping of a closed end; every native function refuses it.
_NOTHING: Final = mmap.mmap(-1, mmap.PAGESIZE)


class RingEnd:
    """What both ends share."""

    role: str
    _port: _core.WritePort | _core.ReadPort

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
        self._waits = 0

    def _where(self, call: str) -> str:
        return f"{call} on queue {self.name!r} ({self.role}, message #{self._port.messages + 1})"

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
        try:
            _, _, capacity, _ = _core.ring_facts(self._memory)
            readers = self._readers()
        except ValueError as error:
            # Another thread has closed this end meanwhile, or there is no ring any more.
            self.check("statistics")
            self._raise_corrupt("statistics", error)
        port = self._port
        return QueueStatistics(
            port.messages, port.nbytes, self._waits, port.waited_ns / 1e9, capacity, readers
        )

    def _describe_reader(self, reader: ReaderStatistics) -> str:
        progress = (
            "never read" if reader.progress_s is None else f"last progress {reader.progress_s:.1f} s ago"
        )
        state = self._watch.describe(reader.rank)
        if not reader.is_attached and reader.progress_s is None:
            state = f"{state}, not attached yet" if self._watch.watches(reader.rank) else "has not come"
        return f"rank {reader.rank} ({state}, {reader.behind_messages} behind, {progress})"

    def _warn(self, call: str, waited_s: float, text: str) -> None:
        logger.warning("%s: waiting for %.0f s: %s", self._where(call), waited_s, text)

    def _raise_corrupt(self, call: str, error: object) -> NoReturn:
        """Raise for a ring whose own words make no sense: nothing behind them can be found."""
        corrupt = InternalError(f"{self._where(call)}: the shared memory was overwritten: {error}")
        self._fail(corrupt)
        raise corrupt from (error if isinstance(error, BaseException) else None)

    def _fail(self, error: BaseException) -> None:
        self._port.hold(True)
        if self._cause is None:
            self._cause = error

    def _end(self, who: int) -> None:
        try:
            _core.ring_end(self._memory, who)
        except ValueError as error:
            # The ring was overwritten; the other end is told by our death, or by its own errors.
            logger.warning("%s: %s", self._where("close"), str(error))

    def _release_memory(self) -> None:
        """Let the mapping go; views of it that a lease left behind keep it until they die."""
        self._watch.close()
        self._port.close()
        self._memory = _NOTHING
        self._segment.close()
        # The calls in its traceback may hold windows on the memory.
        self._cause = None


# How long a writer spins and then parks before it looks around again, in ns.
_WRITER_STAGES: Final = {"spin": (SLICE_NS, 0), "adaptive": (SHORT_SPIN_NS, SLICE_NS), "park": (0, SLICE_NS)}


class RingWriter(RingEnd):
    """The writing end of a ring."""

    role = "writer"
    _port: _core.WritePort

    def __init__(
        self,
        name: str,
        segment: Segment,
        ranks: tuple[int, ...],
        watch: PeerWatch,
        settings: BroadcastSettings,
    ) -> None:
        """Write into a formatted segment; see `RingEnd`."""
        super().__init__(name, segment, ranks, watch, settings)
        self._port = _core.WritePort(self._memory, codec.describe)
        # Sends what is short and fits at once; False leaves it to `write`.
        self.send: Callable[[Any], bool] = self._port.send

    def direct_call(self, source: int, general: Callable[..., Any]) -> Callable[..., Any]:
        """Return `broadcast_object` of a group in which this rank is `source` as one native call.

        It sends as `send` does, and ends in `general` where that does not.
        """
        self._port.direct(source, general)
        return self._port.broadcast_object

    def write(self, message: codec.Message, timeout_s: float | None) -> None:
        """Publish a message; return when every byte of it is in the ring."""
        total = message.nbytes
        with self._calls:
            self.check("enqueue")
            while self._port.is_busy:
                # Another thread copies a message into the ring, which takes less than 1 ms.
                time.sleep(0.0001)
            self._port.hold(True)
            try:
                done = _core.ring_write(self._memory, message.header, message.buffers, 0, 0, 0)
                if done < total:
                    self._write_rest(message, done, timeout_s)
            except CommError:
                raise
            except ValueError as error:
                self._raise_corrupt("enqueue", error)
            except BaseException as error:
                # A signal may have come with parts of the message in the ring: nobody can continue behind them.
                if total > _core.ring_facts(self._memory)[3]:
                    self._fail(error)
                raise
            finally:
                self._port.hold(self._closing or self._cause is not None)
            if self._closing:
                # The other thread may have ended the queue before this message was in it.
                raise ClosedError(f"{self._where('enqueue')}: the queue was closed during the call")
            self._port.messages += 1
            self._port.nbytes += total

    def _write_rest(self, message: codec.Message, done: int, timeout_s: float | None) -> None:
        start = time.monotonic()
        deadline = None if timeout_s is None else start + timeout_s
        spins, parks = _WRITER_STAGES[self._settings.wait]
        next_warning = self._settings.warn_after_s
        self._waits += 1
        try:
            while done < message.nbytes:
                before, limit = done, SLICE_NS
                if deadline is not None:
                    limit = max(0, min(SLICE_NS, int((deadline - time.monotonic()) * 1e9)))
                done = _core.ring_write(
                    self._memory, message.header, message.buffers, done, min(spins, limit), min(parks, limit)
                )
                if done > before:
                    continue
                if self._closing:
                    raise ClosedError(f"{self._where('enqueue')}: the queue was closed while the call waited")
                self.raise_if_lost("enqueue")
                if deadline is not None and time.monotonic() >= deadline:
                    self._raise_late(message.nbytes, timeout_s or 0.0)
                waited = time.monotonic() - start
                if waited >= next_warning:
                    self._warn("enqueue", waited, self._no_room(message.nbytes))
                    next_warning += self._settings.warn_after_s
        except CommError as error:
            # A message of which nothing was written has merely not been sent.
            if done > 0:
                self._fail(error)
            raise
        finally:
            self._port.waited_ns += int((time.monotonic() - start) * 1e9)

    def raise_if_lost(self, call: str) -> None:
        """Raise `PeerLostError` if a reader has died or has closed its end. Does not wait."""
        lost = self._watch.lost()
        states = _core.ring_state(self._memory)[4]
        left = [rank for rank, reader in zip(self.ranks, states, strict=True) if reader[4] == _LEFT]
        gone = sorted({*lost, *left})
        if not gone:
            return
        who = ", ".join(
            self._describe_reader(reader) + (" closed the queue" if reader.rank in left else "")
            for reader in self._readers()
            if reader.rank in gone
        )
        error = PeerLostError(f"{self._where(call)}: lost reader {who}; close the queue", peers=gone)
        self._fail(error)
        raise error

    def await_readers(self, timeout_s: float | None) -> None:
        """Return when every reader is attached."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while absent := [reader for reader in self.statistics().readers if not reader.is_attached]:
            self.raise_if_lost("wait_until_ready")
            if deadline is not None and time.monotonic() >= deadline:
                who = ", ".join(map(self._describe_reader, absent))
                raise CommTimeoutError(
                    f"{self._where('wait_until_ready')}: no reader {who} within {timeout_s:.1f} s",
                    missing=sorted(reader.rank for reader in absent),
                )
            time.sleep(0.001)

    def _laggards(self, nbytes: int) -> list[ReaderStatistics]:
        """Return the readers that leave no room for the next record of a message of `nbytes`."""
        _, _, capacity, longest = _core.ring_facts(self._memory)
        payload = nbytes if nbytes <= longest else longest // 2 // _LINE * _LINE
        record = _LINE + (payload + _LINE - 1) // _LINE * _LINE
        readers = self._readers()
        # Where the end of the ring has to be skipped, only the slowest is sure to be in the way.
        limit = min(capacity - record + 1, max(reader.behind_bytes for reader in readers))
        return [reader for reader in readers if reader.behind_bytes >= limit]

    def _no_room(self, nbytes: int) -> str:
        return "no room, behind are " + ", ".join(map(self._describe_reader, self._laggards(nbytes)))

    def _raise_late(self, nbytes: int, timeout_s: float) -> None:
        raise CommTimeoutError(
            f"{self._where('enqueue')}: {self._no_room(nbytes)}, within {timeout_s:.1f} s",
            missing=sorted(reader.rank for reader in self._laggards(nbytes)),
        )

    def close(self) -> None:
        """Tell the readers that nothing follows, and unmap. Idempotent; wakes a waiting call."""
        if self._closing or self._forks != fork_count():
            return
        self._closing = True
        self._port.hold(True)
        self._end(-1)
        with self._calls:
            self._release_memory()
