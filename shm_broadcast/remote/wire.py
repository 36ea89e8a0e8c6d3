"""Define the records sent between hosts, the sockets that carry them, and the check of who may connect.

Every record is one ZeroMQ message, encrypted and authenticated by CURVE. It begins with 32 bytes; integers are
little-endian:

| offset | bytes | field |
|---|---|---|
| 0 | 1 | kind |
| 1 | 1 | version, 1 |
| 2 | 6 | zero |
| 8 | 8 | first |
| 16 | 8 | second |
| 24 | 8 | third |

`DESIGN.md` says what the three numbers mean for each kind, and what follows them.
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
from shm_broadcast._core import undisturbed
from shm_broadcast.descriptors import check_spare
from shm_broadcast.endpoint import RemoteEndpoint, RemoteKeys, RemoteSettings, bind_host
from shm_broadcast.errors import CapabilityError, DecodeError, UsageError
from shm_broadcast.liveness import ProcessIdentity
from shm_broadcast.reports.log_fields import LogFields

logger: logging.Logger = logging.getLogger(__name__)

VERSION: Final = 1
HEADER: Final = struct.Struct("<BB6xQQQ")

PART_BYTES: Final = 256 << 10
"""A longer message is sent in parts of this size. Encryption, transfer and decryption then overlap, and a connection
holds at most two encrypted parts."""

_CONTROL_BYTES: Final = 4096
"""Longest record that a reader sends; zmq drops the connection of a longer one while it receives it."""

_HANDSHAKE_MS: Final = 2000
"""A connection that has not proved its key after this many milliseconds is closed."""

_RECONNECT_MS: Final = 20

# Connections that the kernel keeps until they are accepted: all ranks of a job may come at once, and strangers too.
_BACKLOG: Final = 2048

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"

# What a context needs besides those of its threads: four for itself, and one or two for each socket.
_SPARE_DESCRIPTORS: Final = 8

Socket = zmq.Socket[bytes]
Context = zmq.Context[Any]


class Kind:
    """Kinds of records."""

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
    """The fields of a record; `body` views its memory."""

    kind: int
    first: int
    second: int
    third: int
    body: memoryview


def pack(kind: int, first: int = 0, second: int = 0, third: int = 0, body: bytes = b"") -> bytes:
    """Return the bytes of a record."""
    return HEADER.pack(kind, VERSION, first, second, third) + body


def unpack(frame: zmq.Frame) -> Record:
    """Parse a frame; the record views its memory.

    Raises:
        DecodeError: The frame is not a record of this version.
    """
    data = frame.buffer
    if data.nbytes < HEADER.size or frame.more:
        raise DecodeError(f"{data.nbytes} bytes are not a record of a remote queue")
    kind, version, first, second, third = HEADER.unpack_from(data)
    if version != VERSION:
        raise DecodeError(f"a record has version {version}, this is version {VERSION}")
    return Record(kind, first, second, third, data[HEADER.size :])


def parts_of(message: codec.Message, number: int) -> list[zmq.Frame]:
    """Copy `message` into frames, one for each part; the first is part `number`.

    zmq owns and reference-counts their memory; all readers share it.
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
    """Return the process identity in `body`.

    Raises:
        DecodeError: The body is not a process identity.
    """
    try:
        return _identity_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"a record lacks the identity of its process: {error}") from error


def new_context(io_threads: int) -> Context:
    """Return a context of zmq, whose first socket needs two descriptors for each of its threads.

    Raises:
        CapabilityError: Too few descriptors are free.
    """
    # libzmq ends the process if the kernel refuses a descriptor to one of its threads. One gap remains:
    # another thread of this process may take the free descriptors between this check and zmq.
    check_spare(_SPARE_DESCRIPTORS + 2 * io_threads, "lets zmq connect hosts")
    return zmq.Context(io_threads=io_threads)


