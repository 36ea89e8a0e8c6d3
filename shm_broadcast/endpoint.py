"""Keys, settings and address of a remote transport: what each end knows before it connects.

Only `RemoteKeys.generate` imports zmq, so a process that never connects can still decode a handle that holds an
endpoint.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Final, Self

import msgspec

from shm_broadcast.errors import CapabilityError, SettingsError, UsageError
from shm_broadcast.settings import positive_seconds
from shm_broadcast.threads import import_aside

__all__ = ["PUBLIC_KEY_BYTES", "RemoteEndpoint", "RemoteKeys", "RemoteSettings", "bind_host", "checked_key"]

VERSION: Final = 1
PUBLIC_KEY_BYTES: Final = 32
_MIN_HIGH_WATER: Final = 64 << 10


class RemoteKeys:
    """The CURVE key pair of one end. The other end learns the public half; the secret half stays here.

    Its repr hides the secret; it can be neither copied nor pickled, and the codec refuses it.

    Attributes:
        public: 32 bytes.
    """

    __slots__ = ("_secret", "public")

    public: bytes

    def __init__(self, public: bytes, secret: bytes) -> None:
        """Hold two keys of 32 bytes each; `generate` makes them."""
        self.public = checked_key(public)
        self._secret = checked_key(secret)

    @classmethod
    def generate(cls) -> Self:
        """Return a new random pair.

        Raises:
            CapabilityError: The installed libzmq was built without CURVE.
        """
        import_aside("zmq.utils.z85", "zmq")
        import zmq
        from zmq.utils import z85

        _require_curve()
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))

    @classmethod
    def derive(cls, key: bytes, rank: int) -> Self:
        """Return the pair of reader `rank` of the queue with the key `key`, the same for every holder of that key.

        It serves a writer that must know its readers' public keys before the readers exist. The secret half is as
        secret as the queue's key: whoever learns the key on its way to the reader can take the reader's place. With
        `generate` the secret half stays in its process.

        Raises:
            CapabilityError: The installed libzmq was built without CURVE.
        """
        import_aside("zmq.utils.z85", "zmq")
        import zmq
        from zmq.utils import z85

        _require_curve()
        secret = hmac.digest(key, b"remote reader %d" % rank, "sha256")
        return cls(z85.decode(zmq.curve_public(z85.encode(secret))), secret)

    def secret(self) -> bytes:
        """Return the secret half (32 bytes). Pass it to the zmq socket option and nowhere else."""
        return self._secret

    def __repr__(self) -> str:
        """Show the first 4 bytes of the public half, nothing of the secret."""
        return f"<RemoteKeys {self.public[:4].hex()}>"

    def __reduce_ex__(self, protocol: object) -> str:
        """Refuse copying and pickling."""
        raise UsageError("a key pair stays in the process that made it")


def _require_curve() -> None:
    import zmq

    if not zmq.has("curve"):
        raise CapabilityError("the installed libzmq was built without CURVE", requirement="libzmq with CURVE")


def checked_key(key: object) -> bytes:
    """Return `key` if it can be a CURVE key.

    Raises:
        UsageError: The key is not 32 bytes long, or is all zeros. The text does not show the key.
    """
    if type(key) is not bytes or len(key) != PUBLIC_KEY_BYTES or not any(key):
        raise UsageError(f"a CURVE key must have {PUBLIC_KEY_BYTES} bytes, not all zero")
    return key


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Flow control and failure detection of the remote transport. The writer chooses; readers get it in the endpoint.

    Attributes:
        high_water_bytes: Most bytes that the writer may be ahead of a reader; at least 64 KiB. Each part of a
            message, of 256 KiB at most, counts 512 bytes extra. A message longer than the limit is sent once its
            readers have read everything before it.
        heartbeat_s: Seconds between the heartbeats of an idle end.
        lost_after_s: A peer is lost for good when it has no connection and has been silent for this many seconds;
            at least three times `heartbeat_s`. Groups take it for whole hosts too, as at least 0.5 s.

    Raises:
        SettingsError: A value is out of range; the text names the field and the value.
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
                f"{self.heartbeat_s!r}, so that one late heartbeat does not look like a dead peer"
            )

    @property
    def ping_ms(self) -> int:
        """Milliseconds between zmq's pings: half of `heartbeat_s`."""
        return max(1, int(self.heartbeat_s * 500))

    @property
    def silence_ms(self) -> int:
        """Milliseconds after which zmq drops a connection whose ping was not answered: 3/8 of `lost_after_s`."""
        return max(1, int(self.lost_after_s * 375))

    @property
    def grace_s(self) -> float:
        """Seconds that a broken connection gets to come back, even after a long silence: 3/8 of `lost_after_s`."""
        return self.lost_after_s * 0.375


class RemoteEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the writer of a queue listens, and the key that authenticates it. Holds no secret.

    Attributes:
        version: Version of this record and of the wire protocol.
        address: Numeric IP address.
        port: TCP port.
        server_public_key: The queue's CURVE key (32 bytes). Only the process with the secret half can answer a reader.
        generation: Random 63-bit number of this queue; a reader with another number is refused.
        ranks: The remote readers' ranks.
        settings: Flow control and timeouts, chosen by the writer.

    Raises:
        UsageError: The version, address, port or key is not valid.
    """

    version: int
    address: str
    port: int
    server_public_key: bytes
    generation: int
    ranks: tuple[int, ...]
    settings: RemoteSettings

    def __post_init__(self) -> None:
        """Check every field that ends up in a URL or a socket option."""
        if self.version != VERSION:
            raise UsageError(f"the remote endpoint has version {self.version}, this is version {VERSION}")
        bind_host(self.address)
        if not 0 < self.port < 65536:
            raise UsageError(f"{self.port} is not a TCP port")
        checked_key(self.server_public_key)

    def url(self) -> str:
        """Return the address in zmq's notation."""
        return f"tcp://{bind_host(self.address)}:{self.port}"


def bind_host(address: str) -> str:
    """Return `address` in URL notation: IPv6 in brackets.

    Raises:
        UsageError: `address` is not the numeric address of one interface.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError as error:
        raise UsageError(f"{address!r} is not a numeric IP address") from error
    plain = getattr(ip, "ipv4_mapped", None) or ip
    if plain.is_unspecified or plain.is_multicast or str(plain) == "255.255.255.255":
        raise UsageError(
            f"{address!r} is not the address of one interface; a queue never listens on all interfaces"
        )
    return f"[{address}]" if ip.version == 6 else address
