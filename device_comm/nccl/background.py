"""Join an NCCL communicator on a thread, while the caller waits with a deadline.

Communicators are blocking: on a non-blocking one every call starts a thread of its own and returns before that has
queued the work, which costs the caller about 0.3 ms (NCCL 2.28.9, group.cc:703-738). Only joining and finalizing then
block for as long as other ranks take. Joining gets a thread, and the connection's keeper finalizes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from device_comm.nccl.library import NcclLibrary
from device_comm.nccl.streams import Streams
from shm_broadcast.errors import CommError, NcclError

logger: logging.Logger = logging.getLogger(__name__)


class Joining:
    """One rank's joining of a communicator; see `Pollable`.

    NCCL cannot be told to stop joining. If the caller gives up, the thread stays in the library until that returns, and
    then aborts what it got.
    """

    def __init__(
        self,
        library: NcclLibrary,
        streams: Streams,
        join: Callable[[], tuple[int, int]],
        look: Callable[[], object],
    ) -> None:
        """Start a thread.

        Args:
            library: The NCCL library.
            streams: On whose device the thread joins.
            join: Joins, and returns a handle and a status.
            look: Is called while the caller waits; raises if that is in vain.
        """
        self._library = library
        self._streams = streams
        self._join = join
        self._look = look
        self._is_over = threading.Event()
        self._is_given_up = False
        self._comm = 0
        # Status of the library; 0 or IN_PROGRESS.
        self.status: int = 0
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="group-coordinator-nccl-join", daemon=True).start()

    def _run(self) -> None:
        try:
            with self._streams.on_device():
                self._comm, self.status = self._join()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self._error = error
        self._is_over.set()
        if self._is_given_up:
            self._abort()

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds; return whether the library has returned."""
        if self._is_over.wait(slice_s):
            return True
        self._look()
        return False

    def raise_error(self, explain: Callable[[NcclError], CommError]) -> None:
        """Raise why joining has failed, if it has; `explain` returns what to raise for the library's error."""
        if isinstance(self._error, NcclError):
            raise explain(self._error) from self._error
        if self._error is not None:
            raise self._error

    def pending(self) -> None:
        """Return nothing: only the status store can tell who has not come."""

    def take(self) -> int:
        """Return the handle, which belongs to the caller from now on."""
        comm, self._comm = self._comm, 0
        return comm

    def give_up(self) -> None:
        """Abort the communicator as soon as there is one."""
        self._is_given_up = True
        if self._is_over.is_set():
            self._abort()

    def _abort(self) -> None:
        # Nothing is called here, so that one of the two threads gets it.
        comm, self._comm = self._comm, 0
        if comm:
            try:
                self._library.call("ncclCommAbort", comm)
            except NcclError as error:
                logger.warning("a communicator that was given up: %s", error)


__all__ = ["Joining"]
