"""Queues inside one process, bare rings, and the resources that queues hold in the system."""

import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shm_broadcast import _core, codec
from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.layout import PAGE, Field, data_offset
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.settings import MIN_RING_BYTES, BroadcastSettings, WaitMode

__all__ = [
    "LONG",
    "RefusedError",
    "background",
    "bare_ring",
    "ends",
    "fill",
    "find_sockets",
    "memory_of",
    "named_memory_of",
    "put_word",
    "queue",
    "refuse",
    "ring_write",
    "segments_of",
    "sockets_of",
    "word",
]

SOCKET_PREFIX = "@group-coordinator-"
LONG = bytes(range(256)) * 400
"""More than 64 KiB, so that it is streamed where it fits one record."""


@contextmanager
def queue(
    readers: int = 1,
    ring_bytes: int = MIN_RING_BYTES,
    wait: WaitMode = "adaptive",
    warn_after_s: float = 60.0,
    writer: int = -1,
) -> Iterator[tuple[QueueWriter, list[QueueReader]]]:
    """Create a queue to ranks 0, 1 ... with both ends in this process."""
    settings = BroadcastSettings(wait=wait, ring_bytes=ring_bytes, warn_after_s=warn_after_s)
    with ExitStack() as stack:
        end = stack.enter_context(QueueWriter.create("steps", range(readers), settings, writer=writer))
        handle = end.handle.to_bytes(end.key)
        ends = [stack.enter_context(QueueReader.open(handle, end.key, rank, 10.0)) for rank in range(readers)]
        end.wait_until_ready(10.0)
        yield end, ends


def bare_ring(data_bytes: int = PAGE, readers: int = 1, generation: int = 7) -> mmap.mmap:
    """Return private memory formatted as a ring with `data_bytes` for records."""
    memory = mmap.mmap(-1, data_offset(readers) + data_bytes)
    _core.ring_format(memory, readers, generation)
    return memory


def word(memory: mmap.mmap, field: Field, at: int = 0) -> int:
    """Return one word of a ring's layout, of the line or record that begins `at` bytes later."""
    return int(struct.unpack_from(field.form, memory, at + field.offset)[0])


def put_word(memory: mmap.mmap, field: Field, value: int, at: int = 0) -> None:
    """Overwrite one word of a ring's layout, cut to its width."""
    bits = 8 * struct.calcsize(field.form)
    struct.pack_into(field.form, memory, at + field.offset, value % (1 << bits))


class RefusedError(Exception):
    """The error that `refuse` raises. It says why an endpoint of a bare ring cannot go on."""

    def __init__(self, reason: int, detail: object) -> None:
        """Store the reason and the detail."""
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def refuse(reason: int, detail: object) -> RefusedError | None:
    """The `look_around` of an endpoint of a bare ring: let it wait, and answer any other reason with `RefusedError`."""
    if reason == _core.LOOK_UNDECODABLE:
        return RefusedError(reason, detail)
    if reason > _core.LOOK_WAITING:
        raise RefusedError(reason, detail)
    return None


def ends(data_bytes: int = 64 * PAGE) -> tuple[mmap.mmap, _core.WriteEndpoint, _core.ReadEndpoint]:
    """Return a bare ring and both of its native endpoints."""
    memory = bare_ring(data_bytes)
    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse)
    return memory, writer, _core.ReadEndpoint(memory, 0, codec.build_owned, "adaptive", refuse)


def ring_write(
    memory: mmap.mmap,
    header: bytes,
    buffers: tuple[memoryview, ...],
    done: int,
    spin_ns: int,
    park_ns: int,
    tag: int = 0,
) -> int:
    """Write a frame from byte `done` on, as far as there is room, and return how many bytes are written now."""
    end = _core.WriteEndpoint(memory, codec.describe, "park", refuse)
    return end.write_some(header, buffers, done, spin_ns, park_ns, tag)


def fill(
    writer: QueueWriter, obj: Any, between: Callable[[], object] = lambda: None
) -> tuple[int, CommTimeoutError]:
    """Send `obj` and call `between` until the ring is full; return the number of messages and the error."""
    sent = 0
    while True:
        try:
            writer.enqueue(obj, 0.0)
        except CommTimeoutError as error:
            return sent, error
        sent += 1
        between()


def memory_of(end: QueueWriter | QueueReader) -> mmap.mmap:
    """Return the mapping of a queue's end, to damage it as a broken peer would."""
    ring: Any = end._ring
    memory: mmap.mmap = ring._memory
    return memory


@contextmanager
def background(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run `call` on a thread; yield a list that receives its result or error at the end."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join(60.0)
        assert not thread.is_alive(), "the call on the other thread hangs"


def find_sockets() -> set[str]:
    """Return our abstract addresses that are bound in this network namespace."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {line.split()[-1] for line in lines if line.split()[-1].startswith(SOCKET_PREFIX)}


def sockets_of(pid: int | str = "self") -> set[str]:
    """Return our abstract addresses whose sockets a process holds.

    Tests run in parallel in one network namespace, so `find_sockets` may return another test's.
    """
    targets = {target for _, target in descriptors_of(pid)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {
        words[-1]
        for words in lines
        if words[-1].startswith(SOCKET_PREFIX) and f"socket:[{words[6]}]" in targets
    }


def segments_of(pid: int | str = "self") -> list[str]:
    """Return the descriptors and mappings of our shared memory that a process holds for a time, not for its life."""
    found = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if _is_segment(line)]
    found += [f"descriptor {entry}: {target}" for entry, target in descriptors_of(pid) if _is_segment(target)]
    return found


def _is_segment(name: str) -> bool:
    # The status page and the memory for stacks stay for the life of the process.
    kept = ("memfd:group-coordinator-status", "memfd:group-coordinator-stacks")
    return "memfd:group-coordinator" in name and not any(each in name for each in kept)


def named_memory_of(pid: int | str = "self") -> set[str]:
    """Return the files in /dev/shm that a process maps or holds open."""
    mapped = {
        line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line
    }
    return mapped | {target for _, target in descriptors_of(pid) if target.startswith("/dev/shm/")}


def descriptors_of(pid: int | str) -> list[tuple[str, str]]:
    """Return the open descriptors of a process, each with its target."""
    found = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append((entry, os.readlink(f"/proc/{pid}/fd/{entry}")))
        except FileNotFoundError:
            continue
    return found
