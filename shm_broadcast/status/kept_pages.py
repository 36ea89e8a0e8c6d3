"""Keep the status pages of other processes open, so that they can still be read when those were killed."""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import Final

from shm_broadcast import _core
from shm_broadcast.status.page import own_page
from shm_broadcast.status.record_file import is_page

__all__ = ["KeptPages"]


class _Kept:
    """The descriptor of a page, which is open as long as somebody keeps it.

    Native code closes it. In a finalizer in Python a signal handler may raise: Python drops that, and closes nothing.
    """

    def __init__(self, descriptor: int) -> None:
        self._owner = _core.own_descriptor(descriptor)


# By device and inode: ranks that share several groups and queues keep one descriptor of each other's page. Two threads
# that get a page at the same time may keep two. No Python code runs when an entry ends, for the same reason.
_kept: Final[dict[tuple[int, int], weakref.ref[_Kept]]] = {}


class KeptPages:
    """The pages that one group or queue keeps, from its creation until `close`.

    Only descriptors are kept: nothing is mapped, and this process reads none of them.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._pages: list[_Kept] = []

    @property
    def own(self) -> int:
        """Return the descriptor of this process's page, for a process that is to keep it."""
        return own_page().segment.descriptor

    def take(self, descriptor: int) -> None:
        """Keep the page of another process, whose `descriptor` belongs to this object from now on.

        What is no page is closed. It came from a process that knows the key, so this is a mistake and no attack.
        """
        kept = _Kept(descriptor)
        if is_page(descriptor):
            status = os.fstat(descriptor)
            key = status.st_dev, status.st_ino
            known = _kept.get(key)
            shared = None if known is None else known()
            if shared is None:
                # `pop` gets the reference as the value to return if the entry is gone.
                _kept[key] = weakref.ref(kept, partial(_kept.pop, key))
                shared = kept
            self._pages.append(shared)

    def close(self) -> None:
        """Keep nothing more. Idempotent."""
        self._pages.clear()
