"""What crosses between two hosts: records, the sockets that carry them, and who is let in.

Every record is one ZeroMQ message, encrypted and authenticated by CURVE. It begins with 32 bytes, integers
little-endian:

| offset | bytes | field |
|---|---|---|
| 0 | 1 | kind |
| 1 | 1 | version, 1 |
| 2 | 6 | zero |
| 8 | 8 | first |
| 16 | 8 | second |
| 24 | 8 | third |

`DESIGN.md` says what the three hold for each kind, and what follows them.
"""

from __future__ import annotations

import errno
import logging
import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from shm_broadcast import codec
from shm_broadcast.endpoint import RemoteEndpoint, RemoteKeys, RemoteSettings, bind_host
from shm_broadcast.errors import CapabilityError, DecodeError, UsageError
from shm_broadcast.liveness import ProcessIdentity

logger: logging.Logger = logging.getLogger(__name__)

VERSION: Final = 1
HEADER: Final = struct.Struct("<BB6xQQQ")

PART_BYTES: Final = 256 << 10
"""A longer message travels in parts of this size: encryption, the wire and decryption then overlap, and one
connection never holds more than two encrypted copies of so much."""

_CONTROL_BYTES: Final = 4096
"""Readers say nothing longer than this; a longer record is refused while it is read."""

_HANDSHAKE_MS: Final = 2000
"""Who has connected and not shown a key by then is disconnected."""

_RECONNECT_MS: Final = 20
_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"

Socket = zmq.Socket[bytes]
Context = zmq.Context[Any]


class Kind:
    """What a record says."""

    HELLO: Final = 1
    WELCOME: Final = 2
    REFUSED: Final = 3
    DATA: Final = 4
    ACK: Final = 5
    BEAT: Final = 6
    END: Final = 7
    BYE: Final = 8
    AGAIN: Final = 9


class Record(NamedTuple):
    """A record, taken apart."""

    kind: int
    first: int
    second: int
    third: int
    body: memoryview


def pack(kind: int, first: int = 0, second: int = 0, third: int = 0, body: bytes = b"") -> bytes:
    """Return the bytes of a record."""
    return HEADER.pack(kind, VERSION, first, second, third) + body


def unpack(frame: zmq.Frame) -> Record:
    """Return the record of a frame, whose memory it views.

    Raises:
        DecodeError: It is none of this version.
    """
    data = frame.buffer
    if data.nbytes < HEADER.size or frame.more:
        raise DecodeError(f"{data.nbytes} bytes are no record of a remote queue")
    kind, version, first, second, third = HEADER.unpack_from(data)
    if version != VERSION:
        raise DecodeError(f"a record of version {version} came, this is version {VERSION}")
    return Record(kind, first, second, third, data[HEADER.size :])


def parts_of(message: codec.Message, number: int) -> list[zmq.Frame]:
    """Return the frames of `message`, the first of which is part `number`.

    Their memory belongs to zmq, is counted there, and is shared by all readers.
    """
    total = message.nbytes
    segments = iter(message.segments())
    segment = next(segments)
    frames = []
    for index, offset in enumerate(range(0, total, PART_BYTES)):
        pieces: list[bytes | memoryview] = [HEADER.pack(Kind.DATA, VERSION, number + index, total, offset)]
        room = min(PART_BYTES, total - offset)
        while room:
            segment = segment or next(segments)
            pieces.append(segment[:room])
            segment, room = segment[room:], room - len(pieces[-1])
        frames.append(zmq.Frame(b"".join(pieces), copy=True))
    return frames


_identity_decoder: Final = msgspec.msgpack.Decoder(ProcessIdentity)


def identity_of(body: memoryview) -> ProcessIdentity:
    """Return the process that introduces itself in `body`.

    Raises:
        DecodeError: It does not.
    """
    try:
        return _identity_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise DecodeError(f"a record without a process: {error}") from error


def _prepare(socket: Socket, settings: RemoteSettings) -> None:
    """Set what both ends need. No queue of zmq is bounded: the high-water mark of the queue bounds all of them.

    A bounded one would stop to read the connection when it is full, heartbeats included.
    """
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, settings.ping_ms)
    socket.set(zmq.HEARTBEAT_TIMEOUT, settings.silence_ms)


