"""Start, watch and end the processes that run ranks; `harness` decides what they do."""

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.rank_main import STACKS_SIGNAL, Message, receive, send
from tests.strict import STRICT

__all__ = ["ONE_THREAD", "RankProcess", "own_children", "own_descriptors", "stop_server"]

ROOT = Path(__file__).parent.parent
SURVIVOR_GRACE_S = 2.0
"""How long a process that a rank started may outlive the rank."""

# Four ranks share a few cores, where more threads would only compete. The server needs a single thread to fork safely.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class _Server:
    """The process that imports torch and forks ranks. `rank_main.serve` is its program."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*STRICT, "-m", "tests.rank_main", "server", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **ONE_THREAD},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        if receive(self.channel) is None:
            raise RuntimeError(
                f"the rank server ended with status {self.process.wait()}; see its output above"
            )

    def ask(self, request: Mapping[str, object], descriptor: int | None = None) -> Message:
        send(self.channel, request)
        if descriptor is not None:
            socket.send_fds(self.channel, [b"."], [descriptor])
        reply = receive(self.channel)
        if reply is None:
            raise RuntimeError(f"the rank server ended with status {self.process.wait()}")
        return reply

    def stop(self) -> None:
        self.channel.close()
        self.process.wait()


_SERVERS: list[_Server] = []
_PROCESSES: "set[RankProcess]" = set()


def _server() -> _Server:
    """Return the server of this process; start it at first use."""
    if not _SERVERS:
        _SERVERS.append(_Server())
    return _SERVERS[0]


@atexit.register
def stop_server() -> None:
    """End the server if there is one. The next rank starts another."""
    while _SERVERS:
        _SERVERS.pop().stop()


def own_descriptors() -> set[int]:
    """Return the descriptors that this module holds, which are no leaks of a test."""
    return {server.channel.fileno() for server in _SERVERS} | {
        descriptor for process in _PROCESSES for descriptor in (process.pidfd, process.channel.fileno())
    }


def own_children() -> set[int]:
    """Return the children that this module has started: the server, which is the parent of all ranks."""
    return {server.process.pid for server in _SERVERS}


class RankProcess:
    """One process that runs jobs until its channel closes.

    Attributes:
        pid: Its process id, which is also the id of its process group and session.
        pidfd: A descriptor that is readable once the process has ended.
        channel: The socket for jobs and answers.
        status: Its exit code as `os.waitstatus_to_exitcode` gives it, None while it runs.
    """

    def __init__(
        self, number: int, directory: Path, environ: Mapping[str, str], *, fresh: bool, brief: bool
    ) -> None:
        """Start the process; its output and stacks go to `directory`."""
        self.number = number
        self.status: int | None = None
        self._log = directory / f"{number}.log"
        self._stacks = directory / f"{number}.stacks"
        self.channel, theirs = socket.socketpair()
        spawn = {
            "environ": {**os.environ, **ONE_THREAD, **environ},
            "fresh": fresh,
            "brief": brief,
            "log": str(self._log),
            "stacks": str(self._stacks),
        }
        with theirs:
            self.pid: int = _server().ask({"spawn": spawn}, theirs.fileno())["pid"]
        self.pidfd = os.pidfd_open(self.pid)  # valid even if it has ended: only `reap` frees its pid
        _PROCESSES.add(self)

    def wait(self, deadline: float) -> bool:
        """Wait until the process has ended or `time.monotonic()` reaches `deadline`; return whether it ended."""
        if self.status is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
            raw: int = _server().ask({"wait": self.pid})["status"]
            self.status = os.waitstatus_to_exitcode(raw)
        return True

    def survivors_after(self, deadline: float) -> bool:
        """Return whether processes that it started still exist at `deadline`, after it has ended."""
        while _server().ask({"survivors": self.pid})["survivors"]:
            if time.monotonic() > deadline:
                return True
            time.sleep(0.01)
        return False

    def release(self) -> None:
        """Kill the process and its descendants, and release it. A second call does nothing."""
        if self not in _PROCESSES:
            return
        self.channel.close()
        if self.status is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.wait(time.monotonic() + 60.0)
        # The id of a process group is not reused while a member lives.
        while _server().ask({"survivors": self.pid})["survivors"]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.005)
        os.close(self.pidfd)
        _PROCESSES.discard(self)

    def forget_output(self) -> None:
        """Truncate the file with its output."""
        if self._log.exists():
            os.truncate(self._log, 0)

    def output(self) -> str:
        """Return the end of its output."""
        return _end_of(self._log)

    def dump_stacks(self) -> str:
        """Return the Python stacks of all its threads. This works even if they hang."""
        if self.wait(time.monotonic()):
            return "(it has ended)"
        before = size = _size(self._stacks)
        signal.pidfd_send_signal(self.pidfd, STACKS_SIGNAL)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = _size(self._stacks)
            if now == size > before:
                break
            size = now
        return _end_of(self._stacks, before) or "(no stacks: the process is stopped, starts or ends)"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _end_of(path: Path, start: int = 0) -> str:
    if not path.exists():
        return ""
    return path.read_bytes()[start:][-6000:].decode(errors="replace").strip()
