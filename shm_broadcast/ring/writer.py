"""Write messages to one ring. This module also holds the code that both endpoints share. Every wait ends.

The native core holds the protocol (`csrc/ring/ring.hpp`) and the state machine of each endpoint
(`csrc/ring/endpoint.hpp`); `DESIGN.md` explains both. The native endpoint calls `look_around` while it waits and when
it cannot go on. The code here handles dead peers and `close` from another thread, and raises errors that name the
readers that are behind. `ring/reader.py` holds the reading endpoint.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn

from shm_broadcast import _core, codec
from shm_broadcast.errors import (
    ClosedError,
    CommTimeoutError,
    GroupBrokenError,
    InternalError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.guard import QueueGuard
from shm_broadcast.layout import LINE, ReaderState, record_bytes
from shm_broadcast.liveness import PeerWatch, fork_count
from shm_broadcast.reports.log_fields import LogFields, log_fields
from shm_broadcast.reports.statistics import QueueStatistics, ReaderStatistics
from shm_broadcast.ring.recorded_waits import RecordedWaits
from shm_broadcast.segment import Segment
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.stacks.attached import QueueStacks
from shm_broadcast.status.page import own_page

logger: logging.Logger = logging.getLogger(__name__)

# This is the longest time-out that the native core can count, 146 years.
_LONGEST_NS: Final = float(1 << 62)

# This replaces the mapping of a closed endpoint. Every native function refuses it.
_NOTHING: Final = mmap.mmap(-1, mmap.PAGESIZE)


def nanoseconds(timeout_s: float | None) -> int:
    """Return a time-out in the form that native endpoints take; -1 means that there is none."""
    if timeout_s is None:
        return -1
    timeout_ns = timeout_s * 1e9
    if 0.0 <= timeout_ns < _LONGEST_NS:
        return int(timeout_ns)
    return 0 if timeout_ns < 0.0 else int(_LONGEST_NS)


class RingEnd(ABC):
    """The base class of both endpoints of a ring."""

    role: str
    call: str
    endpoint: _core.WriteEndpoint | _core.ReadEndpoint

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
            name: The queue's name in errors and logs.
            segment: The segment of the ring; this object owns it from now on.
            ranks: The readers' ranks, in the order of their places in the ring.
            watch: The processes at the other end, by rank; the writer's rank may be -1.
            settings: How to wait.
        """
        self.name = name
        self.ranks = ranks
        self._segment = segment
        self._memory = segment.memory
        self._watch = watch
        self._settings = settings
        self.warns = True
        self.guard: QueueGuard | None = None
        # Fields of every log record of this end. The code that knows its rank or owner adds them.
        self.fields: LogFields = log_fields(queue=name)
        self._closing = False
        # Held by the thread that closes this end. A signal handler on that thread may close it in between.
        self._closer = threading.RLock()
        self._has_closed = False
        self._forks = fork_count()
        self._page = own_page()
        self._stacks = QueueStacks()
        self._shown: int | None = None
        self._record = RecordedWaits(self._page, name, segment, ranks, watch)
        # Errors and logs describe the present wait: the call, when it began, and when it warns next.
        self._call = self.call
        self._began_s = 0.0
        self._warns_s = 0.0

    def _show(self, place: int) -> None:
        """Show this end in the status page: reader `place`, or the writer with -1."""
        self._shown = self._page.add_queue(self.name, self._segment, 0, place)

    def _where(self, call: str) -> str:
        return f"{call} on queue {self.name!r} ({self.role}, message #{self.endpoint.messages + 1})"

    def log_fields(self, call: str) -> LogFields:
        """Return the fields of a log record on `call`."""
        # A copy: the owner may add to it while a record is made, in another thread.
        return {**self.fields, "comm_call": call}

    def check(self, call: str) -> None:
        """Raise an error unless this process can use this endpoint now."""
        if self._forks != fork_count():
            raise UsageError(f"{self._where(call)}: the queue belongs to the process that forked this one")
        if self._closing:
            self._raise_if_broken(call)
            raise ClosedError(f"{self._where(call)}: the queue was closed")
        cause = self.endpoint.cause
        if cause is not None:
            raise GroupBrokenError(
                f"{self._where(call)}: an earlier failure made the queue unusable, close it: {cause}"
            ) from cause

    def _raise_if_broken(self, call: str, *, by_writer: bool = False) -> None:
        """Raise if the owner's failure has ended the queue; `by_writer` says that the writer has closed it."""
        if self.guard is not None:
            self.guard.ended(call, by_writer=by_writer)

    def look_around(self, reason: int, detail: Any) -> Exception | None:
        """Raise an error to end the endpoint's call, or return to let it wait on; see `csrc/ring/endpoint.hpp`."""
        try:
            return self._look_around(self._call, reason, detail)
        except _core.MappingError as error:
            # The ring is gone: another thread has closed this endpoint meanwhile, or the memory was overwritten.
            self.check(self._call)
            self._raise_corrupt(self._call, error)

    def _look_around(self, call: str, reason: int, detail: Any) -> Exception | None:
        if reason == _core.LOOK_BEGIN:
            self._began_s, self._warns_s = time.monotonic(), self._settings.warn_after_s
            self._record.begin(self.endpoint.messages)
            self._begin_wait(call)
        elif reason == _core.LOOK_WAITING:
            self.check(call)
            self.raise_if_lost(call)
            waited_s = time.monotonic() - self._began_s
            if waited_s >= self._warns_s:
                self._warns_s += self._settings.warn_after_s
                self._record_wait()
                if self.warns:
                    self._warn(call, waited_s, detail)
        elif reason == _core.LOOK_LATE:
            timeout_ns, nbytes = detail
            self._record_wait("CommTimeoutError")
            self._raise_late(call, timeout_ns / 1e9, nbytes)
        elif reason == _core.LOOK_CORRUPT:
            self._raise_corrupt(call, detail)
        elif reason == _core.LOOK_UNDECODABLE:
            return codec.decode_error(detail)
        elif reason == _core.LOOK_UNENCODABLE:
            codec.raise_usage_error(detail)
        else:
            self.check(call)
            why = "a message is on loan to this thread, and stays the next one until the loan ends"
            if reason != _core.LOOK_LENT:
                why = "this thread is inside of a call on the queue already, as in a signal handler or a finalizer"
            raise self._nested(call, why)
        return None

    def _nested(self, call: str, why: str) -> UsageError:
        """Return the error of a call inside of `call` of the same thread; `why` says what keeps it out."""
        return UsageError(f"{self._where(call)}: {why}")

    def _warn(self, call: str, waited_s: float, nbytes: int | None) -> None:
        logger.warning(
            "%s: waiting for %.0f s: %s",
            *(self._where(call), waited_s, self._missing(nbytes)),
            extra=self.log_fields(call),
        )

    @abstractmethod
    def _record_wait(self, error: str = "") -> None:
        """Write down what this end waits for, if the process keeps a record; `error` is the class of its error."""

    def _begin_wait(self, call: str) -> None:  # noqa: B027 - a writer inherits this
        """Raise an error if there is nothing to wait for, which only a reader can find."""

    @abstractmethod
    def raise_if_lost(self, call: str) -> None:
        """Raise `PeerLostError` if a process that this endpoint waits for is gone."""

    @abstractmethod
    def _missing(self, nbytes: int | None) -> str:
        """Return a text that says what a waiting call for a message of `nbytes` lacks."""

    @abstractmethod
    def _raise_late(self, call: str, within_s: float, nbytes: int | None) -> NoReturn:
        """Raise `CommTimeoutError` for a deadline that has passed."""

    def _state(self) -> tuple[int, int, int, int, tuple[tuple[int, int, int, int, int], ...]]:
        state = _core.ring_state(self._memory)
        if len(state[4]) != len(self.ranks):
            raise _core.MappingError(f"the ring has {len(state[4])} readers, not {len(self.ranks)}")
        return state

    def _readers(self) -> tuple[ReaderStatistics, ...]:
        published, messages, _, _, readers = self._state()
        now = time.monotonic_ns()
        return tuple(
            ReaderStatistics(
                rank,
                max(messages - read, 0),
                max(published - consumed, 0),
                (now - progress) / 1e9 if progress else None,
                state == ReaderState.ATTACHED,
            )
            for rank, (consumed, read, progress, _, state) in zip(self.ranks, readers, strict=True)
        )

    def statistics(self) -> QueueStatistics:
        """Return what this endpoint has done, and how far each reader is. Works on a broken queue too."""
        return self._statistics("statistics")

    def _statistics(self, call: str) -> QueueStatistics:
        if self._closing or self._forks != fork_count():
            self.check(call)
        try:
            _, _, capacity, _ = _core.ring_facts(self._memory)
            readers = self._readers()
        except _core.MappingError as error:
            # Another thread has closed this endpoint meanwhile, or the ring was overwritten.
            self.check(call)
            self._raise_corrupt(call, error)
        end = self.endpoint
        return QueueStatistics(end.messages, end.nbytes, end.waits, end.waited_ns / 1e9, capacity, readers)

    def _describe_reader(self, reader: ReaderStatistics) -> str:
        progress = (
            "never read" if reader.progress_s is None else f"last progress {reader.progress_s:.1f} s ago"
        )
        state = self._watch.describe(reader.rank)
        if not reader.is_attached and reader.progress_s is None:
            state = f"{state}, not attached yet" if self._watch.watches(reader.rank) else "has not come"
        return f"rank {reader.rank} ({state}, {reader.behind_messages} behind, {progress})"

    def _raise_corrupt(self, call: str, error: object) -> NoReturn:
        """Raise `InternalError` for a ring whose own words are invalid: no record can be found any more."""
        corrupt = InternalError(f"{self._where(call)}: the shared memory was overwritten: {error}")
        self._fail(corrupt)
        raise corrupt from (error if isinstance(error, BaseException) else None)

    def _fail(self, error: BaseException, call: str = "") -> None:
        self.endpoint.fail(error)
        if self.guard is not None and isinstance(error, PeerLostError):
            self.guard.failed(call, error)

    def _end(self, memory: mmap.mmap, who: int) -> None:
        try:
            _core.ring_end(memory, who)
        except _core.MappingError as error:
            # The ring was overwritten. The other end learns of it when this process ends, or from its own errors.
            logger.warning("%s: %s", self._where("close"), str(error), extra=self.log_fields("close"))

    def _close(self, who: int) -> None:
        """Leave the ring as `who` and wake waiting calls. The mapping goes when they and all views of it have ended.

        Each step can be done again, so that a later call goes on where a signal handler has interrupted an earlier one.
        """
        if self._has_closed or self._forks != fork_count():
            return
        with self._closer:
            self._closing = True
            # Close the endpoint first: ending the ring wakes waiting threads, which must then find it closed.
            # Once a writer's endpoint is closed, no thread publishes a record, which some readers would miss.
            self.endpoint.close(partial(_refuse, self._where(self.call), self._forks, self.guard, self.call))
            memory = self._memory
            if memory is not _NOTHING:
                self._end(memory, who)
            self._end_signal()
            self._watch.close()
            self._memory = _NOTHING
            # Forgotten first, so that a place is never given back twice.
            shown, self._shown = self._shown, None
            self._page.remove_queue(shown)
            self._segment.close()
            self._has_closed = True

    def _end_signal(self) -> None:  # noqa: B027 - a writer inherits this
        """Close the descriptor for event loops, which only a reader has."""


