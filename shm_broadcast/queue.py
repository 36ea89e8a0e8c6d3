"""`QueueWriter` and `QueueReader`: one writer, many readers, two verbs.

    key = new_key()
    writer = QueueWriter.create("steps", readers=[0, 1])
    ...  writer.handle and writer.key reach the readers ...
    reader = QueueReader.open(handle, key, rank=0)
    writer.enqueue({"step": 1})
    reader.dequeue()

Needs no torch. Every message reaches every reader, whole, once and in order; the slowest reader holds the
writer back. `enqueue` returns when the message is owned by the queue.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

from shm_broadcast import _core, codec
from shm_broadcast.errors import CommTimeoutError, DecodeError, UsageError
from shm_broadcast.handle import KEY_BYTES, VERSION, QueueHandle, new_key
from shm_broadcast.liveness import PeerWatch, this_process
from shm_broadcast.ring import RingReader, RingWriter, await_any
from shm_broadcast.segment import Handover, Hello, Segment, take_over
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.statistics import QueueStatistics

_PAGE: Final = 4096
_MOST_READERS: Final = 1024  # ring::kMaxReaders


def segment_bytes(ring_bytes: int, readers: int) -> int:
    """Return the size of a segment with `ring_bytes` of records: header lines rounded up to pages, and data."""
    header = (192 + 64 * readers + _PAGE - 1) // _PAGE * _PAGE
    return header + (ring_bytes + _PAGE - 1) // _PAGE * _PAGE


class QueueWriter:
    """The writing end. One thread at a time writes; `close` may come from any."""

    def __init__(
        self, ring: RingWriter, handle: QueueHandle, key: bytes, handover: Handover, watch: PeerWatch
    ) -> None:
        """Use `create`."""
        self.handle = handle
        self.key = key
        self._ring = ring
        self._handover = handover
        self._watch = watch

    @classmethod
    def create(
        cls,
        name: str,
        readers: Sequence[int],
        settings: BroadcastSettings | None = None,
        key: bytes | None = None,
        *,
        writer: int = -1,
    ) -> Self:
        """Create a queue that waits for its readers.

        Args:
            name: For texts.
            readers: Ranks of the readers, each different; their order is that of their places.
            settings: Size of the ring, and how both ends wait.
            key: 32 bytes that the readers will know; fresh ones by default.
            writer: The writer's own rank, which readers' errors name; -1 if it has none.

        Raises:
            UsageError: There are no readers, too many, or one twice, or the key has another length.
            CapabilityError: There is too little memory for the ring.
        """
        ranks = tuple(readers)
        if not ranks or len(set(ranks)) != len(ranks) or len(ranks) > _MOST_READERS:
            raise UsageError(f"a queue needs 1 to {_MOST_READERS} readers, each once, not {list(readers)}")
        settings = settings or BroadcastSettings()
        key = new_key() if key is None else key
        if len(key) != KEY_BYTES:
            raise UsageError(f"the key of a queue has {KEY_BYTES} bytes, not {len(key)}")
        nbytes = segment_bytes(settings.ring_bytes, len(ranks))
        segment = Segment.create(nbytes)
        generation = secrets.randbits(63)
        _core.ring_format(segment.memory, len(ranks), generation)
        watch = PeerWatch(this_process(), {})

        def joined(hello: Hello, descriptor: int) -> None:
            watch.adopt(ranks[hello.member], hello.process, descriptor)

        try:
            handover = Handover(segment, key, set(range(len(ranks))), joined)
        except BaseException:
            segment.close()
            raise
        handle = QueueHandle(
            VERSION,
            name,
            generation,
            handover.address,
            nbytes,
            ranks,
            settings.wait,
            settings.warn_after_s,
            writer,
        )
        ring = RingWriter(name, segment, ranks, watch, settings)
        return cls(ring, handle, key, handover, watch)

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Return when every reader has opened its end.

        Raises:
            CommTimeoutError: Some have not come in time; `.missing` names them.
            PeerLostError: One came and is gone. The queue is unusable.
            ClosedError: The queue was closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = threading.Event()
        while True:
            missing = self._ring.absent()
            if not missing:
                return
            self._ring.raise_if_lost("wait_until_ready")
            if deadline is not None and time.monotonic() >= deadline:
                raise CommTimeoutError(
                    f"queue {self.handle.name!r}: reader(s) {missing} did not come within {timeout_s:.1f} s",
                    missing=missing,
                )
            pause.wait(0.001)

    def enqueue(self, obj: Any, timeout_s: float | None = None) -> None:
        """Send `obj` to every reader; return when the queue owns it.

        Blocks while the slowest reader is a whole ring behind.

        Raises:
            UsageError: `obj` cannot be carried, or this is a forked child; nothing was sent.
            CommTimeoutError: The readers in `.missing` made no room in time. Nothing was sent and the queue
                stays usable, unless the message is longer than half of the ring: then parts of it may be
                written, and every later call raises `GroupBrokenError`.
            PeerLostError: A reader whose room is needed is gone. The queue is unusable.
            ClosedError: The queue was closed.
        """
        self._ring.write(codec.encode(obj), timeout_s)

    def statistics(self) -> QueueStatistics:
        """Return what was written, and how far each reader is."""
        return self._ring.statistics()

    def close(self) -> None:
        """End the queue: readers get what was written, then `ClosedError`. Idempotent."""
        self._handover.close()
        self._ring.close()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Name the queue; never its key."""
        return f"<QueueWriter {self.handle.name!r} to ranks {list(self.handle.ranks)}>"


