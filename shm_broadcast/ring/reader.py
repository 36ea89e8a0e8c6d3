"""Read messages from one ring. Every wait ends. `ring/writer.py` holds the code that both endpoints share."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from shm_broadcast import _core, codec
from shm_broadcast.errors import ClosedError, CommTimeoutError, PeerLostError
from shm_broadcast.layout import RecordKind
from shm_broadcast.liveness import PeerWatch
from shm_broadcast.ring.wait import SLICE_NS
from shm_broadcast.ring.writer import RingEnd, nanoseconds
from shm_broadcast.segment import Segment
from shm_broadcast.settings import BroadcastSettings

# `ring_wait` returns these numbers.
_DATA, _ENDED = 1, 2


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
        self._index = index
        self._writer = writer
        self._looked_ns = 0
        self.endpoint = _core.ReadEndpoint(
            self._memory, index, codec.build_owned, settings.wait, self.look_around
        )
        _core.ring_attach(self._memory, index)

    def read(self, timeout_s: float | None = None, type_: Any = None) -> Any:
        """Wait for the next message, copy it out and return its object."""
        value = self.endpoint.receive(nanoseconds(timeout_s))
        return value if type_ is None else codec.convert(value, type_)

    def try_read(self) -> tuple[bool, Any]:
        """Return (True, the next object), or (False, None) if it is not there or not complete yet."""
        value = self.endpoint.receive_within(0, 0)
        if value is not _core.NOTHING:
            return True, value
        self._begin_wait("try_dequeue")
        # Look for a lost writer only once in a slice, because a caller may ask a million times a second.
        now = time.monotonic_ns()
        if now - self._looked_ns >= SLICE_NS:
            self._looked_ns = now
            self.raise_if_lost("try_dequeue")
        return False, None

    @contextmanager
    def loan(self, timeout_s: float | None) -> Iterator[Any]:
        """Yield the next object without copying its arrays and tensors, which alias the ring until the loan ends."""
        start, memory = time.monotonic(), self._memory
        self._call = "loan"
        try:
            self.endpoint.lend(nanoseconds(timeout_s))
        finally:
            self._call = self.call
        window, taken = None, 0
        try:
            window = self._whole_record(memory)
            if window is not None:
                try:
                    value = codec.decode(memoryview(window), copy=False)
                except Exception:
                    # The message is dropped. After anything else, as Ctrl-C, it stays the next one.
                    taken = len(window)
                    raise
                taken = len(window)
                yield value
        finally:
            self._end_loan(memory, taken)
        if window is None:
            # The message comes in parts, so it is copied once, into memory that nothing else uses.
            yield self.read(None if timeout_s is None else start + timeout_s - time.monotonic())

    def _end_loan(self, memory: mmap.mmap, taken: int) -> None:
        """End the loan; give back the record if a message of `taken` bytes was read, which is 0 if none was."""
        try:
            if taken:
                _core.ring_release(memory, self._index)
        except ValueError as error:
            self._raise_corrupt("loan", error)
        finally:
            self.endpoint.end_loan(taken)

    def _whole_record(self, memory: mmap.mmap) -> _core.Window | None:
        """Return a window on the next message, which must be there; None if it comes in parts."""
        if self.endpoint.is_assembling:
            return None
        try:
            window, flags, _, _ = _core.ring_take(memory, self._index)
        except ValueError as error:
            self._raise_corrupt("loan", error)
        return window if flags in (RecordKind.WHOLE, RecordKind.STREAMED) else None

    def _begin_wait(self, call: str) -> None:
        self.check(call)
        if self._status(call) == _ENDED:
            raise ClosedError(f"{self._where(call)}: the writer closed the queue")

    def _status(self, call: str) -> int:
        """Return `_DATA` if a message is there, `_ENDED` if none is there and the queue has ended, else 0."""
        try:
            return _core.ring_wait(self._memory, self._index, 0, 0)
        except ValueError as error:
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

    def is_ready(self) -> bool:
        """Return whether a message is there or the queue has ended. Raises an error if the writer is lost."""
        self.check("dequeue_any")
        if self._status("dequeue_any") != 0:
            return True
        self.raise_if_lost("dequeue_any")
        return False

    def lost_writer(self) -> str | None:
        """Describe the writer if its process has ended before it closed the queue; else None."""
        try:
            is_lost = not self._closing and bool(self._watch.lost()) and self._status("lost_writer") != _ENDED
        except ClosedError:  # another thread has closed this end meanwhile
            return None
        return self._describe_writer() if is_lost else None

    def _describe_writer(self) -> str:
        rank = "" if self._writer < 0 else f"rank {self._writer}, "
        return f"the writer ({rank}{self._watch.describe(self._writer)})"

    def _missing(self, _nbytes: int | None) -> str:
        what = "end of the message" if self.endpoint.is_assembling else "message"
        return f"no {what} from {self._describe_writer()}"

    def _raise_late(self, call: str, within_s: float, nbytes: int | None) -> NoReturn:
        raise CommTimeoutError(
            f"{self._where(call)}: {self._missing(nbytes)} within {within_s:.1f} s",
            missing=() if self._writer < 0 else (self._writer,),
        )

    def raise_if_lost(self, call: str) -> None:
        """Raise `ClosedError` or `PeerLostError` if the writer is gone and all of its messages were read."""
        self._begin_wait(call)
        if not self._watch.lost() or self._status(call) == _DATA:
            # Messages that a writer published before it died are still read.
            return
        error = PeerLostError(
            f"{self._where(call)}: lost {self._describe_writer()}; close the queue",
            peers=() if self._writer < 0 else (self._writer,),
        )
        self._fail(error)
        raise error

    def close(self) -> None:
        """Unmap and leave the ring; the writer waits for this reader no more. Idempotent; wakes a waiting call."""
        self._close(self._index)
