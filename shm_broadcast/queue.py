"""Send objects from one writer to many readers with `QueueWriter.enqueue` and `QueueReader.dequeue`.

    key = new_key()
    writer = QueueWriter.create("steps", readers=[0, 1])
    ...  writer.handle and writer.key reach the readers ...
    reader = QueueReader.open(handle, key, rank=0)
    writer.enqueue({"step": 1})
    reader.dequeue()

Readers on other hosts are passed as `remote_readers`, each with its public key; see `endpoint.py`. The calls of both
ends stay the same.

This module does not need torch. Every message reaches every reader, whole, once and in order. The slowest reader holds
the writer back. `enqueue` returns when the queue owns the message.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from shm_broadcast import _core, awaiting, codec
from shm_broadcast.endpoint import RemoteKeys, RemoteSettings
from shm_broadcast.errors import (
    ClosedError,
    CommError,
    CommTimeoutError,
    DecodeError,
    GroupBrokenError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.guard import QueueGuard
from shm_broadcast.handle import KEY_BYTES, VERSION, QueueHandle, new_key
from shm_broadcast.interruption import is_held, raised_by_handler, tolerating
from shm_broadcast.layout import MAX_READERS, segment_bytes
from shm_broadcast.liveness import PeerWatch, this_process
from shm_broadcast.reports.log_fields import LogFields, log_fields
from shm_broadcast.reports.statistics import QueueStatistics
from shm_broadcast.ring.reader import RingReader
from shm_broadcast.ring.writer import RingWriter
from shm_broadcast.segment import Handover, Hello, Segment, take_over
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.status.kept_pages import KeptPages
from shm_broadcast.status.page import own_page
from shm_broadcast.threads import import_aside, made_aside
from shm_broadcast.timeouts import AnyTimeout, seconds
from shm_broadcast.transports import NoRemote, NoRing, RemoteTransport, take_any
from shm_broadcast.turn import TakenError, Turn

# How long a writer may take to answer a reader that opens its end.
OPEN_S: Final = 30.0

if TYPE_CHECKING:
    from shm_broadcast.remote.reader import RemoteReader

__all__ = ["QueueReader", "QueueWriter", "dequeue_any", "segment_bytes"]


class _FarEnd:
    """Stands in for the native endpoint of a queue that reaches other hosts: it counts messages and moves none."""

    def __init__(self, end: RingWriter | RemoteReader) -> None:
        """Count what `end` has sent or handed out."""
        self._end = end
        self.has_message: bool = False

    @property
    def messages(self) -> int:
        """Number of messages that were sent or handed out; none is kept, as `has_message` says."""
        return self._end.messages

    def note_refusal(self) -> None:
        """Note that a call inside of a write of the same thread is refused: it must not cut the message."""
        if isinstance(self._end, RingWriter):
            self._end.note_refusal()


class QueueWriter:
    """The writing end of a queue. One thread at a time may write; any thread may call `close`."""

    def __init__(
        self,
        ring: RingWriter,
        remote: RemoteTransport,
        handle: QueueHandle,
        key: bytes,
        handover: Handover | None,
    ) -> None:
        """Use `create`."""
        self.handle = handle
        self.key = key
        self._ring = ring
        self._remote = remote
        self._handover = handover
        self._is_local = isinstance(remote, NoRemote)
        if not self._is_local and not isinstance(ring, NoRing):
            ring.look_elsewhere, remote.look_here = remote.look_around, ring.look_at_readers
        if handle.writer >= 0:
            self._add_fields(log_fields(rank=handle.writer))
        self._guard: QueueGuard | None = None
        # Held by a call that writes to readers on other hosts, between whose steps a signal handler can run.
        self._turn = threading.RLock()
        # On one host, `exchange` sends its argument within `timeout_ns` and returns it. Callers use it to save Python
        # frames.
        self.endpoint: _core.WriteEndpoint | _FarEnd = ring.endpoint if self._is_local else _FarEnd(ring)

    @classmethod
    def create(
        cls,
        name: str,
        readers: Sequence[int] = (),
        settings: BroadcastSettings | None = None,
        key: bytes | None = None,
        *,
        writer: int = -1,
        remote_readers: Mapping[int, bytes] | None = None,
        bind_address: str | None = None,
        port_range: tuple[int, int] | None = None,
        remote: RemoteSettings | None = None,
    ) -> Self:
        """Create a queue that waits for its readers.

        Args:
            name: The queue's name in errors and logs.
            readers: Ranks of the readers on this host, without repetition, in the order of their places in the ring.
            settings: Size of the ring, and how both ends wait.
            key: 32 bytes that the readers must know too; a new random key by default.
            writer: The writer's own rank, which the readers' errors name; -1 if it has none.
            remote_readers: Public key of each reader on another host, by rank; see `RemoteKeys`.
            bind_address: The numeric address at which they can reach this host; it must not be a wildcard.
            port_range: First and last TCP port that may be used; any free port by default.
            remote: High-water mark and heartbeats of the remote transport.

        Raises:
            UsageError: There are no readers or too many, a reader occurs twice, the key has a wrong length, or
                the address does not belong to this host.
            CapabilityError: There is too little memory for the ring, or no free port in the range.
        """
        ranks, far = tuple(readers), dict(remote_readers or {})
        everybody = ranks + tuple(far)
        if not everybody or len(set(everybody)) != len(everybody) or len(everybody) > MAX_READERS:
            raise UsageError(f"a queue needs 1 to {MAX_READERS} readers, each once, not {list(everybody)}")
        if bool(far) != (bind_address is not None):
            raise UsageError("remote_readers and bind_address go together")
        settings = settings or BroadcastSettings()
        key = new_key() if key is None else key
        if len(key) != KEY_BYTES:
            raise UsageError(f"the key of a queue has {KEY_BYTES} bytes, not {len(key)}")
        place = None if bind_address is None else (bind_address, port_range)

        make = partial(cls._made, name, ranks, settings, key, writer, far, place, remote)
        return made_aside(make, lambda made: made.close(0.0), lambda: None)

    @classmethod
    def _made(
        cls,
        name: str,
        ranks: tuple[int, ...],
        settings: BroadcastSettings,
        key: bytes,
        writer: int,
        far: Mapping[int, bytes],
        place: tuple[str, tuple[int, int] | None] | None,
        remote: RemoteSettings | None,
    ) -> Self:
        generation = secrets.randbits(63)
        transport: RemoteTransport = NoRemote()
        endpoint = None
        ring: RingWriter = NoRing()
        handover = None
        with ExitStack() as undo:
            if place is not None:
                import_aside("shm_broadcast.remote.writer", "zmq")
                from shm_broadcast.remote.writer import RemoteWriter

                transport = far_end = RemoteWriter.create(name, far, *place, settings, remote)
                undo.callback(transport.close)
                endpoint = far_end.endpoint
            if ranks:
                ring, handover = _offer_ring(name, ranks, settings, key, generation, undo)
            handle = QueueHandle(
                VERSION,
                name,
                generation,
                "" if handover is None else handover.address,
                0 if handover is None else segment_bytes(settings.ring_bytes, len(ranks)),
                ranks,
                settings.wait,
                settings.warn_after_s,
                writer,
                endpoint,
            )
            made = cls(ring, transport, handle, key, handover)
            undo.pop_all()
        return made

    def wait_until_ready(self, timeout_s: AnyTimeout = None) -> None:
        """Return when every reader has opened its end.

        Raises:
            CommTimeoutError: Some readers have not come in time; `.missing` names them.
            PeerLostError: A reader came and is gone. The queue is unusable.
            ClosedError: The queue was closed.
        """
        start = time.monotonic()
        timeout_s = seconds(timeout_s, may_be_zero=True)
        try:
            self._ring.await_readers(timeout_s)
        except CommTimeoutError as error:
            missing = sorted({*error.missing, *self._remote.absent()})
            raise CommTimeoutError(f"{error}; missing are {missing}", missing=missing) from error
        left = None if timeout_s is None else max(0.0, start + timeout_s - time.monotonic())
        self._remote.await_readers(left)

    def enqueue(self, obj: Any, timeout_s: AnyTimeout = None) -> None:
        """Send `obj` to every reader; return when the queue owns it.

        Blocks while a local reader is a whole ring behind, or a remote reader is the high-water mark behind.

        Raises:
            UsageError: `obj` cannot be carried, or this is a forked child; nothing was sent.
            CommTimeoutError: The readers in `.missing` made no room in time. Nothing was sent and the queue
                stays usable, unless the message is longer than half of the ring: then parts of it may be
                written, and every later call raises `GroupBrokenError`.
            PeerLostError: A remote reader is gone, or the call waits and a local one is. The queue is unusable.
            ClosedError: The queue was closed.
        """
        if timeout_s is not None:
            timeout_s = seconds(timeout_s, may_be_zero=True)
        if self._is_local:
            self._ring.send(obj, timeout_s)
            return
        if is_held(self._turn):
            self._ring.note_refusal()
            raise UsageError(
                f"enqueue on queue {self.handle.name!r} (writer): this thread is inside of a call on the queue "
                "already, as in a signal handler or a finalizer"
            )
        start = time.monotonic()
        try:
            with Turn(self._turn, timeout_s):
                left = None if timeout_s is None else max(0.0, start + timeout_s - time.monotonic())
                self._enqueue_for_all(obj, left)
        except TakenError:
            raise CommTimeoutError(
                f"enqueue on queue {self.handle.name!r} (writer): another thread is inside of a call on this end, no "
                f"turn within {timeout_s:.1f} s",
                missing=(),
            ) from None
        except (ClosedError, GroupBrokenError, PeerLostError) as error:
            if self._guard is not None and not raised_by_handler(error) and not self._remote.is_asking:
                # A reader whose owner has failed closes its end, and is not to blame.
                self._guard.ended("enqueue")
                if isinstance(error, PeerLostError):
                    self._guard.failed("enqueue", error)
            raise

    def _enqueue_for_all(self, obj: Any, timeout_s: float | None) -> None:
        message = codec.encode(obj)
        # Reserve room at the remote readers first, which sends nothing: a message goes to all readers or to none.
        left = self._remote.reserve(message, timeout_s, lambda: self._ring.messages)
        try:
            self._ring.write(message, left)
        except BaseException:
            # A signal handler may raise when the readers on this host have the message already.
            self._remote.complete()
            raise
        self._remote.publish()

    def guard(self, guard: QueueGuard) -> None:
        """Register the owner of this end, such as a group, which is then told when the end fails.

        Call this before the first use. If the queue reaches other hosts, a call that waits also asks the owner now
        and then whether it has failed.
        """
        if self._is_local:
            self._ring.guard = guard
        else:
            # Told at the end of a call, when its locks are free: the owner may close the queue.
            self._guard = self._remote.guard = guard
        self._add_fields(guard.log_fields())

    def _add_fields(self, fields: LogFields) -> None:
        self._ring.fields.update(fields)
        self._remote.fields.update(fields)

    def statistics(self) -> QueueStatistics:
        """Return what was written, and how far each reader is."""
        return self._remote.added_to(self._ring.statistics())

    def close(self, timeout_s: AnyTimeout = None) -> None:
        """End the queue: readers get the messages that were written, then `ClosedError`. Idempotent.

        If another thread is inside of `enqueue`, either all readers get its message or none does, whatever that call
        raises. `close` waits for that call's copy into shared memory, and ends that call's wait for room.

        Args:
            timeout_s: Seconds that readers on other hosts have to take the messages that were written. The default
                and the maximum is `lost_after_s` of the remote settings. A later reader gets a `PeerLostError`.
        """
        timeout_s = seconds(timeout_s, may_be_zero=True)
        # Whatever a signal handler raises, the next step is done, and a later call goes on with what is left.
        try:
            if self._handover is not None:
                self._handover.close()
        finally:
            try:
                self._ring.close()
            except BaseException:
                # Again now, not in a later call: while the ring is open, another thread may still write a
                # message into it, after the remote readers have got END.
                self._ring.close()
                raise
            finally:
                self._remote.close(timeout_s)

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Name the queue; never its key."""
        return f"<QueueWriter {self.handle.name!r} to ranks {_ranks(self.handle)}>"


