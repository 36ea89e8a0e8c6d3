"""Serve the store of a job to its ranks, over connections that only their derived keys open."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Final

import zmq

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
from coordinator.security.table import Asker, Table
from shm_broadcast._core import undisturbed
from shm_broadcast.descriptors import new_eventfd
from shm_broadcast.endpoint import RemoteKeys, RemoteSettings
from shm_broadcast.errors import DecodeError, UsageError
from shm_broadcast.liveness import fork_count
from shm_broadcast.remote.wire import Gatekeeper, listen, new_context
from shm_broadcast.reports.log_fields import LogFields, log_fields

__all__ = ["PINGS", "StoreServer"]

logger: logging.Logger = logging.getLogger(__name__)

PINGS: Final = RemoteSettings(heartbeat_s=5.0, lost_after_s=60.0)
"""zmq asks a silent peer of the store every 2.5 s, and drops the connection if nothing comes for 22 s: a host may have
vanished without closing its sockets. A debugger may stop a process for less."""

# Questions that were given up by those who asked are forgotten at this interval.
_TIDY_S: Final = 1.0
# How long zmq may take to send the last answers.
_FAREWELL_MS: Final = 200
# Answers to one batch of questions before the thread looks at the handshakes again.
_BATCH: Final = 64


class StoreServer:
    """Holds the keys of a job and answers its ranks, on a thread of its own. Any thread may call `close`.

    Attributes:
        generation: Random bytes of this store.
        port: The TCP port on which it listens.
    """

    def __init__(
        self,
        keys: RemoteKeys,
        ranks: Mapping[bytes, int],
        place: tuple[str, tuple[int, int] | None],
        descriptor: int | None = None,
    ) -> None:
        """Listen, and start to serve.

        Args:
            keys: The store's key pair.
            ranks: The rank of each public key that is admitted, as that rank only.
            place: The numeric address to listen on, never a wildcard, and the first and last port; None for any.
            descriptor: A socket that listens there already, which the store then owns.

        Raises:
            UsageError: The address is not of this host, or a wildcard.
            CapabilityError: No port of the range is free, or the kernel refuses a descriptor.
        """
        self.generation: bytes = secrets.token_bytes(GENERATION_BYTES)
        self._table = Table()
        self._fields: LogFields = log_fields(rank=0)
        self._refused = 0
        self._forks = fork_count()
        self._is_stopping = self._is_closed = False
        self._closing = threading.Lock()
        self._wake = new_eventfd()
        try:
            self._context = new_context(1)
            self._gatekeeper = Gatekeeper(self._context, ranks, self._fields, "rank of this job")
            try:
                self._router, self.port = listen(
                    self._context, keys, *place, PINGS, LONGEST_QUESTION, descriptor
                )
            except BaseException:
                self._gatekeeper.socket.close(0)
                self._context.term()
                raise
        except BaseException:
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._serve, name="group-coordinator-store", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop serving. Idempotent; does nothing in a forked child."""
        if self._forks == fork_count():
            undisturbed(self._close)

    def _close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_stopping = True
            if self._thread.is_alive():
                os.eventfd_write(self._wake, 1)
                self._thread.join()
            self._router.close(_FAREWELL_MS)
            self._gatekeeper.socket.close(0)
            self._context.term()
            os.close(self._wake)
            self._is_closed = True

    def _serve(self) -> None:
        try:
            self._loop()
        except Exception:
            # Whoever waits for an answer must not hang: all ranks notice that their connection ends.
            logger.exception("the store of this job has failed", extra=self._fields.copy())
            self._router.close(0)

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._gatekeeper.socket, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        tidy_at = time.monotonic() + _TIDY_S
        while not self._is_stopping:
            poller.poll(int(_TIDY_S * 1000))
            self._gatekeeper.answer()
            self._drain()
            now = time.monotonic()
            if now >= tidy_at:
                self._table.expire(now)
                tidy_at = now + _TIDY_S

    def _drain(self) -> None:
        for _ in range(_BATCH):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            # zmq attaches the rank that the gatekeeper has found for the key of this connection.
            rank, route, content = int(frames[-1].get("User-Id")), frames[0].bytes, frames[-1]
            if len(frames) != 2:
                self._note(rank, f"it has {len(frames) - 1} frames")
                continue
            try:
                self._hear(rank, route, unpack(content.buffer))
            except DecodeError as error:
                self._note(rank, str(error))

    def _hear(self, rank: int, route: bytes, record: Record) -> None:
        """Answer a record on a connection whose key belongs to `rank`; its body is decoded only if it fits to that."""
        if record.rank != rank:
            why = f"it says rank {record.rank}, and its key belongs to rank {rank}"
        elif record.kind == Kind.HELLO:
            self._say(route, pack(Kind.WELCOME, 0, record.number, self.generation))
            return
        elif record.kind != Kind.QUESTION:
            why = f"a record of unknown kind {record.kind}"
        elif record.generation != self.generation:
            why = "it belongs to an earlier start of this job"
        else:
            self._answer(Asker(route, record.number), record.body)
            return
        self._note(rank, why)
        self._say(route, pack(Kind.REFUSED, 0, record.number, self.generation, why.encode()))

    def _answer(self, asker: Asker, body: memoryview) -> None:
        try:
            due = self._table.ask(asker, question_of(body), time.monotonic())
        except (DecodeError, UsageError) as error:
            text = str(error).encode()
            self._say(asker.route, pack(Kind.FAILED, 0, asker.number, self.generation, text))
            return
        for each, answer in due:
            self._say(each.route, pack(Kind.ANSWER, 0, each.number, self.generation, packed(answer)))

    def _say(self, route: bytes, record: bytes) -> None:
        try:
            self._router.send_multipart([route, record], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The rank has left, or its connection is being torn down: nobody waits for this answer.
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise

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
