"""`python -m coordinator trace`: write what status pages show as a trace for Perfetto."""

from __future__ import annotations

import gzip
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.model import Page
from coordinator.diagnosis.pages import find_pages
from coordinator.diagnosis.trace import make_trace
from coordinator.errors import DecodeError
from shm_broadcast.status.layout import PAGE_BYTES

__all__ = ["write_trace"]


def write_trace(out: Path, directory: Path | None, pids: Sequence[int]) -> int:
    """Write a trace; return the exit status.

    Args:
        out: The file; one whose name ends with `.gz` is compressed.
        directory: Holds files of pages, from one host or several; None for the processes that run on this host.
        pids: Take these processes only; empty for all.
    """
    now_ns: dict[int, int] = {}
    if directory is None:
        search = find_pages(pids or None)
        # A process that makes no group may have a page, as the parent of forked ranks does.
        pages = [found.page for found in search.found if found.page.groups]
        here = _time_namespace()
        now_ns = {
            place: time.monotonic_ns() for place, page in enumerate(pages) if page.time_namespace == here
        }
        faults = {f"process {pid}": fault for pid, fault in search.faults.items()}
        if search.refused and not pages:
            faults["the kernel"] = f"refuses to let this user read {len(search.refused)} processes"
    else:
        pages, faults = read_pages(directory)
        pages = [page for page in pages if not pids or page.pid in pids]
    for where, fault in faults.items():
        sys.stderr.write(f"coordinator: {where}: {fault}\n")
    if not pages:
        place = "this host has no process" if directory is None else f"{directory} has no file"
        sys.stderr.write(f"coordinator: error: {place} with a status page\n")
        return 1
    trace = make_trace(pages, now_ns)
    content = trace.to_json()
    try:
        out.write_bytes(gzip.compress(content) if out.suffix == ".gz" else content)
    except OSError as error:
        sys.stderr.write(f"coordinator: error: {out} cannot be written: {error.strerror}\n")
        return 1
    sys.stdout.writelines(f"{note}\n" for note in trace.notes)
    sys.stdout.write(
        f"{out}: {trace.calls} calls of {len(pages)} processes, {trace.running} of them running, "
        f"{trace.arrows} arrows; open it in https://ui.perfetto.dev\n"
    )
    return 0


def read_pages(directory: Path) -> tuple[list[Page], dict[str, str]]:
    """Return the pages in the files of a directory, and why a file of the size of a page holds none, by name."""
    pages, faults = [], {}
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file())
    except OSError as error:
        return [], {str(directory): f"cannot be read: {error.strerror}"}
    for path in files:
        try:
            if path.stat().st_size == PAGE_BYTES:
                pages.append(decode_page(path.read_bytes()))
        except (DecodeError, OSError) as error:
            faults[str(path)] = str(error)
    pages.sort(key=lambda page: (page.rank is None, page.rank or 0, page.pid))
    return pages, faults


def _time_namespace() -> int:
    try:
        return Path("/proc/self/ns/time").stat().st_ino
    except OSError:
        return 0