def _offer_ring(
    name: str,
    ranks: tuple[int, ...],
    settings: BroadcastSettings,
    key: bytes,
    generation: int,
    undo: ExitStack,
) -> tuple[RingWriter, Handover]:
    """Make a ring and offer it to its readers; `undo` closes both."""
    own_page()  # first: if there is no memory for the page, nothing is open yet that would have to be closed
    segment = Segment.create(segment_bytes(settings.ring_bytes, len(ranks)))
    undo.callback(segment.close)
    _core.ring_format(segment.memory, len(ranks), generation)
    watch = PeerWatch(this_process(), {})

    def joined(hello: Hello, descriptor: int) -> None:
        watch.adopt(ranks[hello.member], hello.process, descriptor)

    segment.pages = KeptPages()
    ring = RingWriter(name, segment, ranks, watch, settings)
    undo.callback(ring.close)
    handover = Handover(segment, key, set(range(len(ranks))), joined, segment.pages)
    undo.callback(handover.close)
    handover.start()
    return ring, handover


def _ranks(handle: QueueHandle) -> list[int]:
    """Return the ranks of all readers, those on this host first."""
    return [*handle.ranks, *(() if handle.remote is None else handle.remote.ranks)]


class QueueReader:
    """One reading end of a queue. One thread at a time may read; any thread may call `close`."""

    def __init__(self, ring: RingReader | RemoteReader, handle: QueueHandle) -> None:
        """Use `open`."""
        self.handle = handle
        self._ring = ring
        self._read: Callable[[float | None, Any], Any] = ring.read
        # On one host, `exchange` ignores its argument, reads within `timeout_ns` and returns `NOTHING`: the object is
        # to be taken out of `message`. Callers use it to save Python frames.
        self.endpoint: _core.ReadEndpoint | _FarEnd = (
            ring.endpoint if isinstance(ring, RingReader) else _FarEnd(ring)
        )

    @classmethod
    def open(
        cls,
        handle: QueueHandle | bytes,
        key: bytes,
        rank: int,
        timeout_s: AnyTimeout = OPEN_S,
        *,
        remote_keys: RemoteKeys | None = None,
    ) -> Self:
        """Open the end of `rank`.

        Args:
            handle: The writer's handle, or its bytes, which are authenticated with `key`.
            key: The queue's key.
            rank: One of the handle's ranks; each can be opened once.
            timeout_s: Time that the writer has to answer; None means the default.
            remote_keys: The key pair of a reader on another host, whose public half the writer was given.

        Raises:
            DecodeError: The handle is forged or stale, or it does not lead to a ring or writer of this package.
            UsageError: `rank` is not a reader of this queue, or it is remote and there is no key pair.
            PeerLostError: The writer is gone, or it refused this process.
            CommTimeoutError: The writer did not answer in time.
        """
        limit_s = seconds(timeout_s, may_be_zero=True)
        limit_s = OPEN_S if limit_s is None else limit_s
        if isinstance(handle, bytes):
            handle = QueueHandle.from_bytes(handle, key)
        if rank not in _ranks(handle):
            raise UsageError(f"rank {rank} is no reader of queue {handle.name!r}, which has {_ranks(handle)}")
        if rank in handle.ranks:
            end: RingReader | RemoteReader = _open_ring(handle, key, rank, limit_s)
        else:
            end = _open_remote(handle, rank, limit_s, remote_keys)
        try:
            return cls(end, handle)
        except BaseException:
            end.close()
            raise

    @property
    def warns(self) -> bool:
        """Whether a read that waits for `warn_after_s` logs a warning; true unless set otherwise.

        An application whose reader may wait for hours, because nothing is to be done, sets it to False.
        """
        return self._ring.warns

    @warns.setter
    def warns(self, value: bool) -> None:
        self._ring.warns = value

    def dequeue(self, timeout_s: AnyTimeout = None, type: Any = None) -> Any:  # noqa: A002
        """Return the next object, which shares no memory with the queue.

        By default it waits without limit, at no cost, but wakes when the writer dies or the queue is closed.

        Args:
            timeout_s: Deadline in seconds; when it passes, nothing is lost and the queue stays usable.
            type: Decode into this type.

        Raises:
            CommTimeoutError: No message came in time.
            DecodeError: The message cannot be decoded; the next one can be read.
            PeerLostError: The writer died, and everything it wrote has been read.
            ClosedError: The writer closed the queue and everything has been read, or this end was closed.
        """
        if timeout_s is not None:
            timeout_s = seconds(timeout_s, may_be_zero=True)
        return self._read(timeout_s, type)

    def try_dequeue(self) -> tuple[bool, Any]:
        """Return (True, the next object), or (False, None) if it is not there or not complete yet. Does not wait.

        Raises:
            DecodeError: The message cannot be decoded; the next one can be read.
            PeerLostError: The writer died, and everything it wrote has been read.
            ClosedError: The writer closed the queue and everything has been read, or this end was closed.
        """
        return self._ring.try_read()

    def fileno(self) -> int:
        """Return a descriptor for `select`, `poll`, `epoll` and `selectors`, which also take the reader itself.

        It is readable while `try_dequeue` may return a message, or raise because the writer has closed the queue or
        died (noticed within a second). Now and then it is readable although `try_dequeue` returns nothing,
        for example because only a part of a long message has come; that call makes it unreadable. Only wait
        for it: it holds no data. `close` makes it readable and then closes it: take it out of selectors
        first.

        The first call starts a thread, which sleeps until a message comes; a reader whose writer is on
        another host has a thread anyway. `dequeue`, `loan` and `adequeue` may be mixed with it.

        Raises:
            ClosedError, GroupBrokenError, UsageError: This reader cannot be used.
        """
        return self._ring.fileno()

    async def adequeue(self, timeout_s: AnyTimeout = None, type: Any = None) -> Any:  # noqa: A002
        """Return the next object, as `dequeue` does, without blocking the event loop that runs.

        A call that is cancelled has taken no message. Several tasks, loops and threads may wait; each message goes to
        one of them, in no particular order. Costs a thread, as `fileno` does.

        Raises:
            CommTimeoutError: No message came in time.
            DecodeError: The message cannot be decoded; the next one can be read.
            PeerLostError: The writer died, and everything it wrote has been read.
            ClosedError: The writer closed the queue and everything has been read, or this end was closed.
        """
        return await awaiting.read(self._ring, seconds(timeout_s, may_be_zero=True), type)

    def loan(self, timeout_s: AnyTimeout = None) -> AbstractContextManager[Any]:
        """Return a context manager that yields the next object without copying its arrays and tensors.

        They alias the ring and are valid only inside the `with` block; treat them as read-only. The writer
        cannot reuse their room before the block ends. A message longer than half of the ring is copied,
        and so is every message from another host.
        """
        return self._ring.loan(seconds(timeout_s, may_be_zero=True))

    def lease(self, timeout_s: AnyTimeout = None) -> AbstractContextManager[Any]:
        """Return `loan(timeout_s)`. Deprecated: the method is called `loan` now."""
        warnings.warn("QueueReader.lease is called loan now", DeprecationWarning, stacklevel=2)
        return self.loan(timeout_s)

    def guard(self, guard: QueueGuard) -> None:
        """Register the owner of this end, such as a group: it is told of failures, and can explain them.

        Call this before the first use. A waiting read also asks the owner now and then whether it has failed.
        """
        self._ring.guard = guard
        self._ring.fields.update(guard.log_fields())

    def lost_writer(self) -> str | None:
        """Return which process wrote to this queue, for a log, if it ended without closing it; else None.

        It does not block, and takes no message: those that the writer has sent can still be read.
        """
        return self._ring.lost_writer()

    def statistics(self) -> QueueStatistics:
        """Return what was read, and how far each reader is; a remote reader knows only of itself."""
        return self._ring.statistics()

    def close(self) -> None:
        """Leave the queue; the writer gets a `PeerLostError` when it needs room from this reader. Idempotent."""
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


