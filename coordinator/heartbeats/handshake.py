"""Open the connections of one rank: listen for partners with higher ranks, and connect to those with lower ones.

Links for heartbeats are opened like this, and so are the connections that carry the tensors of collectives.
The rank that accepts sends a random challenge. The rank that connects answers with its rank and an HMAC of
the challenge, keyed with the token that the accepting rank has told the group, and gets an HMAC back.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

from shm_broadcast.descriptors import refusal, refuse_if_full
from shm_broadcast.errors import CapabilityError, ClosedError, CommTimeoutError, NativeError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.threads import made_aside

__all__ = ["HEARTBEATS", "TOKEN_BYTES", "Meeting", "Opened", "Target", "listen_at"]

TOKEN_BYTES: Final = 32
HEARTBEATS: Final = "heartbeats"
_CHALLENGE_BYTES: Final = 16
_MAC_BYTES: Final = 32
_RANK: Final = struct.Struct("!I")
_ANSWER_BYTES: Final = _RANK.size + _MAC_BYTES
_NAME_DIGITS: Final = 16

# A caller that has not proved who it is by then is dropped, and the oldest one when there are too many.
_GUEST_S: Final = 5.0
_MOST_GUESTS: Final = 64
_BACKLOG: Final = 128
_SLICE_S: Final = 0.1
# A refused connection is tried again after this pause. The reason of a rank that has given up can be read by then.
_RETRY_S: Final = 0.1
_REFUSED_S: Final = 2.0


class Target(NamedTuple):
    """Where a rank listens for its partners, and the token that they need."""

    address: str
    port: int
    token: bytes


class Opened(NamedTuple):
    """A connection that both ends have accepted, and the name that both know it by."""

    connection: socket.socket
    name: str


def listen_at(address: str, purpose: str = HEARTBEATS) -> socket.socket:
    """Return a socket that listens on any port of `address`, which is numeric and no wildcard.

    Errors say that it is for `purpose`.

    Raises:
        CapabilityError: No descriptor is free, or this process can have no further thread.
        NativeError: The kernel refuses.
        UsageError: This process is a forked child, which a signal handler has made meanwhile: it must not bind the
            socket that it has a copy of.
    """
    return made_aside(lambda: _listening(address, purpose), lambda listener: listener.close(), lambda: None)


def _listening(address: str, purpose: str) -> socket.socket:
    try:
        family, target = _resolved(address, 0)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(target)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        if raised_by_handler(error):
            raise
        refuse_if_full("socket", f"carries {purpose} to the other hosts", error)
        raise NativeError(
            f"cannot listen for {purpose} on {address}: {error.strerror}",
            library="libc",
            function="listen",
            code=error.errno or 0,
        ) from error
    return listener


def _resolved(address: str, port: int) -> tuple[int, tuple[object, ...]]:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return found[0], found[4]


def _proof(token: bytes, word: bytes, challenge: bytes, caller: int, host: int) -> bytes:
    """Return what shows that one knows `token`, in the part `word` of the handshake between two ranks."""
    return hmac.digest(token, word + challenge + _RANK.pack(caller) + _RANK.pack(host), "sha256")


def _refused(purpose: str, error: OSError) -> CapabilityError:
    """Return the error for a socket that the kernel does not open."""
    return refusal("socket", f"carries {purpose} to the other hosts", error, "a free file descriptor")


class _Guest:
    """A connection that came to the listener, and has not proved yet who it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        self.received = bytearray()
        self.until = time.monotonic() + _GUEST_S
        connection.setblocking(False)
        connection.send(self.challenge)


class _Call:
    """A connection to a partner."""

    def __init__(self, partner: int, target: Target) -> None:
        self.partner = partner
        self.target = target
        self.connection: socket.socket | None = None
        self.received = bytearray()
        self.next_try = 0.0
        self.refused_since: float | None = None
        self.challenge = b""


def _drop(opened: Mapping[int, Opened]) -> None:
    """Close connections that nobody gets."""
    for each in opened.values():
        each.connection.close()


