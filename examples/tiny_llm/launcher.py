"""Start the ranks on this host, watch over them, and leave nothing behind."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .errors import DemoError
from .options import LaunchedRank, Options
from .progress import restore_terminal

__all__ = ["die_with_launcher", "launch", "leave_failure"]

PR_SET_PDEATHSIG = 1
POLL_S = 0.05
# After a first failure the other ranks get this long to say what they saw, then they are killed.
GRACE_S = 3.0
# Failures of those who merely noticed that another rank was gone; shown only if there is nothing better.
CONSEQUENCES = ("PeerLostError", "GroupBrokenError", "CommTimeoutError", "ClosedError")


def launch(options: Options, arguments: Sequence[str]) -> int:
    """Run all ranks as child processes until they end.

    Args:
        options: What the person asked for.
        arguments: The command line that says so, for the children.

    Returns:
        The exit status of the demo.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)
    children: dict[int, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="group-coordinator-demo-") as name:
        directory = Path(name)
        try:
            for rank in range(options.world_size):
                children[rank] = _start(rank, directory, arguments)
            codes = _watch(children, options.deadline_s)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            for child in children.values():
                child.kill()
            for child in children.values():
                child.wait()
            restore_terminal()  # a killed rank leaves it as it was while the progress line was drawn
        return _tell(codes, directory, options.deadline_s)


def _start(rank: int, directory: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start one rank, with the launcher's own command line."""
    launched = ("--launched", str(rank), str(directory), str(os.getpid()))
    return subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", __package__ or "", *arguments, *launched],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the launcher alone, which then ends the ranks
    )


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    """Turn a signal into an exception, so that the children and the files are cleaned up."""
    raise SystemExit(128 + number)


def _watch(children: Mapping[int, subprocess.Popen[bytes]], deadline_s: float) -> dict[int, int | None]:
    """Wait for all ranks until the deadline; after a first failure, only for a moment.

    Returns:
        Exit status of each rank; None for those that were still running.
    """
    give_up_s = time.monotonic() + deadline_s
    has_failed = False
    while True:
        codes = {rank: child.poll() for rank, child in children.items()}
        if not has_failed and any(codes.values()):
            has_failed = True
            give_up_s = min(give_up_s, time.monotonic() + GRACE_S)
        if None not in codes.values() or time.monotonic() > give_up_s:
            return codes
        time.sleep(POLL_S)


def _tell(codes: Mapping[int, int | None], directory: Path, deadline_s: float) -> int:
    """Say what went wrong, if anything did.

    Returns:
        The exit status of the demo.
    """
    failed = {rank: code for rank, code in codes.items() if code}
    if failed:
        return _relay_failure(failed, directory)
    running = [rank for rank, code in codes.items() if code is None]
    if running:
        _print_error(f"no end within {deadline_s:g} s (--deadline); ranks {running} were still running")
        return 1
    return 0


def _relay_failure(codes: Mapping[int, int], directory: Path) -> int:
    """Say which rank failed first and why.

    Args:
        codes: Exit status of the ranks that failed.
        directory: Where they left their reasons.

    Returns:
        The exit status of the demo.
    """
    reasons = {}
    for rank in codes:
        path = _failure_path(directory, rank)
        if path.is_file():
            reasons[rank] = json.loads(path.read_text(encoding="utf-8"))
    for rank, code in codes.items():
        if code < 0:
            _print_error(f"rank {rank} was ended by {signal.Signals(-code).name}")
            return 1
    if not reasons:
        return max(codes.values())  # the rank has said on its own what was wrong
    order = sorted(reasons, key=lambda rank: (reasons[rank]["kind"] in CONSEQUENCES, reasons[rank]["time_s"]))
    reason = reasons[order[0]]
    if reason["kind"] == DemoError.__name__:
        _print_error(reason["message"])
        return 2
    sys.stderr.write(reason["traceback"])
    _print_error(f"rank {order[0]} failed: {reason['kind']}: {reason['message']}")
    return 1


def _print_error(text: str) -> None:
    """Print one line to standard error."""
    sys.stderr.write(f"tiny_llm: error: {text}\n")


def _failure_path(directory: Path, rank: int) -> Path:
    """Name the file in which a rank leaves the reason of its failure."""
    return directory / f"rank-{rank}.failure"


def leave_failure(launched: LaunchedRank, error: BaseException) -> None:
    """Leave a rank's failure for the launcher to show.

    Args:
        launched: Which rank.
        error: What happened.
    """
    reason = {
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time_s": time.monotonic(),
    }
    path = _failure_path(launched.directory, launched.rank)
    path.write_text(json.dumps(reason), encoding="utf-8")


def die_with_launcher(launched: LaunchedRank) -> None:
    """Have the kernel kill this rank when its launcher dies, however that happens.

    Args:
        launched: Whose process this is.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launched.launcher_pid:  # it died before the line above
        raise SystemExit(1)
