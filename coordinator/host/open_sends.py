"""Sends that the caller need not wait for: their handles own memory that a transport still reads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import Final

from device_comm.handles import CompletedHandle, Handle
from shm_broadcast.errors import CapabilityError, CommError
from shm_broadcast.interruption import raised_by_handler, tolerating

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
        """Hold a handle, and the memory that it owns, until the send is complete.

        Raises the error of an older send if that has broken the group. If an older send only lacks a thread,
        its own handle says so: this send is on its way and not affected.
        """
        if isinstance(handle, CompletedHandle):
            return
        handles = self._handles
        try:
            # Other threads and signal handlers keep handles, too: each drops only those that it has asked about.
            while (oldest := self._oldest()) is not None and oldest.is_completed():
                self._drop(oldest)
            if len(handles) >= MAX_OPEN_SENDS and (oldest := self._oldest()) is not None:
                oldest.wait()
                self._drop(oldest)
        except CapabilityError as error:
            if raised_by_handler(error):
                raise
        finally:
            handles.append(handle)

    def _oldest(self) -> Handle | None:
        try:
            return self._handles[0]
        except IndexError:
            return None

    def _drop(self, handle: Handle) -> None:
        """Drop `handle`, unless another thread or a signal handler has done so."""
        # `remove` finds it at the front, and runs no Python code that could come between finding and removing: handles
        # are compared by identity.
        with tolerating(ValueError):
            self._handles.remove(handle)

    def flush(self, timeout_s: float, unfinished: Collection[object] = ()) -> None:
        """Wait up to `timeout_s` seconds, until each send is complete or can no longer complete.

        `unfinished` holds the group's messages that are still being sent, also those whose handles were lost because a
        signal handler raised before `keep` had them, or before the call that waits for them waited.
        """
        deadline = time.monotonic() + timeout_s
        # Another thread may start a send while this one destroys the group.
        sends = list(self._handles)
        while (sends := [send for send in sends if _is_open(send)]) or unfinished:
            if time.monotonic() >= deadline:
                return
            time.sleep(_FLUSH_PAUSE_S)

    def clear(self) -> None:
        """Drop the handles."""
        self._handles.clear()


def _is_open(send: Handle) -> bool:
    """Return whether a send may still complete; what ends one does not end those to other ranks."""
    try:
        return not send.is_completed()
    except CapabilityError:  # it has no thread yet
        return True
    except CommError:  # a connection is closed: its peer is gone
        return False


__all__ = ["MAX_OPEN_SENDS", "OpenSends"]
