"""Start the ranks of a plan on this host, show their progress, and clean up."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.results import BenchmarkError
from benchmarks.running import Findings, Plan
from coordinator.cli.kept_signals import KeptSignals, kept_signals

__all__ = ["die_with_parent", "run_here"]

_PR_SET_PDEATHSIG: Final = 1
_POLL_S: Final = 0.05
# After the first failure, the other ranks get this long to report theirs.
_GRACE_S: Final = 3.0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_here(
    plan: Plan, tell: Callable[[str], None], step: Callable[[], None], timeout_s: float = 900.0
) -> Findings:
    """Run a plan in `plan.world_size` processes on this host; return their findings.

    Raises:
        BenchmarkError: A rank failed, with its error on stderr, or the deadline passed.
    """
    with kept_signals() as signals, tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as name:
        directory = Path(name)
        plan_file = directory / "plan.json"
        plan_file.write_bytes(msgspec.json.encode(plan))
        command = [sys.executable, "-m", "benchmarks", "rank", "--plan", str(plan_file), "--rank"]
        ranks = [
            subprocess.Popen(  # noqa: S603 - our own module
                [*command, str(rank)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if rank == 0 else None
            )
            for rank in range(plan.world_size)
        ]
        listener = threading.Thread(target=_listen, args=(ranks[0], tell, step), daemon=True)
        listener.start()
        try:
            codes = _watch(ranks, timeout_s, signals)
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.wait()
            listener.join()
            if ranks[0].stdout is not None:
                ranks[0].stdout.close()
        if any(code != 0 for code in codes):
            told = ", ".join(
                f"rank {rank}: {'still running' if code is None else f'exit status {code}'}"
                for rank, code in enumerate(codes)
                if code != 0
            )
            raise BenchmarkError(f"the run failed: {told}")
        return msgspec.json.decode((directory / "findings.json").read_bytes(), type=Findings)


def _listen(rank: subprocess.Popen[bytes], tell: Callable[[str], None], step: Callable[[], None]) -> None:
    if rank.stdout is None:
        return
    for line in rank.stdout:
        text = line.decode(errors="replace").rstrip()
        if text.startswith("now "):
            tell(text[4:])
        elif text == "done":
            step()
        else:
            sys.stderr.write(text + "\n")


def _watch(ranks: list[subprocess.Popen[bytes]], timeout_s: float, signals: KeptSignals) -> list[int | None]:
    """Return the exit status of each rank; None for those still running at the deadline.

    Raises:
        SystemExit: A signal asked this process to end.
    """
    end_s = time.monotonic() + timeout_s
    has_failed = False
    while True:
        signals.check()
        codes = [rank.poll() for rank in ranks]
        if not has_failed and any(codes):
            has_failed = True
            end_s = min(end_s, time.monotonic() + _GRACE_S)
        if None not in codes or time.monotonic() > end_s:
            return codes
        time.sleep(_POLL_S)
