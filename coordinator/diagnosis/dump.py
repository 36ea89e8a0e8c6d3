"""Make a dump: all that the status pages of this host say at one moment, as JSON with a version."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from coordinator.diagnosis.model import Page
from coordinator.diagnosis.pages import find_pages
from coordinator.diagnosis.processes import Process, look_at
from coordinator.diagnosis.queues import Ring, read_rings
from shm_broadcast.errors import DecodeError

__all__ = ["VERSION", "Dump", "DumpedPage", "decode_dump", "encode_dump", "take_dump", "write_privately"]

VERSION: Final = 1


class DumpedPage(msgspec.Struct, frozen=True):
    """A page, and its process.

    Attributes:
        pid: Its process as the command saw it; None if that has ended or was not seen, as in
            another container.
        holders: Processes that have the page.
        process: What the kernel said of the process; None if it has ended or was not seen.
        page: What the page says, with its last 4,096 calls.
    """

    pid: int | None
    holders: tuple[int, ...]
    process: Process | None
    page: Page


class Dump(msgspec.Struct, frozen=True):
    """A dump.

    Attributes:
        version: Of this form; a later one may add words, and changes the version if a word gets another meaning.
        taken_at: When, in UTC, as ISO 8601.
        monotonic_ns: When, on the CLOCK_MONOTONIC of the command, on which all times of the pages are.
        pages: By rank.
        queues: Queues, and channels between two ranks of a group.
        refused: Processes whose descriptors the command may not read.
        faults: What is wrong with pages that cannot be decoded, by holder.
    """

    version: int
    taken_at: str
    monotonic_ns: int
    pages: tuple[DumpedPage, ...]
    queues: tuple[Ring, ...]
    refused: tuple[int, ...]
    faults: dict[int, str]


_decoder: Final = msgspec.json.Decoder(Dump)


def take_dump(pids: Sequence[int] | None = None) -> Dump:
    """Return what the pages say that the processes `pids` hold; by default those of all processes."""
    search = find_pages(pids)
    dumped = tuple(
        DumpedPage(found.pid, found.holders, None if found.pid is None else look_at(found.pid), found.page)
        for found in search.found
    )
    return Dump(
        version=VERSION,
        taken_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        monotonic_ns=time.monotonic_ns(),
        pages=dumped,
        queues=read_rings((found.page, found.pid) for found in search.found),
        refused=search.refused,
        faults=search.faults,
    )


def encode_dump(dump: Dump) -> bytes:
    """Return a dump as JSON."""
    return msgspec.json.encode(dump)


def decode_dump(data: bytes) -> Dump:
    """Return the dump that `encode_dump` has written.

    Raises:
        DecodeError: It is none, or has another version.
    """
    try:
        dump = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"this is no dump: {error}") from error
    if dump.version != VERSION:
        raise DecodeError(f"the dump has version {dump.version}, and this release reads version {VERSION}")
    return dump


def write_privately(path: Path, data: bytes) -> None:
    """Write a file that its user alone may read, all of it or nothing: a file that was there is replaced at the end.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            part.unlink()
        raise