def _open_ring(handle: QueueHandle, key: bytes, rank: int, timeout_s: float) -> RingReader:
    """Take the place of `rank` in the ring of a writer on this host."""
    connections: list[socket.socket] = []

    def hang_up() -> None:
        """End the wait for the writer's answer."""
        for connection in connections:
            with tolerating(OSError):  # not connected, or closed already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def make() -> RingReader:
        return _taken_ring(handle, key, rank, timeout_s, connections.append)

    return made_aside(make, RingReader.close, hang_up)


def _taken_ring(
    handle: QueueHandle,
    key: bytes,
    rank: int,
    timeout_s: float,
    connecting: Callable[[socket.socket], None],
) -> RingReader:
    own_page()  # as in `_offer_ring`
    index = handle.ranks.index(rank)
    try:
        segment, writer, descriptor = take_over(
            handle.address, key, index, handle.segment_bytes, timeout_s, 0, KeptPages(), connecting
        )
    except (CommTimeoutError, PeerLostError, DecodeError) as error:
        raise _named(error, handle, rank) from error
    with ExitStack() as undo:
        undo.callback(segment.close)
        watch = PeerWatch(this_process(), {})
        watch.adopt(handle.writer, writer, descriptor)
        undo.callback(watch.close)
        try:
            readers, generation, _, _ = _core.ring_facts(segment.memory)
        except _core.MappingError as error:
            raise DecodeError(f"queue {handle.name!r}: {error}") from error
        if generation != handle.generation or readers != len(handle.ranks):
            raise DecodeError(f"queue {handle.name!r}: the handle is of another generation")
        settings = BroadcastSettings(wait=handle.wait, warn_after_s=handle.warn_after_s)
        ring = RingReader(handle.name, segment, handle.ranks, watch, settings, index, handle.writer)
        undo.pop_all()
    return ring


