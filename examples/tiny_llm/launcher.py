"""Start the ranks on this host, wait for them, and clean up."""

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

from .errors import DemoError
from .options import LaunchedRank, Options
from .progress import restore_terminal

__all__ = ["Signals", "die_with_launcher", "launch", "leave_failure"]

PR_SET_PDEATHSIG = 1
POLL_S = 0.05
# After the first failure, the other ranks get this long to report theirs; then they are killed.
GRACE_S = 3.0
# Errors by which a rank reports another rank's failure; shown only if no rank has another error.
CONSEQUENCES = ("PeerLostError", "GroupBrokenError", "CommTimeoutError", "ClosedError")


def launch(options: Options, arguments: Sequence[str]) -> int:
    """Run all ranks as child processes until they end.

    Args:
        options: The user's options.
        arguments: The command line with these options, for the children.

    Returns:
        The exit status of the demo.
    """
    signals = Signals()
    children: dict[int, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="group-coordinator-demo-") as name:
        directory = Path(name)
        try:
            for rank in range(options.world_size):
                children[rank] = _start(rank, directory, arguments)
            codes = _watch(children, options.deadline_s + options.hold_s, signals)
        finally:
            for child in children.values():
                child.kill()
            for child in children.values():
                child.wait()
            restore_terminal()  # a killed rank may leave its progress line and a hidden cursor
        return _tell(codes, directory, options.deadline_s)


def _start(rank: int, directory: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start one rank with the launcher's command line."""
    launched = ("--launched", str(rank), str(directory), str(os.getpid()))
    return subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", __package__ or "", *arguments, *launched],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches only the launcher, which then kills the ranks
    )


class Signals:
    """Keeps SIGINT and SIGTERM until the launcher looks for them between two steps.

    An exception of a handler could strike within `Popen.poll`, and leave a lock held for which `Popen.wait` would then
    wait for ever.
    """

    def __init__(self) -> None:
        """Become the handler of both, unless they are ignored."""
        self._number = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._keep)

    def _keep(self, number: int, _frame: FrameType | None) -> None:
        self._number = number

    def check(self) -> None:
        """Raise `SystemExit` if one has come."""
        if self._number:
            raise SystemExit(128 + self._number)


def _watch(
    children: Mapping[int, subprocess.Popen[bytes]], deadline_s: float, signals: Signals
) -> dict[int, int | None]:
    """Wait for all ranks until the deadline; after the first failure, at most for `GRACE_S`.

    Returns:
        Exit status of each rank; None for those still running.

    Raises:
        SystemExit: A signal asked this process to end.
    """
    give_up_s = time.monotonic() + deadline_s
    has_failed = False
    while True:
        signals.check()
        codes = {rank: child.poll() for rank, child in children.items()}
        if not has_failed and any(codes.values()):
            has_failed = True
            give_up_s = min(give_up_s, time.monotonic() + GRACE_S)
        if None not in codes.values() or time.monotonic() > give_up_s:
            return codes
        time.sleep(POLL_S)


def _tell(codes: Mapping[int, int | None], directory: Path, deadline_s: float) -> int:
    """Report a failure on stderr, if there was one.

    Returns:
        The exit status of the demo.
    """
    failed = {rank: code for rank, code in codes.items() if code}
    if failed:
        return _relay_failure(failed, directory)
    running = [rank for rank, code in codes.items() if code is None]
    if running:
        _print_error(f"not finished within {deadline_s:g} s (--deadline); ranks {running} were still running")
        return 1
    return 0


def _relay_failure(codes: Mapping[int, int], directory: Path) -> int:
    """Report which rank failed first, and why.

    Args:
        codes: Exit status of the ranks that failed.
        directory: The directory of their failure files.

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
            _print_error(f"rank {rank} was killed by {signal.Signals(-code).name}")
            return 1
    if not reasons:
        return max(codes.values())  # the ranks have printed their errors themselves
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
    """Return the path of a rank's failure file."""
    return directory / f"rank-{rank}.failure"


def leave_failure(launched: LaunchedRank, error: BaseException) -> None:
    """Write a rank's failure file, which the launcher shows.

    Args:
        launched: The rank.
        error: Its error.
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
    """Ask the kernel to kill this rank when its launcher dies.

    Args:
        launched: The rank that this process runs.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launched.launcher_pid:  # the launcher died before the line above
        raise SystemExit(1)
