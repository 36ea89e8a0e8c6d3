"""Write what this process knows when one of its groups breaks, for a look at it later.

A dump holds the status page, the failure, the states of the other ranks' processes and the positions of the queues:
names, numbers, times and texts of our own errors, as the page itself.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from shm_broadcast import _core
from shm_broadcast.errors import CommError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.layout import FIELDS, LINE, MAX_READERS
from shm_broadcast.reports.log_fields import log_fields
from shm_broadcast.segment import Segment
from shm_broadcast.status.layout import TABLES
from shm_broadcast.status.record_file import DUMP_SUFFIX, RunFolder, create_private

__all__ = [
    "DUMP_VERSION",
    "MOST_BYTES",
    "Broken",
    "Dumps",
    "FailureDump",
    "QueueDump",
    "QueueEnd",
    "dump_of_ring",
]

DUMP_VERSION: Final = 1
MOST_BYTES: Final = 1 << 20
"""No dump is larger: it has one page, and limits for the queues and each text."""

_MOST_DUMPS: Final = 8
_MOST_QUEUE_BYTES: Final = 256 * 1024
_MOST_TEXT: Final = 4096
_READERS_AT: Final = FIELDS["consumed"].offset

logger: logging.Logger = logging.getLogger(__name__)


class Broken(Protocol):
    """The failure record of a group; see `device_comm.health.FailureRecord`."""

    @property
    def kind(self) -> str:
        """Return why the group broke."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks at fault."""

    @property
    def by(self) -> int:
        """Return the rank that found it."""

    @property
    def operation(self) -> str:
        """Return the call in which it did."""

    @property
    def within_s(self) -> float:
        """Return the deadline of that call, or 0."""

    @property
    def detail(self) -> str:
        """Return what is known of the ranks at fault."""


class QueueDump(msgspec.Struct, frozen=True):
    """The words of one ring, copied twice, one copy after the other.

    Attributes:
        inode: Inode of the memory that holds the ring.
        offset: Where the ring begins in that memory.
        room: Bytes of the memory from there on.
        first: The first copy.
        second: The second copy.
    """

    inode: int
    offset: int
    room: int
    first: bytes
    second: bytes


class QueueEnd(msgspec.Struct, frozen=True):
    """A process at an end of a queue, as one of them saw it.

    Attributes:
        place: Among the readers; -1 for the writer.
        state: "alive", "stopped", "dead" or "unknown".
        pid: Of the process, in its own PID namespace.
        start_ticks: Its start, in clock ticks since boot.
        pid_namespace: Inode.
        boot_id: Of its kernel.
        hostname: For people.
    """

    place: int
    state: str
    pid: int
    start_ticks: int
    pid_namespace: int
    boot_id: str
    hostname: str


class FailureDump(msgspec.Struct, frozen=True):
    """A dump: of a group that broke, or of a queue for which a call waits, which breaks nothing.

    Attributes:
        version: `DUMP_VERSION`.
        group: The group that broke; empty if it is a queue.
        error: Class of the error; empty while a call waits on.
        text: Its text, if it is one of ours.
        others: State of the other ranks' processes, by rank: "alive", "stopped", "dead" or "unknown".
        monotonic_ns: CLOCK_MONOTONIC.
        page: The status page, as `_core.status_copy` returns it; empty for a wait: the page stays in use.
        queues: The rings of its queues, as long as there is room for them.
        kind: From the failure record, as the fields up to `detail`; empty if there is none.
        ranks: Ranks at fault.
        by: The rank that found the failure.
        operation: The call in which it found the failure.
        within_s: Deadline of that call, or 0.
        detail: What is known of the ranks at fault.
        queue: The queue for which a call waits; empty if a group broke.
        place: This process's place among the readers of that queue, or -1 for the writer.
        ends: The processes at its ends that this one knows, itself too.
        readers: The ranks of its readers in the world, by place; empty if they are not known.
    """

    version: int
    group: str
    error: str
    text: str
    others: dict[int, str]
    monotonic_ns: int
    page: bytes
    queues: list[QueueDump]
    kind: str = ""
    ranks: tuple[int, ...] = ()
    by: int = -1
    operation: str = ""
    within_s: float = 0.0
    detail: str = ""
    queue: str = ""
    place: int = -1
    ends: list[QueueEnd] = []
    readers: list[int] = []


