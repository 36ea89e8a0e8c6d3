"""Serve the store of a job to its ranks, over connections that only their derived keys open."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from coordinator.security.records import (
    GENERATION_BYTES,
    LONGEST_QUESTION,
    Kind,
    Record,
    pack,
    packed,
    question_of,
    unpack,
)
from coordinator.security.store_thread import StoreThread, is_at
from coordinator.security.table import Asker, Table
from shm_broadcast._core import undisturbed
from shm_broadcast.descriptors import new_eventfd
from shm_broadcast.endpoint import RemoteKeys, RemoteSettings
from shm_broadcast.errors import DecodeError, UsageError
from shm_broadcast.remote.wire import Gatekeeper, Socket, listen, new_context
from shm_broadcast.reports.log_fields import log_fields

__all__ = ["StoreServer"]

logger: logging.Logger = logging.getLogger(__name__)

# Questions that were given up by those who asked are forgotten at this interval.
_TIDY_S: Final = 1.0
# How long zmq may take to send the last answers.
_FAREWELL_MS: Final = 200
# A connection that zmq says has ended is looked for this long, since zmq lets go of it a little later.
_SUSPECTED_S: Final = 2.0
# While others keep sending, what a suspected connection sent counts as read after this long.
_READ_S: Final = 1.0
_LOOK_S: Final = 0.02
# Answers to one batch of questions before the thread looks at the handshakes again.
_BATCH: Final = 64


class _Member(NamedTuple):
    """A connection of a rank.

    Attributes:
        rank: The rank of its key.
        route: zmq's name of it.
        descriptor: zmq names it when the connection has ended; the kernel soon reuses it for another one.
        process: A random number of the process that connects, which it repeats when it connects again.
    """

    rank: int
    route: bytes
    descriptor: int
    process: int


class StoreServer(StoreThread):
    """Holds the keys of a job and answers its ranks, on a thread of its own. Any thread may call `close`.

    If the connection of a rank ends without a BYE, the server tells all ranks.

    Attributes:
        generation: Random bytes of this store.
        port: The TCP port on which it listens.
    """

    def __init__(
        self,
        keys: RemoteKeys,
        ranks: Mapping[bytes, int],
        place: tuple[str, tuple[int, int] | None],
        pings: RemoteSettings,
        descriptor: int | None = None,
    ) -> None:
        """Listen, and start to serve.

        Args:
            keys: The store's key pair.
            ranks: The rank of each public key that is admitted, as that rank only.
            place: The numeric address to listen on, never a wildcard, and the first and last port; None for any.
            pings: How long a connection may be silent before it is broken; zmq answers pings for a busy rank.
            descriptor: A socket that listens there already, which the store owns, also if this raises.

        Raises:
            UsageError: The address is not of this host, or a wildcard.
            CapabilityError: No port of the range is free, or the kernel refuses a descriptor.
        """
        super().__init__("group-coordinator-store", log_fields(rank=0))
        self.generation: bytes = secrets.token_bytes(GENERATION_BYTES)
        self._address, _ = place
        self._table = Table()
        self._refused = 0
        self._members: list[_Member] = []  # in the order of their HELLO
        self._suspects: dict[bytes, float] = {}  # since when a connection is looked for, by route
        self._lost: dict[int, str] = {}
        self._linger_ms = 0  # how long zmq may go on to send when the sockets are closed
        with ExitStack() as opened:
            with ExitStack() as unused:
                if descriptor is not None:
                    unused.callback(os.close, descriptor)
                self._wake = new_eventfd()
                opened.callback(os.close, self._wake)
                self._context = new_context(1)
                opened.callback(self._context.term)
                self._gatekeeper = Gatekeeper(self._context, ranks, self._fields, "rank of this job")
                opened.callback(self._gatekeeper.socket.close, 0)
                self.port: int
                self._router, self.port = listen(
                    self._context, keys, *place, pings, LONGEST_QUESTION, descriptor
                )
                opened.callback(self._router.close, 0)
                unused.pop_all()
            self._monitor: Socket = undisturbed(
                lambda: self._router.get_monitor_socket(zmq.Event.DISCONNECTED)
            )
            opened.pop_all()
        self._start()

    def _run(self) -> None:
        try:
            self._loop()
            for member in self._members:
                self._say(member.route, pack(Kind.END, 0, 0, self.generation))
            self._linger_ms = _FAREWELL_MS
        except Exception:
            # Whoever waits for an answer must not hang: all ranks notice that their connection ends.
            logger.exception("the store of this job has failed", extra=self._fields.copy())

    def _owns(self, connection: socket.socket) -> bool:
        return is_at(connection.getsockname(), self._address, self.port)

    def _close_sockets(self) -> None:
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close(self._linger_ms)
        # Each connection has a pipe to it, and waits for it to close that.
        self._gatekeeper.socket.close(0)
        self._context.term()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._gatekeeper.socket, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        tidy_at = time.monotonic() + _TIDY_S
        while not self._is_stopping:
            poller.poll(int((_LOOK_S if self._suspects else _TIDY_S) * 1000))
            self._gatekeeper.answer()
            # Before the records are read, among which there may be a BYE.
            self._suspect(self._ended())
            is_drained = self._drain()
            now = time.monotonic()
            self._judge(now, is_drained)
            if now >= tidy_at:
                self._table.expire(now)
                tidy_at = now + _TIDY_S

    def _drain(self) -> bool:
        """Answer a batch of records; return whether there are no more."""
        for _ in range(_BATCH):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            # zmq attaches the rank that the gatekeeper has found for the key of this connection.
            rank, route, content = int(frames[-1].get("User-Id")), frames[0].bytes, frames[-1]
            if len(frames) != 2:
                self._note(rank, f"it has {len(frames) - 1} frames")
                continue
            try:
                self._hear(rank, route, int(content.get(zmq.SRCFD)), unpack(content.buffer))
            except DecodeError as error:
                self._refuse(rank, route, 0, str(error))
        return False

    def _ended(self) -> set[int]:
        """Return the descriptors of connections that have ended, as zmq tells."""
        ended = set()
        while self._monitor.poll(0):
            ended.add(int(recv_monitor_message(self._monitor)["value"]))
        return ended

    def _suspect(self, ended: set[int]) -> None:
        """Look for the connections of these descriptors. They may be new ones, which have got them since."""
        if ended:
            now = time.monotonic()
            self._suspects.update({each.route: now for each in self._members if each.descriptor in ended})

    def _judge(self, now: float, is_drained: bool) -> None:
        """Tell all ranks which connections ended without a BYE, which may be in a record not read yet."""
        if not self._suspects:
            return
        for member in [each for each in self._members if each.route in self._suspects]:
            waited_s = now - self._suspects[member.route]
            if not is_drained and waited_s < _READ_S:
                continue
            if not self._say(member.route, pack(Kind.BEAT, 0, 0, self.generation)):
                self._leave(member, "its connection to the store of rank 0 broke")
            elif waited_s > _SUSPECTED_S:
                del self._suspects[member.route]

    def _leave(self, member: _Member, lost: str = "") -> None:
        """Forget a connection. If it was `lost`, tell all ranks that its rank is.

        That rank is not lost if another process with its key came first.
        """
        first = next(each for each in self._members if each.rank == member.rank)
        self._members.remove(member)
        self._suspects.pop(member.route, None)
        if lost and first == member:
            self._lost[member.rank] = lost
            logger.warning("lost rank %d: %s", member.rank, lost, extra=self._fields.copy())
            for other in self._members:
                self._tell_of(member.rank, other.route)

    def _tell_of(self, lost: int, route: bytes) -> None:
        self._say(route, pack(Kind.LOST, 0, lost, self.generation, self._lost[lost].encode()))

    def _welcome(self, member: _Member) -> None:
        # The connection on which it said HELLO before has ended, and the rank never knew that it was welcomed on that.
        for each in list(self._members):
            if each.route == member.route or (each.rank, each.process) == (member.rank, member.process):
                self._leave(each)
        self._members.append(member)
        self._say(member.route, pack(Kind.WELCOME, 0, member.process, self.generation))
        for lost in self._lost:
            self._tell_of(lost, member.route)

    def _hear(self, rank: int, route: bytes, descriptor: int, record: Record) -> None:
        """Answer a record on a connection whose key belongs to `rank`; its body is decoded only if it fits to that."""
        if record.rank != rank:
            why = f"it says rank {record.rank}, and its key belongs to rank {rank}"
        elif record.kind == Kind.HELLO:
            self._welcome(_Member(rank, route, descriptor, record.number))
            return
        elif record.kind == Kind.BYE:
            for each in [each for each in self._members if each.route == route]:
                self._leave(each)
            return
        elif record.kind != Kind.QUESTION:
            why = f"a record of unknown kind {record.kind}"
        elif record.generation != self.generation:
            why = "it belongs to an earlier start of this job"
        else:
            self._answer(Asker(route, record.number), record.body)
            return
        self._refuse(rank, route, record.number, why)

    def _refuse(self, rank: int, route: bytes, number: int, why: str) -> None:
        self._note(rank, why)
        self._say(route, pack(Kind.REFUSED, 0, number, self.generation, why.encode()))

    def _answer(self, asker: Asker, body: memoryview) -> None:
        try:
            due = self._table.ask(asker, question_of(body), time.monotonic())
        except (DecodeError, UsageError) as error:
            text = str(error).encode()
            self._say(asker.route, pack(Kind.FAILED, 0, asker.number, self.generation, text))
            return
        for each, answer in due:
            self._say(each.route, pack(Kind.ANSWER, 0, each.number, self.generation, packed(answer)))

    def _say(self, route: bytes, record: bytes) -> bool:
        """Queue a record for a connection; return whether there is one."""
        try:
            self._router.send_multipart([route, record], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The rank has left, or its connection is being torn down: nobody waits for this answer.
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        return True

    def _note(self, rank: int, why: str) -> None:
        """Log the 1st, 2nd, 4th, 8th … refusal, so that nobody can fill the log."""
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:
            logger.warning(
                "the store refused a record of rank %d: %s (%d so far)",
                rank,
                why,
                self._refused,
                extra=self._fields.copy(),
            )

    def __repr__(self) -> str:
        """Name the port, never a key."""
        return f"<StoreServer on port {self.port}>"