def _refuse(
    where: str, forks: int, guard: QueueGuard | None, call: str, _reason: int, _detail: object
) -> NoReturn:
    """Replace `look_around` after `close`; unlike that, it keeps no reference to the endpoint."""
    if forks != fork_count():
        raise UsageError(f"{where}: the queue belongs to the process that forked this one")
    if guard is not None:
        guard.ended(call)
    raise ClosedError(f"{where}: the queue was closed")


class RingWriter(RingEnd):
    """The endpoint of the writer of a ring."""

    role = "writer"
    call = "enqueue"
    endpoint: _core.WriteEndpoint

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
        # Raises if the queue's readers on other hosts end a wait for those on this one.
        self.look_elsewhere: Callable[[str], None] | None = None
        self.endpoint = _core.WriteEndpoint(self._memory, codec.describe, settings.wait, self.look_around)
        self._show(-1)

    @property
    def messages(self) -> int:
        """Number of messages that were written whole."""
        return self.endpoint.messages

    def send(self, obj: Any, timeout_s: float | None) -> None:
        """Encode and publish an object; return when every byte of it is in the ring."""
        self.endpoint.send(obj, nanoseconds(timeout_s))

    def write(self, message: codec.Message, timeout_s: float | None) -> None:
        """Publish a message; return when every byte of it is in the ring."""
        self.endpoint.write(message.header, message.buffers, nanoseconds(timeout_s))

    def note_refusal(self) -> None:
        """Note that a call inside of a write of the same thread is refused, which must not cut the message."""
        self.endpoint.refused_nested = True

    def raise_if_lost(self, call: str) -> None:
        """Raise `PeerLostError` if a reader has died or has closed its end, also on another host. Does not wait."""
        lost = self._watch.lost()
        states = self._state()[4]
        left = [
            rank for rank, reader in zip(self.ranks, states, strict=True) if reader[4] == ReaderState.LEFT
        ]
        gone = sorted({*lost, *left})
        if not gone:
            if self.look_elsewhere is not None:
                self.look_elsewhere(call)
            return
        # A reader whose owner has failed closes the queue, and is not to blame.
        self._raise_if_broken(call)
        who = ", ".join(
            self._describe_reader(reader) + (" closed the queue" if reader.rank in left else "")
            for reader in self._readers()
            if reader.rank in gone
        )
        error = PeerLostError(f"{self._where(call)}: lost reader {who}; close the queue", peers=gone)
        self._fail(error, call)
        raise error

    def look_at_readers(self, call: str) -> None:
        """Raise as `raise_if_lost` does, or if this end was closed: ends a wait outside of the native endpoint."""
        try:
            self.check(call)
            self.raise_if_lost(call)
        except _core.MappingError as error:
            # As in `look_around`.
            self.check(call)
            self._raise_corrupt(call, error)

    def await_readers(self, timeout_s: float | None) -> None:
        """Return when every reader is attached."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        call = "wait_until_ready"
        while absent := [reader for reader in self._statistics(call).readers if not reader.is_attached]:
            self.look_at_readers(call)
            if deadline is not None and time.monotonic() >= deadline:
                who = ", ".join(map(self._describe_reader, absent))
                raise CommTimeoutError(
                    f"{self._where(call)}: no reader {who} within {timeout_s:.1f} s",
                    missing=sorted(reader.rank for reader in absent),
                )
            time.sleep(0.001)

    def _laggards(self, nbytes: int) -> list[ReaderStatistics]:
        """Return the readers that leave no room for the next record of a message of `nbytes`."""
        _, _, capacity, longest = _core.ring_facts(self._memory)
        payload = nbytes if nbytes <= longest else longest // 2 // LINE * LINE
        record = record_bytes(payload)
        readers = self._readers()
        # If the end of the ring has to be skipped, only the slowest reader is sure to be in the way.
        limit = min(capacity - record + 1, max(reader.behind_bytes for reader in readers))
        return [reader for reader in readers if reader.behind_bytes >= limit]

    def _missing(self, nbytes: int | None) -> str:
        if nbytes is None:
            return "another thread is writing"
        return "no room, behind are " + ", ".join(map(self._describe_reader, self._laggards(nbytes)))

    def _record_wait(self, error: str = "") -> None:
        self._record.write(self.endpoint.messages, -1, dict(enumerate(self.ranks)), error)

    def _raise_late(self, call: str, within_s: float, nbytes: int | None) -> NoReturn:
        behind = () if nbytes is None else sorted(reader.rank for reader in self._laggards(nbytes))
        error = CommTimeoutError(
            f"{self._where(call)}: {self._missing(nbytes)}, within {within_s:.1f} s", missing=behind
        )
        raise self._stacks.attached(error, within_s, self.endpoint.messages, behind, self._watch)

    def close(self) -> None:
        """Tell the readers that nothing follows, and unmap the ring. Idempotent; wakes a waiting call."""
        self._close(-1)
