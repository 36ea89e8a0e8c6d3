"""`python -m coordinator trace`: write what status pages show as a trace for Perfetto."""

from __future__ import annotations

import gzip
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.cli.output import write_out
from coordinator.diagnosis.blame.recorded import read_run, run_folders
from coordinator.diagnosis.dump import write_privately
from coordinator.diagnosis.model import Page
from coordinator.diagnosis.pages import find_pages, shift_of
from coordinator.diagnosis.trace import make_trace
from shm_broadcast.errors import UsageError

__all__ = ["write_trace"]


def write_trace(out: Path, directories: Sequence[Path], pids: Sequence[int]) -> int:
    """Write a trace, all of it or nothing, which its user alone may read; return the exit status.

    Args:
        out: The file; one whose name ends with `.gz` is compressed.
        directories: Record directories or folders of runs, of one host or several; empty for the processes that run
            on this host.
        pids: Take these processes only; empty for all.
    """
    now_ns: dict[int, int] = {}
    try:
        pages, unseen = _recorded(directories, pids) if directories else _live(pids)
    except UsageError as error:
        sys.stderr.write(f"coordinator: error: {error}\n")
        return 1
    sys.stderr.writelines(f"coordinator: {line}\n" for line in unseen)
    if not pages:
        sys.stderr.write("coordinator: error: there is no process with a group and a status page\n")
        return 1
    if not directories:
        now_ns = {place: time.monotonic_ns() - shift_of(page) for place, page in enumerate(pages)}
    trace = make_trace(pages, now_ns)
    content = trace.to_json()
    try:
        write_privately(out, gzip.compress(content) if out.suffix == ".gz" else content)
    except OSError as error:
        sys.stderr.write(f"coordinator: error: {out} cannot be written: {error.strerror}\n")
        return 1
    write_out(
        "".join(f"{note}\n" for note in trace.notes)
        + f"{out}: {trace.calls} calls of {len(pages)} processes, {trace.running} of them running, "
        f"{trace.arrows} arrows; open it in https://ui.perfetto.dev\n"
    )
    return 0


def _live(pids: Sequence[int]) -> tuple[list[Page], list[str]]:
    """Return the pages of this host, and what could not be seen."""
    search = find_pages(pids or None)
    unseen = [f"process {pid}: {fault}" for pid, fault in search.faults.items()]
    # A process that makes no group may have a page, as the parent of forked ranks does.
    pages = [found.page for found in search.found if found.page.groups]
    if search.refused and not pages:
        unseen.append(f"the kernel refuses to let this user read {len(search.refused)} processes")
    return pages, unseen


def _recorded(directories: Sequence[Path], pids: Sequence[int]) -> tuple[list[Page], list[str]]:
    evidence = read_run(run_folders(directories))
    pages = [process.page for process in evidence.processes if not pids or process.page.pid in pids]
    return pages, list(evidence.unseen)
