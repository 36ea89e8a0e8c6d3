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
        """Raise if the owner has failed, or if a process that the owner needs is gone.

        A waiting read calls this now and then, and so does a waiting write of a queue that reaches other hosts. The
        owner may close the queue in this call.
        """

    def ended(self, call: str, *, by_writer: bool = False) -> None:
        """Raise if the owner's failure is the reason why the queue has ended; return if it ended in order.

        `by_writer` says that the writer has closed the queue. The writer may have learnt of the failure
        first, so the owner may then wait for some seconds until it has learnt of the failure too.
        """

    def failed(self, call: str, error: PeerLostError) -> None:
        """Tell the owner that the queue has failed with `error`.

        The caller then raises `error`, unless this raises an exception that says more. The owner may close
        the queue in this call.
        """


__all__ = ["QueueGuard"]
