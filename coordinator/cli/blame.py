"""`python -m coordinator blame`: who is at fault where ranks hang or have died."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coordinator.cli.output import write_out
from coordinator.diagnosis.blame.analysis import judge
from coordinator.diagnosis.blame.live import look_at_jobs
from coordinator.diagnosis.blame.recorded import read_run, run_folders
from coordinator.diagnosis.blame.verdict import Verdict
from shm_broadcast.errors import UsageError

__all__ = ["blame"]

_NAMED = 3


class Answer(msgspec.Struct, frozen=True):
    """What `--json` prints.

    Attributes:
        version: Of this form.
        jobs: The verdict on each job.
    """

    version: int
    jobs: tuple[Verdict, ...]


def blame(directories: Sequence[Path], pids: Sequence[int], *, waiting_s: float, as_json: bool) -> int:
    """Say who is at fault; return the exit status: 3 if somebody is named, 0 if nobody is, 1 if nothing can be read.

    Args:
        directories: Record directories or folders of runs; empty to look at the processes of this host.
        pids: Of these, look at the jobs of those processes alone; empty for all.
        waiting_s: A call of a live process counts as a wait if it goes on for this long, in seconds.
        as_json: Whether to print one JSON object.
    """
    try:
        jobs = (read_run(run_folders(directories)),) if directories else look_at_jobs(pids, waiting_s)
    except UsageError as error:
        sys.stderr.write(f"coordinator: error: {error}\n")
        return 1
    verdicts = tuple(judge(evidence) for evidence in jobs)
    if as_json:
        write_out(msgspec.json.encode(Answer(1, verdicts)) + b"\n")
    else:
        write_out("\n\n".join(verdict.text() for verdict in verdicts) + "\n")
    return _NAMED if any(verdict.findings for verdict in verdicts) else 0
