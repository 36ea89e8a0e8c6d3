"""Sends that nobody may wait for: their handles own memory that a transport still reads."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from device_comm.handles import CompletedHandle, Handle
from shm_broadcast.errors import CommError

# When this many sends are open, the oldest is waited for: a receiver that is so far behind has stopped receiving.
MAX_OPEN_SENDS: Final = 256

# Pause between two looks at sends that are still in flight.
_FLUSH_PAUSE_S: Final = 0.002


class OpenSends:
    """The handles of a group's sends until they are complete, so that the application may drop its own."""

    def __init__(self) -> None:
        """Hold none yet."""
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
        """Wait for up to `timeout_s` seconds until all are complete, or one cannot complete any more."""
        deadline = time.monotonic() + timeout_s
        try:
            while not all(send.is_completed() for send in self._handles) and time.monotonic() < deadline:
                time.sleep(_FLUSH_PAUSE_S)
        except CommError as gone:
            # A connection is closed: its peer is gone.
            del gone

    def clear(self) -> None:
        """Drop the handles."""
        self._handles.clear()


__all__ = ["MAX_OPEN_SENDS", "OpenSends"]
