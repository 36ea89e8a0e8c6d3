"""The connection of a pair: fixed records, each read with a deadline, of a size that both ends know.

The end that has connected shows the token of the check, which the ranks know from their store, and its rank; the other
end answers with a digest of the token. Then a record of 64 bytes begins each exchange; its first byte says which.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time
from typing import Final

from coordinator.diagnosis.hosts_check.records import LinkFailure

__all__ = [
    "CHUNK",
    "ENDS",
    "LARGE",
    "RECORD",
    "Broken",
    "Wire",
    "accept",
    "introduce",
]

_MAGIC: Final = b"gchosts1"
_HELLO: Final = struct.Struct("!8s32sI")
RECORD: Final = struct.Struct("!cd55x")
"""Which exchange, and for how many seconds at most."""
ENDS: Final = struct.Struct("!qq")
"""Two numbers: times in ns, or bytes and ns."""
CHUNK: Final = 1 << 18
LARGE: Final = 1 << 16

_MORE: Final = b"\1"
_LAST: Final = b"\0"
# An honest end says hello at once. Whoever is silent holds up nobody longer.
_HELLO_S: Final = 2.0


class Broken(Exception):  # noqa: N818 - it carries a result
    """The exchange has failed.

    Attributes:
        failure: How.
    """

    def __init__(self, failure: LinkFailure) -> None:
        """Fail like this."""
        super().__init__(failure.text)
        self.failure = failure


class Wire:
    """One connection. Each call has a deadline of its own."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        """Take over a connection to `where`."""
        self._connection = connection
        self._where = where

    def close(self) -> None:
        """Close it. Idempotent."""
        self._connection.close()

    def send(self, content: bytes | memoryview, timeout_s: float) -> None:
        """Send all of it.

        Raises:
            Broken: It does not go out.
        """
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(content)
        except OSError as error:
            raise self._broken(error, timeout_s) from None

    def receive(self, nbytes: int, timeout_s: float) -> bytes:
        """Return so many bytes.

        Raises:
            Broken: They do not come.
        """
        content = bytearray(nbytes)
        self.receive_into(memoryview(content), timeout_s)
        return bytes(content)

    def receive_into(self, room: memoryview, timeout_s: float) -> None:
        """Fill `room`. The errors are those of `receive`."""
        end = time.monotonic() + timeout_s
        filled = 0
        while filled < len(room):
            self._connection.settimeout(max(end - time.monotonic(), 1e-3))
            try:
                got = self._connection.recv_into(room[filled:])
            except OSError as error:
                raise self._broken(error, timeout_s) from None
            if got == 0:
                raise Broken(LinkFailure("cut off", f"{self._where} ended the connection"))
            filled += got
            if filled < len(room) and time.monotonic() >= end:
                raise self._broken(TimeoutError(), timeout_s)

    def send_bulk(self, seconds: float, timeout_s: float) -> None:
        """Send chunks for so long; the last one says that it is the last."""
        content = bytearray(CHUNK)
        content[:1] = _MORE
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.send(memoryview(content), timeout_s)
        content[:1] = _LAST
        self.send(memoryview(content), timeout_s)

    def receive_bulk(self, limit_s: float, timeout_s: float) -> tuple[int, int]:
        """Return how many bytes came behind the first chunk, and in how many ns.

        Raises:
            Broken: They end without a last one, or go on for longer than `limit_s`.
        """
        room = memoryview(bytearray(CHUNK))
        self.receive_into(room, timeout_s)
        begin, nbytes = time.perf_counter_ns(), 0
        while bytes(room[:1]) == _MORE:
            self.receive_into(room, timeout_s)
            nbytes += CHUNK
            if time.perf_counter_ns() - begin > limit_s * 1e9:
                raise Broken(LinkFailure("error", f"{self._where} does not stop sending"))
        return nbytes, time.perf_counter_ns() - begin

    def _broken(self, error: OSError, timeout_s: float) -> Broken:
        if isinstance(error, TimeoutError):
            return Broken(
                LinkFailure(
                    "timed out", f"{self._where} took the connection, and was silent for {timeout_s:g} s"
                )
            )
        text = f"{self._where} ended the connection: {error.strerror or type(error).__name__}"
        return Broken(LinkFailure("cut off", text))


def introduce(wire: Wire, token: str, rank: int, timeout_s: float) -> None:
    """Show the token at the end that has connected.

    Raises:
        Broken: The other end does not show that it knows the token.
    """
    wire.send(_HELLO.pack(_MAGIC, bytes.fromhex(token), rank), timeout_s)
    answer = wire.receive(32, timeout_s)
    if not hmac.compare_digest(answer, _answer_to(token)):
        raise Broken(LinkFailure("error", "what listens there is no rank of this check"))


def accept(listener: socket.socket, token: str, rank: int, until: float) -> Wire | None:
    """Return the connection of `rank`; those of others are closed. None if it has not come at the time `until`."""
    while True:
        left_s = until - time.monotonic()
        if left_s <= 0:
            return None
        listener.settimeout(left_s)
        try:
            connection, peer = listener.accept()
        except OSError:  # nobody came, or whoever came has gone
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(connection, f"rank {rank} at {peer[0]}")
        try:
            magic, shown, from_rank = _HELLO.unpack(wire.receive(_HELLO.size, min(left_s, _HELLO_S)))
            if magic == _MAGIC and from_rank == rank and hmac.compare_digest(shown, bytes.fromhex(token)):
                wire.send(_answer_to(token), _HELLO_S)
                return wire
        except Broken:
            pass  # no rank of this check, or one that has given up: the next one may be right
        wire.close()


def _answer_to(token: str) -> bytes:
    return hashlib.sha256(b"group_coordinator hosts_check answer" + bytes.fromhex(token)).digest()