class Meeting:
    """The links that one rank opens at a time."""

    def __init__(
        self,
        rank: int,
        listener: socket.socket | None,
        token: bytes,
        expected: Collection[int],
        targets: Mapping[int, Target],
        purpose: str = HEARTBEATS,
    ) -> None:
        """Accept `expected` ranks that know `token` at `listener`, which this owns, and connect to `targets`.

        Errors say that the connections are for `purpose`.
        """
        self._purpose = purpose
        self._rank = rank
        self._listener = listener
        self._token = token
        self._expected = set(expected)
        self._calls = {partner: _Call(partner, target) for partner, target in targets.items()}
        self._guests: list[_Guest] = []
        self._opened: dict[int, Opened] = {}
        self._selector = selectors.PollSelector()
        self._is_over = False

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the partners to which there is no connection yet, ascending."""
        return tuple(sorted((self._expected | set(self._calls)) - set(self._opened)))

    def run(self, check: Callable[[], None], where: str, timeout_s: float) -> dict[int, Opened]:
        """Open all connections, and return them by partner; the caller owns them.

        They are opened on a thread of their own: a signal handler may fork on this one, and the child, which would go
        on here, would accept connections that are meant for its parent.

        Args:
            check: Called about ten times a second, on that thread; what it raises ends this.
            where: The beginning of an error's text.
            timeout_s: Deadline in seconds.

        Raises:
            CommTimeoutError: Not in time; `.missing` names the partners.
            NativeError: A partner's host refuses connections.
            CapabilityError: The kernel opens no more sockets, or this process can have no further thread.
            UsageError: This process is a forked child, which a signal handler has made while this waited.
        """
        try:
            return made_aside(lambda: self._run(check, where, timeout_s), _drop, self._end)
        except BaseException:
            self._close()  # an interrupt may come before the thread has begun
            raise

    def _end(self) -> None:
        """Let `run` end soon, which nobody waits for any more."""
        self._is_over = True

    def _run(self, check: Callable[[], None], where: str, timeout_s: float) -> dict[int, Opened]:
        end, next_check = time.monotonic() + timeout_s, time.monotonic() + _SLICE_S
        try:
            if self._listener is not None and self._expected:
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            while self.missing:
                self._connect(where)
                for key, _ in self._selector.select(_SLICE_S / 2 if self._calls else _SLICE_S):
                    key.data()
                now = time.monotonic()
                if self._is_over:
                    raise ClosedError(f"{where}: cancelled, the caller no longer waits")
                self._drop_guests([guest for guest in self._guests if now >= guest.until])
                if now >= next_check:
                    next_check = now + _SLICE_S
                    check()
                if now >= end and self.missing:
                    listed = ", ".join(str(rank) for rank in self.missing)
                    raise CommTimeoutError(
                        f"{where}: no connection for {self._purpose} with rank(s) {listed} within {timeout_s:.1f} s",
                        missing=self.missing,
                    )
            opened, self._opened = self._opened, {}
            return opened
        finally:
            self._close()

    def _close(self) -> None:
        """Close all that this still owns. Idempotent."""
        self._selector.close()
        for connection in (
            self._listener,
            *(guest.connection for guest in self._guests),
            *(call.connection for call in self._calls.values()),
            *(opened.connection for opened in self._opened.values()),
        ):
            if connection is not None:
                connection.close()

    # --- accepting

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if raised_by_handler(error):
                raise
            if isinstance(error, (BlockingIOError, ConnectionError)):
                return
            raise _refused(self._purpose, error) from error
        try:
            guest = _Guest(connection)
        except OSError as error:  # gone already
            connection.close()
            if raised_by_handler(error):
                raise
            return
        self._drop_guests(self._guests[: max(len(self._guests) - _MOST_GUESTS + 1, 0)])
        self._guests.append(guest)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(guest))

    def _drop_guests(self, guests: list[_Guest]) -> None:
        for guest in guests:
            self._guests.remove(guest)
            self._selector.unregister(guest.connection)
            guest.connection.close()

    def _hear(self, guest: _Guest) -> None:
        """Take the answer of a guest; admit it if it proves to be a rank that is expected."""
        if guest not in self._guests:  # dropped since the selector has returned
            return
        try:
            received = guest.connection.recv(_ANSWER_BYTES - len(guest.received))
        except BlockingIOError:
            return
        except OSError as error:
            if raised_by_handler(error):
                raise
            received = b""
        guest.received += received
        if received and len(guest.received) < _ANSWER_BYTES:
            return
        caller = self._caller_of(guest) if received else None
        if caller is None:
            self._drop_guests([guest])
            return
        try:
            guest.connection.send(_proof(self._token, b"welcome", guest.challenge, caller, self._rank))
        except OSError as error:
            if raised_by_handler(error):
                raise
            self._drop_guests([guest])
            return
        self._guests.remove(guest)
        self._keep(caller, guest.connection, self._token, guest.challenge, caller, self._rank)

    def _caller_of(self, guest: _Guest) -> int | None:
        """Return the rank that a guest proves to be, if it is expected and has not come before."""
        (caller,) = _RANK.unpack_from(guest.received)
        proof = _proof(self._token, b"answer", guest.challenge, caller, self._rank)
        is_known = hmac.compare_digest(bytes(guest.received[_RANK.size :]), proof)
        return caller if is_known and caller in self._expected - set(self._opened) else None

    def _keep(
        self, partner: int, connection: socket.socket, token: bytes, challenge: bytes, caller: int, host: int
    ) -> None:
        self._selector.unregister(connection)
        name = _proof(token, b"name", challenge, caller, host).hex()[:_NAME_DIGITS]
        self._opened[partner] = Opened(connection, name)

    # --- connecting

    def _connect(self, where: str) -> None:
        """Begin the connections whose time has come."""
        now = time.monotonic()
        for call in self._calls.values():
            if call.connection is None and call.partner not in self._opened and now >= call.next_try:
                if call.refused_since is not None and now - call.refused_since >= _REFUSED_S:
                    raise NativeError(
                        f"{where}: rank {call.partner}'s host refuses connections for {self._purpose} at "
                        f"{call.target.address} port {call.target.port}",
                        library="libc",
                        function="connect",
                        code=errno.ECONNREFUSED,
                    )
                self._begin(call)

    def _begin(self, call: _Call) -> None:
        try:
            family, target = _resolved(call.target.address, call.target.port)
        except (OSError, UnicodeError, OverflowError) as error:
            if raised_by_handler(error):
                raise
            raise NativeError(
                f"rank {call.partner} told no numeric address for {self._purpose}, but {call.target.address!r} port "
                f"{call.target.port}: {error}",
                library="libc",
                function="getaddrinfo",
            ) from error
        try:
            call.connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if raised_by_handler(error):
                raise
            raise _refused(self._purpose, error) from error
        call.connection.setblocking(False)
        call.received, call.challenge = bytearray(), b""
        result = call.connection.connect_ex(target)
        if result not in (0, errno.EINPROGRESS):
            call.connection.close()
            self._try_again(call, OSError(result, os.strerror(result)))
            return
        self._selector.register(call.connection, selectors.EVENT_WRITE, lambda: self._called(call))

    def _called(self, call: _Call) -> None:
        """Go on once the kernel has connected, or has not."""
        assert call.connection is not None
        result = call.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if result:
            self._hang_up(call, OSError(result, os.strerror(result)))
            return
        self._selector.modify(call.connection, selectors.EVENT_READ, lambda: self._answer(call))

    def _answer(self, call: _Call) -> None:
        """Read the challenge and answer it, then read what confirms that."""
        assert call.connection is not None
        token = call.target.token
        wanted = _MAC_BYTES if call.challenge else _CHALLENGE_BYTES
        try:
            received = call.connection.recv(wanted - len(call.received))
            call.received += received
            if not received:
                self._hang_up(call, None)
            elif len(call.received) < wanted:
                return
            elif not call.challenge:
                call.challenge, call.received = bytes(call.received), bytearray()
                answer = _proof(token, b"answer", call.challenge, self._rank, call.partner)
                call.connection.send(_RANK.pack(self._rank) + answer)
            elif hmac.compare_digest(
                bytes(call.received), _proof(token, b"welcome", call.challenge, self._rank, call.partner)
            ):
                self._keep(call.partner, call.connection, token, call.challenge, self._rank, call.partner)
                call.connection = None
            else:
                self._hang_up(call, None)
        except BlockingIOError:
            return
        except OSError as error:
            if raised_by_handler(error):
                raise
            self._hang_up(call, error)

    def _hang_up(self, call: _Call, error: OSError | None) -> None:
        assert call.connection is not None
        self._selector.unregister(call.connection)
        call.connection.close()
        self._try_again(call, error)

    def _try_again(self, call: _Call, error: OSError | None) -> None:
        """Let a call that `error` has ended, or the other end, be made again after a pause."""
        now = time.monotonic()
        call.connection, call.next_try = None, now + _RETRY_S
        if error is None or error.errno != errno.ECONNREFUSED:
            call.refused_since = None
        elif call.refused_since is None:
            call.refused_since = now
