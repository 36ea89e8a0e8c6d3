"""What both ends of the remote transport share: the checks before a call, its wait, and how the thread ends."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import msgspec

from shm_broadcast._core import undisturbed
from shm_broadcast.errors import ClosedError, CommTimeoutError, GroupBrokenError, InternalError, UsageError
from shm_broadcast.guard import QueueGuard
from shm_broadcast.interruption import is_held
from shm_broadcast.liveness import fork_count, this_process
from shm_broadcast.remote.news import News
from shm_broadcast.remote.wire import Context
from shm_broadcast.reports.log_fields import LogFields, log_fields
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.threads import DaemonThread, start_thread

logger: logging.Logger = logging.getLogger(__name__)

# How often a call that waits asks the owner whether it has failed. A group looks at its links to other hosts then, and
# must do so in less than half of the time after which a host counts as lost, which is 0.5 s at least.
_LOOK_S: Final = 0.1
# How long `close` waits for the other ends after a signal handler has raised in it.
_INTERRUPTED_S: Final = 0.2


class RemoteEnd(ABC):
    """One end of a remote queue.

    Attributes:
        name: The queue's name in errors and logs.
        role: What this end is, for errors and logs.
        guard: What the owner of this end knows, if it has one.
        is_asking: Whether the owner is being asked, or the call ends with what the owner raised when asked.
    """

    role: str

    def __init__(self, name: str, settings: BroadcastSettings) -> None:
        """Prepare the thread; the subclass starts it."""
        self.name = name
        # What every log record of this end says; who knows the rank or the owner adds it.
        self.fields: LogFields = log_fields(queue=name)
        self._settings = settings
        self.warns = True
        self.guard: QueueGuard | None = None
        self.is_asking: bool = False
        self._look_at = 0.0
        self._forks = fork_count()
        self._identity: bytes = msgspec.msgpack.encode(this_process())
        self._waits = 0
        self._waited_s = 0.0
        # `_is_closing` from the first `close` on, `_is_stopping` when the thread is to end, `_is_closed` at the end.
        self._is_closing = self._is_stopping = self._is_closed = False
        # A signal handler has called `close` inside of a call. When that call ends, it finishes the closing.
        self._is_deferred = False
        # Guards single uses of the socket. A signal handler that raises cannot come between a native lock and the block
        # that releases it.
        self._lock = threading.RLock()
        self._finishing = threading.RLock()  # held by the thread that does what `close` has to do
        self._is_serving = False
        self._news = News()  # told with the lock held
        self._cause: BaseException | None = None  # the failure that has been raised
        self._thread = DaemonThread(self._serve, "group-coordinator-remote")

    @property
    @abstractmethod
    def messages(self) -> int:
        """Number of messages that this end has sent or read."""

    def check(self, call: str) -> None:
        """Raise unless this process can use this end now; `call` names the method for the text.

        Raises:
            UsageError: This is a forked child.
            ClosedError: This end was closed.
            GroupBrokenError: An earlier call failed; its error is the `__cause__`.
        """
        self.is_asking = False
        self._check_open(call)
        if self._cause is not None:
            raise GroupBrokenError(
                f"{self._where(call)}: an earlier failure made the queue unusable, close it: {self._cause}"
            ) from self._cause

    def _check_open(self, call: str) -> None:
        """Raise if this end was closed, or in a forked child, where a lost thread may hold the lock."""
        if self._forks != fork_count():
            raise UsageError(f"{self._where(call)}: the queue belongs to the process that forked this one")
        if self._is_closing:
            raise ClosedError(f"{self._where(call)}: the queue was closed")

    def _where(self, call: str) -> str:
        return f"{call} on queue {self.name!r} ({self.role}, message #{self.messages + 1})"

    def log_fields(self, call: str) -> LogFields:
        """Return the fields of a log record on `call`."""
        # A copy: the owner may add to it while a record is made, in another thread.
        return {**self.fields, "comm_call": call}

    def _wait(
        self,
        call: str,
        timeout_s: float | None,
        is_over: Callable[[], bool],
        missing: Callable[[], tuple[str, Sequence[int]]],
        since: float | None = None,
    ) -> None:
        """Sleep until the wait is over; log a warning each time `warn_after_s` has passed.

        Args:
            call: The method that waits, for the texts.
            timeout_s: Deadline in seconds; None waits for ever.
            is_over: Returns whether the wait is over; raises if it cannot end.
            missing: Returns what is missing, for the texts, and the ranks that are to blame.
            since: When the call began, by `time.monotonic()`; now by default.

        Raises:
            CommTimeoutError: The deadline passed.
            CommError: The owner has failed; see `QueueGuard.look`.
        """
        now = time.monotonic()
        start = now if since is None else since
        warn_at = start + self._settings.warn_after_s
        news = self._news.next
        while not is_over():
            self._look(call)
            if timeout_s is not None and now - start >= timeout_s:
                self._raise_late(call, timeout_s, *missing())
            if now >= warn_at:
                if self.warns:
                    logger.warning(
                        "%s: waiting for %.0f s: %s",
                        *(self._where(call), now - start, missing()[0]),
                        extra=self.log_fields(call),
                    )
                warn_at = now + self._settings.warn_after_s
            until = warn_at if timeout_s is None else min(warn_at, start + timeout_s)
            self._sleep(news, until - now if self.guard is None else min(until - now, _LOOK_S))
            now, news = time.monotonic(), self._news.next

    def _look(self, call: str) -> None:
        """Ask the owner whether it has failed, at most once in `_LOOK_S`, and raise what it raises.

        The owner also knows which processes outside of this queue have ended, and which hosts have vanished.
        It may close this end; if a lock is held, that is finished when the call ends.
        """
        now = time.monotonic()
        if self.guard is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        self.is_asking = True
        self.guard.look(call)
        self.is_asking = False

    def _raise_late(self, call: str, timeout_s: float, what: str, ranks: Sequence[int]) -> NoReturn:
        raise CommTimeoutError(f"{self._where(call)}: {what} within {timeout_s:.1f} s", missing=ranks)

    @property
    def warn_after_s(self) -> float:
        """How long a call waits before it warns, in seconds."""
        return self._settings.warn_after_s

    @property
    def is_busy(self) -> bool:
        """False: a message on loan keeps no other thread from reading the next one."""
        return False

    @abstractmethod
    def _sleep(self, news: threading.Lock, seconds: float) -> None:
        """Sleep until something may have changed since `news` was the next change, or for about `seconds`."""

    def _start(self) -> None:
        """Start the thread; close this end if that fails, or a signal handler interrupts it.

        Raises:
            CapabilityError: This process can have no further thread.
        """
        try:
            start_thread(self._thread, "to serve a queue between hosts")
        except BaseException:
            self.close()
            raise

    def _serve(self) -> None:
        with self._lock:
            # The call that started this thread may have been interrupted, and have closed this end.
            if self._is_stopping:
                return
            self._is_serving = True
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - whatever it is, the queue must not hang
            broken = InternalError(f"the thread of queue {self.name!r} failed: {error!r}")
            broken.__cause__ = error
            self._break(broken)

    def _stop_thread(self, waker: int) -> None:
        """Let the thread end, which sleeps on the eventfd `waker`, and wait for that. Can be done again."""
        with self._lock:
            self._is_stopping = True
            is_serving = self._is_serving
        if is_serving:
            if self._thread.is_alive():
                os.eventfd_write(waker, 1)
            self._thread.join()

    def _end_context(self, context: Context) -> None:
        """End zmq's context, whose sockets are closed. Can be done again.

        A signal would make zmq give up without an error from pyzmq, and the context's threads and descriptors
        would stay. So signals are held back, for no longer than the sockets may go on sending.
        """
        undisturbed(context.term)

    @abstractmethod
    def close(self) -> None:
        """Close this end."""

    def _is_inside(self) -> bool:
        """Return whether this thread is inside of a call on this end, as a signal handler is that interrupts one.

        The end's own thread always is: a finalizer that runs there cannot wait for it.
        """
        is_own = threading.get_ident() == self._thread.ident
        return is_own or is_held(self._lock) or is_held(self._finishing)

    def _close(self) -> None:
        """Do what `close` has to do, or go on with it if a signal handler has interrupted that.

        If this thread is inside of a call, only note that this is to be done: the call's re-entrant locks
        would let a signal handler in. Every call looks at `_is_deferred` when it ends, and then calls this. It looks
        without calling a function, at whose beginning a handler could raise and take the call's result with it.
        """
        if self._is_closed or self._forks != fork_count():
            return
        if self._is_inside():
            self._is_deferred = True
            return
        with self._finishing:
            if self._is_closed:
                return
            try:
                self._finish(None)
            except BaseException:
                # A signal handler has raised, as for Ctrl-C: go on, but do not wait long. If one raises again, the next
                # call of `close` goes on.
                self._finish(_INTERRUPTED_S)
                raise

    @abstractmethod
    def _finish(self, within_s: float | None) -> None:
        """Do what `close` has to do; wait for peers at most for `within_s` if given. Every step can be done again."""

    @abstractmethod
    def _loop(self) -> None:
        """Do the work of the thread until the end is closed."""

    @abstractmethod
    def _break(self, error: InternalError) -> None:
        """Store the failure of the thread and wake the call that waits."""
