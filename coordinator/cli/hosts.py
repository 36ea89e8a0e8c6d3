"""`python -m coordinator check --hosts`: where a start on several hosts stops, and what it would use."""

from __future__ import annotations

import sys

import msgspec

from coordinator.cli.output import write_out
from coordinator.diagnosis.hosts_check.checking import Check
from coordinator.diagnosis.hosts_check.narration import Narrator, Stopped
from coordinator.diagnosis.hosts_check.records import Finding, Verdict
from coordinator.diagnosis.hosts_check.report import report
from coordinator.launchers.launch import Caller

__all__ = ["check_hosts"]


def check_hosts(init_method: str, caller: Caller, timeout_s: float, *, as_json: bool) -> int:
    """Check this rank's way to the others; return the exit status: 1 if ranks could not start, 0 if they could.

    Args:
        init_method: How the ranks meet.
        caller: What the command line says of this process's place.
        timeout_s: Deadline of each step, in seconds.
        as_json: Whether rank 0, and each rank that stops before the verdict, prints one JSON object on standard output;
            the steps then go to standard error.
    """
    narrator = Narrator(sys.stderr if as_json else sys.stdout)

    def show(verdict: Verdict) -> None:
        text = msgspec.json.encode(verdict).decode() if as_json else report(verdict)
        write_out(f"{text}\n")

    check = Check(init_method, caller, timeout_s, narrator)
    try:
        return int(check.run(show).has_failed)
    except Stopped as stopped:
        narrator.fail(stopped.findings)
        launched = check.launched
        if as_json:
            rank, size = (-1, 0) if launched is None else (launched.rank, launched.world_size)
            show(Verdict(rank=rank, world_size=size, stopped_at=narrator.title, findings=stopped.findings))
        check.linger()
        return 1
    except KeyboardInterrupt:
        narrator.fail(
            [Finding("error", "interrupted", "the last line above: what this rank was waiting for")]
        )
        return 1
