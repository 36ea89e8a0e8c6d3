"""Turn what a process has recorded of a queue for which it waited into evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from coordinator.diagnosis.blame.evidence import Process, ProcessState
from coordinator.diagnosis.model import Page, Queue
from coordinator.diagnosis.queues import Reader, Ring, decode_ring
from shm_broadcast.errors import DecodeError
from shm_broadcast.status.failure_dump import FailureDump, QueueDump, QueueEnd

__all__ = ["ring_of", "with_wait"]

_Identity = tuple[str, int, int, int]


def with_wait(dump: FailureDump, processes: Sequence[Process]) -> tuple[Ring | None, list[Process]]:
    """Return a queue for which a process waited, and the processes as they were then.

    Those of its ends that have no page of their own are added: an engine that writes to the ranks keeps no record.

    Args:
        dump: Of a queue.
        processes: What else was recorded.

    Returns:
        The queue, or None if the wait has ended since: a process at one of its ends has made calls later.
    """
    known = _known(dump, processes)
    if not dump.queues or any(_last_end_ns(processes[at].page) > dump.monotonic_ns for at in known.values()):
        return None, list(processes)
    found, queue = list(processes), dump.queues[0]
    ends = {place: found[at].page for place, at in known.items()}
    for end in dump.ends:
        at = known.get(end.place)
        if at is not None:
            found[at] = msgspec.structs.replace(found[at], state=_state(end) or found[at].state)
        else:
            ends[end.place] = _page(end, dump.queue, queue)
            state = _state(end) or "alive"
            found.append(Process(ends[end.place], "dump", state, dump.monotonic_ns))
    return _waited(ring_of(queue, dump.queue, ends), dump.place), found


def _known(dump: FailureDump, processes: Sequence[Process]) -> dict[int, int]:
    """Return which of `processes` are at the ends of the queue, by place."""
    identities = {_identity(each.page): at for at, each in enumerate(processes)}
    found = {end.place: identities[_named(end)] for end in dump.ends if _named(end) in identities}
    for place, rank in enumerate(dump.readers):
        of_rank = [at for at, each in enumerate(processes) if each.page.rank == rank]
        if len(of_rank) == 1:
            found.setdefault(place, of_rank[0])
    return found


def _waited(ring: Ring, place: int) -> Ring:
    """Return the queue with the wait of the process that recorded it, which was awake while it wrote."""
    if place < 0:
        return msgspec.structs.replace(ring, writer_waits=True)
    readers = (
        msgspec.structs.replace(reader, waits=True) if reader.place == place else reader
        for reader in ring.readers
    )
    return msgspec.structs.replace(ring, readers=tuple(readers))


def ring_of(queue: QueueDump, name: str, ends: Mapping[int, Page]) -> Ring:
    """Return a queue of a dump.

    Args:
        queue: Its words.
        name: Its name.
        ends: The pages of the processes at its ends, by place; -1 for the writer.
    """
    writer = ends.get(-1)
    place: dict[str, Any] = {
        "name": name,
        "is_channel": queue.offset > 0,
        "inode": queue.inode,
        "offset": queue.offset,
        "pid": None if writer is None else writer.pid,
        "rank": None if writer is None else writer.rank,
    }
    try:
        said = decode_ring(queue.first, queue.second, queue.room)
    except DecodeError as error:
        return Ring(**place, fault=str(error))

    def known(reader: Reader) -> Reader:
        page = ends.get(reader.place)
        return reader if page is None else msgspec.structs.replace(reader, pid=page.pid, rank=page.rank)

    return msgspec.structs.replace(said, **place, readers=tuple(known(reader) for reader in said.readers))


def _identity(page: Page) -> _Identity:
    return page.boot_id, page.pid_namespace, page.pid, page.start_ticks


def _named(end: QueueEnd) -> _Identity:
    return end.boot_id, end.pid_namespace, end.pid, end.start_ticks


def _last_end_ns(page: Page) -> int:
    return max((record.end_ns for record in page.records), default=0)


def _state(end: QueueEnd) -> ProcessState | None:
    """Return a state that tells something."""
    states: tuple[ProcessState, ...] = ("stopped", "dead")
    return next((state for state in states if state == end.state), None)


def _page(end: QueueEnd, name: str, queue: QueueDump) -> Page:
    """Return the page of a process of which no more is known than that it is at an end of a queue."""
    return Page(
        pid=end.pid,
        start_ticks=end.start_ticks,
        pid_namespace=end.pid_namespace,
        time_namespace=0,
        boot_id=end.boot_id,
        hostname=end.hostname,
        rank=None,
        world_size=0,
        stack_signal=0,
        refused=0,
        created_ns=0,
        realtime_ns=0,
        calls=0,
        groups=(),
        queues=(Queue(name, queue.inode, queue.offset, end.place, -1),),
        records=(),
    )
