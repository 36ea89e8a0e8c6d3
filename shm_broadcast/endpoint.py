"""What the two ends of the remote leg know of each other before they speak: keys, settings, an address.

Nothing here needs zmq until keys are made, so a handle can hold an endpoint in a process that never uses one.
"""

from __future__ import annotations

import ipaddress
from typing import Final, Self

import msgspec

from shm_broadcast.errors import CapabilityError, SettingsError, UsageError
from shm_broadcast.settings import positive_seconds

__all__ = ["PUBLIC_KEY_BYTES", "RemoteEndpoint", "RemoteKeys", "RemoteSettings", "bind_host", "checked_key"]

VERSION: Final = 1
PUBLIC_KEY_BYTES: Final = 32
_MIN_HIGH_WATER: Final = 64 << 10


class RemoteKeys:
    """A CURVE key pair of one end. The public half is told to the other end; the secret half stays here.

    Neither a text of it nor a copy of it can be made, and nothing carries it to another process.

    Attributes:
        public: 32 bytes.
    """

    __slots__ = ("_secret", "public")

    public: bytes

    def __init__(self, public: bytes, secret: bytes) -> None:
        """Hold a pair of 32 bytes each; see `generate`."""
        self.public = checked_key(public)
        self._secret = checked_key(secret)

    @classmethod
    def generate(cls) -> Self:
        """Return a fresh pair.

        Raises:
            CapabilityError: The installed libzmq has no CURVE.
        """
        import zmq
        from zmq.utils import z85

        if not zmq.has("curve"):
            raise CapabilityError(
                "the installed libzmq was built without CURVE", requirement="libzmq with CURVE"
            )
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))

    def secret(self) -> bytes:
        """Return the secret half, for the socket option that needs it and for nothing else."""
        return self._secret

    def __repr__(self) -> str:
        """Name the pair by the start of its public half."""
        return f"<RemoteKeys {self.public[:4].hex()}>"

    def __reduce_ex__(self, protocol: object) -> str:
        """Refuse to be copied or serialised."""
        raise UsageError("a key pair stays in the process that made it")


def checked_key(key: object) -> bytes:
    """Return `key` if it can be a CURVE key.

    Raises:
        UsageError: It is not 32 bytes, or all of them are zero. The text does not show it.
    """
    if type(key) is not bytes or len(key) != PUBLIC_KEY_BYTES or not any(key):
        raise UsageError(f"a CURVE key has {PUBLIC_KEY_BYTES} bytes and is not zero")
    return key


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the two ends of the remote leg hold each other to account; chosen by the writer, told in the endpoint.

    Attributes:
        high_water_bytes: The writer waits rather than be further ahead of a reader than this. A message that is
            longer passes when its reader has read everything before it. Every message counts 512 bytes more.
        heartbeat_s: An idle end says this often that it is there.
        lost_after_s: An end without a connection, of which nothing was heard for so long, is gone for good.

    Raises:
        SettingsError: A value is out of range.
    """

    high_water_bytes: int = 64 << 20
    heartbeat_s: float = 0.2
    lost_after_s: float = 0.8

    def __post_init__(self) -> None:
        """Check every field."""
        if type(self.high_water_bytes) is not int or self.high_water_bytes < _MIN_HIGH_WATER:
            raise SettingsError(
                f"remote.high_water_bytes is {self.high_water_bytes!r}, but must be an int of at least "
                f"{_MIN_HIGH_WATER}"
            )
        for field in ("heartbeat_s", "lost_after_s"):
            seconds = positive_seconds(f"remote.{field}", getattr(self, field))
            msgspec.structs.force_setattr(self, field, seconds)
        if self.lost_after_s < 3 * self.heartbeat_s:
            raise SettingsError(
                f"remote.lost_after_s is {self.lost_after_s!r}, but must be at least three times heartbeat_s, "
                f"{self.heartbeat_s!r}: one late heartbeat is no death"
            )

    @property
    def ping_ms(self) -> int:
        """How often the transport pings: twice in a heartbeat."""
        return max(1, int(self.heartbeat_s * 500))

    @property
    def silence_ms(self) -> int:
        """How long the transport waits for the answer to a ping before it drops the connection."""
        return max(1, int(self.lost_after_s * 375))

    @property
    def grace_s(self) -> float:
        """How long a broken connection has to come back, however long nothing was heard before."""
        return self.lost_after_s * 0.375


class RemoteEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the writer of a queue listens, and how a reader knows that it is the writer. Holds no secret.

    Attributes:
        version: Of this record and of the wire.
        address: Numeric address.
        port: TCP port.
        server_public_key: The queue's own CURVE key; who does not hold its secret half cannot answer a reader.
        generation: Random number of this queue; a reader of an earlier one is refused.
        ranks: The readers' ranks.
        settings: What the writer chose.
    """

    version: int
    address: str
    port: int
    server_public_key: bytes
    generation: int
    ranks: tuple[int, ...]
    settings: RemoteSettings

    def __post_init__(self) -> None:
        """Check what goes into an address or a socket option."""
        if self.version != VERSION:
            raise UsageError(f"the remote endpoint is of version {self.version}, this is version {VERSION}")
        bind_host(self.address)
        if not 0 < self.port < 65536:
            raise UsageError(f"{self.port} is no TCP port")
        checked_key(self.server_public_key)

    def url(self) -> str:
        """Return the address as zmq writes it."""
        return f"tcp://{bind_host(self.address)}:{self.port}"


def bind_host(address: str) -> str:
    """Return `address` as it stands in a URL.

    Raises:
        UsageError: It is not the numeric address of one interface.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError as error:
        raise UsageError(f"{address!r} is no numeric IP address") from error
    plain = getattr(ip, "ipv4_mapped", None) or ip
    if plain.is_unspecified or plain.is_multicast or str(plain) == "255.255.255.255":
        raise UsageError(f"{address!r} is no address of one interface; a queue never listens on all of them")
    return f"[{address}]" if ip.version == 6 else address
