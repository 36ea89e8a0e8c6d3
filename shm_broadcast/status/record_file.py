"""Keep the status page of a process in a file, so that it survives the death of all ranks.

A record directory holds one folder for each run. The folder holds one file for each process, and the dumps of
the processes whose groups broke. No other user may reach into either, so a file needs no seal: whoever could
truncate it, and so end its process with SIGBUS, could also kill the process. Readers do not map the file,
since root may look at the files of any user. The file's pages are allocated when it is made.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Final

from shm_broadcast.descriptors import refuse_if_full
from shm_broadcast.errors import CapabilityError, SettingsError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.segment import Segment, is_sealed
from shm_broadcast.status.layout import NAME, PAGE_BYTES

__all__ = [
    "DUMP_SUFFIX",
    "KEPT_RUNS",
    "PAGE_SUFFIX",
    "RunFolder",
    "is_page",
    "is_page_link",
    "is_private",
    "new_run",
    "runs_in",
]

KEPT_RUNS: Final = 8
"""Runs whose files are kept."""

PAGE_SUFFIX: Final = ".status-page"
DUMP_SUFFIX: Final = ".dump"

_RUN: Final = re.compile(r"run-[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}")
_OTHERS: Final = 0o077
_DELETED: Final = " (deleted)"


def new_run() -> str:
    """Return a name for a run that begins now; names are in the order of their times."""
    return f"run-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"


def is_private(status: os.stat_result) -> bool:
    """Return whether a file or directory belongs to this user, or this is root, and others may do nothing with it."""
    return os.geteuid() in (0, status.st_uid) and not stat.S_IMODE(status.st_mode) & _OTHERS


def is_page_link(target: str) -> bool:
    """Return whether an entry of /proc/PID/fd with this target looks like a page; `is_page` tells."""
    return target.startswith(f"/memfd:{NAME}") or target.removesuffix(_DELETED).endswith(PAGE_SUFFIX)


def is_page(descriptor: int) -> bool:
    """Return whether a descriptor may be a page: it has that size, and is a sealed memfd or private."""
    status = os.fstat(descriptor)
    if status.st_size != PAGE_BYTES:
        return False
    return is_sealed(descriptor) or (stat.S_ISREG(status.st_mode) and is_private(status))


def runs_in(directory: Path) -> list[str]:
    """Return the names of the runs of a record directory, the newest first."""
    return sorted((name for name in os.listdir(directory) if _RUN.fullmatch(name)), reverse=True)


class RunFolder:
    """The folder of one run, in which this process has one file and writes its dumps.

    Attributes:
        path: Of the folder.
        stem: Beginning of the names of this process's files.
    """

    def __init__(self, directory: Path, run: str, stem: str) -> None:
        """Make the folder, and remove those of old runs: all but the newest `KEPT_RUNS` and this one.

        Args:
            directory: The record directory; it is made if it is not there.
            run: From `new_run`, equal on all ranks.
            stem: Tells this process from all others of the run.

        Raises:
            SettingsError: The directory cannot be made, or other users may reach into it.
            CapabilityError: The file system is full, or no descriptor is free.
        """
        if not _RUN.fullmatch(run):
            raise SettingsError(f"{run!r} is no name of a run")
        _make_private(directory)
        self.path: Path = directory / run
        self.stem: str = stem
        _make_private(self.path)
        try:
            runs = runs_in(directory)
        except OSError as error:
            if raised_by_handler(error):
                raise
            raise _refused(directory, error, "listed") from error
        for old in runs[KEPT_RUNS:]:
            # This run is not the newest if others have begun since, or if a clock was set back.
            if old != run:
                _remove(directory / old)

    def page(self) -> Segment:
        """Return the memory of a new page. If this fails, the caller removes what may be there of the file.

        Raises:
            CapabilityError: The file system has no room for it, or no descriptor is free.
            SettingsError: The file is there already, or cannot be made.
        """
        segment = Segment(create_private(self._page_path), PAGE_BYTES)
        try:
            os.posix_fallocate(segment.descriptor, 0, PAGE_BYTES)
            segment.memory = mmap.mmap(segment.descriptor, PAGE_BYTES)
        except OSError as error:
            segment.close()
            if raised_by_handler(error):
                raise
            raise _refused(self._page_path, error) from error
        except BaseException:
            segment.close()
            raise
        return segment

    def remove_page(self) -> None:
        """Remove the file of the page if it is there. The name can only be that of a page of this process."""
        self._page_path.unlink(missing_ok=True)

    @property
    def _page_path(self) -> Path:
        return self.path / f"{self.stem}{PAGE_SUFFIX}"


def create_private(path: Path) -> int:
    """Return a descriptor of a new file that only this user reaches.

    Raises:
        CapabilityError: The file system is full, or no descriptor is free.
        SettingsError: It is there already, or cannot be made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if raised_by_handler(error):
            raise
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError, what: str = "made") -> CapabilityError | SettingsError:
    refuse_if_full("open", "creates and lists files of record_dir", error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapabilityError(
            f"record_dir: {path} needs {PAGE_BYTES} bytes: {error.strerror}",
            requirement=f"{PAGE_BYTES} bytes in the file system of record_dir",
        )
    return SettingsError(f"record_dir: {path} cannot be {what}: {error.strerror}")


def _make_private(directory: Path) -> None:
    """Make a directory that only this user can reach, or check that an existing one is private."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        if raised_by_handler(error):
            raise
        raise _refused(directory, error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise SettingsError(f"record_dir: {directory} is no directory")
    if not is_private(status):
        raise SettingsError(
            f"record_dir: other users may reach into {directory} (user {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}): it must belong to this user and have mode 0700"
        )


def _remove(folder: Path) -> None:
    """Remove the folder of an old run with what we have written there. Other ranks may do so at the same time."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return
        for name in os.listdir(folder):
            if name.endswith((PAGE_SUFFIX, DUMP_SUFFIX)):
                (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if raised_by_handler(error):
            raise
        if error.errno != errno.ENOTEMPTY:  # somebody keeps files of his own there
            raise _refused(folder, error) from error
