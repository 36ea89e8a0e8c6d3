"""`ExternalWriter`: how the ranks of a group reach a queue whose writer is none of them."""

from __future__ import annotations

import dataclasses
import hashlib

from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import UsageError
from shm_broadcast.handle import KEY_BYTES, QueueHandle


@dataclasses.dataclass(frozen=True, slots=True, repr=False, eq=False)
class ExternalWriter:
    """What a queue's writer outside of the group, an engine's own process, offers to the group's ranks.

        queue = QueueWriter.create("steps", readers=[0, 1])           # in the engine's process
        ExternalWriter(queue.handle, queue.key)                       # in a worker, see below

    Who holds the key can read the queue. It must reach this process through a descriptor that the process
    inherited, such as a pipe, or over another channel that authenticates both sides; never on a command line, in
    the environment or in a file that others can read. The handle is no secret and may travel any way. Ranks of
    the group that were given no `ExternalWriter` get handle and key over the group's host plane.

    The value neither shows its key nor can it be copied or serialised.

    Attributes:
        handle: The writer's `handle`, or the bytes of it.
        key: The queue's key.
        remote_keys: This rank's own key pair, whose public half the writer was given, if this rank reads from
            another host than the writer's.

    Raises:
        UsageError: A part is of the wrong type, or the key of the wrong length.
    """

    handle: bytes | QueueHandle
    key: bytes
    remote_keys: RemoteKeys | None = None

    def __post_init__(self) -> None:
        """Check the types; a forged handle is found when it is used."""
        if not isinstance(self.handle, (bytes, QueueHandle)):
            raise UsageError(
                f"handle must be a QueueHandle or its bytes, not {self.handle.__class__.__name__}"
            )
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise UsageError(f"the key of a queue is {KEY_BYTES} bytes; it travels beside the handle")
        if self.remote_keys is not None and not isinstance(self.remote_keys, RemoteKeys):
            raise UsageError(f"remote_keys must be RemoteKeys, not {self.remote_keys.__class__.__name__}")

    def authenticated(self) -> QueueHandle:
        """Return the handle.

        Raises:
            DecodeError: It is forged, or belongs to another key.
        """
        return QueueHandle.from_bytes(self.handle_bytes(), self.key)

    def handle_bytes(self) -> bytes:
        """Return the handle as it travels."""
        return self.handle if isinstance(self.handle, bytes) else self.handle.to_bytes(self.key)

    def digest(self) -> bytes:
        """Return what tells this queue from others; it says nothing about the key."""
        return hashlib.sha256(self.handle_bytes()).digest()

    def __repr__(self) -> str:
        """Name the queue, if the handle is not in bytes; never the key."""
        what = f"{len(self.handle)} bytes" if isinstance(self.handle, bytes) else repr(self.handle.name)
        return f"<ExternalWriter {what}>"

    def __reduce_ex__(self, protocol: object) -> str:
        """Refuse to be copied or serialised."""
        raise UsageError("an ExternalWriter holds a key: hand its parts over, the key over a safe channel")