class QueueReader:
    """One reading end. One thread at a time reads; `close` may come from any."""

    def __init__(self, ring: RingReader, handle: QueueHandle) -> None:
        """Use `open`."""
        self.handle = handle
        self._ring = ring

    @classmethod
    def open(cls, handle: QueueHandle | bytes, key: bytes, rank: int, timeout_s: float = 30.0) -> Self:
        """Open the end of `rank`.

        Args:
            handle: The writer's handle, or its bytes, which are authenticated with `key`.
            key: The queue's key.
            rank: One of the handle's ranks; each opens once.
            timeout_s: Deadline for the writer's answer.

        Raises:
            DecodeError: The handle is forged or stale, or what it leads to is no ring of ours.
            UsageError: `rank` is no reader of this queue.
            PeerLostError: The writer is gone, or refused.
        """
        if isinstance(handle, bytes):
            handle = QueueHandle.from_bytes(handle, key)
        if rank not in handle.ranks:
            raise UsageError(
                f"rank {rank} is no reader of queue {handle.name!r}, which has {list(handle.ranks)}"
            )
        index = handle.ranks.index(rank)
        segment, writer, descriptor = take_over(handle.address, key, index, handle.segment_bytes, timeout_s)
        watch = PeerWatch(this_process(), {})
        watch.adopt(handle.writer, writer, descriptor)
        try:
            readers, generation, _, _ = _core.ring_facts(segment.memory)
        except ValueError as error:
            watch.close()
            segment.close()
            raise DecodeError(f"queue {handle.name!r}: {error}") from error
        if generation != handle.generation or readers != len(handle.ranks):
            watch.close()
            segment.close()
            raise DecodeError(f"queue {handle.name!r}: the handle is of another generation")
        settings = BroadcastSettings(wait=handle.wait, warn_after_s=handle.warn_after_s)
        ring = RingReader(handle.name, segment, handle.ranks, watch, settings, index, handle.writer)
        return cls(ring, handle)

    def dequeue(self, timeout_s: float | None = None, type: Any = None) -> Any:  # noqa: A002
        """Return the next object, which shares nothing with the queue.

        Waits without limit by default, at no cost, but wakes when the writer dies or the queue is closed.

        Args:
            timeout_s: Deadline in seconds; when it passes nothing is lost and the queue stays usable.
            type: Decode into this type.

        Raises:
            CommTimeoutError: No message came in time.
            DecodeError: The message cannot be decoded; the next one can be read.
            PeerLostError: The writer died, and everything it wrote has been read.
            ClosedError: The writer closed the queue and everything has been read, or this end was closed.
        """
        return self._ring.read(timeout_s, type)

    def try_dequeue(self) -> tuple[bool, Any]:
        """Return (True, the next object), or (False, None) if none is there, or not whole yet. Does not wait.

        Raises:
            DecodeError: The message cannot be decoded; the next one can be read.
            PeerLostError: The writer died, and everything it wrote has been read.
            ClosedError: The writer closed the queue and everything has been read, or this end was closed.
        """
        return self._ring.try_read()

    @contextmanager
    def lease(self, timeout_s: float | None = None) -> Iterator[Any]:
        """Yield the next object without copying its arrays and tensors.

        They alias the ring and are valid inside the `with` block only; treat them as read-only. The writer
        cannot reuse their room before the block ends. A message longer than half of the ring is copied.
        """
        with self._ring.lease(timeout_s) as obj:
            yield obj

    def statistics(self) -> QueueStatistics:
        """Return what was read, and how far each reader is."""
        return self._ring.statistics()

    def close(self) -> None:
        """Leave the queue; the writer gets a `PeerLostError` when it needs this reader. Idempotent."""
        self._ring.close()

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Name the queue and the rank."""
        return f"<QueueReader {self.handle.name!r} {self._ring.role}>"


def dequeue_any(readers: Sequence[QueueReader], timeout_s: float | None = None) -> tuple[int, Any]:
    """Return (index, object) of whichever queue has a message; the mirror case: many writers, one reader.

    Raises:
        CommTimeoutError: None had one in time.
        PeerLostError: A writer died and its queue is empty.
        ClosedError: A queue was closed and is empty.
    """
    if not readers:
        raise UsageError("dequeue_any needs at least one queue")
    start = time.monotonic()
    index = await_any([reader._ring for reader in readers], timeout_s)  # noqa: SLF001 - the same module
    left = None if timeout_s is None else max(0.0, start + timeout_s - time.monotonic())
    return index, readers[index].dequeue(left)