def _prepare(socket: Socket, settings: RemoteSettings) -> None:
    """Set the options that both ends need.

    zmq's own queues are unbounded, because a full one stops reading the connection, heartbeats included. The queue's
    high-water mark bounds them instead.
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
    most_bytes: int = _CONTROL_BYTES,
    descriptor: int | None = None,
) -> tuple[Socket, int]:
    """Return a socket that listens on one address, and its port.

    The context's `Gatekeeper` must already exist; without it no connection is admitted. Records of more than
    `most_bytes` break their connection. A `descriptor` that listens at that address and port is used, and owned.

    Raises:
        UsageError: The address is a wildcard or does not belong to this host, or the port range is not valid.
        CapabilityError: Every port of the range is taken.
    """
    host = bind_host(bind_address)
    router: Socket = context.socket(zmq.ROUTER)
    try:
        _prepare(router, settings)
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_SECRETKEY, keys.secret())
        router.set(zmq.ZAP_DOMAIN, b"readers")
        # Without this option libzmq admits every connection while no authenticator answers for the domain.
        router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.MAXMSGSIZE, most_bytes)
        router.set(zmq.BACKLOG, _BACKLOG)
        if descriptor is not None:
            router.set(zmq.USE_FD, descriptor)
        router.set(zmq.IPV6, int(":" in host))
        for port in _ports(port_range):
            try:
                router.bind(f"tcp://{host}:{port or '*'}")
            except zmq.ZMQError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise UsageError(f"cannot listen on {bind_address}: {error}") from error
            listening_at = router.get_string(zmq.LAST_ENDPOINT)
            return router, int(listening_at.rstrip("\0").rpartition(":")[2])
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
        raise UsageError(f"{port_range} is not a range of ports")
    # Start at a random port, so that the queues of a group do not all try the same ones.
    start = random.randrange(high - low + 1)  # noqa: S311 - spreads load, hides nothing
    for offset in range(high - low + 1):
        yield low + (start + offset) % (high - low + 1)


def connect(
    context: Context,
    keys: RemoteKeys,
    endpoint: RemoteEndpoint,
    most_bytes: int = PART_BYTES + _CONTROL_BYTES,
) -> tuple[Socket, Socket]:
    """Return (socket, its monitor). The socket connects in the background and reconnects until told otherwise.

    Records of more than `most_bytes` break the connection.
    """
    dealer: Socket = context.socket(zmq.DEALER)
    try:
        _prepare(dealer, endpoint.settings)
        dealer.set(zmq.CURVE_SERVERKEY, endpoint.server_public_key)
        dealer.set(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.set(zmq.CURVE_SECRETKEY, keys.secret())
        dealer.set(zmq.MAXMSGSIZE, most_bytes)
        dealer.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.set(zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS)
        dealer.set(zmq.IPV6, int(":" in endpoint.address))
        # pyzmq raises here if a signal comes meanwhile, where it repeats other calls.
        monitor: Socket = undisturbed(dealer.get_monitor_socket)
    except BaseException:
        dealer.close(0)
        raise
    dealer.connect(endpoint.url())
    return dealer, monitor


class Gatekeeper:
    """Decides during the handshake, before any record is read, which connections libzmq admits."""

    def __init__(
        self, context: Context, ranks: Mapping[bytes, int], fields: LogFields, whose: str = "reader"
    ) -> None:
        """Become the context's authenticator.

        Args:
            context: The context to guard; create its other sockets afterwards.
            ranks: The ranks by public key.
            fields: What the log records say of the queue; its owner may add to it.
            whose: What an admitted key belongs to, for the log.
        """
        self._ranks = dict(ranks)
        self._whose = whose
        self._fields = fields
        self.refused: int = 0
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.bind(_ZAP_ADDRESS)

    def answer(self) -> list[int]:
        """Answer all pending requests; return the ranks that were admitted."""
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
                self.socket.send_multipart([*head, b"400", b"this key is not admitted", b"", b""])
            else:
                admitted.append(rank)
                # zmq attaches the user id to every record of this connection.
                self.socket.send_multipart([*head, b"200", b"", str(rank).encode(), b""])

    def expel(self, rank: int) -> None:
        """Refuse `rank` from now on."""
        self._ranks = {key: each for key, each in self._ranks.items() if each != rank}

    def _note_refusal(self, address: bytes) -> None:
        self.refused += 1
        # Log the 1st, 2nd, 4th, 8th ... refusal, so that a stranger who keeps connecting cannot fill the log.
        if self.refused & (self.refused - 1) == 0:
            logger.warning(
                "refused a connection from %s, whose key belongs to no %s (%d so far)",
                address.decode("ascii", "replace"),
                self._whose,
                self.refused,
                extra=self._fields.copy(),
            )
