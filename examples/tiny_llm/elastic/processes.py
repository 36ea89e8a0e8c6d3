"""The processes of the workers: start them, hear them, kill them. Does not import torch."""

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from .wire import Wire

__all__ = ["Worker", "Workers"]


@dataclass
class Worker:
    """A worker as the front end sees it.

    Attributes:
        number: Unique number in the run; that of the first workers is their first rank.
        shard: Which part of each layer it holds: its place in its replica.
        process: Its process.
        wire: The socket to it.
        rank: Its rank in the world that it serves in; None while it serves in none.
        replica: Its replica there.
        epoch: The epoch of that world.
    """

    number: int
    shard: int
    process: subprocess.Popen[bytes]
    wire: Wire
    rank: int | None = None
    replica: int = -1
    epoch: int = -1

    @property
    def is_head(self) -> bool:
        """Whether it serves, and schedules the requests of its replica."""
        return self.rank is not None and self.shard == 0

    def tell(self, **message: Any) -> None:
        """Send it a message; if it has ended, `Workers.ended` says so."""
        with suppress(OSError):
            self.wire.send(message)


class Workers:
    """All workers that were started. As a context manager, it kills those that are left at the end."""

    def __init__(self, directory: Path, arguments: Sequence[str]) -> None:
        """Start none.

        Args:
            directory: For the rendezvous and the checkpoint.
            arguments: The command line, for the workers.
        """
        self.all: list[Worker] = []
        self._directory = directory
        self._arguments = tuple(arguments)
        self._selector = selectors.DefaultSelector()
        self._ended: set[int] = set()

    def __enter__(self) -> Self:
        """Return the workers."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill and reap those that are left."""
        for worker in self.all:
            worker.process.kill()
        for worker in self.all:
            worker.process.wait()
            worker.wire.close()
        self._selector.close()

    def start(self, shard: int, replaces: int | None = None) -> Worker:
        """Start one.

        Args:
            shard: See `Worker`.
            replaces: See `LaunchedWorker`.
        """
        number = len(self.all)
        ours, theirs = socket.socketpair()
        place = "nobody" if replaces is None else str(replaces)
        launched = (str(number), str(self._directory), str(os.getpid()), str(theirs.fileno()), place)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", __package__ or "", *self._arguments, "--launched", *launched],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the front end, which then kills the workers
            )
        worker = Worker(number, shard, process, Wire(ours))
        self.all.append(worker)
        self._selector.register(worker.wire, selectors.EVENT_READ, worker)
        return worker

    def messages(self, wait_s: float) -> Iterator[tuple[Worker, dict[str, Any]]]:
        """Yield what workers say, waiting at most `wait_s` for the first one."""
        for key, _ in self._selector.select(wait_s):
            worker: Worker = key.data
            for message in worker.wire.receive():
                yield worker, message
            if not worker.wire.is_open:
                self._selector.unregister(worker.wire)

    def ended(self) -> Iterator[tuple[Worker, int]]:
        """Yield each worker that has ended since the last call, with its exit status, once all it said was heard."""
        for worker in self.all:
            if worker.number not in self._ended and not worker.wire.is_open:
                status = worker.process.poll()
                if status is not None:
                    self._ended.add(worker.number)
                    yield worker, status

    @property
    def are_over(self) -> bool:
        """Whether all have ended."""
        return len(self._ended) == len(self.all)


def kill(worker: Worker) -> None:
    """Kill a worker as the kernel does it when memory is short: it can do nothing about it."""
    worker.process.send_signal(signal.SIGKILL)