def _open_remote(handle: QueueHandle, rank: int, timeout_s: float, keys: RemoteKeys | None) -> RemoteReader:
    import_aside("shm_broadcast.remote.reader", "zmq")
    from shm_broadcast.remote.reader import RemoteReader

    if keys is None or handle.remote is None:
        raise UsageError(f"rank {rank} reads queue {handle.name!r} from another host: it needs remote_keys")
    settings = BroadcastSettings(wait=handle.wait, warn_after_s=handle.warn_after_s)
    return RemoteReader.open(
        handle.remote, keys, rank, handle.name, settings, timeout_s, writer=handle.writer
    )


def _named(
    error: CommTimeoutError | PeerLostError | DecodeError, handle: QueueHandle, rank: int
) -> CommError:
    """Return an error of the handover with the queue, the role and the writer's rank added."""
    text = f"open on queue {handle.name!r} (reader, rank {rank}): {error}"
    writers = () if handle.writer < 0 else (handle.writer,)
    if isinstance(error, CommTimeoutError):
        return CommTimeoutError(text, missing=writers)
    if isinstance(error, PeerLostError):
        return PeerLostError(text, peers=writers)
    return DecodeError(text)


def dequeue_any(readers: Sequence[QueueReader], timeout_s: AnyTimeout = None) -> tuple[int, Any]:
    """Return (index, object) from a queue that has a message. This serves many writers and one reader.

    Several threads, and signal handlers, may read the same queues: each message goes to one of them.

    Raises:
        CommTimeoutError: No queue had a message in time.
        DecodeError: The message cannot be decoded; the next one can be read.
        PeerLostError: A writer died and its queue is empty.
        ClosedError: A queue was closed and is empty.
        UsageError: No queue was given, or more than 128 in shared memory, or one cannot be used here.
    """
    if not readers:
        raise UsageError("dequeue_any needs at least one queue")
    ends = [reader._ring for reader in readers]  # noqa: SLF001 - the same module
    return take_any(ends, seconds(timeout_s, may_be_zero=True))
