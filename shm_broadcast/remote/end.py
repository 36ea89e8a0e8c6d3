"""What both ends of the remote transport share: the checks before a call, its wait, and how the thread ends."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from shm_broadcast.errors import ClosedError, CommTimeoutError, GroupBrokenError, InternalError, UsageError
from shm_broadcast.liveness import fork_count, this_process
from shm_broadcast.settings import BroadcastSettings

logger: logging.Logger = logging.getLogger(__name__)


class RemoteEnd(ABC):
    """One end of a remote queue.

    Attributes:
        name: The queue's name in errors and logs.
        role: What this end is, for errors and logs.
    """

    role: str

    def __init__(self, name: str, settings: BroadcastSettings) -> None:
        """Prepare the thread; the subclass starts it."""
        self.name = name
        self._settings = settings
        self.warns = True
        self._forks = fork_count()
        self._identity: bytes = msgspec.msgpack.encode(this_process())
        self._waits = 0
        self._waited_s = 0.0
        self._is_closing = self._is_stopping = False
        self._cause: BaseException | None = None  # the failure that has been raised
        self._thread = threading.Thread(target=self._serve, name="group-coordinator-remote", daemon=True)

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

    def _wait(
        self,
        call: str,
        timeout_s: float | None,
        is_over: Callable[[], bool],
        missing: Callable[[], tuple[str, Sequence[int]]],
    ) -> None:
        """Sleep until the wait is over; log a warning each time `warn_after_s` has passed.

        Args:
            call: The method that waits, for the texts.
            timeout_s: Deadline in seconds; None waits for ever.
            is_over: Returns whether the wait is over; raises if it cannot end.
            missing: Returns what is missing, for the texts, and the ranks that are to blame.

        Raises:
            CommTimeoutError: The deadline passed.
        """
        start = now = time.monotonic()
        warn_at = start + self._settings.warn_after_s
        while not is_over():
            if timeout_s is not None and now - start >= timeout_s:
                self._raise_late(call, timeout_s, *missing())
            if self.warns and now >= warn_at:
                logger.warning("%s: waiting for %.0f s: %s", self._where(call), now - start, missing()[0])
                warn_at = now + self._settings.warn_after_s
            self._sleep((warn_at if timeout_s is None else min(warn_at, start + timeout_s)) - now)
            now = time.monotonic()

    def _raise_late(self, call: str, timeout_s: float, what: str, ranks: Sequence[int]) -> NoReturn:
        raise CommTimeoutError(f"{self._where(call)}: {what} within {timeout_s:.1f} s", missing=ranks)

    @property
    def warn_after_s(self) -> float:
        """How long a call waits before it warns, in seconds."""
        return self._settings.warn_after_s

    @abstractmethod
    def _sleep(self, seconds: float) -> None:
        """Sleep until something may have changed, or for about `seconds`."""

    def _serve(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - whatever it is, the queue must not hang
            broken = InternalError(f"the thread of queue {self.name!r} failed: {error!r}")
            broken.__cause__ = error
            self._break(broken)

    @abstractmethod
    def _loop(self) -> None:
        """Do the work of the thread until the end is closed."""

    @abstractmethod
    def _break(self, error: InternalError) -> None:
        """Store the failure of the thread and wake the call that waits."""
