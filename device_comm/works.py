"""Waiting in slices for what torch.distributed has in flight on the CPU.

Gloo's collectives run on its own threads: their `wait` takes a time-out and can be called again. Its
point-to-point works do not: `wait` with a time-out closes every connection of the group when the time
is up, and there is no way to ask whether they are complete. Those are waited for without limit by
threads of ours, which the caller polls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Final

import torch.distributed as dist

from device_comm.health import FOREVER_S

_FOREVER: Final = timedelta(seconds=FOREVER_S)

# torch counts in milliseconds and takes 0 for "without limit": a shorter slice would wait for ever.
_SHORTEST_SLICE_S: Final = 0.001


class CollectiveWork:
    """A collective in flight; see `Pollable`."""

    def __init__(self, work: dist.Work) -> None:
        """Take over `work`."""
        self._work = work

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds."""
        try:
            self._work.wait(timedelta(seconds=max(slice_s, _SHORTEST_SLICE_S)))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            # Complete by now: either it failed, which this raises, or it finished as the slice ended.
            self._work.wait()
        return True

    def pending(self) -> None:
        """Return nothing: only the status store can tell."""


class WaiterThreads:
    """Threads that block in a transport on behalf of others. They start on demand and end with `close`."""

    def __init__(self, name: str) -> None:
        """Start nothing yet; `name` shows in stack dumps."""
        self._name = name
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._all: list[tuple[threading.Thread, threading.Event]] = []
        self._closed = False
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Return whether a thread is blocked in a transport."""
        with self._lock:
            return len(self._idle) < len(self._all)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on an idle thread, or on a new one. `job` must not raise."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            self._start(job)
        else:
            inbox.put(job)

    def _start(self, job: Callable[[], None]) -> None:
        """Run `job` on a new thread.

        An interrupt may come while this thread waits for the new one to start. That one then has its job, and `close`
        knows it.
        """
        inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        inbox.put(job)
        ended = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(inbox, ended), name=f"group-coordinator-{self._name}", daemon=True
        )
        with self._lock:
            self._all.append((thread, ended))
            try:
                thread.start()
            except Exception:
                # The system has no thread to give; unlike an interrupt, this leaves nothing running.
                self._all.pop()
                raise

    def _run(self, inbox: SimpleQueue[Callable[[], None] | None], ended: threading.Event) -> None:
        try:
            self._serve(inbox)
        finally:
            ended.set()

    def _serve(self, inbox: SimpleQueue[Callable[[], None] | None]) -> None:
        while True:
            job = inbox.get()
            if job is None:
                return
            job()
            del job
            with self._lock:
                if self._closed:
                    return
                self._idle.append(inbox)

    def close(self, timeout_s: float) -> None:
        """End the idle threads and those that finish within `timeout_s` seconds."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)
        deadline = time.monotonic() + timeout_s
        with self._lock:
            ending, self._all = self._all, []
        for thread, ended in ending:
            # A thread can be joined only once it has started, which one that has ended has.
            if ended.wait(max(deadline - time.monotonic(), 0.0)):
                thread.join(max(deadline - time.monotonic(), 0.0))


class PointToPointWorks:
    """Sends and receives in flight, with the peer of each; see `Pollable`.

    They are waited for in order on one thread. Once a slice has passed, each of the others gets a
    thread of its own, so that `pending` is exact when somebody must be blamed.
    """

    def __init__(self, threads: WaiterThreads, works: Sequence[tuple[int, dist.Work]], keep: object) -> None:
        """Start to wait.

        Args:
            threads: Where to block.
            works: Pairs (global rank of the peer, work).
            keep: The memory that the transport reads or writes, kept until all works are done.
        """
        self._threads = threads
        self._todo = deque(works)
        self._open = dict(enumerate(works))
        self._count = len(works)
        self._claimed = 0
        self._error: BaseException | None = None
        self._keep = keep
        self._lock = threading.Lock()
        self._done = threading.Lock()
        self._spread = False
        if works:
            self._done.acquire()
            self._threads.submit(self._drain)

    def _drain(self) -> None:
        while self._wait_next():
            pass

    def _wait_next(self) -> bool:
        """Wait for one work that nobody waits for yet; return whether there was one."""
        with self._lock:
            if not self._todo:
                return False
            index, (_, work) = self._claimed, self._todo.popleft()
            self._claimed += 1
        try:
            work.wait(_FOREVER)
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who polls
            with self._lock:
                if self._error is None:
                    self._error = error
                    self._release()
            return False
        with self._lock:
            del self._open[index]
            if not self._open and self._error is None:
                self._release()
        return True

    def _release(self) -> None:
        self._keep = None
        self._done.release()

    def is_complete(self) -> bool:
        """Return whether everything has been sent or received. Raises what went wrong."""
        with self._lock:
            if self._error is not None:
                raise self._error
            return not self._open

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds."""
        if self._count == 0:
            return True
        if self._done.acquire(timeout=slice_s):
            self._done.release()
            return self.is_complete()
        if not self._spread and self._count > 1:
            self._spread = True
            for _ in range(len(self._todo)):
                self._threads.submit(self._drain)
        return False

    def pending(self) -> tuple[int, ...]:
        """Return the peers that are still awaited."""
        with self._lock:
            return tuple(sorted({peer for peer, _ in self._open.values()}))
