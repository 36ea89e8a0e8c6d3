"""The two ends of one ring: records in, records out, and waiting that always ends.

The protocol is in the native core (`csrc/ring.hpp`) and explained in `DESIGN.md`; here are deadlines,
dead peers, signals, `close` from another thread, and errors that name who is behind.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from shm_broadcast.wait import SHORT_SPIN_NS, SLICE_NS, Pacer

logger: logging.Logger = logging.getLogger(__name__)

_LEFT: Final = 2  # ring::kLeft
_DATA, _ENDED = 1, 2
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


class RingReader(RingEnd):
    """One reading end of a ring."""

    _port: _core.ReadPort

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
        self.rank: int = ranks[index]
        self.role: str = f"reader, rank {self.rank}"
        self._index = index
        self._writer = writer
        self._pacer = Pacer(settings.wait)
        self._noted_ns = 0
        self._is_leasing = False
        self._looked_ns = 0
        self._port = _core.ReadPort(self._memory, index, codec.build_owned)
        _core.ring_attach(self._memory, index)

    def read(self, timeout_s: float | None = None, type_: Any = None) -> Any:
        """Wait for the next message, copy it out and return its object."""
        try:
            with self._calls:
                value = self._port.receive(0, 0, 0)
                if value is _core.NOTHING:
                    value = self._await("dequeue", timeout_s, self._port.receive)
        except (CommError, _core.RingCorrupt) as error:
            self._raise("dequeue", error)
        except Exception as error:  # noqa: BLE001 - raises
            codec.raise_decode_error(error)
        return value if type_ is None else codec.convert(value, type_)

    def try_read(self) -> tuple[bool, Any]:
        """Return (True, the next object), or (False, None) if it is not there, or not whole yet."""
        try:
            with self._calls:
                value = self._port.receive(0, 0, 0)
                if value is not _core.NOTHING:
                    return True, value
                self._check_lease("try_dequeue")
                self._check_end("try_dequeue", self._status("try_dequeue"))
                self._look_rarely("try_dequeue")
                return False, None
        except (CommError, _core.RingCorrupt) as error:
            self._raise("try_dequeue", error)
        except Exception as error:  # noqa: BLE001 - raises
            codec.raise_decode_error(error)

    def _raise(self, call: str, error: CommError | _core.RingCorrupt) -> NoReturn:
        if isinstance(error, CommError):
            raise error
        self._raise_corrupt(call, error)

    @contextmanager
    def lease(self, timeout_s: float | None) -> Iterator[Any]:
        """Yield the next object without copying its arrays and tensors, which alias the ring until the end."""
        with self._calls:
            memory, index = self._memory, self._index
            self._check_lease("lease")
            if self._status("lease") != _DATA:
                self._await("lease", timeout_s, self._wait)
            window = self._take_whole("lease")
            if window is None:
                # It comes in parts, so there will be one copy, which nothing else uses.
                yield self.read(timeout_s)
                return
            self._is_leasing = True
            self._port.hold(True)
            try:
                yield codec.decode(memoryview(window), copy=False)
            finally:
                self._is_leasing = False
                self._port.hold(self._cause is not None)
                _core.ring_release(memory, index)

    def _take_whole(self, call: str) -> _core.Window | None:
        """Return a window on the next message, which is there; None if it comes in parts."""
        if self._port.is_assembling:
            return None
        try:
            window, flags, _, total = _core.ring_take(self._memory, self._index)
        except ValueError as error:
            self._raise_corrupt(call, error)
        if flags not in (0, _core.RING_STREAMED):
            return None
        self._port.messages += 1
        self._port.nbytes += total
        return window

    def _wait(self, spin_ns: int, park_ns: int, _nap_ns: int) -> object:
        """Wait as `receive` does, but take nothing."""
        park_ns = min(park_ns, SLICE_NS)
        status = _core.ring_wait(self._memory, self._index, spin_ns, park_ns)
        return None if status == _DATA else _core.NOTHING

    def _status(self, call: str) -> int:
        """Return _DATA, _ENDED or 0; raise if this end cannot be used."""
        self.check(call)
        try:
            return _core.ring_wait(self._memory, self._index, 0, 0)
        except ValueError as error:
            self._raise_corrupt(call, error)

    def _check_lease(self, call: str) -> None:
        if self._is_leasing:
            raise UsageError(f"{self._where(call)}: a lease is open; what it lent is still the next message")

    def _check_end(self, call: str, status: int) -> None:
        if status == _ENDED:
            raise ClosedError(f"{self._where(call)}: the writer closed the queue")

    def _look_rarely(self, call: str) -> None:
        """Raise if the writer is lost; looks once in a slice, as a caller may ask a million times a second."""
        now = time.monotonic_ns()
        if now - self._looked_ns >= SLICE_NS:
            self._looked_ns = now
            self.raise_if_lost(call)

    @property
    def messages(self) -> int:
        """How many messages this end has read."""
        return self._port.messages

    def place(self) -> tuple[mmap.mmap, int]:
        """Return the mapping and this reader's place in it, for waiting on several rings at once."""
        return self._memory, self._index

    def poll(self) -> bool:
        """Return whether a message is there. Does not wait."""
        return _core.ring_wait(self._memory, self._index, 0, 0) == _DATA

    def _await(self, call: str, timeout_s: float | None, take: Callable[[int, int, int], Any]) -> Any:
        """Return what `take` returns, called until that is something; it waits for as long as it is told.

        What happens behind a message's arrival counts, so what can be is done before the next wait.
        """
        self._check_lease(call)
        self._check_end(call, self._status(call))
        if self._noted_ns != self._port.arrived_ns:
            self._noted_ns = self._port.arrived_ns
            self._pacer.arrived(self._noted_ns)
        start = now = time.monotonic_ns()
        limit = None if timeout_s is None else start + int(timeout_s * 1e9)
        next_warning = self._settings.warn_after_s
        self._waits += 1
        while True:
            spin_ns, park_ns, nap_ns = self._pacer.next_stage(now)
            if limit is not None:
                left = max(limit - now, 0)
                spin_ns, park_ns = min(spin_ns, left), min(park_ns, left)
            value = take(spin_ns, park_ns, nap_ns)
            if value is not _core.NOTHING:
                return value
            now = time.monotonic_ns()
            if self._closing:
                raise ClosedError(f"{self._where(call)}: the queue was closed while the call waited")
            status = self._status(call)
            self._check_end(call, status)
            self.raise_if_lost(call)
            if limit is not None and now >= limit:
                what = "end of the message" if self._port.is_assembling else "message"
                raise CommTimeoutError(
                    f"{self._where(call)}: no {what} from {self._describe_writer()} within {timeout_s:.1f} s",
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
        self._end(self._index)
        with self._calls:
            self._release_memory()
