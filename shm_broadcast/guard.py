"""What the owner of a queue's end, such as a group, knows of processes that the queue itself does not watch."""

from __future__ import annotations

from typing import Protocol

from shm_broadcast.errors import PeerLostError
from shm_broadcast.reports.log_fields import LogFields


class QueueGuard(Protocol):
    """Connects the failure of a queue with that of its owner. `call` is the name of the queue's method, for errors."""

    def log_fields(self) -> LogFields:
        """Return what the log records of the queue say of the owner."""

    def look(self, call: str) -> None:
        """Raise if the owner has failed, or a process is gone that it needs.

        A read that waits calls this now and then, and so does a write that waits for readers on other hosts. The owner
        may close the queue.
        """

    def ended(self, call: str, *, by_writer: bool = False) -> None:
        """Raise if the owner's failure is the reason for which the queue has ended; return if it ended in order.

        `by_writer` says that the writer has closed it, which may know of the failure first: the owner may wait then for
        some seconds until it knows too.
        """

    def failed(self, call: str, error: PeerLostError) -> None:
        """Learn that the queue has failed, from `error`, which the caller raises unless this raises one that says more.

        The owner may close the queue.
        """


__all__ = ["QueueGuard"]
