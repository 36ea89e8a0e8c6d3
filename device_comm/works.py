"""Waiting in slices for the work that torch.distributed has in flight on the CPU.

Gloo runs a barrier on its own threads, and `wait` on its work takes a timeout and can be called again. `wait` on
a point-to-point work is different: when its timeout passes it closes every connection of the group, and there is no
way to ask whether the work is complete. Threads of ours wait for these works without limit, the caller polls the
threads, and `gloo.waits` ends those waits that Gloo forgets when a group breaks.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Final

import torch.distributed as dist

from device_comm.gloo.waits import end_wait
from device_comm.health import FOREVER_S
from shm_broadcast.errors import ClosedError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.liveness import fork_count
from shm_broadcast.threads import DaemonThread

_FOREVER: Final = timedelta(seconds=FOREVER_S)

# A wait that the end of the connections ends is over within some milliseconds.
_TOLD_S: Final = 0.1

# After how long the wait of a collective takes a thread for each transfer. Most are over before: they need one thread.
_LONG_WAIT_S: Final = 0.5

# torch counts in milliseconds and takes 0 for "without limit": a shorter slice would wait for ever.
_SHORTEST_SLICE_S: Final = 0.001


class CollectiveWork:
    """A barrier of Gloo in flight; see `Pollable`."""

    def __init__(self, work: dist.Work) -> None:
        """Take over `work`."""
        self._work = work

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds."""
        try:
            self._work.wait(timedelta(seconds=max(slice_s, _SHORTEST_SLICE_S)))
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            if not self._work.is_completed():
                return False
            # Complete by now: either it failed, which this raises, or it finished as the slice ended.
            self._work.wait()
        return True

    def pending(self) -> None:
        """Return nothing: only the status store can tell."""


class WaiterThreads:
    """Threads that block in a transport on behalf of others. They start on demand and end with `close`.

    Attributes:
        waits: The works for which threads wait now, by their identity.
    """

    def __init__(self, name: str) -> None:
        """Start nothing yet; `name` shows in stack dumps."""
        self.waits: dict[int, dist.Work] = {}
        self._name = name
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._all: list[tuple[threading.Thread, threading.Event]] = []
        self._closed = False
        self._forks = fork_count()
        # A signal handler may start or close threads while this thread holds it.
        self._lock = threading.RLock()
        _inheritable.add(weakref.ref(self, _inheritable.discard))

    @property
    def is_busy(self) -> bool:
        """Return whether a thread is blocked in a transport."""
        with self._lock:
            return len(self._idle) < len(self._all)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on an idle thread, or on a new one. `job` must not raise.

        Raises:
            ClosedError: The threads have ended, or end just now: nobody would wait for a new one.
            UsageError: This process is a forked child, in which there are no such threads.
        """
        if self._forks != fork_count():
            raise UsageError(
                f"{self._name}: the threads that wait belong to the process that forked this one"
            )
        idle = self._idle
        # Nothing is called from here to the end of `put`, so that no signal handler leaves an idle thread without a job
        # and no other thread takes it as well.
        if idle:
            inbox = idle[-1]
            del idle[-1]
            inbox.put(job)
        else:
            self._start(job)

    def _start(self, job: Callable[[], None]) -> None:
        """Run `job` on a new thread.

        An interrupt may come while this thread waits for the new one to start. That one then has its job, and `close`
        knows it.
        """
        inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        inbox.put(job)
        ended = threading.Event()
        thread = DaemonThread(self._run, f"group-coordinator-{self._name}", (inbox, ended))
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name}: the group was destroyed meanwhile")
            self._all.append((thread, ended))
            try:
                thread.start()
            except Exception as error:
                # The system has no thread to give; unlike an interrupt, this leaves nothing running.
                if not raised_by_handler(error) and (thread, ended) in self._all:
                    self._all.remove((thread, ended))
                raise

    def _run(self, inbox: SimpleQueue[Callable[[], None] | None], ended: threading.Event) -> None:
        try:
            while (job := inbox.get()) is not None:
                job()
                # Do not keep the job's memory alive while waiting for the next one.
                del job
                with self._lock:
                    if self._closed:
                        return
                    self._idle.append(inbox)
        finally:
            ended.set()

    def renew_lock(self) -> None:
        """Take another lock, in a forked child."""
        self._lock = threading.RLock()

    def close(self, timeout_s: float) -> None:
        """End the idle threads, and those that finish within `timeout_s` seconds. What is waited for is lost."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            ending, self._all = self._all, []
        for inbox in idle:
            inbox.put(None)
        deadline = time.monotonic() + timeout_s
        for thread, ended in ending:
            while not ended.wait(min(_TOLD_S, max(deadline - time.monotonic(), 0.0))):
                # Gloo does not tell the wait for a message whose copy had begun, nor one that begins just now.
                for work in list(self.waits.values()):
                    end_wait(work)
                if time.monotonic() >= deadline:
                    break
            else:
                # Only a thread that has started can be joined, and one that has set `ended` has started.
                thread.join(max(deadline - time.monotonic(), 0.0))


