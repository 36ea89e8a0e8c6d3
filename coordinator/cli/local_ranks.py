"""Start the ranks of a command on this host, wait for them, and clean up."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from coordinator.cli.kept_signals import KeptSignals, kept_signals
from coordinator.errors import ClosedError, GroupBrokenError, PeerLostError

__all__ = ["run_job", "run_rank"]

PR_SET_PDEATHSIG = 1
POLL_S = 0.02
# After the first failure, the other ranks get this long to report theirs.
GRACE_S = 3.0
# Errors by which a rank reports another rank's failure; the launcher prefers to show other errors.
_CONSEQUENCES = (PeerLostError, GroupBrokenError, ClosedError)


class _Failure(msgspec.Struct):
    """The file that a failing rank writes for the launcher."""

    text: str
    trace: str
    is_consequence: bool
    time_s: float


def run_job(
    job: str,
    ranks: int,
    timeout_s: float,
    only: Sequence[str] = (),
    collect: Callable[[Path], None] | None = None,
    hold_s: float = 0.0,
) -> int:
    """Run `job` in `ranks` processes on this host until they end; return the exit status.

    Args:
        job: A key of `jobs.JOBS`: "check", "demo" or "start-up".
        ranks: Number of processes.
        timeout_s: Deadline in seconds, after which the ranks are killed.
        only: Parts of the job to run; empty for all.
        collect: Called with the ranks' shared directory before it is removed.
        hold_s: Seconds for which the demo goes on at its end, beside the deadline.
    """
    children: dict[int, subprocess.Popen[bytes]] = {}
    with kept_signals() as signals, tempfile.TemporaryDirectory(prefix="group-coordinator-") as name:
        directory = Path(name)
        try:
            for rank in range(ranks):
                children[rank] = _start(job, rank, ranks, directory, only, hold_s)
            codes = _watch(children, timeout_s + hold_s, signals)
        finally:
            for child in children.values():
                child.kill()
            for child in children.values():
                child.wait()
        if collect is not None:
            collect(directory)
        return _tell(codes, directory, timeout_s)


def run_rank(
    job: str, rank: int, ranks: int, directory: Path, launcher: int, only: Sequence[str], hold_s: float
) -> int:
    """Run one rank of a job; return its exit status. The process dies with the launcher."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher died before the line above
        return 1
    try:
        from coordinator.cli import jobs

        return jobs.JOBS[job](rank, ranks, directory, jobs.JobOptions(tuple(only), hold_s))
    except Exception as error:  # noqa: BLE001 - the launcher reports any error
        failure = _Failure(
            f"{type(error).__name__}: {error}",
            "".join(traceback.format_exception(error)),
            isinstance(error, _CONSEQUENCES),
            time.monotonic(),
        )
        (directory / f"rank-{rank}.failure").write_bytes(msgspec.json.encode(failure))
        return 1


def _start(
    job: str, rank: int, ranks: int, directory: Path, only: Sequence[str], hold_s: float
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "coordinator", "rank", job, "--rank", str(rank), "--ranks", str(ranks)]
    command += ["--directory", str(directory), "--launcher", str(os.getpid()), "--hold", str(hold_s)]
    command += [each for part in only for each in ("--only", part)]
    # In their own sessions the ranks do not receive Ctrl-C; the launcher does, and kills them.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603


def _watch(
    children: Mapping[int, subprocess.Popen[bytes]], timeout_s: float, signals: KeptSignals
) -> dict[int, int | None]:
    """Return the exit status of each rank; None for those still running at the deadline.

    Raises:
        SystemExit: A signal asked this process to end.
    """
    end_s = time.monotonic() + timeout_s
    has_failed = False
    while True:
        signals.check()
        codes = {rank: child.poll() for rank, child in children.items()}
        if not has_failed and any(codes.values()):
            has_failed = True
            end_s = min(end_s, time.monotonic() + GRACE_S)
        if None not in codes.values() or time.monotonic() > end_s:
            return codes
        time.sleep(POLL_S)


def _tell(codes: Mapping[int, int | None], directory: Path, timeout_s: float) -> int:
    """Report a failure, if there was one, on stderr; return the exit status."""
    for rank, code in codes.items():
        if code is not None and code < 0:
            _complain(f"rank {rank} was killed by {signal.Signals(-code).name}")
            return 1
    failures = {}
    for rank in codes:
        path = directory / f"rank-{rank}.failure"
        if path.is_file():
            failures[rank] = msgspec.json.decode(path.read_bytes(), type=_Failure)
    if failures:
        first = min(failures, key=lambda rank: (failures[rank].is_consequence, failures[rank].time_s))
        sys.stderr.write(failures[first].trace)
        _complain(f"rank {first} failed: {failures[first].text}")
        return 1
    running = [rank for rank, code in codes.items() if code is None]
    if running and not any(codes.values()):
        _complain(f"not finished within {timeout_s:g} s (--timeout); still running: {_listed(running)}")
        return 1
    return max(code or 0 for code in codes.values())


def _complain(text: str) -> None:
    sys.stderr.write(f"coordinator: error: {text}\n")


def _listed(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
