"""Read messages from one ring. Every wait ends. `ring/writer.py` holds the code that both endpoints share."""

from __future__ import annotations

import mmap
import threading
import time
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from shm_broadcast import _core, codec
from shm_broadcast.errors import (
    ClosedError,
    CommError,
    CommTimeoutError,
    DecodeError,
    GroupBrokenError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.interruption import is_held, raised_by_handler
from shm_broadcast.layout import RecordKind
from shm_broadcast.liveness import PeerWatch
from shm_broadcast.ring.signal import ReadSignal
from shm_broadcast.ring.wait import SLICE_NS
from shm_broadcast.ring.writer import RingEnd, nanoseconds
from shm_broadcast.segment import Segment
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.threads import made_aside

# `ring_wait` returns these numbers.
_DATA, _ENDED = 1, 2


class NestedCallError(UsageError):
    """This thread is inside of another call, which the text names; methods put their own name in its place.

    Attributes:
        why: What keeps the call out.
    """

    def __init__(self, where: str, why: str) -> None:
        """Say where, and what keeps the call out."""
        super().__init__(f"{where}: {why}")
        self.why = why


class RingReader(RingEnd):
    """The endpoint of one reader of a ring."""

    call = "dequeue"
    endpoint: _core.ReadEndpoint

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
        self.fields["comm_rank"] = self.rank
        self._index = index
        self._writer = writer
        self._looked_ns = 0
        self._signal: ReadSignal | None = None
        # Guards the making of `_signal` against other threads, and by `is_held` against signal handlers.
        self._signals = threading.RLock()
        self.endpoint = _core.ReadEndpoint(
            self._memory, index, codec.build_owned, settings.wait, self.look_around
        )
        _core.ring_attach(self._memory, index)
        self._show(index)

    def read(self, timeout_s: float | None = None, type_: Any = None) -> Any:
        """Wait for the next message, copy it out and return its object."""
        endpoint = self.endpoint
        try:
            if timeout_s is None:
                within_ns = until_ns = -1
                endpoint.fetch()
            else:
                within_ns = nanoseconds(timeout_s)
                until_ns = time.monotonic_ns() + within_ns
                endpoint.fetch(within_ns, until_ns)
            # A handler that runs here may read the message, or raise and leave it for the next call.
            while (value := endpoint.message) is _core.NOTHING:
                endpoint.fetch(within_ns, until_ns)
        except NestedCallError as error:
            raise UsageError(f"{self._where('dequeue')}: {error.why}") from None
        if type_ is None:
            return value
        try:
            return codec.convert(value, type_)
        except DecodeError as error:
            # A message of another type is dropped, unless a handler has raised this.
            if raised_by_handler(error):
                endpoint.message = value
            raise
        except BaseException:
            # Nothing is called before the message is back: no handler drops it.
            endpoint.message = value
            raise

    def try_read(self, call: str = "try_dequeue", looks: bool = False, type_: Any = None) -> tuple[bool, Any]:
        """Return (True, the next object), or (False, None) if it is not there or not complete yet.

        The object is converted to `type_`, unless that is None. With `looks` this raises at once if the writer is lost.
        """
        endpoint = self.endpoint
        try:
            endpoint.fetch_within(0, 0)
        except NestedCallError as error:
            raise UsageError(f"{self._where(call)}: {error.why}") from None
        value = endpoint.message
        if value is not _core.NOTHING:
            if type_ is None:
                return True, value
            try:
                return True, codec.convert(value, type_)
            except DecodeError as error:
                if raised_by_handler(error):
                    endpoint.message = value
                raise
            except BaseException:
                endpoint.message = value
                raise
        self._begin_wait(call)
        # Look for a lost writer only once in a slice, because a caller may ask a million times a second.
        now = time.monotonic_ns()
        if looks or now - self._looked_ns >= SLICE_NS:
            self._looked_ns = now
            self.raise_if_lost(call)
        return False, None

    def fileno(self, call: str = "fileno") -> int:
        """Return a descriptor that is readable while there is something to read, or to raise."""
        self.check(call)
        if is_held(self._signals):
            raise UsageError(
                f"{self._where(call)}: this thread is inside of `fileno` already, as in a signal handler"
            )
        with self._signals:
            if self._signal is None:
                memory, index = self._memory, self._index
                self._signal = made_aside(
                    lambda: ReadSignal(self, memory, index), ReadSignal.end, lambda: None
                )
            try:
                self._signal.begin(self.endpoint)
            except BaseException:
                # Another thread may have closed this end before it could see the signal.
                if self._closing:
                    self._signal.end()
                raise
            descriptor = self._signal.descriptor
        if descriptor < 0:
            self.check(call)
            raise ClosedError(f"{self._where(call)}: the process is about to exit")
        return descriptor

    def notice_lost_writer(self) -> bool:
        """Return whether the next read that finds no message raises, because the writer's process has ended."""
        try:
            if self.lost_writer() is None:
                return False
        except CommError:  # the ring was overwritten, or the owner has failed: the next read says so
            return True
        self._looked_ns = 0
        return True

    @property
    def warn_after_s(self) -> float:
        """How long a call waits before it warns, in seconds."""
        return self._settings.warn_after_s

    @property
    def is_busy(self) -> bool:
        """Whether a thread is inside of a call, or has a message on loan."""
        return self.endpoint.is_busy

    def loan(self, timeout_s: float | None) -> AbstractContextManager[Any]:
        """Yield the next object without copying its arrays and tensors, which alias the ring until the loan ends."""
        return _Loan(self, timeout_s)

    def borrow(self, timeout_s: float | None) -> tuple[object, Any, int]:
        """Take the next object on loan.

        Returns:
            (handle, object, length of its message). The loan ends when the handle is released. If the message
            comes in parts, the loan has ended already, and the object is `NOTHING`.
        """
        endpoint, memory = self.endpoint, self._memory
        before, after, self._call = self._call, self.call, "loan"
        try:
            hold: object = endpoint.lend(nanoseconds(timeout_s))
        except NestedCallError as error:
            # The outer call goes on under its own name.
            after = before
            raise UsageError(f"{self._where('loan')}: {error.why}") from None
        finally:
            self._call = after
        taken = 0
        try:
            window = self._whole_record(memory)
            if window is None:
                hold = None
                return hold, _core.NOTHING, 0
            try:
                return hold, codec.decode(memoryview(window), copy=False), len(window)
            except Exception as error:
                # An undecodable message is dropped. If the message is not at fault, it stays the next one.
                taken = 0 if codec.decode_error(error) is None else len(window)
                raise
        except BaseException:
            # No signal handler runs between these two: letting go ends the loan.
            endpoint.lent_bytes = taken
            hold = None
            raise

    def _whole_record(self, memory: mmap.mmap) -> _core.Window | None:
        """Return a window on the next message, which must be there; None if it comes in parts."""
        if self.endpoint.is_assembling:
            return None
        try:
            window, flags, _, _ = _core.ring_take(memory, self._index)
        except _core.MappingError as error:
            self._raise_corrupt("loan", error)
        return window if flags in (RecordKind.WHOLE, RecordKind.STREAMED) else None

    def _nested(self, call: str, why: str) -> UsageError:
        return NestedCallError(self._where(call), why)

    def _begin_wait(self, call: str) -> None:
        self.check(call)
        if self._status(call) == _ENDED:
            self._raise_if_broken(call, by_writer=True)
            raise ClosedError(f"{self._where(call)}: the writer closed the queue")

    def _status(self, call: str) -> int:
        """Return `_DATA` if a message is there, `_ENDED` if none is there and the queue has ended, else 0."""
        try:
            return _core.ring_wait(self._memory, self._index, 0, 0)
        except _core.MappingError as error:
            # Another thread has closed this endpoint meanwhile, or the ring was overwritten.
            self.check(call)
            self._raise_corrupt(call, error)

    @property
    def messages(self) -> int:
        """How many messages this endpoint has read."""
        return self.endpoint.messages

    def place(self) -> tuple[mmap.mmap, int]:
        """Return the mapping and this reader's place in it, for waiting on several rings at once."""
        return self._memory, self._index

    def writer_descriptors(self) -> tuple[int, ...]:
        """Return descriptors that are readable once the writer's process has ended; they are this endpoint's own."""
        return self._watch.descriptors()

    def is_ready(self) -> bool:
        """Return whether a message is there or the queue has ended. Raises an error if the writer is lost."""
        self.check("dequeue_any")
        if self.endpoint.is_busy:
            try:
                # Raises if this very thread is inside of a call: the next message belongs to that call.
                self.endpoint.fetch_within(0, 0)
            except NestedCallError as error:
                raise UsageError(f"{self._where('dequeue_any')}: {error.why}") from None
        if self.endpoint.has_message:
            return True
        if self._status("dequeue_any") != 0:
            return True
        self.raise_if_lost("dequeue_any")
        return False

    def lost_writer(self) -> str | None:
        """Describe the writer if its process has ended before it closed the queue; else None."""
        try:
            is_lost = not self._closing and bool(self._watch.lost()) and self._status("lost_writer") != _ENDED
        except (ClosedError, GroupBrokenError):  # another thread has closed this end meanwhile
            return None
        return self._describe_writer() if is_lost else None

    def _describe_writer(self) -> str:
        rank = "" if self._writer < 0 else f"rank {self._writer}, "
        return f"the writer ({rank}{self._watch.describe(self._writer)})"

    def _missing(self, _nbytes: int | None) -> str:
        what = "end of the message" if self.endpoint.is_assembling else "message"
        return f"no {what} from {self._describe_writer()}"

    def _late(self, call: str, within_s: float) -> CommTimeoutError:
        return CommTimeoutError(
            f"{self._where(call)}: {self._missing(None)} within {within_s:.1f} s",
            missing=() if self._writer < 0 else (self._writer,),
        )

    def _record_wait(self, error: str = "") -> None:
        self._record.write(self.endpoint.messages, self._index, {-1: self._writer}, error)

    def _raise_late(self, call: str, within_s: float, nbytes: int | None) -> NoReturn:
        error = self._late(call, within_s)
        raise self._stacks.attached(error, within_s, self.endpoint.messages, (self._writer,), self._watch)

    def raise_late(self, call: str, within_s: float) -> NoReturn:
        """Raise `CommTimeoutError` for a message that has not come within `within_s` seconds.

        It has no stacks: to ask the writer for them would block the event loop of the caller for up to half a second.
        """
        raise self._late(call, within_s)

    def raise_if_lost(self, call: str) -> None:
        """Raise `ClosedError` or `PeerLostError` if the writer is gone and all of its messages were read."""
        self._begin_wait(call)
        if self._status(call) == _DATA:
            # Messages that a writer published before it died are still read.
            return
        if not self._watch.lost():
            if self.guard is not None:
                self.guard.look(call)
            return
        # Between the two looks it may have published something or closed the queue, and then ended.
        self._begin_wait(call)
        if self._status(call) == _DATA:
            return
        error = PeerLostError(
            f"{self._where(call)}: lost {self._describe_writer()}; close the queue",
            peers=() if self._writer < 0 else (self._writer,),
        )
        self._record_wait("PeerLostError")
        self._fail(error, call)
        raise error

    def close(self) -> None:
        """Unmap and leave the ring; the writer waits for this reader no more. Idempotent; wakes a waiting call."""
        self._close(self._index)

    def _end_signal(self) -> None:
        if self._signal is not None:
            self._signal.end()


class _Loan(_core.LoanBlock):
    """The block in which a message is on loan. Whatever interrupts its beginning, the message stays the next one."""

    def __init__(self, reader: RingReader, timeout_s: float | None) -> None:
        self._reader = reader
        self._timeout_s = timeout_s

    def __enter__(self) -> Any:
        start, endpoint = time.monotonic(), self._reader.endpoint
        # An interrupted call may have left a message, which is a copy.
        if (value := endpoint.message) is not _core.NOTHING:
            return value
        hold, value, nbytes = self._reader.borrow(self._timeout_s)
        if value is _core.NOTHING:
            # The message comes in parts, so it is copied once, into memory that nothing else uses.
            left_s = None if self._timeout_s is None else start + self._timeout_s - time.monotonic()
            return self._reader.read(left_s)
        # From here on the message counts as read: no signal handler runs before the block begins.
        self.hold = hold
        endpoint.lent_bytes = nbytes
        return value
