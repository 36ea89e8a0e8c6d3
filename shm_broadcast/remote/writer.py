"""Write a queue to readers on other hosts: one listening socket, one encrypted connection from each reader.

A lock guards the socket, which the caller and a background thread share. The caller sends a message straight to the
socket. The thread admits readers, receives acknowledgements, sends heartbeats and decides which readers are lost.
`DESIGN.md` explains the protocol.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import zmq

from shm_broadcast import codec
from shm_broadcast.descriptors import new_eventfd
from shm_broadcast.endpoint import VERSION, RemoteEndpoint, RemoteKeys, RemoteSettings, checked_key
from shm_broadcast.errors import DecodeError, InternalError, PeerLostError, UsageError
from shm_broadcast.interruption import tolerating
from shm_broadcast.liveness import fork_count
from shm_broadcast.remote.end import RemoteEnd
from shm_broadcast.remote.ledger import Ledger, Link, Part
from shm_broadcast.remote.wire import Gatekeeper, Kind, Record, identity_of, listen, new_context, pack, unpack
from shm_broadcast.reports.statistics import QueueStatistics
from shm_broadcast.settings import BroadcastSettings

logger: logging.Logger = logging.getLogger(__name__)

# At most 4 zmq threads encrypt: that many already outrun one network card.
_MOST_IO_THREADS: Final = 4

# Records that are received before the lock is released, and how long the thread then leaves it to others if more wait:
# a reader that sends without end must not hold up the callers and the other readers.
_BATCH: Final = 256
_PAUSE_S: Final = 0.001

# How a record's two frames are sent: the name of its connection, and content that zmq owns already.
_FLAGS: Final = (int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK))
_COPIES: Final = (True, False)


class RemoteWriter(RemoteEnd):
    """Sends every message to every remote reader, whole, once and in order.

    One thread at a time may send; any thread may call `close`.
    """

    role = "writer"

    def __init__(
        self,
        name: str,
        readers: Mapping[int, bytes],
        place: tuple[str, tuple[int, int] | None],
        settings: BroadcastSettings,
        remote: RemoteSettings,
    ) -> None:
        """Use `create`."""
        super().__init__(name, settings)
        keys = RemoteKeys.generate()
        self._remote = remote
        self._is_ended = False  # END was sent, and no part can follow
        self._farewell_s = remote.lost_after_s  # how long `close` waits for the readers
        self._ledger = Ledger(readers, remote.high_water_bytes)
        # The parts of a message that the local readers get first, and a function that counts their messages.
        self._ready: list[Part] = []
        self._written: Callable[[], int] = _nothing_written
        self._is_waiting = False
        # Raises if the queue's readers on this host end a wait for those on other hosts.
        self.look_here: Callable[[str], None] | None = None
        self._wake = new_eventfd()
        try:
            self._context = new_context(min(len(readers), _MOST_IO_THREADS))
            ranks = {key: rank for rank, key in readers.items()}
            self._gatekeeper = Gatekeeper(self._context, ranks, self.fields)
            try:
                self._router, port = listen(self._context, keys, *place, remote)
            except BaseException:
                self._gatekeeper.socket.close(0)
                self._context.term()
                raise
        except BaseException:
            os.close(self._wake)
            raise
        self._dropped = 0  # records that made no sense
        self._is_cut = False  # whether a signal handler may have interrupted the sending of a record
        # The native method behind `send`.
        self._send: Callable[[Any, int, bool], Any] = super(zmq.Socket, self._router).send
        self.endpoint: RemoteEndpoint = RemoteEndpoint(
            VERSION, place[0], port, keys.public, secrets.randbits(63), tuple(readers), remote
        )
        self._start()

    @classmethod
    def create(
        cls,
        name: str,
        readers: Mapping[int, bytes],
        bind_address: str,
        port_range: tuple[int, int] | None = None,
        settings: BroadcastSettings | None = None,
        remote: RemoteSettings | None = None,
    ) -> Self:
        """Listen for readers, with a key pair made for this queue. Does not wait for them.

        Args:
            name: The queue's name in errors and logs.
            readers: Public key (32 bytes) of each reader, by rank. No other key is admitted, and each only as its rank.
            bind_address: The numeric address to listen on, never a wildcard.
            port_range: First and last port that may be used; by default any free port.
            settings: Gives the time after which a waiting call warns.
            remote: High-water mark and heartbeats; the readers use the same.

        Raises:
            UsageError: There are no readers, two share a key, a key is not valid, or the address is not of this host.
            CapabilityError: No port of the range is free, the kernel refuses a descriptor, or libzmq has no CURVE.
        """
        keys = [checked_key(key) for key in readers.values()]
        if not keys or len(set(keys)) != len(keys):
            raise UsageError(
                f"a remote queue needs at least one reader and a different key for each, got {len(keys)} keys"
            )
        place = (bind_address, port_range)
        return cls(name, dict(readers), place, settings or BroadcastSettings(), remote or RemoteSettings())

    # --- sending ----------------------------------------------------------------------------------------------

    @property
    def messages(self) -> int:
        """Number of messages that were sent."""
        return self._ledger.last.messages

    def reserve(
        self, message: codec.Message, timeout_s: float | None, written: Callable[[], int]
    ) -> float | None:
        """Wait until `message` may be published, and copy it; return what is left of `timeout_s` (seconds).

        Blocks while a reader would be more than the high-water mark behind. `written` returns how many messages the
        writer's other readers have; as soon as that includes this one, it will be sent, whatever a signal handler
        raises meanwhile: by this call's `publish` or `complete`, by the next call, or by the thread.

        Raises:
            CommTimeoutError: The readers in `.missing` made no room in time. The queue stays usable.
            PeerLostError: A reader is gone; the queue is unusable.
            ClosedError: The queue was closed.
            GroupBrokenError: An earlier call failed; its error is the `__cause__`.
        """
        self.is_asking = False
        self._check_open("enqueue")
        left = timeout_s
        try:
            with self._lock:
                self.check("enqueue")
                self._send_ready()
                self._ready = []
                is_full = bool(self._ledger.in_the_way(message.nbytes))
            if is_full:
                start = time.monotonic()
                self._await_room(message.nbytes, timeout_s)
                left = None if timeout_s is None else max(0.0, start + timeout_s - time.monotonic())
        finally:
            if self._is_deferred:
                self._close()
        # Without the lock: the thread must answer while a long message is copied. Nobody else adds parts.
        self._written, self._ready = written, self._ledger.cut(message)
        return left

    def publish(self) -> None:
        """Send the message that `reserve` copied, which the local readers have. Does not wait."""
        if not self.complete():
            self.check("enqueue")

    def complete(self) -> bool:
        """Send the message that `reserve` copied if the local readers have it; return whether it was sent."""
        try:
            with self._lock:
                self._send_ready()
                is_sent, self._ready = not self._ready, []
                return is_sent
        finally:
            if self._is_deferred:
                self._close()

    def _send_ready(self) -> None:
        """Do as `complete` does; the caller holds the lock, and can repeat what a handler interrupts."""
        parts = self._ready
        if not parts or self._is_ended or self._written() < parts[-1].messages:
            return
        if self._ledger.last.messages < parts[-1].messages:
            self._ledger.add(parts)
        # If a signal interrupts this loop, a reader notices the missing part at the next heartbeat.
        for part in parts:
            self._push_to_all(part.frame)
        self._ready = []
        self._receive_rest()

    def check(self, call: str) -> None:
        """Raise unless this process can use this end now, as `RemoteEnd.check` does.

        Raises:
            PeerLostError: A reader is gone; later calls raise `GroupBrokenError`.
        """
        super().check(call)
        gone = [link for link in self._ledger.links.values() if link.is_gone]
        if gone:
            who, ranks = self._named(gone)
            self._cause = PeerLostError(
                f"{self._where(call)}: lost reader {who}; close the queue", peers=ranks
            )
            raise self._cause

    def look_around(self, call: str) -> None:
        """Raise if a reader is gone, as `check` does, or the owner has failed: ends a wait for readers on this host."""
        try:
            with self._lock:
                self.check(call)
        finally:
            if self._is_deferred:
                self._close()
        super()._look(call)

    def _look(self, call: str) -> None:
        super()._look(call)
        if self.look_here is not None:
            self.look_here(call)

    def _named(self, links: list[Link]) -> tuple[str, list[int]]:
        """Return the state of some readers for an error's text, and their ranks, ascending."""
        return self._ledger.describe(links), sorted(link.rank for link in links)

    def _await_room(self, nbytes: int, timeout_s: float | None) -> None:
        """Wait until every reader has room for `nbytes`."""

        def has_room() -> bool:
            self._check_open("enqueue")
            with self._lock:
                self.check("enqueue")
                return not self._ledger.in_the_way(nbytes)

        def missing() -> tuple[str, list[int]]:
            with self._lock:
                who, ranks = self._named(self._ledger.in_the_way(nbytes))
            return f"no room, behind are {who}", ranks

        start = time.monotonic()
        self._waits += 1
        try:
            # Readers acknowledge only occasionally: ask for their progress before blaming one.
            with self._lock:
                self.check("enqueue")
                self._is_waiting = True
                self._beat()
            self._wait("enqueue", timeout_s, has_room, missing)
        finally:
            self._is_waiting = False
            self._waited_s += time.monotonic() - start

    def _sleep(self, news: threading.Lock, seconds: float) -> None:
        self._news.sleep(news, seconds)

    def absent(self) -> list[int]:
        """Return the ranks that have not opened their end."""
        self._check_open("wait_until_ready")
        try:
            with self._lock:
                return sorted(link.rank for link in self._ledger.links.values() if not link.has_come)
        finally:
            if self._is_deferred:
                self._close()

    def await_readers(self, timeout_s: float | None) -> None:
        """Wait until every reader has opened its end.

        Raises:
            CommTimeoutError: The readers in `.missing` did not open theirs in time; the queue stays usable.
            PeerLostError: A reader opened its end and is gone; the queue is unusable.
        """

        def has_everybody() -> bool:
            if self.absent():
                self.check("wait_until_ready")
                return False
            return True

        def missing() -> tuple[str, list[int]]:
            who, ranks = self._named([self._ledger.links[rank] for rank in self.absent()])
            return f"no reader {who}", ranks

        self._wait("wait_until_ready", timeout_s, has_everybody, missing)

    def statistics(self) -> QueueStatistics:
        """Return what was sent and each reader's progress, at most one heartbeat old. Works on a broken queue too."""
        self._check_open("statistics")
        try:
            with self._lock:
                last, readers = self._ledger.last, self._ledger.readers()
        finally:
            if self._is_deferred:
                self._close()
        capacity = self._remote.high_water_bytes
        return QueueStatistics(last.messages, last.nbytes, self._waits, self._waited_s, capacity, readers)

    def added_to(self, local: QueueStatistics) -> QueueStatistics:
        """Return the statistics of the whole queue, given those of its local transport."""
        own = self.statistics()
        return QueueStatistics(
            max(own.messages, local.messages),
            max(own.nbytes, local.nbytes),
            own.waits + local.waits,
            own.waited_s + local.waited_s,
            local.capacity_bytes or own.capacity_bytes,
            local.readers + own.readers,
        )

    # --- the thread: receiving and timeouts; the methods it calls need the lock -------------------------------

    def _break(self, error: InternalError) -> None:
        with self._lock:
            self._cause = self._cause or error
            self._news.tell()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._gatekeeper.socket, zmq.POLLIN)
        # Poll the descriptor: zmq's own poll would use the socket without the lock.
        poller.register(self._router.get(zmq.FD), zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        beat_at = time.monotonic()
        has_more = False
        while not self._is_stopping:
            losses = [at for link in self._ledger.links.values() if (at := self._lost_at(link))]
            wake_at = min([beat_at, *losses])
            if has_more:
                time.sleep(_PAUSE_S)
            poller.poll(0 if has_more else int(max(0.0, wake_at - time.monotonic()) * 1000) + 1)
            with tolerating(BlockingIOError):  # raised if the eventfd was not set
                os.eventfd_read(self._wake)
            admitted = self._gatekeeper.answer()
            with self._lock:
                now = time.monotonic()
                for rank in admitted:
                    self._ledger.links[rank].heard_at = now
                has_more = self._drain()
                if now >= beat_at:
                    self._send_ready()
                    self._beat()
                    beat_at = now + self._remote.heartbeat_s
                for link in self._ledger.links.values():
                    lost_at = self._lost_at(link)
                    if lost_at is not None and now >= lost_at:
                        self._lose(link)

    def _lost_at(self, link: Link) -> float | None:
        """Return the time at which `link` counts as lost unless it comes back; None while all is well."""
        if link.route is not None or not link.has_come or link.is_gone:
            return None
        return max(link.broken_at + self._remote.grace_s, link.heard_at + self._remote.lost_after_s)

    def _lose(self, link: Link) -> None:
        link.is_lost = True
        self._gatekeeper.expel(link.rank)
        who = self._ledger.describe([link])
        logger.warning("queue %r: lost reader %s", self.name, who, extra=self.fields.copy())
        self._news.tell()

    def _beat(self) -> None:
        """Send a heartbeat to every connected reader; it also reveals broken connections."""
        # After END, which counts as one more part, it also reveals to a reader that it has lost END.
        last = self._ledger.last.number + self._is_ended
        for link in self._ledger.links.values():
            self._push(link, zmq.Frame(pack(Kind.BEAT, last, self._is_waiting, link.ask)))
        self._receive_rest()

    def _push_to_all(self, frame: zmq.Frame) -> None:
        for link in self._ledger.links.values():
            self._push(link, frame)

    def _push(self, link: Link, frame: zmq.Frame) -> None:
        route = link.route
        if route is not None and not self._say(route, frame):
            link.route, link.broken_at = None, time.monotonic()

    def _say(self, route: bytes, frame: zmq.Frame) -> bool:
        """Queue a record for one connection; return whether the connection exists."""
        if self._is_cut:
            # If only a record's first frame was sent, zmq takes the next one for its second. An empty frame
            # ends that record, and the reader drops it. If it was whole, zmq drops the empty frame itself.
            self._send(b"", zmq.NOBLOCK, True)
        # zmq looks for signals behind each half, and a handler may raise there.
        self._is_cut = True
        try:
            deque(map(self._send, (route, frame), _FLAGS, _COPIES), maxlen=0)
            self._is_cut = False
        except zmq.ZMQError as error:
            self._is_cut = False
            # EAGAIN: the connection is being torn down and accepts no more records.
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        return True

    def _receive_rest(self) -> None:
        """Receive what has arrived while records were sent: sending clears the descriptor that wakes the thread."""
        if int(self._router.get(zmq.EVENTS)) & zmq.POLLIN and self._drain():
            os.eventfd_write(self._wake, 1)

    def _drain(self) -> bool:
        """Receive what the readers have sent, up to a batch of it; return whether more may be waiting."""
        for _ in range(_BATCH):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            if len(frames) != 2:  # a signal handler has raised between the two; the reader says it again
                continue
            try:
                link = self._ledger.links[int(frames[-1].get("User-Id"))]
                self._hear(link, frames[0].bytes, unpack(frames[-1]))
            except DecodeError as error:
                self._note_dropped(error)
        return True

    def _note_dropped(self, error: DecodeError) -> None:
        """Log the 1st, 2nd, 4th, 8th ... record that makes no sense, so that a reader cannot fill the log."""
        self._dropped += 1
        if self._dropped & (self._dropped - 1) == 0:
            logger.warning(
                "queue %r: dropped a reader's record (%d so far): %s",
                *(self.name, self._dropped, error),
                extra=self.fields.copy(),
            )

    def _hear(self, link: Link, route: bytes, record: Record) -> None:
        link.heard_at = time.monotonic()
        if record.kind == Kind.HELLO:
            self._greet(link, route, record)
        elif link.incarnation is None or record.third != link.incarnation:
            # The sender is a second reader object of that rank, which was refused.
            return
        elif record.kind == Kind.ACK:
            self._ledger.acknowledge(link, record.first, record.second)
            self._news.tell()
        elif record.kind == Kind.AGAIN:
            if record.first == link.ask:
                # The next demand must repeat a number that the reader gets after all that is resent now.
                link.ask = secrets.randbits(63) + 1
                self._send_after(link, record.second)
        elif record.kind == Kind.BYE:
            link.has_left, link.route = True, None
            self._news.tell()
        else:
            raise DecodeError(f"rank {link.rank} sent a record of unknown kind {record.kind}")

    def _greet(self, link: Link, route: bytes, hello: Record) -> None:
        """Admit a reader: start it, or resume after the last part that it received."""
        if not link.may_greet(route):
            return
        received, last = hello.second, self._ledger.last.number
        process = identity_of(hello.body)
        why = ""
        if hello.first != self.endpoint.generation:
            why = "its handle has another generation"
        elif link.is_gone:
            why = "it was given up, or had left"
        elif link.incarnation not in (None, hello.third):
            why = "this rank has opened the queue before"
        elif received > last + 1:
            why = f"it claims to have received {received} of {last} parts"
        if why:
            refusal = pack(Kind.REFUSED, self.endpoint.generation, third=hello.third, body=why.encode())
            self._say(route, zmq.Frame(refusal))
            return
        if received < link.received:
            # An acknowledgement over a newer connection has overtaken this HELLO.
            return
        is_new = link.connect(route)
        link.incarnation, link.process, link.received = hello.third, process, received
        welcome = pack(Kind.WELCOME, self.endpoint.generation, third=hello.third, body=self._identity)
        self._push(link, zmq.Frame(welcome))
        if is_new:
            self._send_after(link, received)
        self._news.tell()

    def _send_after(self, link: Link, received: int) -> None:
        """Send everything after part `received` over the current connection."""
        for part in self._ledger.after(received):
            self._push(link, part.frame)
        if self._is_ended:
            self._push(link, self._end())

    # --- closing ----------------------------------------------------------------------------------------------

    def _end(self) -> zmq.Frame:
        return zmq.Frame(pack(Kind.END, self._ledger.last.number + 1))

    def close(self, timeout_s: float | None = None) -> None:
        """Close the queue: readers get what was written, then `ClosedError`. Idempotent; wakes a waiting call.

        Waits until every reader's process has received everything, at most for the shorter of `lost_after_s` and
        `timeout_s` (seconds). A reader that is late gets `PeerLostError` instead of `ClosedError`. If a signal handler
        raises meanwhile, this still finishes, within a fifth of a second. A handler that calls this inside of a call of
        its thread only begins it: that call finishes it.
        """
        if self._forks != fork_count():
            return
        if timeout_s is not None:
            self._farewell_s = min(self._farewell_s, timeout_s)
        self._is_closing = True
        self._close()

    def _finish(self, within_s: float | None) -> None:
        start = time.monotonic()
        self._send_end()
        within_s = self._farewell_s if within_s is None else min(within_s, self._farewell_s)
        self._news.await_until(start + within_s, self._is_finished)
        self._stop_thread(self._wake)
        self._router.close(0)
        self._gatekeeper.socket.close(0)
        self._end_context(self._context)
        if self._wake >= 0:
            wake, self._wake = self._wake, -1
            os.close(wake)
        self._ready = []
        self._ledger.clear()
        self._is_closed = True

    def _send_end(self) -> None:
        """Send what the local readers have, then END, unless the thread is to stop: END precedes that."""
        with self._lock:
            if self._is_stopping:
                return
            # The ring was closed before: what it has is counted, and no other message comes into it.
            self._send_ready()
            self._is_ended = True
            self._push_to_all(self._end())
            self._receive_rest()
            self._news.tell()

    def _is_finished(self) -> bool:
        """Return whether every reader has received everything, or nothing more can be learnt of that."""
        with self._lock:
            # A thread that is gone receives no more acknowledgements.
            is_over = self._is_stopping or isinstance(self._cause, InternalError)
            return is_over or self._ledger.has_everybody_everything()

    def __repr__(self) -> str:
        """Name the queue, its address and its ranks, never a key."""
        return f"<RemoteWriter {self.name!r} on {self.endpoint.url()} to ranks {list(self._ledger.links)}>"


def _nothing_written() -> int:
    """Stand for the number of messages before the first."""
    return 0
