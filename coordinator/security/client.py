"""Ask the store of a job, over one encrypted connection to rank 0.

A thread of its own uses the socket; callers hand it their questions and sleep, without the interpreter, until it has
the answer. So any thread may ask while others wait, those of Gloo too.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import torch.distributed as dist
import zmq
from zmq.utils.monitor import recv_monitor_message

from coordinator.security.records import (
    LONGEST_ANSWER,
    LONGEST_QUESTION,
    NO_GENERATION,
    Answer,
    Kind,
    Question,
    answer_of,
    pack,
    packed,
    unpack,
)
from coordinator.security.store_thread import StoreThread, is_at
from shm_broadcast.descriptors import new_eventfd
from shm_broadcast.endpoint import RemoteEndpoint, RemoteKeys
from shm_broadcast.errors import DecodeError, UsageError
from shm_broadcast.interruption import tolerating
from shm_broadcast.liveness import fork_count
from shm_broadcast.remote.wire import connect, new_context
from shm_broadcast.reports.log_fields import log_fields

__all__ = ["StoreClient"]

logger: logging.Logger = logging.getLogger(__name__)

_FAILED_HANDSHAKES: Final = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_GIVES_UP: Final = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_CLOSED: Final = "it was closed"
_CHECK_EVERY_S: Final = 0.1
# A rank that was refused, or with whom somebody spoke nonsense, connects again after this pause.
_PAUSE_S: Final = 0.1
# How long zmq may take to send BYE.
_FAREWELL_MS: Final = 200


class _Pending:
    """A question that waits for its answer."""

    def __init__(self) -> None:
        # Not an event, which lets go of a lock before the `try` that takes it back: a signal handler may raise there.
        self._told = threading.Lock()
        self._told.acquire()
        self.answer: Answer = None
        self.error: Exception | None = None

    def tell(self, answer: Answer, error: Exception | None = None) -> None:
        """End the wait, at most once."""
        self.answer, self.error = answer, error
        self._told.release()

    def await_answer(self, timeout_s: float) -> bool:
        """Return whether the answer has come within so many seconds."""
        if not self._told.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
            return False
        self._told.release()
        return True


class StoreClient(StoreThread):
    """This rank's connection to the store. Any thread may use it.

    A connection that breaks once it was welcomed is not made again: what was on its way may have been lost. Every later
    call raises.

    Attributes:
        generation: The store's random bytes; known once `join` has returned.
    """

    def __init__(self, endpoint: RemoteEndpoint, keys: RemoteKeys, rank: int) -> None:
        """Begin to connect.

        Args:
            endpoint: Where rank 0 serves, and the store's public key.
            keys: This rank's key pair.
            rank: This process's global rank.

        Raises:
            CapabilityError: The kernel refuses a descriptor.
        """
        super().__init__("group-coordinator-store-client", log_fields(rank=rank))
        self.generation: bytes = NO_GENERATION
        self._rank = rank
        self._process = secrets.randbits(64)
        self._url = endpoint.url()
        self._at = endpoint.address, endpoint.port
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._outbox: deque[bytes] = deque()
        self._welcome = _Pending()
        self._is_welcome = False
        self._broken: Exception | None = None
        self._again_at: float | None = None  # when to connect again
        self._event = zmq.Event.CONNECT_DELAYED  # the last one of the connection
        self._lost: dict[int, str] = {}
        self._on_lost: Callable[[int, str], None] | None = None
        self._connections = self._failed_handshakes = self._refusals = 0
        self._wake = new_eventfd()
        try:
            self._context = new_context(1)
            try:
                self._dealer, self._monitor = connect(self._context, keys, endpoint, LONGEST_ANSWER)
            except BaseException:
                self._context.term()
                raise
        except BaseException:
            os.close(self._wake)
            raise
        self._start()

    # --- calls of any thread ----------------------------------------------------------------------------------

    def join(self, timeout_s: float, check: Callable[[], None]) -> bool:
        """Return whether the store has welcomed this rank within so many seconds.

        Args:
            timeout_s: The deadline.
            check: Called about ten times a second; what it raises ends the wait.

        Raises:
            UsageError: The store, which holds the job's secret, refuses this rank.
            DistNetworkError: It does not speak as this version does, or the thread of this connection has failed.
        """
        end = time.monotonic() + timeout_s
        while not self._welcome.await_answer(min(_CHECK_EVERY_S, end - time.monotonic())):
            check()
            if self._broken is not None and not self._is_welcome:
                raise dist.DistNetworkError(f"no answer of the store at {self._url}: {self._broken}")
            if time.monotonic() >= end:
                return False
        if self._welcome.error is not None:
            raise self._welcome.error
        return True

    def watch(self, on_lost: Callable[[int, str], None]) -> None:
        """Call `on_lost` with each rank that is lost, or was before, and how it was; from any thread.

        A rank is lost when its connection to the store ends unless it closed it; rank 0, when this one ends.
        """
        with self._lock:
            self._on_lost = on_lost
            lost = list(self._lost.items())
        for rank, how in lost:
            on_lost(rank, how)

    @property
    def tried(self) -> str:
        """Return what has become of the attempts to connect, as the end of an error's text."""
        if self._refusals:
            return (
                f"{self._refusals} connection(s) were refused: rank 0 was started with fewer ranks, or somebody else "
                "answers there"
            )
        if self._failed_handshakes:
            return (
                f"{self._failed_handshakes} handshake(s) failed: who listens there does not hold this job's secret, or "
                "serves another run, or somebody between changes what is sent"
            )
        if self._connections:
            return "somebody accepted a connection and said nothing that a store of ours says"
        return "nobody listens there"

    def ask(self, question: Question, timeout_s: float, what: str) -> Answer:
        """Return the store's answer.

        Args:
            question: The question.
            timeout_s: How long to wait for the answer, in seconds.
            what: The question in words, for errors.

        Raises:
            DistStoreError: There was no answer in time.
            DistNetworkError: The connection is broken, or was closed.
            UsageError: The store has refused the question, it is too long, or this process is a forked child.
        """
        if self._forks != fork_count():
            raise UsageError(f"{what}: the store belongs to the process that forked this one")
        number, pending = next(self._numbers), _Pending()
        record = pack(Kind.QUESTION, self._rank, number, self.generation, packed(question))
        if len(record) > LONGEST_QUESTION:
            raise UsageError(
                f"{what}: {len(record)} bytes are more than the {LONGEST_QUESTION} of a question"
            )
        with self._lock:
            if self._is_stopping or self._broken is not None:
                raise dist.DistNetworkError(f"{what}: {self._broken or _CLOSED}")
            self._pending[number] = pending
            self._outbox.append(record)
            os.eventfd_write(self._wake, 1)
        try:
            if not pending.await_answer(timeout_s):
                raise dist.DistStoreError(f"{what}: timed out after {timeout_s:.3f} s at {self._url}")
        finally:
            self._pending.pop(number, None)
        if pending.error is not None:
            if isinstance(pending.error, UsageError):
                raise UsageError(f"{what}: {pending.error}")
            raise dist.DistNetworkError(f"{what}: {pending.error}")
        return pending.answer

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            logger.exception("the connection to the store of this job has failed", extra=self._fields.copy())
            self._break(f"its thread has failed: {error!r}")

    def _owns(self, connection: socket.socket) -> bool:
        return is_at(connection.getpeername(), *self._at)

    def _close_sockets(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(0)
        is_connected = self._is_welcome and self._broken is None
        if is_connected:
            with tolerating(zmq.Again):  # the connection has just ended
                self._dealer.send(pack(Kind.BYE, self._rank, 0, self.generation), zmq.NOBLOCK)
        # An open socket would connect again.
        self._dealer.close(_FAREWELL_MS if is_connected else 0)
        self._break(_CLOSED)
        self._context.term()

    def _loop(self) -> None:
        poller = zmq.Poller()
        for source in (self._dealer, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        while not self._is_stopping and self._broken is None:
            ready = dict(poller.poll(None if self._again_at is None else round(_PAUSE_S * 1000)))
            self._connect_again()
            if self._wake in ready:
                os.eventfd_read(self._wake)
            # What was received before the connection broke is read first.
            self._drain()
            self._look()
            if self._is_welcome:
                self._send()

    def _connect_again(self) -> None:
        """Connect again where zmq has given up: another start of the store may come there."""
        if self._again_at is not None and time.monotonic() >= self._again_at:
            self._again_at = None
            with tolerating(zmq.ZMQError):  # zmq has let go of the address itself
                self._dealer.disconnect(self._url)
            self._dealer.connect(self._url)

    def _send(self) -> None:
        while self._outbox:
            try:
                self._dealer.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                # There is no connection any more, of which the monitor tells.
                return
            self._outbox.popleft()

    def _drain(self) -> None:
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._hear(frames[-1].buffer)
            except DecodeError as error:
                self._break(f"rank 0 has sent nonsense: {error}")

    def _hear(self, data: memoryview) -> None:
        record = unpack(data)
        if record.kind == Kind.REFUSED:
            self._refuse(bytes(record.body).decode("utf-8", "replace"))
        elif record.kind == Kind.WELCOME:
            if not self._is_welcome:
                self.generation, self._is_welcome = record.generation, True
                self._welcome.tell(None)
        elif record.generation != self.generation:
            raise DecodeError("a record of another start of the store")
        elif record.kind == Kind.ANSWER:
            self._tell(record.number, answer_of(record.body), None)
        elif record.kind == Kind.LOST:
            self._lose(record.number, bytes(record.body).decode("utf-8", "replace"))
        elif record.kind == Kind.END:
            self._break("rank 0 has left, which serves the store")
        elif record.kind == Kind.BEAT:
            pass  # it shows the server that this connection is there
        elif record.kind == Kind.FAILED:
            self._tell(record.number, None, UsageError(bytes(record.body).decode("utf-8", "replace")))
        else:
            raise DecodeError(f"a record of unknown kind {record.kind}")

    def _tell(self, number: int, answer: Answer, error: Exception | None) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.tell(answer, error)

    def _look(self) -> None:
        """Learn from zmq what has become of the connection."""
        while self._monitor.poll(0):
            before, event = self._event, zmq.Event(recv_monitor_message(self._monitor)["event"])
            self._event = event
            # Only here zmq gives up, in the second case because the first bytes were none of zmq's. Else it connects
            # again by itself, and we would cut a good connection.
            if event & _GIVES_UP or (before, event) == (zmq.Event.CONNECTED, zmq.Event.DISCONNECTED):
                self._again_at = time.monotonic() + _PAUSE_S
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._again_at = None
                self._dealer.send(pack(Kind.HELLO, self._rank, self._process, NO_GENERATION), zmq.NOBLOCK)
            elif event == zmq.Event.CONNECTED:
                self._connections += 1
            elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                # Anybody on the way can send this too, as it is not encrypted: try until the deadline.
                self._refusals += 1
            elif not self._is_welcome:
                if event & _FAILED_HANDSHAKES:
                    self._failed_handshakes += 1
            elif event == zmq.Event.DISCONNECTED or event & _FAILED_HANDSHAKES:
                # A record that cannot be decrypted counts as a failed handshake too, and zmq only stops reading then.
                self._drain()  # what came before, END perhaps
                if self._broken is None:
                    how = "the connection to rank 0 broke: it has ended, or somebody changed what is sent"
                    self._break(how)
                    self._lose(0, how)
                return

    def _refuse(self, why: str) -> None:
        error = UsageError(f"the store of rank 0 at {self._url} refuses rank {self._rank}: {why}")
        if not self._is_welcome:
            self._is_welcome = True
            self._welcome.tell(None, error)
        self._break(str(error))

    def _lose(self, rank: int, how: str) -> None:
        with self._lock:
            self._lost[rank] = how
            on_lost = self._on_lost
        if on_lost is not None:
            on_lost(rank, how)

    def _break(self, why: str) -> None:
        with self._lock:
            self._broken = self._broken or dist.DistNetworkError(why)
            waiting, self._pending = list(self._pending.values()), {}
        for pending in waiting:
            pending.tell(None, self._broken)

    def __repr__(self) -> str:
        """Name the address, never a key."""
        return f"<StoreClient of rank {self._rank} at {self._url}>"
