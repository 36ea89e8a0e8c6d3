"""vLLM's `MessageQueue`, with its verbs and attributes, over a queue of this project.

vLLM creates one in the executor for the workers' inputs, and one in each worker for its outputs. The constructor makes
the writing end; `export_handle` returns what the readers need, and `create_from_handle` opens a reading end. Objects
travel in this project's codec, which builds only registered types: the plugin registers vLLM's own, and what vLLM
serialises itself, such as the callables of `collective_rpc`, travels as bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final, Self

import torch.distributed as dist

from coordinator.integrations.ray.carrying import carry_in_clear
from coordinator.integrations.sealing import open_sealed, seal
from coordinator.integrations.vllm.announcement import announce
from coordinator.settings import CoordinatorSettings
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import ClosedError, CommTimeoutError, PeerLostError, UsageError
from shm_broadcast.handle import QueueHandle, new_key
from shm_broadcast.queue import QueueReader, QueueWriter

__all__ = ["MessageQueue", "MessageQueueHandle"]

# Numbers the queues of this process. Its rank or process id comes first, so that errors and logs can tell them apart.
_numbers = itertools.count()

# The reading ends of this process. The executor reads the answers of one worker while another one may have died.
# Threads and signal handlers read and close queues while others open theirs, and processes are forked meanwhile: there
# is no lock, and each look and change is one native step.
_reading: Final[set[weakref.ref[MessageQueue]]] = set()
os.register_at_fork(after_in_child=_reading.clear)


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class MessageQueueHandle:
    """What a reader in another process needs to open its end.

    It can be serialised for a process of the same family (see `sealing`); the key is sealed then. Between hosts, the
    group carries handle and key (see `VllmGroupCoordinator.create_mq_broadcaster`), or Ray does (see `ray`).

    Attributes:
        queue: The queue's handle, authenticated with the key.
        key: The queue's key, 32 bytes.
    """

    queue: bytes
    key: bytes

    @property
    def local_reader_ranks(self) -> list[int]:
        """Return the ranks of the readers on the writer's host; vLLM asks whether there are any."""
        return list(self._decoded.ranks)

    @property
    def remote_reader_ranks(self) -> list[int]:
        """Return the ranks of the readers on other hosts."""
        remote = self._decoded.remote
        return [] if remote is None else list(remote.ranks)

    @property
    def remote_subscribe_addr(self) -> str | None:
        """Return the address for readers on other hosts; vLLM asks whether it is None."""
        remote = self._decoded.remote
        return None if remote is None else remote.address

    @property
    def _decoded(self) -> QueueHandle:
        return QueueHandle.from_bytes(self.queue, self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Seal the key for the processes of this family."""
        return _unseal, (self.queue, seal(self.key, self.queue))

    def __repr__(self) -> str:
        """Name the queue; never its key."""
        return f"<MessageQueueHandle {self._decoded.name!r}>"


def _unseal(queue: bytes, sealed: bytes) -> MessageQueueHandle:
    return MessageQueueHandle(queue, open_sealed(sealed, queue))


def _owner() -> str:
    """Return who writes a queue, for its name."""
    return f"rank {dist.get_rank()}" if dist.is_initialized() else f"pid {os.getpid()}"


def _parts(handle: MessageQueueHandle) -> tuple[bytes, bytes]:
    return handle.queue, handle.key


def _whole(parts: tuple[bytes, bytes]) -> MessageQueueHandle:
    return MessageQueueHandle(*parts)


class MessageQueue:
    """One end of a queue: the writing end, or the reading end that `create_from_handle` returns.

    One thread at a time may use an end; any thread may call `shutdown`, which wakes a waiting call.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = 0,
        max_chunks: int = 0,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        """Create a queue and its writing end.

        Args:
            n_reader: Number of readers.
            n_local_reader: How many of them are on this host.
            local_reader_ranks: Their ranks; default: 0 to n_local_reader - 1, as they must be if there are readers on
                other hosts, which have the ranks from n_local_reader on.
            max_chunk_bytes: Ignored: a message may have any length. `GROUP_COORDINATOR_BROADCAST__RING_BYTES` sets the
                size of the ring.
            max_chunks: Ignored, as `max_chunk_bytes`.
            connect_ip: The numeric address of this host, for readers on other hosts.
            enable_shm_tensor_arena: Ignored: large tensors are copied into the ring once, and out of it once.

        Raises:
            UsageError: The numbers contradict each other, or there are readers on other hosts and no `connect_ip`.
            CapabilityError: There is too little memory.
        """
        del max_chunk_bytes, max_chunks, enable_shm_tensor_arena
        local = list(range(n_local_reader)) if local_reader_ranks is None else list(local_reader_ranks)
        if len(local) != n_local_reader or n_local_reader > n_reader:
            raise UsageError(f"{n_reader} readers, of which {n_local_reader} are local, with ranks {local}")
        remote = list(range(n_local_reader, n_reader))
        if remote and not connect_ip:
            raise UsageError(f"readers {remote} are on other hosts: pass connect_ip, this host's address")
        if remote and local != list(range(n_local_reader)):
            raise UsageError(
                f"with readers on other hosts, those on this one must have the ranks 0 to {n_local_reader - 1}, "
                f"not {local}: the ranks of the others would be unknown"
            )
        settings = CoordinatorSettings.from_env()
        key = new_key()
        writer = QueueWriter.create(
            f"vllm/{_owner()}/{next(_numbers)}",
            local,
            settings.broadcast,
            key,
            writer=dist.get_rank() if dist.is_initialized() else -1,
            remote_readers={rank: RemoteKeys.derive(key, rank).public for rank in remote},
            bind_address=connect_ip if remote else None,
            port_range=settings.remote_port_range,
            remote=settings.remote,
        )
        try:
            self._bind(writer, None, MessageQueueHandle(writer.handle.to_bytes(key), key))
        except BaseException:
            writer.close()
            raise

    def _bind(
        self, writer: QueueWriter | None, reader: QueueReader | None, handle: MessageQueueHandle | None
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._handle = handle
        self.shutting_down: bool = False
        self.tensor_arena: None = None
        announce()

    @classmethod
    def of(cls, end: Any) -> Self:
        """Return the end of a group's queue, `end`, under vLLM's verbs."""
        queue = cls.__new__(cls)
        is_reader = isinstance(end, QueueReader)
        queue._bind(None if is_reader else end, end if is_reader else None, None)  # noqa: SLF001 - ours
        return queue

    def export_handle(self) -> MessageQueueHandle:
        """Return what readers pass to `create_from_handle`.

        Raises:
            UsageError: This is a queue between the ranks of a group, which all have their ends.
        """
        if self._handle is None:
            raise UsageError("the ranks of the group have their ends of this queue already")
        carry_in_clear(MessageQueueHandle, _parts, _whole)
        return self._handle

    @classmethod
    def create_from_handle(cls, handle: MessageQueueHandle, rank: int) -> Self:
        """Open the reading end of `rank`; -1 means the only reader on another host.

        Raises:
            UsageError: `rank` is not a reader of this queue.
            PeerLostError: The writer is gone.
            CommTimeoutError: The writer did not answer within the settings' `create_timeout_s`.
        """
        if not isinstance(handle, MessageQueueHandle):
            raise UsageError(
                f"create_from_handle needs a MessageQueueHandle, not {type(handle).__qualname__}: every process of the "
                "engine must name this plugin in VLLM_PLUGINS"
            )
        remote = handle.remote_reader_ranks
        if rank == -1 and len(remote) == 1:
            rank = remote[0]
        keys = RemoteKeys.derive(handle.key, rank) if rank in remote else None
        timeout_s = CoordinatorSettings.from_env().create_timeout_s
        queue = cls.__new__(cls)
        reader = QueueReader.open(handle.queue, handle.key, rank, timeout_s, remote_keys=keys)
        try:
            queue._bind(None, reader, handle)  # noqa: SLF001 - ours
            _reading.add(weakref.ref(queue, _reading.discard))
        except BaseException:
            reader.close()
            raise
        return queue

    def wait_until_ready(self) -> None:
        """Return when every reader has opened its end; on a reading end at once, because it is open.

        It waits without a deadline, because other hosts may load a model meanwhile; vLLM watches the processes, and
        `shutdown` ends the wait.

        Raises:
            PeerLostError: A reader came and is gone, or the queue was closed because another worker has died.
            RuntimeError: `shutdown` was called.
        """
        if self._writer is not None:
            try:
                self._writer.wait_until_ready()
            except ClosedError as error:
                raise self._cancelled(error) from error

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send `obj` to every reader.

        Args:
            obj: Anything that the codec carries.
            timeout: Deadline in seconds for the readers to make room.

        Raises:
            TimeoutError: The readers made no room in time.
            UsageError: `obj` cannot be carried; nothing was sent.
            PeerLostError: A reader is gone.
            RuntimeError: `shutdown` was called.
        """
        if self._writer is None:
            raise UsageError("only the writing end of a queue can enqueue")
        try:
            self._writer.enqueue(obj, timeout)
        except ClosedError as error:
            raise self._cancelled(error) from error

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Return the next object.

        Args:
            timeout: Deadline in seconds; None waits until the writer ends.
            indefinite: Whether there may be nothing to do for long. Otherwise a long wait logs a warning that names the
                writer.

        Raises:
            TimeoutError: No object came in time.
            PeerLostError: The writer's process ended, or the queue was closed because the writer of another queue that
                this process reads has ended. The text names it.
            RuntimeError: `shutdown` was called here or by the writer.
        """
        if self._reader is None:
            raise UsageError("only a reading end of a queue can dequeue")
        self._reader.warns = not indefinite
        try:
            return self._reader.dequeue(timeout)
        except CommTimeoutError as error:
            # vLLM catches TimeoutError, of which this error is a subclass; the text names the writer.
            raise error from None
        except ClosedError as error:
            raise self._cancelled(error) from error

    def broadcast_object(self, obj: Any = None) -> Any:
        """Send `obj` and return it; on a reading end receive it."""
        if self._writer is None:
            return self.dequeue()
        self.enqueue(obj)
        return obj

    def shutdown(self) -> None:
        """Close this end and wake a call that waits in another thread. Idempotent."""
        self.shutting_down = True
        if self._reader is not None:
            self._reader.close()
        if self._writer is not None:
            self._writer.close()

    def _cancelled(self, error: ClosedError) -> Exception:
        """Return what vLLM raises for a closed queue; or the true reason, if a writer is lost."""
        queues = [queue for each in list(_reading) if (queue := each()) is not None]
        lost = sorted({text for queue in queues if (text := queue.lost_writer()) is not None})
        if lost:
            return PeerLostError(f"{error}, after the loss of {', '.join(lost)}")
        return RuntimeError(f"cancelled: {error}")

    def lost_writer(self) -> str | None:
        """Return which process wrote to this end, if it has ended and this end is open; else None."""
        return None if self._reader is None or self.shutting_down else self._reader.lost_writer()
