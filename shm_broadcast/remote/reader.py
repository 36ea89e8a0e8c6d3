"""Read a queue from another host, over one encrypted connection to its writer.

A lock guards the socket, which the caller and a background thread share. A reading call receives its messages by
itself. The thread says HELLO after each reconnect, answers heartbeats while no call reads, and decides whether the
writer is lost. `DESIGN.md` explains the protocol.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from functools import partial
from typing import Final, NoReturn, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from shm_broadcast._core import undisturbed
from shm_broadcast.descriptors import new_eventfd
from shm_broadcast.endpoint import RemoteEndpoint, RemoteKeys
from shm_broadcast.errors import (
    ClosedError,
    DecodeError,
    InternalError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.interruption import is_held, tolerating
from shm_broadcast.liveness import ProcessIdentity, fork_count
from shm_broadcast.remote.reads import RemoteReads
from shm_broadcast.remote.wire import Context, Kind, Record, connect, identity_of, new_context, pack, unpack
from shm_broadcast.reports.statistics import QueueStatistics, ReaderStatistics
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.threads import made_aside

# Records that the thread receives before it releases the lock, so that a reading call does not wait long.
_BATCH: Final = 256

# After this many failed handshakes, each within `_QUICK_S` of connecting, the listener is taken to be a stranger that
# cannot decrypt what is encrypted for the writer's key.
_WRONG_KEY_TRIES: Final = 3
_QUICK_S: Final = 1.0

# Say HELLO again after this many heartbeats of silence on a connection: the writer may have lost the first one.
_GREET_AGAIN: Final = 2.5

# A wait looks again after this time. `poll` refuses more than 24.8 days.
_LONGEST_SLEEP_S: Final = 3600.0

# Milliseconds that zmq may take to send BYE when the reader closes.
_FAREWELL_MS: Final = 200

_FAILED_HANDSHAKES: Final = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL


class RemoteReader(RemoteReads):
    """The end of a reader on another host. One thread at a time may read; any thread may call `close`."""

    def __init__(
        self,
        endpoint: RemoteEndpoint,
        keys: RemoteKeys,
        rank: int,
        name: str,
        settings: BroadcastSettings,
        writer: int,
    ) -> None:
        """Use `open`."""
        super().__init__(name, settings, endpoint)
        self.rank = rank
        self.role: str = f"reader, rank {rank}"
        self.fields["comm_rank"] = rank
        self._writer = writer
        self._writer_process: ProcessIdentity | None = None  # known after WELCOME
        self._incarnation = secrets.randbits(63)
        self._has_ended = self._is_off = False
        self._failure: Exception | None = None  # raised once everything received has been read
        self._heard_at = self._connected_at = 0.0
        self._broken_at: float | None = None  # None while connected, and before the first connection
        self._greeted_at = 0.0
        self._wrong_keys = 0
        # `_signal` is readable while there is something to read, or to raise; -1 until somebody asks for it.
        self._signal = self._wake = self._stop = -1
        try:
            self._wake = new_eventfd()
            self._stop = new_eventfd()
            self._context: Context = new_context(1)
            try:
                self._dealer, self._monitor = connect(self._context, keys, endpoint)
            except BaseException:
                self._context.term()
                raise
        except BaseException:
            self._close_descriptors()
            raise
        self.descriptors: tuple[int, int] = (int(self._dealer.get(zmq.FD)), self._wake)
        self._poll = select.poll()
        for descriptor in self.descriptors:
            self._poll.register(descriptor, select.POLLIN)
        self._start()

    @classmethod
    def open(
        cls,
        endpoint: RemoteEndpoint,
        keys: RemoteKeys,
        rank: int,
        name: str,
        settings: BroadcastSettings | None = None,
        timeout_s: float = 30.0,
        *,
        writer: int = -1,
    ) -> Self:
        """Connect to the writer and wait until it admits this reader.

        Args:
            endpoint: The writer's endpoint, from an authenticated handle.
            keys: The key pair whose public half the writer holds for `rank`.
            rank: One of the endpoint's ranks; each may open once.
            name: The queue's name in errors and logs.
            settings: Gives the time after which a waiting call warns.
            timeout_s: Deadline in seconds for the writer's answer.
            writer: The writer's rank, which errors name; -1 if it has none.

        Raises:
            UsageError: `rank` is not a remote reader of this queue.
            PeerLostError: The writer refused: it does not know the key, or this rank opened the queue before.
            DecodeError: The process listening there is not the writer of this endpoint, or has another generation.
            CommTimeoutError: Nothing answered in time.
        """
        if rank not in endpoint.ranks:
            raise UsageError(
                f"rank {rank} is not a remote reader of queue {name!r}; its remote ranks are {endpoint.ranks}"
            )
        make = partial(cls, endpoint, keys, rank, name, settings or BroadcastSettings(), writer)
        reader = made_aside(make, cls.close, lambda: None)
        try:
            reader._await_welcome(timeout_s)  # noqa: SLF001 - the same class
        except BaseException:
            reader.close()
            raise
        return reader

    def _await_welcome(self, timeout_s: float) -> None:
        def is_welcome() -> bool:
            self.poll()
            if self._writer_process is not None:
                return True
            if isinstance(self._failure, PeerLostError):
                raise PeerLostError(f"{self._where('open')}: {self._failure}", peers=self._culprits())
            if self._failure is not None:
                raise DecodeError(f"{self._where('open')}: {self._failure}") from self._failure
            return False

        self._wait("open", timeout_s, is_welcome, lambda: self._missing("answer"))

    # --- reading ----------------------------------------------------------------------------------------------

    def fileno(self, call: str = "fileno") -> int:
        """Return a descriptor that is readable while there is something to read, or to raise."""
        self._refuse_nested(call)
        self._check_open(call)
        try:
            # Not `_calls`, which another thread holds while it waits for a message.
            with self._lock:
                self.check(call)
                if self._signal < 0:
                    self._signal = made_aside(new_eventfd, os.close, lambda: None)
                    # Wakes the thread, which from now on receives messages when they come.
                    os.eventfd_write(self._stop, 1)
                    self._settle()
                return self._signal
        finally:
            if self._is_deferred:
                self._close()

    def _settle(self) -> None:
        """Make the descriptor of `fileno` readable if there is something to read or to raise, else unreadable."""
        with self._lock:
            if self._signal < 0:
                return
            if not self._inbox and not self._is_closing:
                self._drain(_BATCH)
            self._signal_state()

    def _signal_state(self) -> None:
        """Do what `_settle` says by what has been received so far; the caller holds `_lock`."""
        if self._inbox or self._has_ended or self._is_closing or self._failure is not None:
            os.eventfd_write(self._signal, 1)
        else:
            with tolerating(BlockingIOError):  # raised if it is unreadable
                os.eventfd_read(self._signal)

    def raise_late(self, call: str, within_s: float) -> NoReturn:
        """Raise `CommTimeoutError` for a message that has not come within `within_s` seconds."""
        self._raise_late(call, within_s, *self._missing("message"))

    def poll(self) -> bool:
        """Return whether a message has arrived. Does not wait."""
        with self._lock:
            if not self._inbox and not self._is_closing:
                with tolerating(BlockingIOError):  # raised if the eventfd was not set
                    os.eventfd_read(self._wake)
                self._drain(_BATCH)
            return bool(self._inbox)

    def is_ready(self) -> bool:
        """Return whether a reading call would return or raise at once, for `dequeue_any`. Does not wait.

        What the owner raises, this raises.
        """
        if is_held(self._lock):
            raise UsageError(
                f"{self._where('dequeue_any')}: this thread is inside of a call on the queue already"
            )
        try:
            if self.poll() or self._has_ended or self._is_closing or self._failure is not None:
                return True
            self._look("dequeue_any")
            return False
        finally:
            if self._is_deferred:
                self._close()

    @property
    def messages(self) -> int:
        """Number of messages that this end has read."""
        return self._inbox.progress.messages

    def _await(self, call: str, timeout_s: float | None, since: float) -> None:
        def has_arrived() -> bool:
            if self.poll():
                return True
            self._raise_if_over(call)
            return bool(self._inbox)

        start = time.monotonic()
        self._waits += 1
        try:
            self._wait(call, timeout_s, has_arrived, lambda: self._missing("message"), since)
        finally:
            self._waited_s += time.monotonic() - start

    def _raise_if_over(self, call: str) -> None:
        """Raise if no further message will come, and none is there."""
        if self._is_closing:
            raise ClosedError(f"{self._where(call)}: the queue was closed while the call waited")
        if not (self._has_ended or self._failure is not None) or self._inbox:
            # The inbox is looked at last: since the caller looked, this end's thread may have received a
            # message and then END.
            return
        if self._has_ended:
            raise ClosedError(f"{self._where(call)}: the writer closed the queue")
        if isinstance(self._failure, PeerLostError):
            self._cause = PeerLostError(
                f"{self._where(call)}: {self._failure}; close the queue", peers=self._culprits()
            )
            raise self._cause
        if self._failure is not None:
            self._cause = self._failure
            raise self._failure

    def _sleep(self, _news: threading.Lock, seconds: float) -> None:
        self._poll.poll(max(0.0, min(seconds, _LONGEST_SLEEP_S)) * 1000 + 1)

    def _culprits(self) -> tuple[int, ...]:
        return () if self._writer < 0 else (self._writer,)

    def _missing(self, what: str) -> tuple[str, tuple[int, ...]]:
        """Return what a waiting call lacks, for the text, and whom to blame."""
        return f"no {what} from {self._describe_writer()}", self._culprits()

    def lost_writer(self) -> str | None:
        """Describe the writer if it counts as lost, even if messages of it are still to be read; else None."""
        is_lost = isinstance(self._failure, PeerLostError) or isinstance(self._cause, PeerLostError)
        return self._describe_writer() if is_lost else None

    def _describe_writer(self) -> str:
        process = self._writer_process
        parts = [] if self._writer < 0 else [f"rank {self._writer}"]
        parts += [] if process is None else [f"pid {process.pid} on host {process.hostname}"]
        parts.append(self._endpoint.url())
        if process is not None:
            parts.append("connected" if self._broken_at is None else "no connection")
            parts.append(f"last heard {time.monotonic() - self._heard_at:.1f} s ago")
        return f"the writer ({', '.join(parts)})"

    def statistics(self) -> QueueStatistics:
        """Return what this end has read and what is waiting; the other readers are not visible here."""
        self._check_open("statistics")
        try:
            with self._lock:
                progress = None if self._progress_at is None else time.monotonic() - self._progress_at
                behind = len(self._inbox), self._inbox.nbytes()
                own = ReaderStatistics(self.rank, *behind, progress, self._failure is None)
        finally:
            if self._is_deferred:
                self._close()
        capacity = self._endpoint.settings.high_water_bytes
        read = self._inbox.progress
        return QueueStatistics(read.messages, read.nbytes, self._waits, self._waited_s, capacity, (own,))

    # --- receiving; the caller holds `_lock` ------------------------------------------------------------------

    def _drain(self, most: int) -> bool:
        """Receive up to `most` records; return whether more may be waiting."""
        for _ in range(most if self._failure is None else 0):
            try:
                frame = self._dealer.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            if not len(frame):  # the rest of a record that a signal handler has cut
                continue
            try:
                self._hear(unpack(frame))
            except DecodeError as error:
                self._give_up(error)
                return False
        return self._failure is None

    def _hear(self, record: Record) -> None:
        self._heard_at = time.monotonic()
        if record.kind == Kind.DATA:
            self._inbox.take(record)
        elif record.kind == Kind.BEAT:
            if record.first > self._inbox.received and not self._has_ended:
                # A signal interrupted one of the two processes, and a part was lost.
                self._say(pack(Kind.AGAIN, record.third, self._inbox.received, self._incarnation))
            self._is_awaited = bool(record.second)
            self._acknowledge()
        elif record.kind == Kind.END:
            if record.first == self._inbox.received + 1:
                self._has_ended = True
            self._acknowledge()
        elif record.kind not in (Kind.WELCOME, Kind.REFUSED):
            raise DecodeError(f"the writer sent a record of unknown kind {record.kind}")
        elif record.first != self._endpoint.generation:
            raise DecodeError("the handle belongs to another generation of the queue")
        elif record.third == self._incarnation and record.kind == Kind.WELCOME:
            self._writer_process = identity_of(record.body)
        elif record.third == self._incarnation:
            self._refuse(bytes(record.body[:200]).decode("utf-8", "replace"))

    def _greet(self) -> None:
        """Say HELLO: ask for everything after the last part received."""
        self._greeted_at = time.monotonic()
        self._say(
            pack(
                Kind.HELLO, self._endpoint.generation, self._inbox.received, self._incarnation, self._identity
            )
        )

    def _acknowledge(self) -> None:
        self._unacknowledged = 0
        # END counts as one more part.
        received = self._inbox.received + self._has_ended
        self._say(pack(Kind.ACK, self._inbox.progress.given_back, received, self._incarnation))

    def _say(self, record: bytes) -> None:
        if not self._is_off:
            # Without a connection zmq keeps the record for the next one.
            self._dealer.send(record, zmq.NOBLOCK)

    def _refuse(self, why: str) -> None:
        self._give_up(PeerLostError(f"{self._describe_writer()} refuses this reader: {why}"))

    def _give_up(self, error: Exception) -> None:
        """Store the failure unless the queue has already ended or failed, and disconnect."""
        if self._failure is None and not self._has_ended:
            self._failure = error
        self._hang_up()

    def _hang_up(self) -> None:
        if not self._is_off:
            self._is_off = True
            undisturbed(partial(self._dealer.disconnect, self._endpoint.url()))

    # --- the thread: connection and timeouts ------------------------------------------------------------------

    def _break(self, error: InternalError) -> None:
        self._failure = self._failure or error
        if self._signal >= 0:
            os.eventfd_write(self._signal, 1)
        os.eventfd_write(self._wake, 1)

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        heartbeat_s = self._endpoint.settings.heartbeat_s
        is_signalling = False
        while not self._is_stopping:
            lost_at = self._lost_at()
            wait_s = heartbeat_s if lost_at is None else min(heartbeat_s, lost_at - time.monotonic())
            # A reader that has failed receives no more, which leaves the descriptor of its socket readable.
            if is_signalling != (self._signal >= 0 and self._failure is None):
                is_signalling = not is_signalling
                if is_signalling:
                    poller.register(self.descriptors[0], zmq.POLLIN)
                else:
                    poller.unregister(self.descriptors[0])
            poller.poll(int(max(0.0, wait_s) * 1000) + 1)
            with tolerating(BlockingIOError):  # raised if the eventfd was not set
                os.eventfd_read(self._stop)
            before = self._state()
            while self._monitor.poll(0):
                event = zmq.Event(recv_monitor_message(self._monitor)["event"])
                with self._lock:
                    self._notice(event, time.monotonic())
            has_more = True
            while has_more and not self._is_stopping:
                with self._lock:
                    has_more = self._drain(_BATCH)
            with self._lock:
                self._check_connection(time.monotonic())
                if self._signal >= 0:
                    self._signal_state()
            if self._state() != before:
                os.eventfd_write(self._wake, 1)

    def _state(self) -> tuple[object, ...]:
        """Return the state whose change must wake a waiting call."""
        return self._inbox.received, self._has_ended, self._failure, self._writer_process

    def _notice(self, event: zmq.Event, now: float) -> None:
        """Track the state of the connection."""
        if event == zmq.Event.CONNECTED:
            self._connected_at = now
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._wrong_keys, self._broken_at = 0, None
            self._greet()
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._refuse("no reader has this key, or the writer gave that reader up")
        elif event in _FAILED_HANDSHAKES and now - self._connected_at < _QUICK_S:
            self._wrong_keys += 1
            if self._wrong_keys >= _WRONG_KEY_TRIES and self._writer_process is None:
                url = self._endpoint.url()
                self._give_up(DecodeError(f"the process listening at {url} does not hold the handle's key"))
        elif event == zmq.Event.DISCONNECTED:
            self._broken_at = self._broken_at or now
            if self._has_ended:
                self._hang_up()

    def _lost_at(self) -> float | None:
        """Return the time at which the writer counts as lost unless it comes back; None while all is well."""
        is_fine = self._broken_at is None or self._writer_process is None
        if is_fine or self._has_ended or self._failure is not None:
            return None
        settings = self._endpoint.settings
        return max((self._broken_at or 0.0) + settings.grace_s, self._heard_at + settings.lost_after_s)

    def _check_connection(self, now: float) -> None:
        """Give up a lost writer; say HELLO again if the last one seems lost."""
        lost_at = self._lost_at()
        if lost_at is not None and now >= lost_at:
            self._give_up(PeerLostError(f"lost {self._describe_writer()}"))
        elif self._broken_at is None and self._greeted_at and not self._has_ended:
            silent_s = now - max(self._heard_at, self._greeted_at)
            if silent_s > _GREET_AGAIN * self._endpoint.settings.heartbeat_s:
                self._greet()

    # --- closing ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the queue; the writer notices at once. Idempotent. A waiting call wakes up and raises `ClosedError`.

        A signal handler that calls this inside of a call of its thread only begins it: that call finishes it.
        """
        if self._forks != fork_count():
            return
        self._is_closing = True
        self._ring_out()
        self._close()

    def _ring_out(self) -> None:
        """Wake whoever waits, because this end closes."""
        with self._lock:
            for descriptor in (self._wake, self._signal):
                if descriptor >= 0:
                    os.eventfd_write(descriptor, 1)

    def _finish(self, _within_s: float | None) -> None:
        self._ring_out()
        with self._calls:
            self._stop_thread(self._stop)
            is_connected = self._writer_process is not None and self._broken_at is None and not self._is_off
            with self._lock:
                if not self._dealer.closed:
                    if is_connected and not self._has_ended:
                        self._say(pack(Kind.BYE, third=self._incarnation))
                    undisturbed(self._dealer.disable_monitor)
                    self._monitor.close(0)
                    self._dealer.close(_FAREWELL_MS if is_connected else 0)
            self._end_context(self._context)
            with self._lock:
                self._close_descriptors()
                self._inbox.clear()
                self._cause = self._failure = None
            self._is_closed = True

    def _close_descriptors(self) -> None:
        """Close the eventfds; no signal handler runs between clearing an attribute and closing its number."""
        if self._wake >= 0:
            wake, self._wake = self._wake, -1
            os.close(wake)
        if self._stop >= 0:
            stop, self._stop = self._stop, -1
            os.close(stop)
        if self._signal >= 0:
            signal, self._signal = self._signal, -1
            os.close(signal)

    def __repr__(self) -> str:
        """Name the queue and the rank, never a key."""
        return f"<RemoteReader {self.name!r} {self.role}>"
