"""Keep the status pages of other processes open, so that they can still be read when those were killed."""

from __future__ import annotations

import os
from weakref import WeakValueDictionary

from shm_broadcast.status.page import own_page
from shm_broadcast.status.record_file import is_page

__all__ = ["KeptPages"]


class _Kept:
    """The descriptor of a page, which is open as long as somebody keeps it."""

    _descriptor: int = -1

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


# By device and inode: ranks that share several groups and queues keep one descriptor of each other's page. Two threads
# that get a page at the same time may keep two.
_kept: WeakValueDictionary[tuple[int, int], _Kept] = WeakValueDictionary()


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
            self._pages.append(_kept.setdefault((status.st_dev, status.st_ino), kept))

    def close(self) -> None:
        """Keep nothing more. Idempotent."""
        self._pages.clear()