# A fork copies the locks, also one that another thread holds just then, which would never release the copy.
_inheritable: Final[set[weakref.ref[WaiterThreads]]] = set()


def _renew_locks() -> None:
    for threads in [reference() for reference in list(_inheritable)]:
        if threads is not None:
            threads.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


class PointToPointWorks:
    """Sends and receives in flight, with the peer of each; see `Pollable`.

    One thread waits for them in order. When the wait turns out to be long, each of the others gets a thread of its own:
    Gloo tells only those transfers of a lost rank that it has gone, so that one would fail unseen behind another that
    is late. `pending` is exact from then on, which an error needs that names the ranks at fault.
    """

    def __init__(
        self,
        threads: WaiterThreads,
        works: Sequence[tuple[int, dist.Work]],
        keep: object,
        unfinished: set[object] | None = None,
        *,
        spread_after_s: float = 0.0,
        most: int | None = None,
    ) -> None:
        """Start to wait.

        Args:
            threads: Where to block.
            works: Pairs (global rank of the peer, work).
            keep: The memory that the transport reads or writes, kept until all works are done.
            unfinished: Holds this object until then.
            spread_after_s: For how many seconds one thread is enough; by default for one slice.
            most: How many threads it may take then; by default one for each work.
        """
        self._threads = threads
        self._todo = deque(enumerate(works))
        self._peers = {index: peer for index, (peer, _) in enumerate(works)}
        # What `pending` returns, until another work is done.
        self._awaited: tuple[int, ...] | None = (works[0][0],) if len(works) == 1 else None
        self._error: BaseException | None = None
        self._keep = keep
        self._unfinished: set[object] = set() if unfinished is None else unfinished
        self._lock = threading.Lock()
        self._done = threading.Lock()
        self._alone_s = spread_after_s
        self._most = len(works) if most is None else most
        self._spread = min(len(works), self._most) < 2
        if works:
            self._done.acquire()
            self._unfinished.add(self)
            try:
                self._threads.submit(self._drain)
            except BaseException:
                self._unfinished.discard(self)
                raise

    def _drain(self) -> None:
        """Wait, one after the other, for the works that no thread waits for yet."""
        while True:
            with self._lock:
                if not self._todo:
                    return
                index, (_, work) = self._todo.popleft()
            try:
                self._wait(work)
            except BaseException as error:  # noqa: BLE001 - the caller's next poll raises it
                with self._lock:
                    if self._error is None:
                        # Its traceback would keep the work, and so the connections of a group that is destroyed.
                        self._error = error.with_traceback(None)
                        self._release()
                return
            with self._lock:
                del self._peers[index]
                self._awaited = None if self._peers else ()
                if not self._peers and self._error is None:
                    self._release()

    def _wait(self, work: dist.Work) -> None:
        waits = self._threads.waits
        waits[id(work)] = work
        try:
            if work.wait(_FOREVER) is False:
                raise RuntimeError("the group was destroyed before the message was complete")
        finally:
            del waits[id(work)]

    def _release(self) -> None:
        self._keep = None
        self._unfinished.discard(self)
        self._done.release()

    def is_complete(self) -> bool:
        """Return whether everything has been sent or received. Raises what went wrong."""
        # Without the lock: a signal handler that runs while this thread holds it may destroy the group, and ask too.
        if self._error is not None:
            raise self._error
        return not self._peers

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds."""
        if self._done.acquire(timeout=slice_s):
            self._done.release()
            return self.is_complete()
        self._alone_s -= slice_s
        if not self._spread and self._alone_s <= 0.0:
            self._spread_out()
        return False

    def _spread_out(self) -> None:
        """Let a thread wait for each work that has none."""
        try:
            for _ in range(min(len(self._todo), self._most - 1)):
                self._threads.submit(self._drain)
        except ClosedError:
            pass  # whoever waits finds out that the group is closed
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            # The system has no thread to give, and one waits already.
            self._alone_s = _LONG_WAIT_S
            return
        self._spread = True

    def pending(self) -> tuple[int, ...]:
        """Return the peers that are still awaited."""
        awaited = self._awaited
        return tuple(sorted(set(self._peers.values()))) if awaited is None else awaited


class ExchangeWorks:
    """The sends and receives of a collective in flight; see `Pollable`."""

    def __init__(
        self,
        threads: WaiterThreads,
        works: Sequence[tuple[int, dist.Work]],
        keep: object,
        is_watched: Callable[[int], bool],
    ) -> None:
        """Start to wait; the arguments are those of `PointToPointWorks`.

        A long wait takes threads only for the peers for which `is_watched` is false: of the others the group notices in
        another way that they have ended, and with many ranks on a host there would be hundreds of threads.
        """
        ordered = sorted(works, key=lambda work: is_watched(work[0]))
        unwatched = sum(not is_watched(peer) for peer, _ in works)
        self._transfers = PointToPointWorks(
            threads, ordered, keep, spread_after_s=_LONG_WAIT_S, most=unwatched
        )

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds."""
        return self._transfers.poll(slice_s)

    def pending(self) -> None:
        """Return nothing: a rank that is awaited may be in another call, which only the status store can tell."""