class Dumps:
    """The dumps of one process: one for each failure, however many groups that breaks.

    One more, with the number 0, is of the queue for which a call has waited last; it is overwritten.
    """

    def __init__(self, folder: RunFolder, segment: Segment) -> None:
        """Write dumps of the page in `segment` into `folder`."""
        self._folder = folder
        self._segment = segment
        self._written = 0
        # Groups that broke and are still there: what breaks beside them belongs to the same failure.
        self._broken: set[str] = set()
        # Never waited for: the thread that holds it is writing the dump of its own failure.
        self._lock = threading.Lock()
        self._waits_lock = threading.Lock()

    @property
    def run(self) -> str:
        """Return the name of the run."""
        return self._folder.path.name

    def write(
        self, group: str, cause: BaseException, failure: Broken | None, others: Mapping[int, str]
    ) -> Path | None:
        """Write a dump and return its path; None for a group that breaks beside another one, and after `_MOST_DUMPS`.

        A file system that refuses, or a text that is no Unicode, is logged: the failure of the group stays as it is.
        """
        if not self._lock.acquire(blocking=False):
            self._broken.add(group)
            return None
        try:
            is_first = not self._broken
            self._broken.add(group)
            if not is_first or self._written >= _MOST_DUMPS:
                return None
            self._written += 1
            return self._write(self._dump(group, cause, failure, others), self._written)
        except (OSError, CommError, UnicodeEncodeError) as error:
            if raised_by_handler(error):
                raise
            logger.warning(
                "no dump of the failure of %r was written: %s", group, error, extra=log_fields(group=group)
            )
            return None
        finally:
            self._lock.release()

    def write_wait(
        self,
        name: str,
        place: int,
        queue: QueueDump,
        error: str,
        ends: Sequence[QueueEnd],
        readers: Sequence[int],
    ) -> None:
        """Write how far the ends of a queue are for which a call waits; `error` is the class of its error, or empty.

        Args:
            name: Of the queue.
            place: Of this end among the readers, or -1 for the writer.
            queue: The words of its ring.
            error: Class of the error in which the call ends; empty while it waits.
            ends: The processes at the ends, this one too.
            readers: See `FailureDump`.
        """
        if not self._waits_lock.acquire(blocking=False):
            return
        try:
            self._write(
                FailureDump(
                    version=DUMP_VERSION,
                    group="",
                    error=error,
                    text="",
                    others={},
                    monotonic_ns=time.monotonic_ns(),
                    page=b"",
                    queues=[queue],
                    queue=name,
                    place=place,
                    ends=list(ends),
                    readers=list(readers),
                ),
                0,
            )
        except (OSError, CommError, UnicodeEncodeError) as problem:
            if raised_by_handler(problem):
                raise
            logger.warning(
                "what queue %r waits for was not written: %s", name, problem, extra=log_fields(queue=name)
            )
        finally:
            self._waits_lock.release()

    def forget_wait(self, name: str) -> None:
        """Remove what `write_wait` has written: the queue `name` goes on. A file system that refuses is logged."""
        try:
            self._path(0).unlink(missing_ok=True)
        except OSError as problem:
            if raised_by_handler(problem):
                raise
            logger.warning(
                "what queue %r has waited for was not removed: %s",
                name,
                problem,
                extra=log_fields(queue=name),
            )

    def _path(self, number: int) -> Path:
        return self._folder.path / f"{self._folder.stem}-{number}{DUMP_SUFFIX}"

    def left(self, group: str) -> None:
        """Note that a group was destroyed: when all that broke are, the next to break begins another failure."""
        self._broken.discard(group)

    def _dump(
        self, group: str, cause: BaseException, failure: Broken | None, others: Mapping[int, str]
    ) -> FailureDump:
        page = _core.status_copy(self._segment.memory)
        dump = FailureDump(
            version=DUMP_VERSION,
            group=group,
            error=type(cause).__name__,
            text=str(cause)[:_MOST_TEXT] if isinstance(cause, CommError) else "",
            others=dict(others),
            monotonic_ns=time.monotonic_ns(),
            page=page,
            queues=_queues(page),
        )
        if failure is None:
            return dump
        return msgspec.structs.replace(
            dump,
            kind=failure.kind,
            ranks=failure.ranks,
            by=failure.by,
            operation=failure.operation[:_MOST_TEXT],
            within_s=failure.within_s,
            detail=failure.detail[:_MOST_TEXT],
        )

    def _write(self, dump: FailureDump, number: int) -> Path:
        """Write the file under another name first, so that a dump that is found is always whole."""
        path = self._path(number)
        unfinished = path.with_name(f".{path.name}")
        try:
            with os.fdopen(create_private(unfinished), "wb") as file:
                file.write(msgspec.msgpack.encode(dump))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return path


def _queues(page: bytes) -> list[QueueDump]:
    """Return the rings of the queues in a page of this process, as long as there is room for them."""
    table, found, nbytes = TABLES["queues"], [], 0
    for place in range(table.number):
        row = dict(
            zip(table.fields, table.form.unpack_from(page, table.offset + place * table.nbytes), strict=True)
        )
        queue = dump_of_ring(row["descriptor"], row["inode"], row["offset"]) if row["state"] else None
        if queue is not None and nbytes + 2 * len(queue.first) <= _MOST_QUEUE_BYTES:
            nbytes += 2 * len(queue.first)
            found.append(queue)
    return found


def dump_of_ring(descriptor: int, inode: int | None = None, offset: int = 0) -> QueueDump | None:
    """Return the words of a ring in the memory of a descriptor; None if its end was closed meanwhile.

    `inode` is that of the memory, by default whatever it is.
    """
    try:
        status = os.fstat(descriptor)
        if inode not in (None, status.st_ino):
            return None
        (readers,) = struct.unpack(
            "<I", os.pread(descriptor, 4, offset + FIELDS["readers"].offset).ljust(4, b"\0")
        )
        nbytes = _READERS_AT + LINE * min(readers, MAX_READERS)
        first = os.pread(descriptor, nbytes, offset)
        second = os.pread(descriptor, nbytes, offset)
        return QueueDump(status.st_ino, offset, status.st_size - offset, first, second)
    except OSError as error:
        if raised_by_handler(error):
            raise
        return None
