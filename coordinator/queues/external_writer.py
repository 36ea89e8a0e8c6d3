"""`ExternalWriter`: connects the ranks of a group to a queue whose writer is not a member of the group."""

from __future__ import annotations

import dataclasses
import hashlib

from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import UsageError
from shm_broadcast.handle import KEY_BYTES, QueueHandle


@dataclasses.dataclass(frozen=True, slots=True, repr=False, eq=False)
class ExternalWriter:
    """Handle and key of a queue whose writer is outside the group, such as the engine's own process.

        queue = QueueWriter.create("steps", readers=[0, 1])           # in the engine's process
        ExternalWriter(handle, key)       # in a worker that was given both, see below

    Whoever holds the key can read the queue. Pass the key through an inherited descriptor such as a pipe, or over
    another channel that authenticates both sides; never on a command line, in the environment or in a file that
    others can read. The handle is not secret. Ranks of the group that were given no `ExternalWriter` get handle and
    key over the group's host plane.

    The object does not show its key, and it cannot be copied or serialised.

    Attributes:
        handle: The writer's `handle`, or its bytes.
        key: The queue's key, 32 bytes.
        remote_keys: This rank's key pair, if this rank and the writer are on different hosts. The writer must have
            been given the public half.

    Raises:
        UsageError: A part has the wrong type, or the key the wrong length.
    """

    handle: bytes | QueueHandle
    key: bytes
    remote_keys: RemoteKeys | None = None

    def __post_init__(self) -> None:
        """Check types and key length; a forged handle is detected when it is used."""
        if not isinstance(self.handle, (bytes, QueueHandle)):
            raise UsageError(
                f"handle must be a QueueHandle or its bytes, not {self.handle.__class__.__name__}"
            )
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise UsageError(
                f"key must be the queue's key, {KEY_BYTES} bytes; the handle does not contain it"
            )
        if self.remote_keys is not None and not isinstance(self.remote_keys, RemoteKeys):
            raise UsageError(f"remote_keys must be RemoteKeys, not {self.remote_keys.__class__.__name__}")

    def authenticated(self) -> QueueHandle:
        """Return the handle after verifying it with the key.

        Raises:
            DecodeError: The handle is forged, or was made with another key.
        """
        return QueueHandle.from_bytes(self.handle_bytes(), self.key)

    def handle_bytes(self) -> bytes:
        """Return the handle in its serialised form."""
        return self.handle if isinstance(self.handle, bytes) else self.handle.to_bytes(self.key)

    def digest(self) -> bytes:
        """Return a SHA-256 digest that identifies the queue; it reveals nothing about the key."""
        return hashlib.sha256(self.handle_bytes()).digest()

    def __repr__(self) -> str:
        """Return the queue's name, or the size of a handle given as bytes; never the key."""
        what = f"{len(self.handle)} bytes" if isinstance(self.handle, bytes) else repr(self.handle.name)
        return f"<ExternalWriter {what}>"

    def __reduce_ex__(self, protocol: object) -> str:
        """Refuse to be copied or serialised."""
        raise UsageError(
            "an ExternalWriter holds a key and cannot be copied or serialised: "
            "pass its handle and its key separately, the key over a safe channel"
        )
