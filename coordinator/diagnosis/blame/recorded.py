"""Read what a run has recorded: the pages that its processes have left in files, and the dumps of its failures."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from coordinator.diagnosis.blame.evidence import Evidence, Failure, Process, ProcessState
from coordinator.diagnosis.blame.recorded_waits import ring_of, with_wait
from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.model import Page
from coordinator.diagnosis.page_memory import copy_of_file
from coordinator.diagnosis.processes import look_at
from coordinator.diagnosis.queues import Ring
from shm_broadcast.errors import DecodeError, UsageError
from shm_broadcast.liveness import this_process
from shm_broadcast.status.failure_dump import DUMP_VERSION, MOST_BYTES, FailureDump, QueueDump
from shm_broadcast.status.layout import PAGE_BYTES
from shm_broadcast.status.record_file import DUMP_SUFFIX, PAGE_SUFFIX, runs_in

__all__ = ["read_dump", "read_run", "run_folders"]

# Sort key of a process's record of a wait, whose file has the number 0: it must come before the dumps.
_WAIT: Final = 1000

_STEM: Final = re.compile(rf"(.+?)(?:-([0-9]{{1,3}}))?(?:{re.escape(DUMP_SUFFIX)}|{re.escape(PAGE_SUFFIX)})")
_dump_decoder = msgspec.msgpack.Decoder(FailureDump)
# Text that is no UTF-8, and values nested too deep, are no errors of msgspec's own.
_MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def run_folders(directories: Sequence[Path]) -> list[Path]:
    """Return the folders that hold files of one run: of a record directory that of its newest run.

    Args:
        directories: Record directories, or folders of runs; several if the hosts of a job have one each.

    Raises:
        UsageError: One cannot be read, or holds nothing of ours.
    """
    found = []
    for directory in directories:
        try:
            names = os.listdir(directory)
            runs = runs_in(directory)
        except OSError as error:
            raise UsageError(f"{directory} cannot be read: {error.strerror}") from error
        if any(name.endswith((PAGE_SUFFIX, DUMP_SUFFIX)) for name in names):
            found.append(directory)
        elif runs:
            found.append(directory / runs[0])
        else:
            raise UsageError(f"{directory} is no record directory: it has neither runs nor pages nor dumps")
    return found


class _Recorded(NamedTuple):
    """What a process has recorded: its page, and the words of its queues if that page is in a dump."""

    process: Process
    queues: list[QueueDump]


def read_run(folders: Iterable[Path]) -> Evidence:
    """Return what the processes of a run have recorded: of each the last dump, or its page if it has none.

    If a process has gone on after its last dump, its page counts, and the dump is in what was `earlier`.

    Raises:
        UsageError: Nothing of it can be read.
    """
    found: list[_Recorded] = []
    earlier: list[_Recorded] = []
    waits: list[FailureDump] = []
    unseen: list[str] = []
    for folder in folders:
        for files in _by_process(folder):
            dump, page = _of_process(files, waits, unseen)
            last = (
                page if dump is None or (page is not None and _went_on(dump.process, page.process)) else dump
            )
            if last is not None:
                found.append(last)
                earlier.append(dump or last)
    if not found:
        raise UsageError("nothing of the run can be read" + "".join(f"; {line}" for line in unseen))
    evidence = _evidence(found, waits, unseen)
    if earlier == found:
        return evidence
    return msgspec.structs.replace(evidence, earlier=_evidence(earlier, waits, unseen))


def _of_process(
    files: Iterable[Path], waits: list[FailureDump], unseen: list[str]
) -> tuple[_Recorded | None, _Recorded | None]:
    """Return the last dump and the page of a process; add its wait for a queue to `waits`, and faults to `unseen`."""
    last = None
    for path in files:
        try:
            if path.name.endswith(PAGE_SUFFIX):
                return last, _Recorded(_page_in(path), [])
            dump = decode_dump(_bytes(path, MOST_BYTES)) if last is None else None
            if dump is not None and dump.queue:
                waits.append(dump)
            elif dump is not None:
                last = _Recorded(_process_of(dump), dump.queues)
        except (DecodeError, OSError) as error:
            unseen.append(f"{path.name}: {error}")
    return last, None


def _went_on(dumped: Process, now: Process) -> bool:
    """Return whether a process has made groups after its dump that it has not left, or calls in groups that work.

    A group that broke beside the one of the dump belongs to that failure. One that was left tells of none.
    """
    since_ns = dumped.now_ns
    return any(
        group.state != "left"
        and (
            group.created_ns > since_ns
            or (group.state != "broken" and any(lane.begin_ns > since_ns for lane in group.lanes))
        )
        for group in now.page.groups
        if not group.is_torn
    )


def _evidence(found: Sequence[_Recorded], waits: Iterable[FailureDump], unseen: Iterable[str]) -> Evidence:
    processes = sorted(
        (each.process for each in found),
        key=lambda each: (each.page.rank is None, each.page.rank or 0, each.page.pid),
    )
    rings = list(_rings(((each.process.page, each.queues) for each in found), processes))
    for dump in waits:
        ring, processes = with_wait(dump, processes)
        rings += [] if ring is None else [ring]
    return Evidence(tuple(processes), tuple(rings), {}, tuple(unseen))


def _by_process(folder: Path) -> list[list[Path]]:
    """Return the files of each process: what it waited for, its dumps, the newest first, and behind these its page."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for name in sorted(os.listdir(folder)):
        match = None if name.startswith(".") else _STEM.fullmatch(name)
        if match is not None:
            is_dump = name.endswith(DUMP_SUFFIX)
            stem = match[1] if is_dump else name.removesuffix(PAGE_SUFFIX)
            number = int(match[2] or 0) if is_dump else -1
            found.setdefault(stem, []).append((number or _WAIT, folder / name))
    return [[path for _, path in sorted(files, reverse=True)] for _, files in sorted(found.items())]


