"""Describe a queue so that a reader in another process can open it.

A handle holds no secret. Its key authenticates the handle and proves the reader to the writer, so the key must
travel separately: through an inherited descriptor, or over the control plane of the group.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final, Self

import msgspec

from shm_broadcast.endpoint import RemoteEndpoint
from shm_broadcast.errors import DecodeError
from shm_broadcast.settings import WaitMode

VERSION: Final = 2
KEY_BYTES: Final = 32
_MAC_BYTES: Final = 32
# Larger handles are refused before they are parsed. 64 KiB hold over 10,000 ranks, at 5 bytes each.
_MAX_BYTES: Final = 64 << 10


def new_key() -> bytes:
    """Return a new random key (32 bytes) for one queue."""
    return secrets.token_bytes(KEY_BYTES)


class QueueHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tells a reader where a queue is and how large its ring is. It holds no secret.

    Attributes:
        version: Version of this record.
        name: The queue's name in errors and logs.
        generation: Random number of this queue; the handle of an earlier queue is refused.
        address: Abstract Unix address where the writer hands out the segment; empty if no reader is local.
        segment_bytes: Size of the segment.
        ranks: The local readers' ranks, in the order of their places in the ring.
        wait: How readers wait.
        warn_after_s: Seconds after which a waiting call logs a warning.
        writer: The writer's rank, which errors name; -1 if the writer has none.
        remote: Where readers on other hosts connect; None if there are none.
    """

    version: int
    name: str
    generation: int
    address: str
    segment_bytes: int
    ranks: tuple[int, ...]
    wait: WaitMode
    warn_after_s: float
    writer: int = -1
    remote: RemoteEndpoint | None = None

    def to_bytes(self, key: bytes) -> bytes:
        """Return the encoded handle behind its 32-byte HMAC under `key`."""
        body = msgspec.msgpack.encode(self)
        return hmac.digest(key, b"handle" + body, "sha256") + body

    @classmethod
    def from_bytes(cls, data: bytes, key: bytes) -> Self:
        """Check the HMAC of bytes that `to_bytes` returned, and decode them.

        Raises:
            DecodeError: The handle was made with another key, was changed, or has another version. Nothing was
                mapped or connected.
        """
        if not _MAC_BYTES < len(data) <= _MAX_BYTES:
            raise DecodeError(f"{len(data)} bytes are not a queue handle")
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, hmac.digest(key, b"handle" + body, "sha256")):
            raise DecodeError("the queue handle is forged, or was made with another key")
        try:
            handle = msgspec.msgpack.decode(body, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"the queue handle is malformed: {error}") from error
        if handle.version != VERSION:
            raise DecodeError(f"the queue handle has version {handle.version}, this is version {VERSION}")
        return handle
