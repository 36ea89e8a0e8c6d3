"""Sends that nobody may be waiting for: their memory is kept until they are complete."""

from __future__ import annotations

from collections import deque
from typing import Final

from device_comm.handles import CompletedHandle, Handle

# When this many sends are open, the oldest is waited for: a receiver this far behind has stopped receiving.
MAX_OPEN_SENDS: Final = 256


class OpenSends:
    """The sends of one group that are not complete, so that the caller may drop a handle."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._open: deque[Handle] = deque()

    def keep(self, handle: Handle) -> None:
        """Keep `handle`, and the memory it owns, until it is complete. Waits when too many are open."""
        if isinstance(handle, CompletedHandle):
            return
        while self._open and self._open[0].is_completed():
            self._open.popleft()
        if len(self._open) >= MAX_OPEN_SENDS:
            self._open.popleft().wait()
        self._open.append(handle)

    def take(self) -> list[Handle]:
        """Return the open sends, oldest first, and keep none of them any longer."""
        handles = list(self._open)
        self._open.clear()
        return handles
