"""Run a call of NCCL that waits for other ranks on a thread, while the caller waits with a deadline.

Communicators are blocking: on a non-blocking one every call starts a thread of its own and returns before that has
queued the work, which costs the caller about 0.3 ms (NCCL 2.28.9, group.cc:703-738). Only joining, registering a window
and finalizing then block for as long as other ranks take. The first two get a thread, and the connection's keeper
finalizes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from device_comm.nccl.library import NcclLibrary
from device_comm.nccl.streams import Streams
from shm_broadcast.errors import CommError, NcclError
from shm_broadcast.reports.log_fields import LogFields

logger: logging.Logger = logging.getLogger(__name__)


class Background:
    """A call of the library on a thread; see `Pollable`.

    NCCL cannot be told to stop such a call. If the caller does not wait any longer, the thread stays in the library
    until that returns.
    """

    def __init__(
        self, streams: Streams, name: str, call: Callable[[], int], look: Callable[[], object]
    ) -> None:
        """Start a thread.

        Args:
            streams: On whose device the thread calls.
            name: What the thread does, for its name.
            call: Calls the library and returns a status.
            look: Called while the caller waits; raises if there is no point in waiting.
        """
        self._streams = streams
        self._call = call
        self._look = look
        self._is_over = threading.Event()
        # Status of the library; 0 or IN_PROGRESS.
        self.status: int = 0
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=f"group-coordinator-nccl-{name}", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._streams.on_device():
                self.status = self._call()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self._error = error
        self._is_over.set()

    @property
    def is_over(self) -> bool:
        """Return whether the library has returned."""
        return self._is_over.is_set()

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds; return whether the library has returned."""
        if self._is_over.wait(slice_s):
            return True
        self._look()
        return False

    def raise_error(self, explain: Callable[[NcclError], CommError]) -> None:
        """Raise why the call has failed, if it has; `explain` returns what to raise for the library's error."""
        if isinstance(self._error, NcclError):
            raise explain(self._error) from self._error
        if self._error is not None:
            raise self._error

    def pending(self) -> None:
        """Return nothing: only the status store can tell who has not come."""


class Joining(Background):
    """One rank's joining of a communicator. If the caller gives up, the thread aborts what it got in the end."""

    def __init__(
        self,
        library: NcclLibrary,
        streams: Streams,
        join: Callable[[], tuple[int, int]],
        look: Callable[[], object],
        fields: LogFields,
    ) -> None:
        """Start a thread; `join` joins, and returns a handle and a status. `fields` are those of a log record."""
        self._library = library
        self._join = join
        self._fields = fields
        self._is_given_up = False
        self._comm = 0
        super().__init__(streams, "join", self._take_part, look)

    def _take_part(self) -> int:
        self._comm, status = self._join()
        return status

    def _run(self) -> None:
        super()._run()
        if self._is_given_up:
            self._abort()

    def take(self) -> int:
        """Return the handle, which belongs to the caller from now on."""
        comm, self._comm = self._comm, 0
        return comm

    def give_up(self) -> None:
        """Abort the communicator as soon as there is one."""
        self._is_given_up = True
        if self.is_over:
            self._abort()

    def _abort(self) -> None:
        # One statement without a call, so that only one of the two threads gets the handle.
        comm, self._comm = self._comm, 0
        if comm:
            try:
                self._library.call("ncclCommAbort", comm)
            except NcclError as error:
                logger.warning("a communicator that was given up: %s", error, extra=self._fields)


__all__ = ["Background", "Joining"]