def _page_in(path: Path) -> Process:
    """Return the process whose page is in a file; it may live and write."""
    descriptor = _opened(path)
    try:
        nbytes = os.fstat(descriptor).st_size
        if nbytes != PAGE_BYTES:
            raise DecodeError(f"a status page has {PAGE_BYTES} bytes, this has {nbytes}")
        page = decode_page(copy_of_file(descriptor))
    finally:
        os.close(descriptor)
    state = _state_now(page)
    return Process(page, "file", state, 0 if state == "unknown" else time.monotonic_ns())


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file of up to `most` bytes."""
    with os.fdopen(_opened(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DecodeError(f"it has more than {most} bytes")
    return data


def decode_dump(data: bytes) -> FailureDump:
    """Return a dump.

    Raises:
        DecodeError: It is no dump of this version.
    """
    try:
        dump = _dump_decoder.decode(data)
    except _MALFORMED as error:
        raise DecodeError(f"it is no dump: {error}") from error
    if dump.version != DUMP_VERSION:
        raise DecodeError(
            f"the dump has version {dump.version}, and this release reads version {DUMP_VERSION}"
        )
    return dump


def read_dump(data: bytes) -> tuple[Process, list[QueueDump]]:
    """Return the process that has written the dump of a group that broke, and the words of its queues.

    Raises:
        DecodeError: It is no dump of this version, or its page cannot be read.
    """
    dump = decode_dump(data)
    return _process_of(dump), dump.queues


def _process_of(dump: FailureDump) -> Process:
    """Return the process that has written the dump of a group that broke, as it was then.

    Raises:
        DecodeError: Its page cannot be read.
    """
    page = decode_page(dump.page)
    failure = Failure(
        dump.group, dump.kind, dump.ranks, dump.by, dump.operation, dump.within_s, dump.detail or dump.text
    )
    others = {dump.group: dump.others} if dump.others else {}
    return Process(page, "dump", "alive", dump.monotonic_ns, (failure,), others)


def _state_now(page: Page) -> ProcessState:
    """Return what the process of a page does now, if it is one of this host that has not ended.

    That it has ended tells nothing: by now all others have ended too.
    """
    own = this_process()
    if (page.boot_id, page.pid_namespace) != (own.boot_id, own.pid_namespace):
        return "unknown"
    process = look_at(page.pid)
    if process is None or process.start_ticks != page.start_ticks or process.has_ended:
        return "unknown"
    return "stopped" if process.is_stopped else "alive"


def _rings(seen: Iterable[tuple[Page, list[QueueDump]]], processes: Sequence[Process]) -> Iterable[Ring]:
    """Return the queues that dumps hold, each once, with the processes at their ends."""
    done: set[tuple[str, int, int]] = set()
    for page, queues in seen:
        for queue in queues:
            key = page.boot_id, queue.inode, queue.offset
            name = next(
                (end.name for end in page.queues if (end.inode, end.offset) == (queue.inode, queue.offset)),
                "",
            )
            if key in done or not name:
                continue
            done.add(key)
            yield ring_of(queue, name, _ends(key, processes))


def _ends(key: tuple[str, int, int], processes: Sequence[Process]) -> Mapping[int, Page]:
    """Return the pages of the processes at the ends of a queue, by place; -1 for the writer."""
    boot_id, inode, offset = key
    return {
        end.reader: process.page
        for process in processes
        for end in process.page.queues
        if process.page.boot_id == boot_id and (end.inode, end.offset) == (inode, offset)
    }
