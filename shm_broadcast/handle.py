"""The value that crosses a process boundary so that a reader finds its queue.

It holds no secret: the key that authenticates it, and with which a reader proves itself to the writer,
travels another way (an inherited descriptor, or the control plane of the group).
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final, Self

import msgspec

from shm_broadcast.endpoint import RemoteEndpoint
from shm_broadcast.errors import DecodeError
from shm_broadcast.settings import WaitMode

VERSION: Final = 1
KEY_BYTES: Final = 32
_MAC_BYTES: Final = 32
# A handle names at most this many readers; more bytes than this are refused before they are parsed.
_MAX_BYTES: Final = 64 << 10


def new_key() -> bytes:
    """Return a fresh key for one queue."""
    return secrets.token_bytes(KEY_BYTES)


class QueueHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a queue is, and what its ring looks like.

    Attributes:
        version: Of this record and of the ring.
        name: The queue's name, for texts.
        generation: Random number of this queue; a handle of an earlier one is refused.
        address: Abstract Unix address at which the writer hands the segment over; empty if no reader is local.
        segment_bytes: Size of the segment.
        ranks: The local readers' ranks, in the order of their places.
        wait: How readers wait.
        warn_after_s: When a waiting call warns.
        writer: The writer's rank, which errors name; -1 for a writer that has none.
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
        """Return the handle with its authentication code under `key`."""
        body = msgspec.msgpack.encode(self)
        return hmac.digest(key, b"handle" + body, "sha256") + body

    @classmethod
    def from_bytes(cls, data: bytes, key: bytes) -> Self:
        """Return the handle that `to_bytes` made.

        Raises:
            DecodeError: It was made with another key, was changed, or is of another version. Nothing has
                been mapped or connected.
        """
        if not _MAC_BYTES < len(data) <= _MAX_BYTES:
            raise DecodeError(f"a queue handle has not {len(data)} bytes")
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, hmac.digest(key, b"handle" + body, "sha256")):
            raise DecodeError("the queue handle is forged, or belongs to another key")
        try:
            handle = msgspec.msgpack.decode(body, type=cls)
        except msgspec.MsgspecError as error:
            raise DecodeError(f"the queue handle is malformed: {error}") from error
        if handle.version != VERSION:
            raise DecodeError(f"the queue handle is of version {handle.version}, this is version {VERSION}")
        return handle