def listen(
    context: Context,
    keys: RemoteKeys,
    bind_address: str,
    port_range: tuple[int, int] | None,
    settings: RemoteSettings,
) -> tuple[Socket, int]:
    """Return a socket that listens on one address, and its port.

    The context's `Gatekeeper` must exist already; without one nobody is admitted.

    Raises:
        UsageError: The address is a wildcard, or none of this host.
        CapabilityError: Every port of the range is taken.
    """
    host = bind_host(bind_address)
    router: Socket = context.socket(zmq.ROUTER)
    try:
        _prepare(router, settings)
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_SECRETKEY, keys.secret())
        router.set(zmq.ZAP_DOMAIN, b"readers")
        # Without this libzmq admits everybody for as long as nobody answers for the domain.
        router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.MAXMSGSIZE, _CONTROL_BYTES)
        router.set(zmq.IPV6, int(":" in host))
        for port in _ports(port_range):
            try:
                router.bind(f"tcp://{host}:{port or '*'}")
            except zmq.ZMQError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise UsageError(f"cannot listen on {bind_address}: {error}") from error
            last_endpoint = router.get(zmq.LAST_ENDPOINT)
            assert isinstance(last_endpoint, bytes)
            return router, int(last_endpoint.rstrip(b"\0").rpartition(b":")[2])
    except BaseException:
        router.close(0)
        raise
    router.close(0)
    raise CapabilityError(
        f"no free port on {bind_address} in {port_range}", requirement=f"a free port in {port_range}"
    )


def _ports(port_range: tuple[int, int] | None) -> Iterator[int]:
    if port_range is None:
        yield 0
        return
    low, high = port_range
    if not 0 < low <= high < 65536:
        raise UsageError(f"{port_range} is no range of ports")
    # From a random one on, so that the queues of a group do not all try the same ones.
    start = random.randrange(high - low + 1)  # noqa: S311 - spreads, hides nothing
    for offset in range(high - low + 1):
        yield low + (start + offset) % (high - low + 1)


def connect(context: Context, keys: RemoteKeys, endpoint: RemoteEndpoint) -> tuple[Socket, Socket]:
    """Return (socket, its monitor); it connects in the background, again and again, until told otherwise."""
    dealer: Socket = context.socket(zmq.DEALER)
    try:
        _prepare(dealer, endpoint.settings)
        dealer.set(zmq.CURVE_SERVERKEY, endpoint.server_public_key)
        dealer.set(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.set(zmq.CURVE_SECRETKEY, keys.secret())
        dealer.set(zmq.MAXMSGSIZE, PART_BYTES + _CONTROL_BYTES)
        dealer.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.set(zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS)
        dealer.set(zmq.IPV6, int(":" in endpoint.address))
        monitor: Socket = dealer.get_monitor_socket()
    except BaseException:
        dealer.close(0)
        raise
    dealer.connect(endpoint.url())
    return dealer, monitor


class Gatekeeper:
    """Answers libzmq's question who may come in, during the handshake and before any record is read."""

    def __init__(self, context: Context, ranks: Mapping[bytes, int]) -> None:
        """Take the place of the context's authenticator.

        Args:
            context: Its other sockets must be made later.
            ranks: The readers' ranks by public key.
        """
        self._ranks = dict(ranks)
        self.refused: int = 0
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.bind(_ZAP_ADDRESS)

    def answer(self) -> list[int]:
        """Answer what was asked so far; return the ranks that were admitted."""
        admitted: list[int] = []
        while True:
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return admitted
            rank = self._ranks.get(question[6]) if len(question) == 7 and question[5] == b"CURVE" else None
            head = [_ZAP_VERSION, question[1]]
            if rank is None:
                self._note_refusal(question[3])
                self.socket.send_multipart([*head, b"400", b"no reader of this queue", b"", b""])
            else:
                admitted.append(rank)
                # The user id comes with every record that this connection delivers.
                self.socket.send_multipart([*head, b"200", b"", str(rank).encode(), b""])

    def expel(self, rank: int) -> None:
        """Refuse `rank` from now on."""
        self._ranks = {key: each for key, each in self._ranks.items() if each != rank}

    def _note_refusal(self, address: bytes) -> None:
        self.refused += 1
        # A stranger that knocks without end fills no log: the 1st, 2nd, 4th, 8th ... time is logged.
        if self.refused & (self.refused - 1) == 0:
            logger.warning(
                "refused a connection from %s, whose key belongs to no reader (%d so far)",
                address.decode("ascii", "replace"),
                self.refused,
            )
