"""Sends that the caller need not wait for: their handles own memory that a transport still reads."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Final

from device_comm.handles import CompletedHandle, Handle
from shm_broadcast.errors import CommError

# When this many sends are open, the next one waits for the oldest: a receiver that is so far behind has stopped.
MAX_OPEN_SENDS: Final = 256

# Pause between two checks of sends that are still in flight.
_FLUSH_PAUSE_S: Final = 0.002


class OpenSends:
    """Holds the handles of a group's sends until they are complete, so that the application may drop its own."""

    def __init__(self) -> None:
        """Start empty."""
        self._handles: deque[Handle] = deque()

    def keep(self, handle: Handle) -> None:
        """Hold a handle, and the memory that it owns, until the send is complete."""
        if isinstance(handle, CompletedHandle):
            return
        handles = self._handles
        while handles and handles[0].is_completed():
            handles.popleft()
        if len(handles) >= MAX_OPEN_SENDS:
            handles.popleft().wait()
        handles.append(handle)

    def flush(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds, until all sends are complete or one can no longer complete."""
        deadline = time.monotonic() + timeout_s
        # Another thread may start a send while this one destroys the group.
        sends = list(self._handles)
        with suppress(CommError):  # a connection is closed: its peer is gone
            while not all(send.is_completed() for send in sends) and time.monotonic() < deadline:
                time.sleep(_FLUSH_PAUSE_S)

    def clear(self) -> None:
        """Drop the handles."""
        self._handles.clear()


__all__ = ["MAX_OPEN_SENDS", "OpenSends"]
