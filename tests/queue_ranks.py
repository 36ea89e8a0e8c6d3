"""Use a queue between processes: pass its handle to the readers, and record how calls ended."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shm_broadcast.errors import CommError
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.settings import BroadcastSettings
from tests.waiting import DEADLINE_S, wait_until

__all__ = ["DEADLINE_S", "Marks", "blob", "ended_with", "offer", "take"]


class Marks:
    """Marks with which processes wait for each other; a mark is a file in a directory."""

    def __init__(self, directory: Path | str) -> None:
        """Keep the marks in `directory`."""
        self._directory = Path(directory)

    def mark(self, name: str, text: str = "") -> None:
        """Set a mark with a text, atomically."""
        # Several processes may set one mark at the same time.
        new = self._directory / f".{name}-{os.getpid()}"
        new.write_text(text)
        new.rename(self._directory / name)

    def has(self, name: str) -> bool:
        """Return whether the mark exists."""
        return (self._directory / name).exists()

    def wait(self, name: str) -> str:
        """Wait for a mark and return its text."""
        wait_until(lambda: self.has(name), f"the mark {name!r}", DEADLINE_S, poll_s=0.002)
        return (self._directory / name).read_text()


def offer(
    marks: Marks, readers: Sequence[int], ring_bytes: int = 1 << 20, writer: int = 0, **settings: Any
) -> QueueWriter:
    """Create a queue whose name has the writer's rank, and publish its handle and key for the readers."""
    made = QueueWriter.create(
        f"steps:{writer}", readers, BroadcastSettings(ring_bytes=ring_bytes, **settings), writer=writer
    )
    marks.mark(f"queue-{writer}", f"{made.handle.to_bytes(made.key).hex()} {made.key.hex()}")
    return made


def take(marks: Marks, rank: int, writer: int = 0, timeout_s: float = DEADLINE_S) -> QueueReader:
    """Wait for the queue's handle and key, and open the reader of `rank`."""
    handle, key = map(bytes.fromhex, marks.wait(f"queue-{writer}").split())
    return QueueReader.open(handle, key, rank, timeout_s)


def blob(number: int, nbytes: int) -> np.ndarray:
    """Return bytes that depend on `number` and on their position."""
    return (np.arange(nbytes, dtype=np.uint32) * 31 + number * 17 + (number >> 8)).astype(np.uint8)


def ended_with(call: Callable[[], Any], until: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Repeat `call` until it raises an error of ours; return the error's kind, ranks, text and time.

    If `until` is true after a call, stop and return the kind "over".
    """
    try:
        while True:
            call()
            if until():
                return {"kind": "over"}
    except CommError as error:
        ranks = getattr(error, "peers", getattr(error, "missing", ()))
        return {
            "kind": type(error).__name__,
            "ranks": list(ranks),
            "text": str(error),
            "at": time.monotonic(),
        }
